"""Linear layers as fast as a CPU allows: weights packed once for oneDNN, or quantised to int8.

A packed layer computes what ``torch.nn.Linear`` computes, up to the order of float additions. An int8 layer is a
different (slightly coarser) model: symmetric per-channel weights, symmetric per-row activations, integer
accumulation, so a row's result never depends on the rows beside it. Both fall back to ordinary operators where oneDNN's
are missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Int8Linear",
    "PackedLinear",
    "can_pack",
    "first_layers",
    "int8_copy",
    "pack_linears",
    "quantise_linears",
]

_ROWS_HINT = 5
"""Rows the packed layout is chosen for: a verification pass of a usual draft length."""


def can_pack(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether oneDNN's packed linear layers exist here for this dtype."""
    if torch.device(device).type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's own blocked order.

    Args:
        linear: The layer to pack; its weight can be freed afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias: torch.Tensor | None = linear.bias
        # Not a parameter or buffer: torch cannot move or save tensors of this layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in its ordinary order, [out, in]; made anew at every call."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


class Int8Linear(nn.Module):
    """A linear layer with int8 weights (one scale per output channel) and int8 activations (one scale per row).

    Args:
        weight: [out, in], any floating dtype.
        bias: [out] or ``None``.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        full = weight.detach().float()
        scales = full.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        quantised = (full / scales[:, None]).round_().to(torch.int8)
        self.register_buffer("scales", scales, persistent=False)
        self.scales: torch.Tensor
        self._prepacked = _prepack_int8(quantised)
        self.register_buffer(
            "quantised", None if self._prepacked is not None else quantised, persistent=False
        )
        self.quantised: Any
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)

    @property
    def weight(self) -> torch.Tensor:
        """Stands in for the weight where code asks for its dtype, device or number of rows; holds no values."""
        dtype = torch.float32 if self.bias is None else self.bias.dtype
        return torch.empty(self.out_features, 0, dtype=dtype, device=self.scales.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the dtype of x."""
        if self._prepacked is None:
            scaled = nn.functional.linear(x, self.quantised.to(x.dtype)) * self.scales.to(x.dtype)
            return scaled if self.bias is None else scaled + self.bias
        rows = x.reshape(-1, self.in_features).float()
        largest = torch.linalg.vector_norm(rows, ord=torch.inf, dim=-1, keepdim=True).clamp_min_(1e-30)
        # Unsigned with zero point 128; adding 128.5 before the cut rounds to nearest.
        quantised = (rows * (127.0 / largest)).add_(128.5).to(torch.uint8)
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised, 1.0, 128, self._prepacked, self.scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )  # fmt: skip
        out = out.mul_(largest / 127.0).to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


def _prepack_int8(quantised: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's packed form of an int8 weight, or ``None`` where its operators are missing."""
    if quantised.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if not (hasattr(torch.ops.onednn, "qlinear_prepack") and hasattr(torch.ops.onednn, "qlinear_pointwise")):
        return None
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(quantised, None)
    return packed


def pack_linears(model: PreTrainedModel) -> bool:
    """Replace the linear layers of a model by packed ones, one after another, so that no second copy of it is alive.

    Returns:
        Whether anything was packed; False where the operators are missing or the model is not on the CPU.
    """
    return _replace(
        model,
        lambda layer: (
            PackedLinear(layer)
            if isinstance(layer, nn.Linear) and can_pack(layer.weight.dtype, layer.weight.device)
            else layer
        ),
    )


def quantise_linears(model: PreTrainedModel) -> bool:
    """Replace the linear layers of a model by int8 ones in place: from then on the int8 model is the model."""
    return _replace(model, lambda layer: Int8Linear(layer.weight, layer.bias))


def int8_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model with int8 linear layers that shares everything else with the given one, packed or not."""
    clone = _structural_copy(model)
    quantise_linears(clone)
    return clone


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model's first ``count`` decoder layers with its own final norm and head; all weights are shared.

    Raises:
        ValueError: The model's list of decoder layers was not found, ``count`` is not between 1 and its length, or
            layers keep convolution states: these know no length, so a cache cannot tell that some were left out.
    """
    config = model.config.get_text_config(decoder=True)
    total = config.num_hidden_layers
    if not 1 <= count <= total:
        raise ValueError(f"{count} layers asked for, the model has {total}")
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers):
        raise ValueError("some of its layers keep convolution states")
    clone = _structural_copy(model)
    lists = [
        (parent, name, child)
        for parent in clone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(lists) != 1:
        raise ValueError(f"the decoder layers of {type(model).__name__} were not found")
    parent, name, layers = lists[0]
    setattr(parent, name, nn.ModuleList(list(layers)[:count]))
    short: Any = copy.copy(parent.config)
    short.num_hidden_layers = count
    for module in clone.modules():
        if getattr(module, "config", None) is parent.config and module is not parent:
            module.config = short
    parent.config = short
    return clone


def _structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the tree of modules over the same parameters and buffers.

    Raises:
        UsageError: A module carries a ``forward`` of its own, which is bound to the original: the copy would run that.
    """
    clones: dict[int, nn.Module] = {}

    def clone(module: nn.Module) -> nn.Module:
        if id(module) not in clones:
            if "forward" in vars(module):
                raise UsageError(
                    "This target cannot draft for itself: its layers were wrapped, by a device map or by a compiler.",
                    "Leave that out, or use a drafter model.",
                )
            twin = copy.copy(module)
            clones[id(module)] = twin
            twin._modules = {
                name: None if child is None else clone(child) for name, child in module._modules.items()
            }
            twin._parameters = dict(module._parameters)
            twin._buffers = dict(module._buffers)
        return clones[id(module)]

    return clone(model)  # type: ignore[return-value]


def _replace(model: nn.Module, build: Callable[[nn.Linear | PackedLinear], nn.Module]) -> bool:
    """Put ``build(layer)`` in the place of every linear layer; shared layers stay shared."""
    built: dict[int, tuple[nn.Module, nn.Module]] = {}
    changed = False
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() would skip a layer's second name
            # Exactly nn.Linear: a subclass may compute something else.
            if type(child) is not nn.Linear and not isinstance(child, PackedLinear):
                continue
            if id(child) not in built:
                built[id(child)] = (child, build(child))
            new = built[id(child)][1]
            if new is not child:
                setattr(parent, name, new)
                changed = True
    return changed
