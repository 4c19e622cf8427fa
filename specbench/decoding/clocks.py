"""Clocks and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from specbench.decoding.records import PARTS, StepTimes


class Clock(Protocol):
    """A clock in seconds from an arbitrary origin."""

    def now(self) -> float:
        """Return monotonic seconds, after all work so far is done."""


class WallClock:
    """The machine's monotonic clock, for devices whose calls return when their work is done."""

    def now(self) -> float:
        return time.perf_counter()


class DeviceClock:
    """A clock for accelerators: waits for the work of their current stream before it reads.

    Args:
        device: Name of a torch device with a ``synchronize``, such as ``cuda:0``.
    """

    def __init__(self, device: str) -> None:
        import torch

        module = torch.get_device_module(device)
        stream = getattr(module, "current_stream", None)  # waiting for it alone takes a third of the time
        self._synchronize = module.synchronize if stream is None else stream(device).synchronize

    def now(self) -> float:
        self._synchronize()
        return time.perf_counter()


class ShiftedClock:
    """A clock that can be paused, and that can skip time.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or WallClock()).now
        self._shift = 0.0

    def now(self) -> float:
        return self._now() + self._shift

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside the ``with`` block."""
        began = self._now()
        try:
            yield
        finally:
            self._shift -= self._now() - began

    def skip_to(self, time: float) -> None:
        """Skip to a later time; an earlier time changes nothing."""
        self._shift += max(0.0, time - self.now())


class Stopwatch:
    """Times the parts of a step. The caller of the loop provides it, and the loop calls its methods.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = (clock or WallClock()).now

    def start(self) -> None:
        """Start a step."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._last = self._now()

    def lap(self, part: Literal["draft", "verify", "accept", "rollback", "other"]) -> None:
        """Add the time since the last lap to a part."""
        now = self._now()
        self._parts[part] += now - self._last
        self._last = now

    def times(self, draft_prefill_s: float = 0.0, mask_s: float = 0.0) -> StepTimes:
        """Return the step's times so far; ``draft_prefill_s`` and ``mask_s`` are from clocks that are never paused."""
        parts = self._parts
        return StepTimes(
            **{f"{part}_s": seconds for part, seconds in parts.items()},
            draft_prefill_s=min(draft_prefill_s, parts["draft"]),
            mask_s=min(mask_s, parts["draft"] + parts["accept"]),
        )


def clock_for(device: str) -> Clock:
    """Return the clock for work on ``device`` (``cpu``, ``cuda:0``, ...)."""
    kind = device.split(":")[0]
    return WallClock() if kind in {"cpu", "meta"} else DeviceClock(device)


def peak_memory(device: str) -> int:
    """Return peak memory in bytes: torch's on a CUDA device, else this process's resident set."""
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
