"""Weights in huge pages.

A forward reads all weights once. In pages of 4 KiB that takes some hundred thousand address translations per billion
parameters, and the processor prefetches only within a page: large matrix products then reach a half to three quarters
of the memory bandwidth. Linux can collapse existing memory into pages of 2 MiB; on other systems nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from specbench.base.machine import HUGE_PAGES, huge_page_setting

_PROCESS = Path("/proc/self")

_MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it, and nothing changes
_PRESENT = np.uint64(1 << 63)

_LEAST_FULL = 0.9  # share of a block that must be in use: the rest is allocated too


@contextmanager
def in_huge_pages() -> Iterator[list[tuple[int, int]]]:
    """Move what is allocated in this context, and still there at its end, into huge pages, where the system has them.

    Contents and addresses do not change, nor does memory that was in use before. Takes one or two seconds per gigabyte.

    Yields:
        A list to which the caller adds address and size of memory that it frees, since it can be in use again at the
        end.
    """
    size = _huge_page_size()
    before = set(_full_blocks(size)) if size else set()
    freed: list[tuple[int, int]] = []
    yield freed
    if size:
        for begin, length in freed:
            before.difference_update(range(begin // size * size, begin + length, size))
        _collapse([block for block in _full_blocks(size) if block not in before], size)


def _huge_page_size() -> int:
    """Return the size in bytes; 0 where there are none or they are switched off."""
    if not sys.platform.startswith("linux") or huge_page_setting() in (None, "never"):
        return 0
    try:
        return int((HUGE_PAGES / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _full_blocks(size: int) -> list[int]:
    """Return aligned blocks of this size of the process's own memory that are (nearly) all in use, ascending.

    A pagemap has eight bytes per page, whose highest bit tells whether it is present (proc_pid_pagemap(5)).
    """
    pages = size // mmap.PAGESIZE
    blocks: list[int] = []
    try:
        with (_PROCESS / "pagemap").open("rb", buffering=0) as pagemap:
            for begin, end in _own_mappings():
                begin, end = -(-begin // size) * size, end // size * size
                if begin >= end:
                    continue
                pagemap.seek(begin // mmap.PAGESIZE * 8)
                entries = np.frombuffer(pagemap.read((end - begin) // mmap.PAGESIZE * 8), dtype=np.uint64)
                present = (entries[: len(entries) // pages * pages] & _PRESENT).astype(bool)
                counts = present.reshape(-1, pages).sum(axis=1)
                blocks += [begin + int(i) * size for i in np.flatnonzero(counts >= _LEAST_FULL * pages)]
    except (OSError, ValueError):
        return []
    return blocks


def _own_mappings() -> list[tuple[int, int]]:
    """Return begin and end of the process's writable memory that belongs to no file, including stacks of threads."""
    mappings = []
    for line in (_PROCESS / "maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name[0] == "[heap]" or name[0].startswith("[anon")):
            begin, end = addresses.split("-")
            mappings.append((int(begin, 16), int(end, 16)))
    return mappings


def _collapse(blocks: list[int], size: int) -> None:
    """Ask for huge pages; a refusal changes nothing."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + size:
            madvise(blocks[begin], (end - begin) * size, _MADV_COLLAPSE)
            begin = end
