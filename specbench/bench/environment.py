"""The machine of a measurement, without host or user names or local paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from specbench._version import __version__
from specbench.base.machine import huge_page_setting, processor_name
from specbench.results.run import Environment


def describe_environment() -> Environment:
    """Return processor, memory, system and versions."""
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Environment(
        cpu=processor_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        physical_cores=psutil.cpu_count(logical=False),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        huge_pages=huge_page_setting(),
        ram_gb=round(psutil.virtual_memory().total / 1e9, 1),
        os=_system(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=metadata.version("transformers"),
        specbench=__version__,
        devices=cuda or (["Apple GPU (mps)"] if torch.backends.mps.is_available() else []),
        git_commit=_git_commit(Path(__file__).parents[1]),
    )


def _system() -> str:
    """Return name and version of the system, without the kernel's suffix, which can contain private names."""
    release = re.match(r"\d+(\.\d+)*", platform.release())
    system = f"{platform.system()} {release[0] if release else ''}".strip()
    with suppress(OSError):
        system = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {system}"
    return f"{system}, {platform.machine()}"


def _git_commit(package: Path) -> str | None:
    """Return the commit of a checkout of the package; ``None`` if it was installed."""
    git = ["git", "-C", str(package)]
    if _output([*git, "ls-files", "--error-unmatch", "_version.py"]) is None:
        return None
    commit = _output([*git, "rev-parse", "HEAD"])
    if commit is None:
        return None
    return commit + ("+" if _output([*git, "status", "--porcelain", "--untracked-files=no", "."]) else "")


def _output(command: Sequence[str]) -> str | None:
    """Return the output of a command; ``None`` if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()


def reset_peak_memory(device: str) -> None:
    """Reset what ``specbench.decoding.clocks.peak_memory`` reads, on CUDA devices and Linux."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
