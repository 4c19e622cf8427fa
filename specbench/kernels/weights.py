"""Packed and quantized weights as layers keep them here: in panels, or rows of bytes where products are not native."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specbench.kernels import native
from specbench.kernels.instructions import has_bfloat16, has_vnni, is_allowed
from specbench.options import QuantizedName

_CHUNK_NUMBERS = 1 << 18
"""Numbers of a weight that are quantized at a time: in float32 they fit into a processor's caches."""

_GROUP = 32  # inputs that share a scale, in 4 bits
_LINES = tuple((steps, 0.0) for steps in range(15, 7, -1)) + tuple((15, 0.02 * cut) for cut in range(1, 9))
"""The grids tried for a group: the number of steps from its lowest to its highest number, and the share of that range
to cut off at both ends."""

MIN_SCALE = 1e-30
"""Least value taken for the largest element of a row, so that rows of zeros have a scale."""


def can_pack(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Return whether there are packed linear layers for this dtype."""
    if torch.device(device).type != "cpu":
        return False
    return onednn_packs(dtype) or (dtype == torch.bfloat16 and native.is_available())


def onednn_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype here.

    Without instructions for bfloat16, oneDNN unpacks it for every product, if it supports it at all: native products
    are faster.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        known = is_allowed("avx512") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return known and (has_bfloat16() or not native.is_available())
    if dtype == torch.float16:
        return is_allowed("avx512") and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def takes_12_bits_in(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether a bfloat16 weight of this shape fills panels of 12 bits."""
    outputs, inputs = shape
    return outputs * inputs > 0 and all(size % native.WIDE_PANEL == 0 for size in sizes or (outputs,))


class Int8Weight(NamedTuple):
    """A weight in int8."""

    quantized: Tensor  # [out, in], int8
    scales: Tensor  # [out], float32, factors of the rows


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantize a weight [out, in], some rows at a time: in float32 all of it takes much memory."""
    quantized = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    step = max(1, _CHUNK_NUMBERS // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        full = weight[rows].float()
        scales[rows] = full.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        quantized[rows] = (full / scales[rows, None]).round_()
    return Int8Weight(quantized, scales)


QuantizedWeight = Int8Weight | native.Panels
"""A weight as a quantized layer keeps it: native products read another layout."""


_PARTS = ("sizes", "exceptions", "panels", "scales", "quantized")


class KeptLayers:
    """Packed or quantized weights of a model, by the names of its layers: those of an earlier run, or those made now.

    Args:
        found: What was read; ``None`` if they are made now.
        report: Called with the number of each layer of the model that is made.

    Attributes:
        tensors: Their tensors by name.
        fit: Whether what was read is of use.
    """

    def __init__(self, found: dict[str, Tensor] | None, report: Callable[[int], None]) -> None:
        self._made, self.tensors, self.fit, self._report = found is None, found or {}, True, report

    def find(self, place: str) -> QuantizedWeight | None:
        """Return the stored weight of a layer; ``None`` if there is none."""
        if self._made:  # nothing is there yet, and a layer is made next
            if layer := re.search(r"\.(\d+)\.", place):
                self._report(int(layer[1]))
            return None
        names = {part: f"{place} {part}" for part in _PARTS}
        tensors = {part: self.tensors[name] for part, name in names.items() if name in self.tensors}
        try:
            return from_stored(tensors) if tensors else None
        except (KeyError, ValueError):
            self.discard()
            return None

    def discard(self) -> None:
        """Forget all that was read, since a layer's weight is of no use here."""
        if not self._made:
            self.tensors, self.fit = {}, False

    def save(self, place: str, weight: QuantizedWeight) -> None:
        """Store the weight of a layer; what was read is not extended."""
        if self._made:
            self.tensors |= {f"{place} {part}": tensor for part, tensor in stored(weight).items()}


def is_usable(
    weight: QuantizedWeight,
    kind: QuantizedName | Literal["packed"],
    shape: tuple[int, int],
    sizes: Sequence[int],
) -> bool:
    """Return whether a layer of this kind, shape [out, in] and ``sizes`` could have made this weight here."""
    if isinstance(weight, Int8Weight):
        dtypes = weight.quantized.dtype, weight.scales.dtype
        shapes = weight.quantized.shape, weight.scales.shape
        return (kind, *dtypes) == ("int8", torch.int8, torch.float32) and shapes == (shape, shape[:1])
    if (weight.outputs, weight.inputs) != shape or not native.is_available():
        return False
    if kind != "packed":
        return weight.bits == (8 if kind == "int8" else 4)
    if weight.bits == 12:
        return takes_12_bits_in(shape, sizes)
    return weight.bits == 16 and not onednn_packs(torch.bfloat16)


def int8_weight(weight: Tensor) -> QuantizedWeight:
    """Return a weight [out, in] in the int8 form that layers use on this machine."""
    made = quantize_int8(weight)
    if weight.device.type == "cpu" and native.is_available():
        return native.Panels.from_int8(made.quantized, made.scales)
    return made


def bytes_per_weight(kind: QuantizedName, wide: int) -> float:
    """Return the bytes per number of a quantized layer, with its share of scales. Without native products int4 takes
    the ``wide`` bytes that it had before.
    """
    if kind == "int8":
        return 1
    return 0.5 + 4 / _GROUP if native.is_available() else wide


def stored(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors to save; ``from_stored`` reads them back."""
    if isinstance(weight, native.Panels):
        return weight.stored()
    return {"scales": weight.scales, "quantized": weight.quantized}


def from_stored(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """Use a saved weight where it lies; raise ``KeyError`` or ``ValueError`` if it is of another kind or size."""
    if "panels" not in tensors:
        return Int8Weight(tensors["quantized"], tensors["scales"])
    return native.Panels.from_stored(tensors)


def layout() -> tuple[object, ...]:
    """Return what the form of saved weights depends on, beside the processor's name."""
    return native.LAYOUT, has_vnni()


def takes_12_bits() -> bool:
    """Return whether weights in bfloat16 are packed in 12 bits here."""
    return native.is_available() and native.loaded().level > 2


def fake_quantize_int4(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as 4-bit groups of 32 inputs give it, in float32: offset + scale · code, codes from 0
    to 15.

    Offset and scale are bfloat16. For each group, the pair with the least squared error is chosen out of several. Among
    them are pairs that reproduce the numbers of a 4-bit file, even if it uses only some of the codes (its blocks have a
    scale, and some a minimum). native.c does the same faster.
    """
    outputs, inputs = weight.shape
    places = torch.arange(inputs + -inputs % _GROUP, device=weight.device)
    places[inputs:] = inputs // _GROUP * _GROUP  # what fills the last group up is in it already
    groups = weight.float()[:, places].view(outputs, -1, _GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best, least_error = low.bfloat16().float().expand_as(groups), torch.full_like(low, torch.inf)
    for steps, cut in _LINES:
        scale = ((high - low) * (1 - 2 * cut) / steps).bfloat16().float()
        least = (low + cut * (high - low)).bfloat16().float()
        codes = ((groups - least) / scale.where(scale > MIN_SCALE, 1.0)).round_().clamp_(0, 15)
        found = codes * scale + least
        error = (found - groups).square_().sum(-1, keepdim=True).where(scale > MIN_SCALE, torch.inf)
        best = torch.where(error < least_error, found, best)
        least_error = torch.minimum(error, least_error)
    return best.reshape(outputs, -1)[:, :inputs]
