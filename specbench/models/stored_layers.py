"""Weights of quantized checkpoints: unpacked when they are read, or packed anew for int8 and int4 layers.

A weight is told as numbers (whole ones, or floating ones of 4 or 8 bits) and a scale for each block of them, in some
forms a zero too. It is computed in float32, some rows at a time, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from specbench import kernels
from specbench.base.machine import give_back_free_memory
from specbench.kernels import weights
from specbench.kernels.weights import KeptLayers, QuantizedWeight
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

    def int8(self) -> tuple[Tensor, ...] | None:
        """Return whole numbers in int8 and their scales, [rows, 1 or groups of 32 columns], float32; ``None`` if the
        weight is told otherwise.
        """
        scales = self.scales if self.scales.shape[1] == 1 else self._by_32(self.scales)
        if scales is None:
            return None
        codes = torch.empty(len(self.scales), self.columns, dtype=torch.int8)
        for chunk in self._chunks(len(codes)):
            whole = self._whole(chunk)
            codes[chunk] = whole.to(torch.int8)
            if not whole.equal(codes[chunk].float()):
                return None
        return codes, scales

    def int4(self) -> tuple[Tensor, ...] | None:
        """Return codes from 0 to 15, and scales and least numbers of groups of 32 columns, float32; ``None`` if the
        weight is told otherwise.
        """
        codes, zeros = self.codes(slice(0, len(self.scales))), torch.as_tensor(self.zeros)
        scales = self._by_32(self.scales)
        least = self._by_32(-zeros.float() * self.scales)
        if scales is None or least is None or codes.is_floating_point():
            return None
        if codes.dtype == torch.int8:
            codes, least = codes + 8, least - 8 * scales
        return None if codes.min() < 0 or codes.max() > 15 else (codes.view(torch.uint8), scales, least)

    def _by_32(self, values: Tensor) -> Tensor | None:
        """Give groups of 32 columns what theirs have; ``None`` if groups are others."""
        count, left = divmod(self.columns, 32 * values.shape[1])
        return None if left or self.groups is not None else values.repeat_interleave(count, 1)

    def fill(self, part: Tensor, begin: int = 0) -> None:
        """Unpack rows into a part of the weight, from row number ``begin`` on."""
        for chunk in self._chunks(len(part)):
            rows = slice(begin + chunk.start, begin + chunk.stop)
            part[chunk] = self._whole(rows) * self._spread(self.scales[rows])

    def _chunks(self, rows: int) -> Iterator[slice]:
        step = max(32, _CHUNK // self.columns // 32 * 32)
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def _whole(self, chunk: slice) -> Tensor:
        """Return rows without their scales, float32."""
        numbers = self.codes(chunk).float()
        if isinstance(self.zeros, Tensor):
            return numbers - self._spread(self.zeros[chunk].float())
        return numbers - self.zeros if self.zeros else numbers

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

    def __init__(self, grid: Callable[[], Grid], dtype: torch.dtype, *, packs: bool = False) -> None:
        self.grid, self._dtype, self._packs = grid, dtype, packs
        self.outline: Tensor | None = None

    def __getitem__(self, _: EllipsisType) -> Tensor:
        grid = self.grid()
        self.outline = grid.outline(self._dtype) if self._packs else None
        return grid.unpack(self._dtype) if self.outline is None else self.outline

    def fill(self) -> None:
        """Unpack what was read as an outline."""
        if self._packs and self.outline is not None:
            self.outline.copy_(self.grid().unpack(self._dtype))


def packed_as_told(
    grids: Sequence[Grid], kind: QuantizedName, *, by_groups: bool = True
) -> QuantizedWeight | None:
    """Return a weight with the numbers of these grids, one below the other; ``None`` if they do not fit.

    Args:
        by_groups: Whether int8 layers may have a scale for each group, which takes longer than one for each row.
    """
    told = [grid.int4() if kind == "int4" else grid.int8() for grid in grids]
    known = [parts for parts in told if parts is not None]
    if len(known) < len(grids) or len({parts[1].shape[1] for parts in known}) > 1:
        return None
    codes, *lines = [torch.cat(each) if len(each) > 1 else each[0] for each in zip(*known, strict=True)]
    del told, known
    return weights.from_codes(codes, *lines, by_groups=by_groups)


class StoredLayers:
    """Linear layers of a quantized checkpoint that are to be quantized again: they are packed out of it one by one.

    Where a layer can take the numbers of the checkpoint as they are, it does; others are rounded from float32.

    Args:
        layers: The weights by the layers' names; each layer has an outline of it, or all of it.

    Attributes:
        inner: The store of packed layers that is asked first, and is given what is packed.
        by_groups: See ``packed_as_told``.
        exact, rounded: How many layers were packed with the numbers of the checkpoint, and how many with others.
    """

    def __init__(self, layers: dict[str, StoredWeight], kind: QuantizedName) -> None:
        self._layers, self._kind = layers, kind
        self.inner: KeptLayers | None = None
        self.by_groups = False
        self.exact = self.rounded = 0

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
        give_back_free_memory()  # of the layer before
        path, _, names = place.rpartition(".")
        own = [self._layers.pop(f"{path}.{name}".lstrip("."), None) for name in names.split("+")]
        told = [weight for weight in own if weight is not None]
        shapes = [weight.outline.shape for weight in told if weight.outline is not None]
        rows = [shape[0] for shape in shapes]
        found = None if self.inner is None else self.inner.find(place)
        if found and (not told or weights.is_usable(found, self._kind, (sum(rows), shapes[0][1]), rows)):
            return found
        made, grids = None, [weight.grid() for weight in told]
        if told and len(told) == len(own):
            made = packed_as_told(grids, self._kind, by_groups=self.by_groups)
        self.exact, self.rounded = self.exact + (made is not None), self.rounded + (made is None)
        if made is None and (len(told) < len(own) or (self._kind == "int4" and not kernels.is_available())):
            for weight in told:
                weight.fill()
            return None
        made = made or self._round(grids, rows)
        self.save(place, made)
        return made

    def _round(self, grids: Sequence[Grid], rows: Sequence[int]) -> QuantizedWeight:
        whole = torch.empty(sum(rows), grids[0].columns)
        for grid, part in zip(grids, whole.split([*rows]), strict=True):
            grid.fill(part)
        return weights.rounded(whole, self._kind)

    @property
    def note(self) -> str | None:
        """A sentence for the user on what was packed."""
        if not self.exact + self.rounded:
            return None
        if not self.rounded:
            return f"Its {self._kind} layers have the numbers of the checkpoint."
        some = f"{self.exact} of its {self.exact + self.rounded}" if self.exact else "None of its"
        return f"{some} {self._kind} layers have the numbers of the checkpoint: others were rounded."

    def drop(self, path: str) -> None:
        """Forget a layer that was changed since it was loaded."""
        self._layers.pop(path, None)

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
