"""Linear layers as fast as a CPU allows: weights packed once for oneDNN, or quantized to int8 or int4.

A packed layer computes what ``torch.nn.Linear`` computes, up to the order of float additions; up to 32 rows a row's
result does not depend on the number of rows. An int8 layer is a slightly coarser model: symmetric weights per output
channel, symmetric activations per row, integer sums, so that a row's result never depends on other rows. Both use
ordinary operators where oneDNN's are missing. An int4 layer is coarser still: its weights have a scale and an offset
per 32 inputs, its activations are those of an int8 layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from specbench.base.errors import UsageError
from specbench.kernels import native
from specbench.kernels.instructions import has_vnni
from specbench.kernels.onednn_layout import memory_of
from specbench.kernels.weights import (
    MIN_SCALE,
    QuantizedWeight,
    fake_quantize_int4,
    int8_weight,
    onednn_packs,
    takes_12_bits_in,
)
from specbench.options import QuantizedName

_ROWS_HINT = 5  # rows the packed layout is chosen for: verification at a usual draft length


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed: for oneDNN, or in bfloat16 for native products, without loss in 12 bits.

    ``panels`` is the memory that native products read; ``None`` if they cannot.

    Args:
        weight: [out, in]; or panels in bfloat16 that were made of it.
        sizes: Of the layers that are merged in it, in outputs.
    """

    def __init__(
        self, weight: Tensor | native.Panels, bias: Tensor | None, sizes: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.bias, self.dtype = bias, weight.dtype
        self.panels: native.Panels | None = None
        self._packed: Tensor | None = None
        self._doubles_single_rows = False
        if isinstance(weight, native.Panels):
            self.out_features, self.in_features, self.panels = weight.outputs, weight.inputs, weight
            return
        self.out_features, self.in_features = weight.shape
        if weight.dtype == torch.bfloat16 and native.is_available():
            if takes_12_bits_in(weight.shape, sizes):
                self.panels = native.Panels.shorten_bfloat16(weight)
            if self.panels is None and not onednn_packs(weight.dtype):
                self.panels = native.Panels.from_bfloat16(weight)
            if self.panels is not None:
                return
        # Not a parameter or buffer: torch cannot move or save tensors of this layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT)
        if native.is_available():
            self.panels = native.Panels.from_onednn(self._packed, weight)
        self._doubles_single_rows = _single_rows_differ(self._packed, weight.dtype, self.in_features)

    @property
    def memory(self) -> tuple[int, int] | None:
        """Address and bytes of the packed weight; ``None`` where that is not known."""
        if self._packed is not None:
            return memory_of(self._packed)
        assert self.panels is not None
        return self.panels.data.data_ptr(), self.panels.data.nbytes

    @property
    def weight(self) -> Tensor:
        """The weight in its ordinary layout, [out, in]; copied at every call."""
        if self._packed is None:
            assert self.panels is not None
            return self.panels.dense()
        dense: Tensor = self._packed.to_dense()
        return dense

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if not self._doubles_single_rows or x.numel() != self.in_features:
            return self._product(x)
        doubled = x.reshape(1, self.in_features).expand(2, -1).contiguous()
        return self._product(doubled)[:1].view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor
        if self._packed is None:
            assert self.panels is not None
            flat = x.reshape(-1, self.in_features)
            out = self.panels.product(flat, None if self.bias is None else self.bias.float())
            return out.to(x.dtype).view(*x.shape[:-1], self.out_features)
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save what a ``torch.nn.Linear`` would save, to the bit."""
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


_single_rows: dict[tuple[int, int], bool] = {}
_TRIAL_OUTPUTS = 10_000


def _single_rows_differ(packed: Tensor, dtype: torch.dtype, width: int) -> bool:
    """Return whether a row's result in a product of this shape differs bitwise if it is the only row.

    oneDNN chooses its code by shape and dtype. In float32 a test with random rows shows the difference. In half
    precision only one output in some ten thousand differs, and fewer in a narrow layer, so a difference is assumed.
    """
    if dtype != torch.float32:
        return True
    outputs = int(packed.shape[0])
    key = (outputs, width)
    if key not in _single_rows:
        count = max(4, _TRIAL_OUTPUTS // max(1, outputs))
        rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
        product = torch.ops.mkldnn._linear_pointwise
        _single_rows[key] = not all(
            torch.equal(
                product(row, packed, None, "none", [], ""),
                product(row.expand(2, -1).contiguous(), packed, None, "none", [], "")[:1],
            )
            for row in rows.split(1)
        )
    return _single_rows[key]


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight.

    Attributes:
        panels: Its weight for native products; ``None`` for others.
        quantizes_rows: Whether activations are quantized too.
    """

    kind: QuantizedName

    def __init__(
        self, outputs: int, inputs: int, bias: Tensor | None, panels: native.Panels | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = outputs, inputs
        self.bias, self.panels, self.quantizes_rows = bias, panels, panels is not None

    @property
    def memory(self) -> tuple[int, int] | None:
        """Address and bytes of the quantized weight; ``None`` where that is not known."""
        held = self.buffers() if self.panels is None else [self.panels.data]
        return max(((each.data_ptr(), each.nbytes) for each in held), key=itemgetter(1), default=None)

    @property
    def weight(self) -> Tensor:
        """A placeholder with the weight's dtype, device and number of rows, without values."""
        dtype = torch.float32 if self.bias is None else self.bias.dtype
        device = next((buffer.device for buffer in self.buffers()), None)
        return torch.empty(self.out_features, 0, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the dtype of x."""
        if self.panels is None:
            out = self._product(x)
        else:
            out = self.panels.product(x.reshape(-1, self.in_features)).to(x.dtype)
            out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _product(self, x: Tensor) -> Tensor:
        """Compute the product without panels."""
        raise NotImplementedError

    def _save_to_state_dict(self, *_: Any) -> None:
        raise UsageError(
            f"An {self.kind} model cannot be saved: its original weights are gone.",
            "Load the model in another dtype, and save that.",
        )


class Int8Linear(QuantizedLinear):
    """A linear layer with int8 weights (a scale per output channel) and int8 activations (a scale per row).

    Args:
        weight: [out, in], any floating dtype; or what was made of it.
    """

    kind: QuantizedName = "int8"

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> None:
        known = int8_weight(weight.detach()) if isinstance(weight, Tensor) else weight
        if isinstance(known, native.Panels):
            super().__init__(known.outputs, known.inputs, bias, known)
            return
        quantized, scales = known
        super().__init__(len(quantized), quantized.shape[1], bias)
        self.register_buffer("scales", scales, persistent=False)
        self.scales: Tensor
        self._prepacked = _prepack_int8(quantized)
        self.quantizes_rows = self._prepacked is not None
        self.register_buffer("quantized", None if self.quantizes_rows else quantized, persistent=False)
        self.quantized: Any
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)
        # Without VNNI instructions pairs of products are added up in 16 bits, which bytes in full would overflow.
        self._levels = 127 if has_vnni() else 63

    @property
    def memory(self) -> tuple[int, int] | None:
        packed = getattr(self, "_prepacked", None)
        return super().memory if packed is None else memory_of(packed)

    def _product(self, x: Tensor) -> Tensor:
        if self._prepacked is None:
            return nn.functional.linear(x, self.quantized.to(x.dtype)) * self.scales.to(x.dtype)
        rows = x.reshape(-1, self.in_features)
        steps = rows.abs().amax(dim=-1, keepdim=True).float().clamp_min_(MIN_SCALE).div_(self._levels)
        # Unsigned, zero in the middle; adding another half before the cut rounds to nearest.
        zero = self._levels + 1
        quantized = (rows / steps).add_(zero + 0.5).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantized, 1.0, zero, self._prepacked, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        return out.mul_(steps).to(x.dtype).view(*x.shape[:-1], self.out_features)


class Int4Linear(QuantizedLinear):
    """A linear layer with 4-bit weights, see ``fake_quantize_int4``, and int8 activations (a scale per row).

    Without native products its weights keep their dtype's size and activations are not quantized: it is no faster then.
    """

    kind: QuantizedName = "int4"

    def __init__(self, weight: Tensor | native.Panels, bias: Tensor | None) -> None:
        if isinstance(weight, Tensor) and weight.device.type == "cpu" and native.is_available():
            weight = native.Panels.quantize_int4(weight)
        rounded = None
        if isinstance(weight, native.Panels):
            super().__init__(weight.outputs, weight.inputs, bias, weight)
        else:
            super().__init__(len(weight), weight.shape[1], bias)
            rounded = fake_quantize_int4(weight.detach()).to(weight.dtype)
        self.register_buffer("rounded", rounded, persistent=False)
        self.rounded: Any

    def _product(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.rounded.to(x.dtype))


def _prepack_int8(quantized: Tensor) -> Tensor | None:
    """Pack an int8 weight for oneDNN; ``None`` if its operators are missing."""
    if quantized.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if not (hasattr(torch.ops.onednn, "qlinear_prepack") and hasattr(torch.ops.onednn, "qlinear_pointwise")):
        return None
    packed: Tensor = torch.ops.onednn.qlinear_prepack(quantized, None)
    return packed
