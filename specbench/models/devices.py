"""Devices: checks of those that models are loaded on, and their free memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import psutil
import torch

from specbench.base.errors import UsageError
from specbench.options import DEVICE_MAPS, DtypeName, LoadOptions

DTYPES = get_args(DtypeName)


def check_options(options: LoadOptions) -> None:
    """Raise ``UsageError`` for an unknown dtype or device."""
    if options.dtype not in DTYPES:
        raise UsageError(f"Unknown dtype {options.dtype!r}.", f"Choose one of {', '.join(DTYPES)}.")
    resolve_device(options.device)


def resolve_device(name: str) -> torch.device:
    """Return the device for auto, cpu, cuda, cuda:N or mps; raise ``UsageError`` if this machine lacks it.

    Of several devices it is the one that "auto" is.
    """
    if name in ("auto", *DEVICE_MAPS):
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if _has_mps() else "cpu")
    kind, colon, index = name.partition(":")
    if not re.fullmatch("cpu|mps|cuda(:[0-9]+)?", name):
        names = ", ".join(DEVICE_MAPS)
        raise UsageError(f"Unknown device {name!r}.", f"Choose auto, cpu, cuda, cuda:N, mps, {names}.")
    if kind == "mps" and not _has_mps():
        raise UsageError("The device mps is not available on this machine.", "Use the device cpu.")
    if kind != "cuda":
        return torch.device(kind)
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        raise UsageError(f"The device {name} is not available: {reason}.", "Use the device cpu.")
    number, count = int(index) if colon else torch.cuda.current_device(), torch.cuda.device_count()
    if number >= count:
        raise UsageError(
            f"The device {name} is out of range: this machine has {count}.", "Counting starts at cuda:0."
        )
    return torch.device("cuda", number)


def _has_mps() -> bool:
    mps: Any = torch.backends.mps
    return bool(mps.is_available())


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes free on a device (``None`` for the CPU), without swapping and within the container's limit."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = int(psutil.virtual_memory().available)
    try:  # a container's limit: the kernel kills without a word at this one
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(statistics["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no such limit ("max"), or not this kind of system
        pass
    return max(available, 0)
