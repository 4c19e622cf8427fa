"""Text of prompts and models, made safe to show: it must neither color nor control a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}

# Printable by Unicode's categories, yet invisible: joiners and fillers that count as letters or marks, and
# variation selectors; and U+FFFD, which also stands for other characters.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffd\U000e0100-\U000e01ef]"
)

# Controls other than newline and tab (C0, DEL, C1) and the characters that switch the writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """Replace lone surrogates, which JSON and arguments can hold, by U+FFFD; no tokenizer takes them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def visible(text: str) -> str:
    r"""Return a token's text as one line, with invisible characters made visible.

    A space becomes ``␣``, a newline ``⏎`` and a tab ``⇥``. Other invisible characters (controls, ANSI escapes,
    direction switches, zero-width characters, exotic spaces, lone surrogates) and U+FFFD become escapes such as
    ``\x1b`` or ``\u202e``. A combining mark at the beginning gets a dotted circle. Backslashes are not doubled.
    """
    shown = "".join(
        _MARKS.get(x) or (x if x.isprintable() and not _UNSEEN.match(x) else _escaped(x)) for x in text
    )
    return f"◌{shown}" if shown and unicodedata.category(shown[0]).startswith("M") else shown


def terminal_safe(text: str) -> str:
    r"""Return text that is safe to stream to a terminal.

    Newlines, tabs, letters of every direction and emoji stay; other control characters and direction switches become
    escapes such as ``\x1b``, and lone surrogates become U+FFFD. A text can be passed in pieces, since each character is
    treated alone.
    """
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub(lambda found: _escaped(found[0]), text))


def one_line(text: object) -> str:
    """Return any text as one printable line."""
    return " ".join(terminal_safe(str(text)).split())


def excerpt(text: object, limit: int = 300) -> str:
    """Return the first paragraph of another program's message as one printable line of at most ``limit`` characters."""
    line = one_line(str(text).strip().partition("\n\n")[0])
    return line if len(line) <= limit else line[: limit - 1] + "…"


def counted(number: int, noun: str, plural: str | None = None, *, form: str = "") -> str:
    """Return a number with its noun, ``1 token`` or ``2 tokens``; ``form`` is the number's format."""
    return f"{number:{form}} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names in a row, and the number of those after the first ``most``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def tokens_text(tokens: int, steps: int, per_step: float | None) -> str:
    """Return the tokens of an output, with those of its steps apart from a first one of the prompt's own pass."""
    if per_step is None:
        return counted(tokens, "token")
    of_steps = round(per_step * steps)
    shown = counted(of_steps, "token")
    if of_steps != tokens:
        shown = f"{counted(tokens, 'token')}: {tokens - of_steps} of the prompt's pass, {of_steps}"
    return f"{shown} in {counted(steps, 'step')} ({per_step:.2f} per step)"


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
