"""Incremental detokenization, which releases only final text, and stop rules."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.decoding.records import FinishReason

_REPLACEMENT = "\ufffd"

Label = TypeVar("Label")


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the special tokens, which decoding omits, by name."""
    vocabulary = tokenizer.get_vocab()
    names = {str(name) for name in tokenizer.all_special_tokens}
    names |= {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
    return {name: vocabulary[name] for name in names if name and name in vocabulary}


class _ByteRun:
    """A run of byte tokens, with which SentencePiece spells rare characters.

    Tokenizers decode a run as a whole: if it is not UTF-8, each byte is a replacement character. So nothing is final
    before the run has ended.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, int | None] = {}
        self.begin()

    def begin(self) -> None:
        """Start a new run."""
        self.length = 0
        self.text = ""  # of the whole characters
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._valid = True

    def byte_of(self, token: int) -> int | None:
        """Return a byte token's byte; ``None`` for other tokens."""
        if token not in self._known:
            piece = self._tokenizer.convert_ids_to_tokens(token)  # None for an id it does not know
            byte = re.fullmatch("<0x([0-9A-F]{2})>", piece or "")
            spelled = byte is not None and self._tokenizer.decode([token]) == piece  # where it means no byte
            self._known[token] = int(byte[1], 16) if byte and not spelled else None
        return self._known[token]

    def add(self, byte: int) -> bool:
        """Add a byte; return whether it completes a character of a valid run."""
        self.length += 1
        try:
            fresh = self._utf8.decode(bytes([byte])) if self._valid else ""
        except UnicodeDecodeError:
            self._valid, fresh = False, ""
        self.text += fresh
        return bool(fresh)


class TextStream(Generic[Label]):
    """Turns a growing output into final text, in pieces with the labels of their tokens.

    It holds back incomplete characters and possible starts of stop strings. After ``finish`` all released text is the
    text of the output, without a stop string and what follows it. Characters of several tokens have the last one's
    label.

    Args:
        tokenizer: Decodes token ids.
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
        self._labels: deque[tuple[Label, int]] = deque()  # characters decoded and not released yet, by label
        self._run = _ByteRun(tokenizer)
        self.stopped = False

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, token: int, label: Label) -> list[tuple[Label, str]]:
        """Add a token; return the text that became final, none after a stop string."""
        return [] if self.stopped else self._release(self._fresh(token), label)

    def _fresh(self, token: int) -> str:
        """Add a token; return the text that is decoded for good by it."""
        byte = self._run.byte_of(token)
        if byte is not None:
            self._ids.append(token)
            return self._push_byte(byte)
        if self._run.length:
            if self._is_special(token):  # decoding omits it first, so the run continues
                return ""
            self._run.begin()
        self._ids.append(token)
        window = self._decode(self._ids[self._before :])
        # Characters before trailing replacement characters are final.
        stable = len(window.rstrip(_REPLACEMENT))
        fresh = window[self._window_text : stable]
        self._window_text = max(stable, self._window_text)
        if fresh and stable == len(window):
            # The next window starts with this whole chunk, as tokenizers may drop a leading space, and single bytes
            # need the rest of their character.
            self._before, self._chunk = self._chunk, len(self._ids)
            self._window_text = len(self._decode(self._ids[self._before :]))
        elif stable == len(window) and self._is_special(token):
            # As a window's first token it would remove the next one's leading space.
            self._ids.pop()
        return fresh

    def _push_byte(self, byte: int) -> str:
        """Add a byte token: nothing is final, but a stop string may be complete."""
        if self._run.add(byte) and self._stops:
            so_far = self._decoded[-self._longest :] + self._run.text
            if so_far.endswith(self._stops):
                fresh = self._decode(self._ids[self._before :])[self._window_text :]
                if any(stop in self._decoded + fresh for stop in self._stops):
                    return fresh
        return ""

    def finish(self, label: Label) -> list[tuple[Label, str]]:
        """Release the remaining text; the output has ended. ``label`` is the last token's."""
        if self.stopped:
            return []
        rest = self._decode(self._ids[self._before :])[self._window_text :] if self._ids else ""
        self._before, self._chunk, self._window_text = len(self._ids), len(self._ids), 0
        return self._release(rest, label, ended=True)

    def _is_special(self, token: int) -> bool:
        return not self._decode([token]) and bool(self._decode([token], special=True))

    def _decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def _release(self, fresh: str, label: Label, *, ended: bool = False) -> list[tuple[Label, str]]:
        self._decoded += fresh
        self._labels.append((label, len(fresh)))
        stops = [(at + len(stop), at) for stop in self._stops if (at := self._decoded.find(stop)) >= 0]
        if stops:
            self.stopped = True
            # The one complete first, of those the longest, however tokens divide the text.
            _, start = min(stops)
            out, self._decoded = self._decoded[:start], ""
        else:
            cut = len(self._decoded) - (0 if ended else self._possible_stop())
            out, self._decoded = self._decoded[:cut], self._decoded[cut:]
        self._released.append(out)
        pieces: list[tuple[Label, str]] = []
        while out:
            of, length = self._labels.popleft()
            if length > len(out):
                self._labels.appendleft((of, length - len(out)))
            pieces += [(of, out[:length])] if length else []
            out = out[length:]
        return pieces

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the text that may begin a stop string."""
        for length in range(min(self._longest - 1, len(self._decoded)), 0, -1):
            if any(stop.startswith(self._decoded[-length:]) for stop in self._stops):
                return length
        return 0


class StopRules:
    """Ends outputs at an end token, or with the token that completes a stop string.

    A stop string may be a special token, which is not part of the text.

    Args:
        end_ids: Token ids that end the output; none to ignore end tokens.
        stop_strings: Texts that end the output, none of them empty.
        tokenizer: Needed for stop strings only.

    Raises:
        UsageError: A stop string combines a special token with other text, and could never occur.
    """

    def __init__(
        self,
        end_ids: Iterable[int] = (),
        stop_strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        specials = special_tokens(tokenizer) if stop_strings else {}
        for stop in stop_strings:
            joined = next((name for name in specials if name in stop), None) if stop not in specials else None
            if joined is not None:
                raise UsageError(
                    f"The stop string {stop!r} joins the special token {joined} to other text.",
                    "Give the special token alone, or the text before it.",
                )
        self.end_ids, self.strings, self.tokenizer = frozenset(end_ids), tuple(stop_strings), tokenizer
        self._stop_ids = frozenset(specials[stop] for stop in stop_strings if stop in specials)
        self._stream = None
        if stop_strings and tokenizer is not None:
            self._stream = TextStream[None](tokenizer, stop_strings)

    def cut(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Check new tokens.

        Returns:
            How many belong to the output, and ``"eos"`` or ``"stop-string"`` if it ends there, else ``None``.
        """
        for count, token in enumerate(tokens, 1):
            if token in self.end_ids:
                return count, "eos"
            if token in self._stop_ids:
                return count, "stop-string"
            if self._stream is not None:
                self._stream.push(token, None)
                if self._stream.stopped:
                    return count, "stop-string"
        return len(tokens), None
