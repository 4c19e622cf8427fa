"""Clocks and memory."""

from __future__ import annotations

import sys
import time
from typing import Protocol

__all__ = ["Clock", "DeviceClock", "WallClock", "clock_for", "peak_memory"]


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
