"""A conversation with a model, which keeps earlier messages in its KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.decoding.protocols import NoDraft
from specbench.generate import GenerationRun, encode_messages
from specbench.options import NO_OPTIONS, TemplateOptions

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.models.target import Target


class Conversation:
    """A conversation with a target, formatted by its chat template.

    Args:
        target: Writes the answers.
        drafter: Drafts the answers; ``None`` for plain decoding.
        system: A system message.
        template: What the chat template is told.
        settings: Settings of every answer, see ``GenerationRun``.

    Attributes:
        messages: The system message, and those of user and assistant in turn, as templates take them.

    Raises:
        UsageError: The target has no chat template.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        system: str | None = None,
        template: TemplateOptions = NO_OPTIONS,
        **settings: Any,
    ) -> None:
        if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
            raise UsageError(
                "A conversation needs a chat template, and the target's tokenizer has none.",
                "Take a chat model, or continue a text with `specbench generate`.",
            )
        self.template = template
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._target, self._tokenizer, self._drafter = target, target.tokenizer, drafter or NoDraft()
        self._settings = settings
        self._last: GenerationRun | None = None

    def ask(self, text: str) -> GenerationRun:
        """Return a generation that answers a message; ``add`` puts message and answer into the conversation.

        Raises:
            UsageError: The template refuses the conversation, or the conversation fills the target's context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_messages(self._tokenizer, messages, template=self.template)
        limit = self._target.scorer.context_limit
        if limit is not None and len(prompt) >= limit:
            raise UsageError(
                f"The conversation has {len(prompt)} tokens, and the target's context of {limit} leaves no room for an"
                " answer.",
                "Begin a new one, or shorten the message.",
            )
        self._last = GenerationRun(prompt, self._target, self._drafter, after=self._last, **self._settings)
        return self._last

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
