"""SIGTERM ends a command as Ctrl-C does: what is measured is kept, child processes and work folders go."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["end_cleanly_on_sigterm", "exit_code_of_interrupt"]

_received: list[int] = []


def end_cleanly_on_sigterm() -> None:
    """Have SIGTERM interrupt the program, unless whoever started it wants something else. Main thread only."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def exit_code_of_interrupt() -> int:
    """What a shell reports for the signal that interrupted the program: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what a handler is called with
    _received.append(number)
    raise KeyboardInterrupt
