"""Where and in which order oneDNN has packed a weight."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

_WIDTHS = (64, 48, 32, 16, 8)
"""Outputs that may lie together where oneDNN has packed a weight."""

_LANES = {1: 8, 2: 16, 3: 16}
"""Outputs that are multiplied at once, by the level of instructions."""

_DEPTH = 64
"""No more inputs lie together there: to a multiple of them native.c fills rows up with zeros."""


class Laid(NamedTuple):
    """Where and how panels lie.

    Attributes:
        data: What keeps the memory.
        address: Its beginning.
        width: Outputs of a panel.
        depth: Inputs, with the zeros behind them.
    """

    data: torch.Tensor
    address: int
    width: int
    depth: int


def memory_of_packed(packed: torch.Tensor) -> tuple[int, int] | None:
    """Address and size in bytes of what oneDNN has packed; ``None`` where torch does not tell."""
    try:
        return int(torch.ops.mkldnn.data_ptr(packed)), int(torch.ops.mkldnn._nbytes(packed))
    except (AttributeError, RuntimeError):
        return None


def layout_of(packed: torch.Tensor, weight: torch.Tensor, level: int) -> Laid | None:
    """How oneDNN has packed a weight; ``None`` where it lies otherwise, or all orders look alike.

    It does not tell: the first, the middle and the last panel are compared with the weight in every order that products
    read, of which one has to be right. ``level`` is that of the processor's instructions.
    """
    place = memory_of_packed(packed)
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
        panels = memory.view(count, depth // pair, width, pair)
        if all(
            torch.equal(
                panels[panel].permute(1, 0, 2).reshape(width, depth),
                _filled_up(weight[panel * width : (panel + 1) * width], width, depth),
            )
            for panel in {0, count // 2, count - 1}
        ):
            found.append(Laid(packed, address, width, depth))
    return found[0] if len(found) == 1 else None


def _filled_up(rows: torch.Tensor, width: int, depth: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows.detach(), (0, depth - rows.shape[1], 0, width - len(rows)))
