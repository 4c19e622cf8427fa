"""Errors shown to users: a sentence, a hint, and an exit code."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecbenchError(Exception):
    """An error a user can act on.

    Args:
        message: One sentence that says what is wrong.
        hint: What to change; printed after the message.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"


class UsageError(SpecbenchError):
    """The command line, an option or an input file is at fault (exit code 2)."""

    exit_code = 2


class RunError(SpecbenchError):
    """A valid request failed (exit code 1)."""


def unknown(what: str, word: str, known: Iterable[str], where: str = "") -> UsageError:
    """Return the error for a word that is none of the known ones, which suggests the closest one."""
    near = get_close_matches(word, known := [*known], 1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return UsageError(f"There is no {what} {word!r}{where}.", f"{meant}Choose {', '.join(known)}.")
