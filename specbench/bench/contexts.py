"""Prompts with real text in front, cut so that each fits into a number of tokens (``--context``)."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.bench.prompts import Prompt, sets_folder
from specbench.options import TemplateOptions
from specbench.rows import Condition

_BUILT_IN = "documentation.txt"
_PARAGRAPH = "\n\n"


def load_context_text() -> str:
    """Return the text that stands in front of questions: paragraphs, separated by blank lines."""
    return (sets_folder() / "context" / _BUILT_IN).read_text(encoding="utf-8").strip()


def text_name(text: str) -> str:
    """Return the name of its file and a hash of it, as results keep them."""
    return f"{_BUILT_IN} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def passage(text: str, mark: str) -> str:
    """Return a text, beginning at a paragraph that depends on ``mark``."""
    parts = text.split(_PARAGRAPH)
    start = zlib.crc32(mark.encode("utf-8", "surrogatepass")) % len(parts)
    return _PARAGRAPH.join((*parts[start:], *parts[:start]))


def fill(prompt: Prompt, tokens: int, text: str, count: Callable[[Prompt], int]) -> Prompt:
    """Return a prompt with as much of a text in front of its first turn as fits into so many tokens.

    Args:
        prompt: The prompt.
        tokens: Its length, with everything that a chat template adds.
        text: The text.
        count: Returns the number of tokens of a prompt.

    Raises:
        UsageError: The prompt alone is longer, or the text is too short.
    """

    def cut(letters: int) -> Prompt:
        first = f"{text[:letters]}{_PARAGRAPH}{prompt.turns[0]}" if letters else prompt.turns[0]
        return replace(prompt, turns=(first, *prompt.turns[1:]))

    if (alone := count(prompt)) > tokens:
        raise UsageError(
            f"The prompt {prompt.id!r} has {alone:,} tokens, more than {tokens:,}.", "Leave it out."
        )
    low, high = 0, min(len(text), 8 * tokens)
    if count(cut(high)) < tokens:
        low, high = high, len(text)
    if count(cut(high)) < tokens:
        raise UsageError(f"The text for --context ends before {tokens:,} tokens.", "Give a shorter length.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(cut(middle)) <= tokens else (low, middle)
    return cut(high) if count(cut(high)) <= tokens else cut(low)


class ContextPrompts:
    """The prompts of a sweep under each condition: after a text, and with what the chat template is told.

    Args:
        prompts: The prompts as they are.
        template: What the chat template is told of all.
        text: The text in front; ``None`` without contexts.
        count: Returns the number of tokens of a prompt.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        template: TemplateOptions,
        text: str | None,
        count: Callable[[Prompt], int],
    ) -> None:
        self.prompts = {prompt.id: prompt.told(template) for prompt in prompts}
        self._text, self._count = text, count
        self._known: dict[tuple[str, int], Prompt] = {}

    def at(self, name: str, condition: Condition) -> Prompt:
        """Return a prompt under a condition.

        Raises:
            UsageError: See ``fill``.
        """
        prompt, context = self.prompts[name], condition.context
        if context is not None and self._text is not None:
            if (name, context) not in self._known:
                self._known[name, context] = fill(prompt, context, passage(self._text, name), self._count)
            prompt = self._known[name, context]
        return prompt if condition.thinking is None else prompt.told(TemplateOptions(condition.thinking))


def fitting(
    prompts: Iterable[Prompt], contexts: Sequence[int], count: Callable[[Prompt], int]
) -> tuple[tuple[Prompt, ...], list[str]]:
    """Return the prompts that fit into the shortest context, and a note on others, so that all lengths share prompts.

    Raises:
        UsageError: None fits.
    """
    every = tuple(prompts)
    if not contexts:
        return every, []
    kept = tuple(prompt for prompt in every if count(prompt) <= contexts[0])
    if not kept:
        shortest = min(map(count, every))
        raise UsageError(
            f"Every prompt has more than {contexts[0]:,} tokens.",
            f"Give --context at least {shortest:,} tokens.",
        )
    out = len(every) - len(kept)
    return kept, [f"{counted(out, 'prompt')} left out: longer than {contexts[0]:,} tokens."] if out else []
