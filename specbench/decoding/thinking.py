"""Tells which tokens of an answer are thinking: what a model writes between marks before it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = Literal["mark", "thinking", "answer"]
Labeled: TypeAlias = list[tuple[int, Part]]
"""Tokens, each with the part of the answer that it belongs to."""


_FINAL = "<|channel|>final<|message|>"

_CLOSINGS: Mapping[str, tuple[str, ...]] = {
    "<think>": ("</think>",),  # Qwen, DeepSeek, GLM, SmolLM3, Kimi
    "[THINK]": ("[/THINK]",),  # Mistral
    "<|channel|>analysis<|message|>": (f"<|end|><|start|>assistant{_FINAL}", _FINAL),  # gpt-oss
    "<|channel>thought": ("<channel|>",),  # Gemma
    "<seed:think>": ("</seed:think>",),
}
"""By the text with which thinking begins, those of which the first ends it."""

_NEAR = 64
"""Tokens at a prompt's end that hold a mark with which it ends."""


class ThinkingSplit:
    """Tells which tokens of an answer are thinking, one after the other.

    An answer thinks if it begins with an opening mark, or if its prompt ends with one, as a template renders it behind
    all messages, maybe with a first word: marks inside a message open nothing. After the closing mark comes the answer
    itself, whatever it holds. Tokens that may be the beginning of a mark are held until that is known.

    Args:
        tokenizer: The target's.
        prompt: Token ids of the prompt.

    Attributes:
        thinks: Whether the thinking has begun and not ended.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._closings = _CLOSINGS.get(self._opened_by(prompt[-_NEAR:]), ())
        self.thinks = bool(self._closings)
        self._begun = self.thinks  # whether it is known if the answer thinks
        self._held: list[int] = []

    def _opened_by(self, ending: Sequence[int]) -> str:
        """Return the mark that the end of a prompt has left open; empty for none.

        A template's own mark is the last text, or the first behind the last turn's special token and role.
        """
        marks = [*_CLOSINGS, *(closing for closings in _CLOSINGS.values() for closing in closings)]
        added = self._tokenizer.added_tokens_decoder
        turns = {
            token for token, text in added.items() if text.special and not any(str(text) in m for m in marks)
        }
        begins = max((place + 1 for place, token in enumerate(ending) if token in turns), default=None)
        whole = self._text(ending).rstrip()
        turn = "" if begins is None else self._text(ending[begins:])
        for opening, closings in _CLOSINGS.items():
            first = re.match(rf"\s*\w*\s*{re.escape(opening)}", turn)
            is_open = first is not None and not any(closing in turn[first.end() :] for closing in closings)
            if is_open or whole.endswith(opening):
                return opening
        return ""

    def push(self, token: int) -> Labeled:
        """Add a token; return those of which the part is now known."""
        self._held.append(token)
        if not self._begun:
            return self._begin()
        return self._until_closing() if self.thinks else self._release("answer")

    def ends_after(self, tokens: Sequence[int]) -> int | None:
        """Return after how many of further tokens the thinking ends: 0 if it has ended, ``None`` if it goes on.

        The tokens are not added.
        """
        ahead = copy(self)
        ahead._held = [*self._held]
        for count, token in enumerate(tokens):
            if not ahead.thinks:
                return count
            ahead.push(token)
        return None if ahead.thinks else len(tokens)

    def finish(self) -> Labeled:
        """Return what is held at the end of the answer."""
        return self._release("thinking" if self.thinks else "answer")

    def _begin(self) -> Labeled:
        text = self._text(self._held).lstrip()
        opened = next((opening for opening in _CLOSINGS if text.startswith(opening)), None)
        every = [closing for closings in _CLOSINGS.values() for closing in closings]
        if opened is None and not text.startswith(tuple(every)):
            if any(known.startswith(text) for known in (*_CLOSINGS, *every)):
                return []
            self._begun = True
            return self._release("answer")
        self._begun, self.thinks = True, opened is not None
        self._closings = _CLOSINGS.get(opened or "", ())
        return self._release("mark")

    def _until_closing(self) -> Labeled:
        text = self._text(self._held)
        ends = [(text.find(closing), closing) for closing in self._closings if closing in text]
        if ends:
            before = self._first(min(ends)[0])
            self.thinks = False
            return [*self._release("thinking", before), *self._release("mark")]
        possible = next(
            (
                start
                for start in range(len(text))
                if any(closing.startswith(text[start:]) for closing in self._closings)
            ),
            len(text),
        )
        return self._release("thinking", self._first(possible))

    def _first(self, length: int) -> int:
        """Return how many of the tokens held begin within the first characters of their text."""
        return sum(len(self._text(self._held[:count])) < length for count in range(len(self._held)))

    def _release(self, part: Part, count: int | None = None) -> Labeled:
        released = self._held[:count]
        del self._held[:count]
        return [(token, part) for token in released]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def thinking_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens at the beginning of an answer are thinking, with its marks; 0 if it does not think."""
    split = ThinkingSplit(tokenizer, prompt)
    labeled = [entry for token in answer for entry in split.push(token)] + split.finish()
    return sum(part != "answer" for _, part in labeled)


def unopened_tokens(tokenizer: PreTrainedTokenizerBase, answer: Sequence[int]) -> int:
    """Return how many tokens at the beginning of an answer are thinking, if its prompt is not known.

    They are those up to a closing mark; 0 without one.
    """
    text = str(tokenizer.decode(list(answer), skip_special_tokens=False))
    for opening, closings in _CLOSINGS.items():
        if any(closing in text for closing in closings):
            opened = tokenizer(opening, add_special_tokens=False)["input_ids"]
            return thinking_tokens(tokenizer, opened, answer)
    return 0
