"""Replace the linear layers of a loaded model by packed or quantized ones, and merge those that can be one product.

Layers that read the same input (query, key and value; gate and up) become one product, since a small model spends much
of a forward on starting products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specbench.base.machine import give_back_free_memory
from specbench.kernels.hooks import Hooks
from specbench.kernels.huge_pages import lay_in_huge_pages
from specbench.kernels.linear import Int4Linear, Int8Linear, PackedLinear, QuantizedLinear
from specbench.kernels.native import Panels
from specbench.kernels.weights import KeptLayers, QuantizedWeight, can_pack, int8_weight, is_usable
from specbench.options import QuantizedName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGE_MODEL = 1 << 23  # weights in linear layers from which huge pages are worth looking for
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of linear layers of a decoder layer that read the same input."""


class _MergedProduct:
    """One product for several linear layers that read the same input.

    The layer that is called first computes the product, the others take their parts, and the last one frees it. With
    hooks, which can change a layer's input, each layer computes its own.
    """

    def __init__(self, layer: PackedLinear | QuantizedLinear, sizes: Sequence[int]) -> None:
        self.layer, self.sizes = layer, tuple(sizes)
        self.hooks = Hooks(())  # of the layers
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        hooked = self.hooks.are_present()
        if hooked or self._input is not x or self._parts[index] is None:
            # Not called as a module: hooks of all modules see the layers that it stands for.
            self._input, self._parts = x, list(self.layer.forward(x).split(self.sizes, dim=-1))
        part, self._parts[index] = self._parts[index], None
        if hooked or not any(other is not None for other in self._parts):
            self._input = None
        assert part is not None
        return part


class MergedLinear(nn.Module):
    """One of several linear layers that are computed as one product."""

    def __init__(self, merged: _MergedProduct, index: int) -> None:
        super().__init__()
        self.merged, self.index, self.layer = merged, index, merged.layer
        self.in_features, self.out_features = merged.layer.in_features, merged.sizes[index]

    @property
    def weight(self) -> Tensor:
        """The layer's own weight, [out, in], copied at every call; of a quantized layer a stand-in without values."""
        return self._own(self.merged.layer.weight)

    @property
    def bias(self) -> Tensor | None:
        bias = self.merged.layer.bias
        return None if bias is None else self._own(bias)

    def _own(self, tensor: Tensor) -> Tensor:
        own: Tensor = tensor.split(self.merged.sizes, dim=0)[self.index]
        return own

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], a view of the merged product."""
        part: Tensor = self.merged.part(self.index, x)
        return part

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Save what a ``torch.nn.Linear`` would save, to the bit, and not the merged product.

        Raises:
            UsageError: The layers are quantized.
        """
        saved: dict[str, Tensor] = {}
        self.merged.layer._save_to_state_dict(saved, prefix, keep_vars)
        destination = {} if destination is None else destination
        destination.update((name, self._own(tensor).clone()) for name, tensor in saved.items())
        return destination


class _Place(NamedTuple):
    """A linear layer, or several that become one product, to be replaced."""

    name: str
    weight: Callable[[], Tensor]
    bias: Tensor | None
    shape: tuple[int, int]  # [out, in]
    sizes: Sequence[int] = ()  # of the layers that are merged, in outputs


def _found(layers: KeptLayers | None, place: _Place, kind: _Kind) -> QuantizedWeight | None:
    """Return the stored weight of a layer if it is as if made now."""
    stored = None if layers is None else layers.find(place.name)
    if layers is not None and stored is not None and not is_usable(stored, kind, place.shape, place.sizes):
        layers.discard()
        return None
    return stored


def pack(model: PreTrainedModel, layers: KeptLayers | None = None) -> bool:
    """Replace the linear layers of a model by packed ones, one by one, so that there is no second copy of it.

    Args:
        layers: Store of this model's packed weights.

    Returns:
        Whether anything was packed; False where operators are missing or the model is not on the CPU.
    """

    def packed(place: _Place, stored: QuantizedWeight | None) -> PackedLinear:
        weight = stored if isinstance(stored, Panels) else place.weight()
        made = PackedLinear(weight, place.bias, place.sizes)
        if layers is not None and stored is None and made.panels is not None and made.panels.is_own:
            layers.save(place.name, made.panels)
        return made

    return _replace(model, "packed", packed, layers)


def quantize(model: PreTrainedModel, kind: QuantizedName = "int8", layers: KeptLayers | None = None) -> bool:
    """Replace the linear layers of a model by quantized ones.

    Args:
        layers: Store of this model's quantized weights; int4 weights are stored in panels only.
    """

    def quantized(place: _Place, stored: QuantizedWeight | None) -> QuantizedLinear:
        if kind == "int4":
            known = stored if isinstance(stored, Panels) else None
            int4 = Int4Linear(place.weight().detach() if known is None else known, place.bias)
            if layers is not None and known is None and int4.panels is not None:
                layers.save(place.name, int4.panels)
            return int4
        made = int8_weight(place.weight().detach()) if stored is None else stored
        if layers is not None and stored is None:
            layers.save(place.name, made)
        return Int8Linear(made, place.bias)

    return _replace(model, kind, quantized, layers)


def unpack(layer: Any) -> nn.Linear | None:
    """Return an ordinary layer with the weight of a linear one, packed or not; ``None`` for others, quantized too."""
    if not isinstance(layer, nn.Linear | PackedLinear) and not _is_merged_packed(layer):
        return None
    weight, bias = layer.weight.detach(), layer.bias
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class Layers(NamedTuple):
    """What the linear layers of a model are.

    Attributes:
        packed: Whether some are packed.
        quantized: What they are quantized to; ``None`` for nothing.
        round_rows: Whether some round their inputs to bytes.
        weights: How many weights a token of a prompt is multiplied by, without output layers; 0 where that is not
            known: with experts a token is multiplied by some of them only.
    """

    packed: bool
    quantized: QuantizedName | None
    round_rows: bool
    weights: int


def layers_of(model: nn.Module) -> Layers:
    """Return what the linear layers of a model are."""
    outputs: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    head = None if outputs is None else outputs()
    modules: dict[str, Any] = dict(model.named_modules())
    own = {name: each for name, each in modules.items() if isinstance(each, _Linear)}
    quantized = [each for each in own.values() if isinstance(each, QuantizedLinear)]
    inner = [each for name, each in own.items() if each is not head and not _HEADS & set(name.split("."))]
    return Layers(
        any(isinstance(each, PackedLinear) for each in own.values()),
        next((each.kind for each in quantized), None),
        any(each.quantizes_rows for each in quantized),
        0
        if any(name.endswith(".experts") for name in modules)
        else sum(each.in_features * each.out_features for each in inner),
    )


_Linear = nn.Linear | PackedLinear | QuantizedLinear
_LinearLike = nn.Linear | PackedLinear | MergedLinear
_HEADS = {"lm_head", "lm_heads"}
_Kind = QuantizedName | Literal["packed"]
_MakeLayer = Callable[[_Place], PackedLinear | QuantizedLinear]


_Buffers = dict[tuple[int, int, torch.dtype, torch.device], Tensor]
"""Memory for joined weights, one for each shape, since allocating it anew costs more than copying."""


def _join(buffers: _Buffers, weights: Sequence[Tensor]) -> Tensor:
    """[out, in] each -> [sum of out, in]; valid until the next call."""
    first, rows = weights[0], sum(len(weight) for weight in weights)
    key = (rows, first.shape[1], first.dtype, first.device)
    if key not in buffers:
        buffers[key] = first.new_empty(key[:2])
    return torch.cat(list(weights), out=buffers[key])


def _replace(
    model: nn.Module,
    kind: _Kind,
    make: Callable[[_Place, QuantizedWeight | None], PackedLinear | QuantizedLinear],
    kept: KeptLayers | None,
) -> bool:
    """Replace all suitable linear layers by the results of ``make``, which gets their weights of an earlier run.

    New weights of large models are laid in huge pages. Layers that are packed already, have hooks, or cannot be packed
    are left alone. Shared layers stay shared. The weight of merged layers is valid only during the call of ``make``.
    """
    # Only parents are kept, so that nothing refers to a layer's weights once it is replaced.
    places: dict[tuple[int, ...], list[tuple[str, nn.Module, list[str]]]] = {}
    for path, parent in model.named_modules():
        for names in _groups(parent):
            ids = tuple(id(parent._modules[name]) for name in names)
            places.setdefault(ids, []).append((path, parent, names))
    memory: list[tuple[int, int] | None] = []

    def made_or_kept(place: _Place) -> PackedLinear | QuantizedLinear:
        stored = _found(kept, place, kind)
        layer = make(place, stored)
        if stored is None:
            memory.append(layer.memory)
        return layer

    changed, buffers = False, _Buffers()
    large = sum(_weights_of(module) for module in model.modules()) >= _LARGE_MODEL
    for same in places.values():
        path, parent, names = same[0]
        layers: Any = [parent._modules[name] for name in names]
        made = _make_layers(
            f"{path}.{'+'.join(names)}", layers, made_or_kept, buffers, packs=kind == "packed"
        )
        if made == layers:
            continue
        changed = True
        for _, parent, names in same:
            for name, new in zip(names, made, strict=True):
                setattr(parent, name, new)
    if large:
        give_back_free_memory()
        lay_in_huge_pages(each for each in memory if each is not None)
    return changed


def _groups(parent: nn.Module) -> list[list[str]]:
    """Return the names of a module's linear layers, those that read the same input together."""
    if isinstance(parent, MergedLinear):
        return []
    # named_children() would skip a layer's second name.
    names = [name for name, child in parent._modules.items() if _is_linear(child)]
    groups = [
        [*group]
        for group in _SAME_INPUT
        if all(name in names for name in group) and _can_merge([parent._modules[name] for name in group])
    ]
    taken = {name for group in groups for name in group}
    return groups + [[name] for name in names if name not in taken]


def _weights_of(module: Any) -> int:
    return module.in_features * module.out_features if _is_linear(module) else 0


def _is_linear(module: nn.Module | None) -> bool:
    # Exactly nn.Linear: a subclass may compute something else, and so may another forward. Hooks stay where they are.
    if module is None or module._forward_hooks or module._forward_pre_hooks:
        return False
    return (type(module) is nn.Linear and "forward" not in vars(module)) or (
        isinstance(module, PackedLinear) or _is_merged_packed(module)
    )


def _is_merged_packed(module: nn.Module | None) -> bool:
    return isinstance(module, MergedLinear) and isinstance(module.merged.layer, PackedLinear)


def _can_merge(layers: Sequence[Any]) -> bool:
    merged = [layer.merged if isinstance(layer, MergedLinear) else None for layer in layers]
    if any(merged):
        return all(each is merged[0] for each in merged)
    if any(isinstance(layer, PackedLinear) for layer in layers):
        return False
    alike = {
        (layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers
    }
    return len(alike) == 1 and len({id(layer) for layer in layers}) == len(layers)


def _make_layers(
    name: str, layers: Sequence[_LinearLike], make: _MakeLayer, buffers: _Buffers, *, packs: bool
) -> list[nn.Module]:
    """Return the layers that replace these, or these themselves."""
    first = layers[0]
    if packs and not (isinstance(first, nn.Linear) and can_pack(first.weight.dtype, first.weight.device)):
        return list(layers)
    if len(layers) == 1:
        shape = (first.out_features, first.in_features)
        return [make(_Place(name, lambda: first.weight, first.bias, shape))]
    bias, sizes = first.bias, tuple(layer.out_features for layer in layers)
    shape = (sum(sizes), first.in_features)
    if isinstance(first, MergedLinear):
        packed = first.merged.layer
        new = make(_Place(name, lambda: packed.weight, packed.bias, shape, sizes))
    else:
        if bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])  # type: ignore[union-attr]
        joined = partial(_join, buffers, [layer.weight.detach() for layer in layers])
        new = make(_Place(name, joined, bias, shape, sizes))
    merged = _MergedProduct(new, sizes)
    parts = [MergedLinear(merged, index) for index in range(len(layers))]
    merged.hooks = Hooks(parts)
    return list(parts)
