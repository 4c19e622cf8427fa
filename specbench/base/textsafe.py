"""Text of prompts and models made safe to show: it is data, and must neither color nor move a terminal."""

from __future__ import annotations

import re
import unicodedata

_MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_ASCII_MARKS = {" ": "_", "\n": "\\n", "\t": "\\t"}

# Printable by Unicode's categories, yet nothing is seen of them: joiners and fillers that count as letters or
# marks, and variation selectors. U+FFFD is seen, but does not say that it is itself.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffd\U000e0100-\U000e01ef]"
)

# Controls other than newline and tab (C0, DEL, C1) and the characters that switch the writing direction.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def visible(text: str, encoding: str = "utf-8") -> str:
    r"""A token's text in one line with nothing hidden in it.

    A space becomes ``␣``, a newline ``⏎`` and a tab ``⇥``. Whatever else has no shape of its own (controls,
    ANSI escapes, direction switches, zero-width characters, exotic spaces, lone surrogates) and U+FFFD become
    escapes such as ``\x1b`` or ``\u202e``. A mark at the beginning, which would settle on its neighbor, gets
    a dotted circle. Backslashes stay single: text that spells out an escape looks like one.

    Args:
        text: Any string.
        encoding: Of the place it is shown in. Other than UTF, what it lacks is escaped too, and white space
            becomes ``_``, ``\n`` and ``\t``.
    """
    unicode = _is_unicode(encoding)
    marks = _MARKS if unicode else _ASCII_MARKS
    shown = "".join(marks.get(x) or (x if _is_seen(x) else _escaped(x)) for x in text)
    if not unicode:
        return _encodable(shown, encoding)
    return f"◌{shown}" if shown and unicodedata.category(shown[0]).startswith("M") else shown


def terminal_safe(text: str, encoding: str = "utf-8") -> str:
    r"""Text as it may be streamed to a terminal: readable, with its lines, and without power.

    Newlines and tabs stay, as do letters of every direction and emoji; other control characters and direction
    switches become escapes such as ``\x1b``, lone surrogates U+FFFD. Every character is treated by itself, so
    a text may come in pieces.

    Args:
        text: Any string.
        encoding: Of the place it is shown in; characters that it lacks become escapes too.
    """
    safe = _CONTROLS.sub(lambda found: _escaped(found[0]), text)
    safe = _SURROGATES.sub("\ufffd", safe)
    return safe if _is_unicode(encoding) else _encodable(safe, encoding)


def one_line(text: object) -> str:
    """Text of whatever origin as one printable line."""
    return " ".join(terminal_safe(str(text)).split())


def excerpt(text: object, limit: int = 300) -> str:
    """The first paragraph of someone else's message as one printable line of at most ``limit`` characters."""
    line = one_line(str(text).strip().partition("\n\n")[0])
    return line if len(line) <= limit else line[: limit - 1] + "…"


def counted(number: int, noun: str, plural: str | None = None, *, form: str = "") -> str:
    """A number with its noun: ``1 token``, ``2 tokens``.

    Args:
        number: How many.
        noun: Of one.
        plural: Of several; ``None`` for the noun with an s.
        form: Of the number, as ``format`` takes it.
    """
    return f"{number:{form}} {noun if number == 1 else plural or noun + 's'}"


def _is_unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def _is_seen(letter: str) -> bool:
    return letter.isprintable() and not _UNSEEN.match(letter)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, "backslashreplace").decode(encoding)
