"""SIGTERM ends a command as Ctrl-C does: measurements are kept, child processes and work folders removed."""

from __future__ import annotations

import signal
from types import FrameType

_received: list[int] = []


def end_cleanly_on_sigterm() -> None:
    """Let SIGTERM interrupt the program, unless its parent has set something else. Main thread only."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def answer_ctrl_c() -> None:
    """Let Ctrl-C interrupt the program, which until now it ended at once (``__main__``)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, _interrupt)


def exit_code_of_interrupt() -> int:
    """Return what a shell reports for the signal that interrupted the program: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + (_received[-1] if _received else signal.SIGINT)


def interrupted() -> bool:
    """Return whether a signal interrupted the program; an import of C that it interrupts raises other errors."""
    return bool(_received)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what a handler is called with
    _received.append(number)
    raise KeyboardInterrupt
