"""Break down the memory of this process, to tell leaks from what libraries keep on purpose."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
import torch

from specbench.backends.torch.kernels.huge_pages import give_back_free_memory


@dataclass(frozen=True)
class Footprint:
    """Memory of a process.

    Attributes:
        resident: Bytes in memory.
        objects: That Python's collector knows.
        tensors: Bytes of the tensors among them.
        allocated: Bytes that malloc has handed out, tensors' among them; 0 where it does not tell (glibc's does).
        unused: Bytes that it has been given back and keeps.
        compiled: Bytes of code that was made while it ran: oneDNN's, by shapes of products, at most
            ``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` of them; with it go some 0.5 MB each that malloc has handed out. 0
            where the system does not tell (Linux does).
    """

    resident: int
    objects: int
    tensors: int
    allocated: int
    unused: int
    compiled: int

    @classmethod
    def now(cls) -> Footprint:
        """Return the current footprint."""
        objects = gc.get_objects()
        malloc = _malloc_info()
        return cls(
            resident=psutil.Process().memory_info().rss,
            objects=len(objects),
            tensors=_bytes_of_tensors(objects),
            allocated=malloc.in_blocks + malloc.in_maps,
            unused=malloc.free,
            compiled=_compiled(),
        )

    def text(self) -> str:
        """Return it as a line of text."""
        parts = {name: round(value / 2**20) for name, value in asdict(self).items() if name != "objects"}
        listed = ", ".join(f"{name} {value}" for name, value in parts.items() if name != "resident")
        return f"{parts['resident']} MB ({listed}), {self.objects} objects"


def growth(rounds: Sequence[Footprint]) -> dict[str, float]:
    """Return by name the median of the last third over that of the first; nothing with too few rounds."""
    third = len(rounds) // 3
    if not third:
        return {}
    first, last = (
        {name: statistics.median(asdict(each)[name] for each in part) for name in asdict(rounds[0])}
        for part in (rounds[:third], rounds[-third:])
    )
    return {name: round(last[name] / value, 4) for name, value in first.items() if value}


def given_back() -> int:
    """Return the bytes that malloc gives back to the system on request."""
    process = psutil.Process()
    before = process.memory_info().rss
    give_back_free_memory()
    return int(before - process.memory_info().rss)


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` (mallinfo(3))."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("in_maps", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("in_blocks", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )
    in_maps: int
    in_blocks: int
    free: int


def _malloc_info() -> _Malloc:
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):  # another C library
        return _Malloc()
    ask.restype = _Malloc
    info: _Malloc = ask()
    return info


def _bytes_of_tensors(objects: Sequence[object]) -> int:
    found: dict[int, int] = {}
    for each in objects:
        if issubclass(type(each), torch.Tensor):
            assert isinstance(each, torch.Tensor)
            if each.layout is torch.strided:
                storage = each.untyped_storage()
                if storage.device.type == "cpu":  # unlike that of a fake tensor, as torch.compile keeps them
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _compiled() -> int:
    if sys.platform != "linux":
        return 0
    maps = psutil.Process().memory_maps(grouped=False)
    made = [
        each for each in maps if "x" in each.perms and each.path.startswith(("[anon", "[heap", "/memfd:"))
    ]
    return sum(int(each.rss) for each in made)
