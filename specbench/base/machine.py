"""What this machine is, and what its memory allocator holds."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def processor_name() -> str | None:
    """Return the processor's model; ``None`` if it is not known."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                return " ".join(value.split())
    if platform.system() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
    return platform.processor() or platform.machine() or None


def huge_page_setting() -> str | None:
    """Return the system's setting for transparent huge pages: "always", "madvise", "never"; ``None`` where there are
    none.
    """
    try:
        return (HUGE_PAGES / "enabled").read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        return None


def give_back_free_memory() -> None:
    """Return memory that glibc keeps between other memory to the system:
    a tenth of a model, once its weights are replaced.
    """
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
