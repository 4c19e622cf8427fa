"""What machine a measurement was made on, and how busy it was. No host or user names, no local paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from specbench._version import __version__
from specbench.huge_pages import huge_page_setting

__all__ = [
    "LoadSnapshot",
    "describe_environment",
    "load_snapshot",
    "reset_peak_memory",
]


def describe_environment() -> dict[str, Any]:
    """Processor, memory, system, versions: what a figure depends on, ready for JSON.

    Returns:
        ``cpu`` (model), ``cpu_capability`` (torch's instruction set), ``physical_cores``, ``cores`` (logical
        ones this process may use), ``threads`` (torch's), ``huge_pages`` (Linux's setting for transparent ones),
        ``ram_gb``, ``os``, ``python``, ``torch``, ``transformers``, ``specbench``, ``devices`` (names of
        accelerators), ``git_commit`` of the checkout specbench runs from, with "+" behind it if files were
        changed since. ``None`` stands for what cannot be told.
    """
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "physical_cores": psutil.cpu_count(logical=False),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "huge_pages": huge_page_setting(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "os": _system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "specbench": __version__,
        "devices": cuda or (["Apple GPU (mps)"] if torch.backends.mps.is_available() else []),
        "git_commit": _git_commit(Path(__file__).parent),
    }


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return " ".join(value.split())
    if platform.system() == "Darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or platform.machine() or None


def _system() -> str:
    """Name and version of the system; a kernel's own suffix may hold anything, so it is left out."""
    release = re.match(r"\d+(\.\d+)*", platform.release())
    system = f"{platform.system()} {release[0] if release else ''}".strip()
    with suppress(OSError):
        system = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {system}"
    return f"{system}, {platform.machine()}"


def _git_commit(package: Path) -> str | None:
    """The commit of the checkout that ``package`` belongs to; ``None`` if it was installed."""
    git = ["git", "-C", str(package)]
    if _output([*git, "ls-files", "--error-unmatch", "_version.py"]) is None:
        return None
    commit = _output([*git, "rev-parse", "HEAD"])
    if commit is None:
        return None
    return commit + ("+" if _output([*git, "status", "--porcelain", "--untracked-files=no", "."]) else "")


def _output(command: Sequence[str]) -> str | None:
    """What a command prints, or ``None`` if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()


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
    )


def reset_peak_memory(device: str) -> None:
    """Let ``specbench.measure.peak_memory`` count from now on, where the system can: CUDA devices, and
    Linux."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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
