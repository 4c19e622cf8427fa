"""Errors shown to users: a sentence, a hint, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


class SpecbenchError(Exception):
    """An error a user can act on.

    Args:
        message: One sentence that says what is wrong.
        hint: What to change; printed after the message.
        commands: Command lines that do what the hint says; printed below it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, commands: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.commands = commands

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"


class UsageError(SpecbenchError):
    """The command line, an option or an input file is at fault (exit code 2)."""

    exit_code = 2


class RunError(SpecbenchError):
    """A valid request failed (exit code 1)."""
