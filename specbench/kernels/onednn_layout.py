"""Find out where, and in which layout, oneDNN has packed a weight."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

_WIDTHS = (64, 48, 32, 16, 8)  # outputs in a panel of oneDNN's
_LANES = {1: 8, 2: 16, 3: 16}  # outputs that are multiplied at a time, by level of instructions
_DEPTH = 64  # inputs are padded at most to a multiple of this, as native.c pads rows


class PackedLayout(NamedTuple):
    """Where panels are, and how they are laid out."""

    data: Tensor  # owns the memory
    address: int  # of its beginning
    width: int  # outputs in a panel
    depth: int  # inputs, with padding


_known: dict[tuple[torch.Size, torch.dtype, int, int], tuple[int, int]] = {}
"""Width and depth by the shape, dtype and packed bytes of weights, and the level of instructions."""


def layout_of(packed: Tensor, weight: Tensor, level: int) -> PackedLayout | None:
    """Find out how oneDNN has packed a weight; ``None`` if the layout is not known, or not unique.

    oneDNN does not report its layout, so the first, the middle and the last panel are compared with the weight in every
    layout that native products can read. Of further weights of the same shape only the middle panel is compared.
    ``level`` is the level of the processor's instructions.
    """
    try:
        address, size = int(torch.ops.mkldnn.data_ptr(packed)), int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):  # torch does not tell
        return None
    memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=weight.dtype)
    key = (weight.shape, weight.dtype, size, level)
    if key in _known and _is_laid_out(memory, weight, *_known[key], whole=False):
        return PackedLayout(packed, address, *_known[key])
    (outputs, inputs), pair = weight.shape, 4 // weight.itemsize
    found = []
    for width in _WIDTHS:
        count = -(-outputs // width)
        depth, rest = divmod(len(memory), count * width)
        if (
            rest
            or width % _LANES[level]
            or depth % pair
            or not inputs <= depth <= -(-inputs // _DEPTH) * _DEPTH
        ):
            continue
        if _is_laid_out(memory, weight, width, depth, whole=True):
            found.append((width, depth))
    if len(found) != 1:
        return None
    _known[key] = found[0]
    return PackedLayout(packed, address, *found[0])


def _is_laid_out(memory: Tensor, weight: Tensor, width: int, depth: int, *, whole: bool) -> bool:
    """Return whether panels hold the weight: the first, middle and last one, or only the middle one."""
    count, pair = -(-len(weight) // width), 4 // weight.itemsize
    panels = memory.view(count, depth // pair, width, pair)
    return all(
        torch.equal(
            panels[panel].permute(1, 0, 2).reshape(width, depth),
            _filled_up(weight[panel * width : (panel + 1) * width], width, depth),
        )
        for panel in ({0, count // 2, count - 1} if whole else {count // 2})
    )


def _filled_up(rows: Tensor, width: int, depth: int) -> Tensor:
    return torch.nn.functional.pad(rows.detach(), (0, depth - rows.shape[1], 0, width - len(rows)))
