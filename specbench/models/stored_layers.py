"""Layers of quantized checkpoints, packed out of them for int8 and int4."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from specbench import kernels
from specbench.base.machine import give_back_free_memory
from specbench.kernels import weights
from specbench.kernels.weights import KeptLayers, QuantizedWeight
from specbench.models.quantized import Grid, StoredWeight
from specbench.options import QuantizedName


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
    def of(cls, model: nn.Module, stored: Iterable[Any], kind: QuantizedName) -> StoredLayers | None:
        """Return the layers of a model just loaded whose weights are outlines.

        ``None`` if a weight was changed after it was read, such as joined with others: then outlines are of no use.
        """
        read = [each for each in stored if isinstance(each, StoredWeight) and each.outline is not None]
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
