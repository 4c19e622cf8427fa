"""The one kind of error a user is meant to see: a sentence, what to change, and an exit code."""

from __future__ import annotations

from collections.abc import Sequence


class SpecbenchError(Exception):
    """Something a user can act on.

    Args:
        message: One sentence that says what is wrong, in the user's words.
        hint: What to change; printed behind the message. ``None`` when the message already says it.
        commands: Any of which does that; printed below, to be copied.

    Attributes:
        exit_code: 2 when the command line or its input is at fault, 1 when the run failed.
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
    """The request was sound, carrying it out failed (exit code 1)."""

    exit_code = 1
