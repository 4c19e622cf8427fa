"""Snapshots of how busy the machine is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil

_stops = 0


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy the machine is at one moment; a field that this system does not report is ``None``.

    Attributes:
        cores: Logical cores of the machine.
        load_average: Runnable processes, averaged over a minute.
        busy_s, steal_s, total_s: Processor time of all cores since boot: in use, given to other virtual machines,
            total.
        own_s: Processor time of this process and its children.
        frequency_mhz: Frequency of the processor, mean over the cores.
        memory_bytes, available_bytes: Size of the main memory, and how much of it is available.
        swapped_in_bytes: Bytes read back from swap since boot.
        stops: How often this process was stopped and continued since ``count_stops`` was called.
    """

    cores: int
    load_average: float | None
    busy_s: float
    steal_s: float | None
    total_s: float
    own_s: float
    frequency_mhz: float | None
    memory_bytes: int
    available_bytes: int
    swapped_in_bytes: int | None
    stops: int = 0

    def steal_share(self, before: LoadSnapshot) -> float | None:
        """Return the share of processor time that went to other virtual machines since ``before``, if known."""
        if before.steal_s is None or self.steal_s is None or self.total_s <= before.total_s:
            return None
        return (self.steal_s - before.steal_s) / (self.total_s - before.total_s)

    def busy_elsewhere(self, before: LoadSnapshot) -> float | None:
        """Return how many cores other processes kept busy since ``before``; ``None`` if no time has passed."""
        passed = (self.total_s - before.total_s) / self.cores
        if passed <= 0:
            return None
        return max(0.0, (self.busy_s - before.busy_s) - (self.own_s - before.own_s)) / passed


def load_snapshot() -> LoadSnapshot:
    """Take a snapshot of the machine, in well under a millisecond on Linux."""
    times = psutil.cpu_times()
    steal: float | None = getattr(times, "steal", None)
    # On Linux a guest's time is counted in user and nice as well.
    counted = {name: value for name, value in times._asdict().items() if not name.startswith("guest")}
    total = sum(counted.values())
    own = os.times()
    memory = psutil.virtual_memory()
    return LoadSnapshot(
        cores=psutil.cpu_count() or 1,
        load_average=_or_none(lambda: os.getloadavg()[0]),
        busy_s=total - times.idle - getattr(times, "iowait", 0.0) - (steal or 0.0),
        steal_s=steal,
        total_s=total,
        own_s=own.user + own.system + own.children_user + own.children_system,
        frequency_mhz=_or_none(lambda: float(psutil.cpu_freq().current) or None),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        swapped_in_bytes=_or_none(lambda: int(psutil.swap_memory().sin)),
        stops=_stops,
    )


def count_stops() -> None:
    """Make snapshots count how often this process is stopped and continued, except on Windows and in other threads."""
    if hasattr(signal, "SIGCONT") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCONT, _continued)


def _continued(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what a handler is called with
    global _stops
    _stops += 1


def _or_none(read: Callable[[], Any]) -> Any:
    """Return what a system reports; ``None`` if it does not."""
    with suppress(AttributeError, OSError, RuntimeError, ValueError):
        return read()
    return None
