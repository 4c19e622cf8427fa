"""Counters of energy: RAPL of Intel and AMD processors under Linux, and NVML of NVIDIA's GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")
_NVML = ("libnvidia-ml.so.1", "nvml.dll")


class EnergyCounter(Protocol):
    """A counter that only grows."""

    name: str

    def joules(self) -> float:
        """Return the energy since some moment, in joules.

        Raises:
            OSError: It can no longer be read.
        """
        ...


class RaplCounter:
    """The energy of a processor package, with everything on it; the kernel's counter begins again at its range.

    Args:
        folder: A domain of the kernel's powercap framework, such as ``intel-rapl:0``.

    Raises:
        OSError, ValueError: It cannot be read, as by default for users other than root.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"RAPL {(folder / 'name').read_text(encoding='ascii').strip()}"
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
        self._last = self._read()
        self._sum = 0

    def _read(self) -> int:
        return int(self._file.read_text(encoding="ascii"))

    def joules(self) -> float:
        now = self._read()
        self._sum += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._sum / 1e6


class NvmlCounter:
    """The energy of a GPU, with its memory.

    Args:
        library: NVML.
        index: The GPU's number.

    Raises:
        OSError: It is too old to count energy (before Volta).
    """

    def __init__(self, library: Any, index: int) -> None:
        self.name = f"NVML GPU {index}"
        self._library, self._handle = library, ctypes.c_void_p()
        _checked(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(self._handle)))
        self.joules()

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        _checked(self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules)))
        return millijoules.value / 1e3


def _checked(code: int) -> None:
    if code:
        raise OSError(f"NVML gave code {code}")


class EnergyMeter:
    """The sum of several counters.

    Attributes:
        name: What is counted; ``None`` if nothing can be.
    """

    def __init__(self, counters: Sequence[EnergyCounter]) -> None:
        self._counters = tuple(counters)
        self.name = ", ".join(counter.name for counter in self._counters) or None

    def joules(self) -> float | None:
        """Return the energy since some moment, in joules; ``None`` without a counter, or if one fails."""
        with suppress(OSError, ValueError):
            return sum(counter.joules() for counter in self._counters) if self._counters else None
        return None


@cache
def energy_meter() -> EnergyMeter:
    """Return the meter of this machine: its processor packages, and its NVIDIA GPUs."""
    return EnergyMeter([*rapl_counters(), *nvml_counters()])


def rapl_counters(folder: Path = POWERCAP) -> list[EnergyCounter]:
    """Return the counters of processor packages that can be read; their parts are counted in them."""
    found: list[EnergyCounter] = []
    for each in sorted(folder.glob("*-rapl:[0-9]*")):
        if each.name.count(":") == 1:
            with suppress(OSError, ValueError):
                counter = RaplCounter(each)
                found += [counter] if "package" in counter.name else []
    return found


def nvml_counters(load: Callable[[str], Any] = ctypes.CDLL) -> list[EnergyCounter]:
    """Return the counters of GPUs that can be read."""
    found: list[EnergyCounter] = []
    for name in _NVML:
        with suppress(OSError, AttributeError):
            library, count = load(name), ctypes.c_uint()
            _checked(library.nvmlInit_v2())
            _checked(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            for index in range(count.value):
                with suppress(OSError):
                    found.append(NvmlCounter(library, index))
            break
    return found
