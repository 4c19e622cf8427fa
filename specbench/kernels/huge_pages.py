"""Weights in huge pages.

A forward reads all weights once. In pages of 4 KiB that takes some hundred thousand address translations per billion
parameters, and the processor prefetches only within a page: large matrix products then reach a half to three quarters
of the memory bandwidth. Linux can collapse existing memory into pages of 2 MiB; on other systems nothing is done.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from specbench.base.machine import HUGE_PAGES, huge_page_setting

_MADV_COLLAPSE = 25  # Linux 6.1; older kernels refuse it, and nothing changes

_LEAST_FULL = 0.9  # share of a page that must be of this memory: the rest is allocated too


def lay_in_huge_pages(memory: Iterable[tuple[int, int]]) -> None:
    """Move memory into huge pages, where the system has them. Contents and addresses do not change.

    Takes one or two seconds per gigabyte.

    Args:
        memory: Addresses and bytes, in use.
    """
    size = _huge_page_size()
    if not size:
        return
    used: Counter[int] = Counter()
    for begin, length in memory:
        for page in range(begin // size * size, begin + length, size):
            used[page] += min(begin + length, page + size) - max(begin, page)
    _collapse(sorted(page for page, count in used.items() if count >= _LEAST_FULL * size), size)


def _huge_page_size() -> int:
    """Return the size in bytes; 0 where there are none or they are switched off."""
    if not sys.platform.startswith("linux") or huge_page_setting() in (None, "never"):
        return 0
    try:
        return int((HUGE_PAGES / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _collapse(pages: Sequence[int], size: int) -> None:
    """Ask for huge pages; a refusal changes nothing."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + size:
            madvise(pages[begin], (end - begin) * size, _MADV_COLLAPSE)
            begin = end
