"""A conversation with a model: every answer goes on from what the caches hold of those before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.drafters.plain import NoDraft
from specbench.generate import GenerationRun, encode_messages

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.models.target import Target


class Conversation:
    """Asks one target message after message, as its chat template puts them.

    Args:
        target: Answers.
        drafter: Drafts the answers; ``None`` for plain decoding.
        system: A system message; ``None`` for none.
        settings: Of every answer, see ``GenerationRun``.

    Attributes:
        messages: What the user and the assistant have said in turn, as templates take it.
        system: May be changed between two answers.

    Raises:
        UsageError: The target has no chat template.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, system: str | None = None, **settings: Any
    ) -> None:
        if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
            raise UsageError(
                "A conversation needs a chat template, and the target's tokenizer has none.",
                "Take a chat model, or continue a text with `specbench generate`.",
            )
        self.system = system
        self.messages: list[dict[str, str]] = []
        self._target, self._tokenizer, self._drafter = target, target.tokenizer, drafter or NoDraft()
        self._settings = settings
        self._last: GenerationRun | None = None

    def ask(self, text: str) -> GenerationRun:
        """The answer to a message, which has not begun. Neither belongs to the conversation before it is told to.

        Raises:
            UsageError: The template refuses the conversation, or it leaves no room for an answer.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = encode_messages(
            self._tokenizer, [*system, *self.messages, {"role": "user", "content": text}]
        )
        limit = self._target.scorer.context_limit
        if limit is not None and len(prompt) >= limit:
            raise UsageError(
                f"The conversation has {len(prompt)} tokens, and the target's context of {limit} leaves no room for an"
                " answer.",
                "Begin a new one, or shorten the message.",
            )
        self._last = GenerationRun(prompt, self._target, self._drafter, after=self._last, **self._settings)
        return self._last

    def tell(self, text: str, answer: str) -> None:
        """Let a message and its answer belong to the conversation."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def forget(self) -> None:
        """Begin a new one under the same system message."""
        self.messages.clear()
