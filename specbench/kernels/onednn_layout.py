"""Find out where, and in which layout, oneDNN has packed a weight."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

_WIDTHS = (64, 48, 32, 16, 8)  # outputs in a panel of oneDNN's
_LANES = {1: 8, 2: 8, 3: 16, 4: 16}  # outputs that are multiplied at a time, by level of instructions
_DEPTH = 64  # inputs are padded at most to a multiple of this, as native.c pads rows


class PackedLayout(NamedTuple):
    """Where panels are, and how they are laid out."""

    data: Tensor  # owns the memory
    address: int  # of its beginning
    width: int  # outputs in a panel
    depth: int  # inputs, with padding


def memory_of(packed: Tensor) -> tuple[int, int] | None:
    """Return address and bytes of a weight that oneDNN has packed; ``None`` if torch does not tell."""
    try:
        return int(torch.ops.mkldnn.data_ptr(packed)), int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None


def layout_of(packed: Tensor, weight: Tensor, level: int) -> PackedLayout | None:
    """Find out how oneDNN has packed a weight; ``None`` if the layout is not known, or not unique.

    oneDNN does not report its layout, so the first, the middle and the last panel are compared with the weight in every
    layout that native products can read. ``level`` is the level of the processor's instructions.
    """
    place = memory_of(packed)
    if place is None:
        return None
    address, size = place
    memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=weight.dtype)
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
        if _is_laid_out(memory, weight, width, depth):
            found.append((width, depth))
    return PackedLayout(packed, address, *found[0]) if len(found) == 1 else None


def _is_laid_out(memory: Tensor, weight: Tensor, width: int, depth: int) -> bool:
    """Return whether the first, middle and last panel hold the weight."""
    count, pair = -(-len(weight) // width), 4 // weight.itemsize
    panels = memory.view(count, depth // pair, width, pair)
    return all(
        torch.equal(
            panels[panel].permute(1, 0, 2).reshape(width, depth),
            _filled_up(weight[panel * width : (panel + 1) * width], width, depth),
        )
        for panel in {0, count // 2, count - 1}
    )


def _filled_up(rows: Tensor, width: int, depth: int) -> Tensor:
    return torch.nn.functional.pad(rows.detach(), (0, depth - rows.shape[1], 0, width - len(rows)))
