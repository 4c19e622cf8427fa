"""Large pages of memory: what is laid there, what is left alone, and that contents stay."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specbench.base import machine
from specbench.base.machine import huge_page_setting
from specbench.kernels import huge_pages
from specbench.kernels.huge_pages import lay_in_huge_pages
from specbench.kernels.surgery import pack, quantize
from specbench.kernels.weights import can_pack

SIZE = 1 << 25


def huge_bytes() -> int:
    """Bytes of the process in huge pages, by proc_pid_smaps(5)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def laid() -> int:
    """Lay a region of ordinary pages in huge ones, whose contents stay; return how many bytes more are there."""
    content = bytes(range(256)) * (SIZE // 256)
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory.write(content)
    memory.madvise(mmap.MADV_HUGEPAGE)  # the kernel merges nothing that was told not to be
    before = huge_bytes()
    lay_in_huge_pages([(ctypes.addressof(ctypes.c_char.from_buffer(memory)), SIZE)])
    memory.seek(0)
    assert memory.read() == content
    return huge_bytes() - before


needs_huge_pages = pytest.mark.skipif(
    sys.platform != "linux" or not laid(), reason="this system gives no huge pages"
)


@needs_huge_pages
def test_memory_is_laid_there_and_keeps_its_contents():
    assert laid() >= SIZE // 2


@needs_huge_pages
@pytest.mark.parametrize("kind", ["int8", "packed"])
def test_weights_are_laid_there(kind, monkeypatch):
    if kind == "packed" and not can_pack(torch.float32, "cpu"):
        pytest.skip("oneDNN packs nothing here")
    sizes: list[int] = []
    monkeypatch.setattr(huge_pages, "_collapse", lambda pages, size: sizes.append(len(pages) * size))
    model: Any = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).requires_grad_(False)
    x = torch.randn(3, 2048)
    expected = model(x)
    assert pack(model) if kind == "packed" else quantize(model)
    assert (model(x) - expected).abs().max() <= 0.05 * expected.abs().max()
    assert sum(sizes) >= 4 * 2048 * 2048 * (4 if kind == "packed" else 1) / 2


def test_a_page_is_taken_if_nearly_all_of_it_is_given(monkeypatch):
    laid: list[list[int]] = []
    monkeypatch.setattr(huge_pages, "_huge_page_size", lambda: 100)
    monkeypatch.setattr(huge_pages, "_collapse", lambda pages, size: laid.append(pages))
    lay_in_huge_pages([(110, 45), (155, 150), (330, 70), (495, 5)])
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
def test_setting_is_read_and_nothing_is_done_where_they_are_not_wanted(tmp_path, monkeypatch, text, setting):
    if text is not None:
        (tmp_path / "enabled").write_text(text)
    for module in (machine, huge_pages):
        monkeypatch.setattr(module, "HUGE_PAGES", tmp_path)
    monkeypatch.setattr(huge_pages, "_collapse", lambda *_: pytest.fail("asked for huge pages"))
    assert huge_page_setting() == setting
    lay_in_huge_pages([(0, SIZE)])
