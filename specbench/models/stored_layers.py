"""Weights of quantized checkpoints: unpacked when they are read, or packed anew for int8 and int4 layers.

A weight is told as numbers (whole ones, or floating ones of 4 or 8 bits) and a scale for each block of them, in some
forms a zero too. It is computed in float32, some rows at a time, and rounded once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.linear import Int8Weight, QuantizedWeight, int8_weight, is_usable
from specbench.backends.torch.kernels.native import Panels
from specbench.backends.torch.kernels.surgery import KeptLayers
from specbench.options import QuantizedName

_CHUNK = 1 << 20
"""Numbers that are unpacked at a time."""


@dataclass(frozen=True)
class Grid:
    """A weight as it is stored: ``(codes - zeros) * scales``.

    Attributes:
        codes: Returns rows of codes, [rows, columns].
        scales: [all rows, groups of columns], float32.
        zeros: The same shape; or one for all.
        shape: Of the weight; ``None`` for rows and columns. Codes beyond it are left out.
        groups: The group of each column; ``None`` if groups are equal and in order.
        turned: Whether the last two dimensions are exchanged once it is unpacked.
    """

    codes: Callable[[slice], Tensor]
    scales: Tensor
    columns: int
    zeros: Tensor | int = 0
    shape: Sequence[int] | None = None
    groups: Tensor | None = None
    turned: bool = False

    def unpack(self, dtype: torch.dtype) -> Tensor:
        shape = self.shape or (len(self.scales), self.columns)
        if shape[-1] != self.columns:  # the numbers follow each other in blocks
            made = torch.empty(len(self.scales), self.columns, dtype=dtype)
            self.fill(made)
            return made.view(-1)[: math.prod(shape)].view(*shape)
        made = torch.empty(*shape[:-2], *(shape[:-3:-1] if self.turned else shape[-2:]), dtype=dtype)
        parts = made.transpose(-1, -2) if self.turned else made
        for number, part in enumerate(parts.view(1, *shape) if len(shape) == 2 else parts):
            self.fill(part, number * shape[-2])
        return made

    def outline(self, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor for a matrix with only its first and last rows, by which models are told apart; the memory of
        the others is not touched. ``None`` if the weight is told otherwise than in rows and columns.
        """
        rows, shape = len(self.scales), self.shape or (len(self.scales), self.columns)
        if tuple(shape) != (rows, self.columns) or self.turned:
            return None
        made, count = torch.empty(rows, self.columns, dtype=dtype), max(1, -(-64 // self.columns)) + 31 & ~31
        last = max(0, rows - count) & ~31
        self.fill(made[:count])
        self.fill(made[last:], last)
        return made

    def int8(self) -> tuple[Tensor, Tensor] | None:
        """Return the weight as int8 layers take it, see ``Int8Weight``; ``None`` if rows have more than a scale."""
        if self.scales.shape[1] > 1:
            return None
        codes, zeros = self.codes(slice(0, len(self.scales))), torch.as_tensor(self.zeros)
        if codes.dtype == torch.uint8:
            codes, zeros = (codes ^ 128).view(torch.int8), zeros - 128
        if codes.dtype != torch.int8 or zeros.any():
            return None
        return codes, self.scales[:, 0].contiguous()

    def int4(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the weight as int4 layers take it, see ``Panels.from_int4``; ``None`` if its scales are not of
        bfloat16, or it is told otherwise.
        """
        rows, groups = self.scales.shape
        codes, zeros = self.codes(slice(0, rows)), torch.as_tensor(self.zeros)
        if self.columns % (32 * groups) or self.groups is not None or codes.is_floating_point():
            return None
        if codes.dtype == torch.int8:
            codes, zeros = codes + 8, zeros + 8
        lines = [self.scales, -zeros.float() * self.scales]
        if (
            codes.min() < 0
            or codes.max() > 15
            or any(not each.equal(each.bfloat16().float()) for each in lines)
        ):
            return None
        count = self.columns // groups // 32
        scales, least = (each.bfloat16().repeat_interleave(count, 1) for each in lines)
        return codes.view(torch.uint8), scales, least

    def fill(self, part: Tensor, begin: int = 0) -> None:
        """Unpack rows into a part of the weight, from row number ``begin`` on."""
        step = max(32, _CHUNK // self.columns // 32 * 32)
        for first in range(0, len(part), step):
            last = min(first + step, len(part))
            chunk = slice(begin + first, begin + last)
            numbers = self.codes(chunk).float()
            if isinstance(self.zeros, Tensor):
                numbers = numbers - self._spread(self.zeros[chunk].float())
            elif self.zeros:
                numbers = numbers - self.zeros
            part[first:last] = numbers * self._spread(self.scales[chunk])

    def _spread(self, values: Tensor) -> Tensor:
        """Give each column the value of its group."""
        count = values.shape[1]
        if count == 1:
            return values
        if self.groups is not None:
            return values[:, self.groups]
        return values.repeat_interleave(-(-self.columns // count), 1)[:, : self.columns]


class StoredWeight:
    """A weight that is unpacked when it is read: for `from_pretrained` a slice of a safetensors file."""

    _turn = threading.Lock()  # each product of torch has threads of its own

    def __init__(self, grid: Callable[[], Grid], dtype: torch.dtype, *, packs: bool = False) -> None:
        self.grid, self._dtype, self._packs = grid, dtype, packs
        self.outline: Tensor | None = None

    def __getitem__(self, _: EllipsisType) -> Tensor:
        with self._turn:
            grid = self.grid()
            self.outline = grid.outline(self._dtype) if self._packs else None
            return grid.unpack(self._dtype) if self.outline is None else self.outline

    def fill(self) -> None:
        """Unpack what was read as an outline."""
        assert self.outline is not None
        self.outline.copy_(self.grid().unpack(self._dtype))


class StoredLayers:
    """Linear layers of a quantized checkpoint that are to be quantized again: they are packed out of it one by one.

    Where a layer can take the numbers of the checkpoint as they are, it does; others are rounded from float32.

    Args:
        layers: The weights by the layers' names; each layer has only an outline of it.

    Attributes:
        inner: The store of packed layers that is asked first, and is given what is packed.
        exact: Whether all that was packed has the numbers of the checkpoint; ``None`` if nothing was.
    """

    def __init__(self, layers: dict[str, StoredWeight], kind: QuantizedName) -> None:
        self._layers, self._kind = layers, kind
        self.inner: KeptLayers | None = None
        self.exact: bool | None = None

    @classmethod
    def of(cls, model: nn.Module, weights: Iterable[Any], kind: QuantizedName) -> StoredLayers | None:
        """Return the layers of a model just loaded whose weights are outlines.

        ``None`` if a weight was changed after it was read, such as joined with others: then outlines are of no use.
        """
        read = [each for each in weights if isinstance(each, StoredWeight) and each.outline is not None]
        held = {each.outline.data_ptr(): each for each in read if each.outline is not None}
        untyped: Any = model
        head, found = untyped.get_output_embeddings(), {}
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                weight = None if parameter is None else held.pop(parameter.data_ptr(), None)
                if weight is not None and type(module) is nn.Linear and module is not head:
                    found[path] = weight
                elif weight is not None:
                    weight.fill()
        return None if held else cls(found, kind)

    def find(self, place: str) -> QuantizedWeight | None:
        path, _, names = place.rpartition(".")
        weights = [self._layers.pop(f"{path}.{name}".lstrip("."), None) for name in names.split("+")]
        told = [weight for weight in weights if weight is not None]
        shapes = [weight.outline.shape for weight in told if weight.outline is not None]
        rows = [shape[0] for shape in shapes]
        found = None if self.inner is None else self.inner.find(place)
        if not told or (found and is_usable(found, self._kind, (sum(rows), shapes[0][1]), rows)):
            return found
        if len(told) < len(weights) or (self._kind == "int4" and not native.is_available()):
            for weight in told:
                weight.fill()
            return None
        made = self._packed([weight.grid() for weight in told], rows)
        self.save(place, made)
        return made

    def _packed(self, grids: Sequence[Grid], rows: Sequence[int]) -> QuantizedWeight:
        told = [grid.int4() if self._kind == "int4" else grid.int8() for grid in grids]
        known = [parts for parts in told if parts is not None]
        if len(known) < len(grids):
            self.exact = False
            whole = torch.empty(sum(rows), grids[0].columns)
            for grid, part in zip(grids, whole.split([*rows]), strict=True):
                grid.fill(part)
            return Panels.quantize_int4(whole) if self._kind == "int4" else int8_weight(whole)
        self.exact = self.exact is not False
        joined = [torch.cat(each) for each in zip(*known, strict=True)]
        if self._kind == "int4":
            return Panels.from_int4(*joined)
        return Panels.from_int8(*joined) if native.is_available() else Int8Weight(*joined)

    def discard(self) -> None:
        if self.inner is not None:
            self.inner.discard()

    def save(self, place: str, weight: QuantizedWeight) -> None:
        if self.inner is not None:
            self.inner.save(place, weight)

    def finish(self) -> None:
        """Unpack what no layer asked for."""
        for weight in self._layers.values():
            weight.fill()
        self._layers = {}
