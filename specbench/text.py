"""From tokens to text, one token at a time: nothing incomplete is shown, and stop strings are found as they appear."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LabelledText", "StopRules", "TextStream"]

_REPLACEMENT = "\ufffd"

Label = TypeVar("Label")


class TextStream:
    """Turns a growing output into text that is final as soon as it is released.

    Held back are bytes that do not yet make a character, and anything that may turn out to be the start of a stop
    string. What was released in all, after ``finish``, is the text of the output: a stop string and what stands behind
    it are not part of it.

    Args:
        tokenizer: Decodes token ids; special tokens become nothing.
        stop_strings: Texts that end the output; empty ones are not allowed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._ids: list[int] = []
        self._before = (
            0  # first token of the window that is decoded: the last whole chunk and what came since
        )
        self._chunk = 0  # first token that came since
        self._window_text = 0  # characters of the window's text that are decoded for good
        self._decoded = ""  # decoded for good, not yet released
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._released)

    def push(self, token: int) -> str:
        """Take one more token; return the text that became final. Empty once a stop string was found."""
        if self.stopped:
            return ""
        self._ids.append(token)
        window = self._decode(self._ids[self._before :])
        # The characters before a trailing run of replacement characters will not change any more.
        stable = len(window.rstrip(_REPLACEMENT))
        fresh = window[self._window_text : stable]
        self._window_text = max(stable, self._window_text)
        if fresh and stable == len(window):
            # The next window starts with this chunk, so that a tokenizer that drops a leading space drops it in both,
            # and with the whole of it, for tokens of single bytes mean nothing without the rest of their character.
            self._before, self._chunk = self._chunk, len(self._ids)
            self._window_text = len(self._decode(self._ids[self._before :]))
        elif stable == len(window) and self._is_special(token):
            # As the first token of a window it would let the next one lose its leading space.
            self._ids.pop()
        return self._release(fresh)

    def finish(self) -> str:
        """Release what was held back; the output has ended."""
        if self.stopped:
            return ""
        rest = self._decode(self._ids[self._before :])[self._window_text :] if self._ids else ""
        self._before, self._chunk, self._window_text = len(self._ids), len(self._ids), 0
        out = self._release(rest)
        held, self._decoded = self._decoded, ""  # nothing, if a stop string was found
        self._released.append(held)
        return out + held

    def _is_special(self, token: int) -> bool:
        return not self._decode([token]) and bool(self._decode([token], skip_special_tokens=False))

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def _release(self, fresh: str) -> str:
        self._decoded += fresh
        found = [(at + len(stop), at) for stop in self._stops if (at := self._decoded.find(stop)) >= 0]
        if found:
            self.stopped = True
            # The one that is complete first, of those the longest: however the text is cut into tokens.
            _, start = min(found)
            out, self._decoded = self._decoded[:start], ""
        else:
            cut = len(self._decoded) - self._possible_stop()
            out, self._decoded = self._decoded[:cut], self._decoded[cut:]
        self._released.append(out)
        return out

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        for length in range(min(self._longest - 1, len(self._decoded)), 0, -1):
            if any(stop.startswith(self._decoded[-length:]) for stop in self._stops):
                return length
        return 0


class LabelledText(Generic[Label]):
    """What a ``TextStream`` releases, in pieces with the labels of the tokens that they came from.

    Characters that several tokens make go with the last of them.

    Args:
        tokenizer, stop_strings: Those of ``TextStream``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer, stop_strings)
        # What may be the start of a stop string is released later, and by another token than it came from.
        self._at_once = TextStream(tokenizer) if stop_strings else None
        self._waiting: deque[tuple[Label, int]] = deque()  # characters to come, by their labels

    def push(self, token: int, label: Label) -> list[tuple[Label, str]]:
        """Take one more token; return the text that became final."""
        text = self._stream.push(token)
        if self._at_once is None:
            return [(label, text)] if text else []
        self._waiting.append((label, len(self._at_once.push(token))))
        return self._labelled(text, label)

    def finish(self, label: Label) -> list[tuple[Label, str]]:
        """Release what was held back; ``label`` is the last token's."""
        text = self._stream.finish()
        return self._labelled(text, label)

    def _labelled(self, text: str, last: Label) -> list[tuple[Label, str]]:
        pieces: list[tuple[Label, str]] = []
        while text:
            label, length = self._waiting.popleft() if self._waiting else (last, len(text))
            if length > len(text):
                self._waiting.appendleft((label, length - len(text)))
            if length:
                pieces.append((label, text[:length]))
            text = text[length:]
        return pieces


class StopRules:
    """Says where an output ends: at an end token, or with the token that completes a stop string.

    Args:
        end_ids: Token ids that end the output; none to ignore end tokens.
        stop_strings: Texts that end the output.
        tokenizer: Needed for stop strings only.
    """

    def __init__(
        self,
        end_ids: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if stop_strings and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string is empty")
        self.end_ids = frozenset(end_ids)
        self._stream = TextStream(tokenizer, stop_strings) if stop_strings and tokenizer is not None else None

    def cut(self, tokens: Sequence[int]) -> tuple[int, str | None]:
        """Look at newly emitted tokens.

        Returns:
            How many of them belong to the output, and ``"eos"`` or ``"stop-string"`` if it ends there, else ``None``.
        """
        for count, token in enumerate(tokens, 1):
            if token in self.end_ids:
                return count, "eos"
            if self._stream is not None:
                self._stream.push(token)
                if self._stream.stopped:
                    return count, "stop-string"
        return len(tokens), None
