"""Clocks and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from specbench.decoding.records import StepTimes


class Clock(Protocol):
    """Tells the time in seconds from an arbitrary origin."""

    def now(self) -> float:
        """Seconds, monotonic; all work asked for so far has been done."""
        ...


class WallClock:
    """The monotonic clock of the machine: right wherever a call returns when its work is done."""

    def now(self) -> float:
        return time.perf_counter()


class DeviceClock:
    """A clock for accelerators, which work on after a call has returned: waits for them before it reads.

    Args:
        device: Name of a torch device with a ``synchronize``, such as ``cuda``.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._synchronize = torch.get_device_module(device).synchronize

    def now(self) -> float:
        self._synchronize()
        return time.perf_counter()


class PausedClock:
    """A clock that can be stopped for a while.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or WallClock()).now
        self._lost = 0.0

    def now(self) -> float:
        return self._now() - self._lost

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It stands still meanwhile."""
        began = self._now()
        try:
            yield
        finally:
            self._lost += self._now() - began


class Stopwatch:
    """Where the time of a step goes. It belongs to whoever drives the loop; the loop says what it has done.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or WallClock()).now

    def start(self) -> None:
        """A step begins."""
        self._parts = {"draft": 0.0, "verify": 0.0, "accept": 0.0, "rollback": 0.0, "other": 0.0}
        self._last = self._now()

    def lap(self, part: Literal["draft", "verify", "accept", "rollback", "other"]) -> None:
        """What was done since the last lap was this."""
        now = self._now()
        self._parts[part] += now - self._last
        self._last = now

    def times(self, draft_prefill_s: float = 0.0) -> StepTimes:
        """The step so far. Seconds of reading a prompt are told by the drafter, and a part of its draft's.

        Its clock goes on while this one may stand still.
        """
        parts = self._parts
        return StepTimes(
            draft_s=parts["draft"],
            verify_s=parts["verify"],
            accept_s=parts["accept"],
            rollback_s=parts["rollback"],
            other_s=parts["other"],
            draft_prefill_s=min(draft_prefill_s, parts["draft"]),
        )


def clock_for(device: str) -> Clock:
    """The clock that is right for work on ``device`` (``cpu``, ``cuda:0``, ...)."""
    kind = device.split(":")[0]
    return WallClock() if kind in {"cpu", "meta"} else DeviceClock(kind)


def peak_memory(device: str) -> int:
    """Most memory in use so far, in bytes: what torch allocated on a CUDA device, else this process's resident set."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
