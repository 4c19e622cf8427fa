"""Clocks and memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, TypeAlias

from specbench.decoding.records import PARTS, StepTimes

Clock: TypeAlias = Callable[[], float]
"""Returns monotonic seconds from an arbitrary origin, after all work so far is done."""


class ShiftedClock:
    """A clock that can be paused, and that can skip time.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = clock or perf_counter
        self._shift = 0.0

    def __call__(self) -> float:
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
        self._shift += max(0.0, time - self())


class Stopwatch:
    """Times the parts of a step. The caller of the loop provides it, and the loop calls its methods.

    Args:
        clock: Tells the time; ``None`` for the machine's.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._now = clock or perf_counter

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
    """Return the clock for work on ``device`` (``cpu``, ``cuda:0``, ...); an accelerator's waits for its stream."""
    if device.split(":")[0] in {"cpu", "meta"}:
        return perf_counter
    import torch

    module = torch.get_device_module(device)
    stream = getattr(module, "current_stream", None)  # waiting for it alone takes a third of the time
    synchronize = module.synchronize if stream is None else stream(device).synchronize

    def now() -> float:
        synchronize()
        return perf_counter()

    return now


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
