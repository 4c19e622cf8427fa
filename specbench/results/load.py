"""How busy the machine is: what disturbs a measurement."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

_stops = 0


@dataclass(frozen=True)
class LoadSnapshot:
    """How busy the machine is at one moment; two of them tell what happened between.

    ``None`` stands for what cannot be told here.

    Attributes:
        cores: Logical cores of the machine.
        load_average: Runnable processes, averaged over a minute.
        busy_s, steal_s, total_s: Processor time of all cores since the machine started: in use, taken by
            other virtual machines, and in all.
        own_s: Processor time that this process and its children have used.
        frequency_mhz: Mean over the cores.
        throttled: How often the processor has slowed itself down because of heat.
        memory_bytes, available_bytes: Of main memory.
        swapped_in_bytes: Read back from swap since the machine started.
        stops: How often this process was stopped and continued since `count_stops` was called.
    """

    cores: int
    load_average: float | None
    busy_s: float
    steal_s: float | None
    total_s: float
    own_s: float
    frequency_mhz: float | None
    throttled: int | None
    memory_bytes: int
    available_bytes: int
    swapped_in_bytes: int | None
    stops: int = 0

    def steal_share(self, before: LoadSnapshot) -> float | None:
        """Share of processor time that the machine's host gave to others since ``before``; ``None``: not told."""
        if before.steal_s is None or self.steal_s is None or self.total_s <= before.total_s:
            return None
        return (self.steal_s - before.steal_s) / (self.total_s - before.total_s)

    def busy_elsewhere(self, before: LoadSnapshot) -> float | None:
        """How many cores other processes kept busy since ``before``; ``None`` if no time has passed."""
        passed = (self.total_s - before.total_s) / self.cores
        if passed <= 0:
            return None
        return max(0.0, (self.busy_s - before.busy_s) - (self.own_s - before.own_s)) / passed


def load_snapshot() -> LoadSnapshot:
    """Look at the machine; takes well under a millisecond on Linux."""
    times = psutil.cpu_times()
    steal: float | None = getattr(times, "steal", None)
    # On Linux a guest's time is counted in user and nice as well.
    counted = {name: value for name, value in times._asdict().items() if not name.startswith("guest")}
    total = sum(counted.values())
    own = os.times()
    memory = psutil.virtual_memory()
    return LoadSnapshot(
        cores=psutil.cpu_count() or 1,
        load_average=_load_average(),
        busy_s=total - times.idle - getattr(times, "iowait", 0.0) - (steal or 0.0),
        steal_s=steal,
        total_s=total,
        own_s=own.user + own.system + own.children_user + own.children_system,
        frequency_mhz=_frequency(),
        throttled=_throttled(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        swapped_in_bytes=_swapped_in(),
        stops=_stops,
    )


def count_stops() -> None:
    """Have snapshots count how often this process is stopped (SIGSTOP, Ctrl-Z) and continued.

    Outside the main thread, and on Windows, nothing is counted.
    """
    if hasattr(signal, "SIGCONT") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCONT, _continued)


def _continued(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what a handler is called with
    global _stops
    _stops += 1


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _frequency() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None
    return float(frequency.current) if frequency is not None and frequency.current else None


def _throttled() -> int | None:
    try:
        counters = sorted(
            Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        )
        return sum(int(counter.read_text(encoding="ascii")) for counter in counters) if counters else None
    except (OSError, ValueError):
        return None


def _swapped_in() -> int | None:
    try:
        return int(psutil.swap_memory().sin)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return None
