"""Large pages of memory: what is laid there, what is left alone, and that contents stay."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbench.base import machine
from specbench.base.machine import huge_page_setting
from specbench.kernels import huge_pages
from specbench.kernels.huge_pages import in_huge_pages
from specbench.kernels.weights import can_pack

MEBIBYTE = 1 << 20
SIZE = 32 * MEBIBYTE


class Region:
    """Memory of its own, in ordinary pages, all of it used."""

    def __init__(self, size: int = SIZE) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.memory.write(bytes(range(256)) * (size // 256))
        self.memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel merges nothing that was told not to be
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @property
    def huge(self) -> int:
        """Bytes in huge pages of the mapping it lies in, by proc_pid_smaps(5)."""
        found = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split()[0]
            if not head.endswith(":"):
                begin, _, end = head.partition("-")
                found = int(begin, 16) <= self.address < int(end, 16)
            elif found and head == "AnonHugePages:":
                return int(line.split()[1]) * 1024
        raise AssertionError("its mapping was not found")


def _can_collapse() -> bool:
    if huge_page_setting() in (None, "never"):
        return False
    with in_huge_pages():
        region = Region()
    return region.huge > 0


needs_huge_pages = pytest.mark.skipif(not _can_collapse(), reason="this system gives no huge pages")


@needs_huge_pages
def test_what_is_allocated_inside_lies_in_huge_pages_and_keeps_its_contents():
    with in_huge_pages():
        region = Region()
        address = region.address
    assert region.huge >= SIZE // 2
    assert region.address == address
    region.memory.seek(0)
    assert region.memory.read() == bytes(range(256)) * (SIZE // 256)


@needs_huge_pages
def test_what_was_there_before_is_left_alone():
    before = Region()
    with in_huge_pages():
        pass
    assert before.huge == 0


@needs_huge_pages
def test_memory_that_is_mostly_unused_is_not_filled_up():
    with in_huge_pages():
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, SIZE, 4 * mmap.PAGESIZE):
            memory[page] = 1
        memory.madvise(mmap.MADV_HUGEPAGE)
        sparse = Region.__new__(Region)
        sparse.memory, sparse.address = memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert sparse.huge == 0


CHILD = """
import sys
import torch
from torch import nn
from specbench.kernels import huge_pages
from specbench.kernels.surgery import pack, quantize

collapse = huge_pages._collapse
huge_pages._collapse = lambda blocks, size: (laid.append(len(blocks) * size), collapse(blocks, size))
for kind in sys.argv[1:]:
    laid = []
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).requires_grad_(False)
    x = torch.randn(3, 2048)
    expected = model(x)
    done = pack(model) if kind == "packed" else quantize(model)
    assert done and type(model[0]) is not nn.Linear
    assert (model(x) - expected).abs().max() <= 0.05 * expected.abs().max()
    print(kind, sum(laid))
"""


@needs_huge_pages
def test_weights_are_laid_there():
    kinds = ["int8", "packed"] if can_pack(torch.float32, "cpu") else ["int8"]
    # In a process of its own: here they may get memory that was in use before.
    found = subprocess.run([sys.executable, "-c", CHILD, *kinds], capture_output=True, text=True, check=True)
    laid = dict(line.split() for line in found.stdout.splitlines())
    assert laid.keys() == {*kinds}
    for kind, size in laid.items():
        assert int(size) >= 4 * 2048 * 2048 * (4 if kind == "packed" else 1) / 2, kind


def test_what_takes_the_place_of_something_freed_is_laid_there_too(monkeypatch):
    laid: list[list[int]] = []
    monkeypatch.setattr(huge_pages, "_huge_page_size", lambda: 100)
    monkeypatch.setattr(huge_pages, "_full_blocks", lambda size: [0, 100, 200, 300])
    monkeypatch.setattr(huge_pages, "_collapse", lambda blocks, size: laid.append(blocks))
    with in_huge_pages() as freed:
        freed.append((150, 60))
    assert laid == [[100, 200]]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("always [madvise] never\n", "madvise"),
        ("always madvise [never]\n", "never"),
        ("", None),
        (None, None),
    ],
)
def test_setting_is_read(tmp_path, monkeypatch, text, setting):
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path)
    assert huge_page_setting() == setting


@pytest.mark.parametrize("text", ["always madvise [never]\n", None, "[always] madvise never\n"])
def test_nothing_is_done_where_they_are_not_wanted_or_proc_tells_nothing(tmp_path, monkeypatch, text):
    if text is not None:
        (tmp_path / "enabled").write_text(text)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")
    for module in (machine, huge_pages):
        monkeypatch.setattr(module, "HUGE_PAGES", tmp_path)
    if text is not None and "[always]" in text:
        monkeypatch.setattr(huge_pages, "_PROCESS", tmp_path)
    else:
        monkeypatch.setattr(huge_pages, "_collapse", lambda *_: pytest.fail("asked for huge pages"))
    with in_huge_pages():
        tensor = torch.ones(SIZE // 4)
    assert tensor.sum() == SIZE // 4
