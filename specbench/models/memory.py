"""Free memory of devices."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes free on a device (``None``: the CPU), without swapping and within the container's limit."""
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
