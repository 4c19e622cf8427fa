"""The layers of a loaded model: linear ones replaced by packed or int8 ones, joined, or left out.

Layers that read the same input (query, key and value; gate and up) become one product, whose parts they hand out: a
small model spends much of a pass on starting products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.backends.torch.kernels.huge_pages import give_back_free_memory, in_huge_pages
from specbench.backends.torch.kernels.linear import (
    Int4Linear,
    Int8Linear,
    PackedLinear,
    QuantizedLinear,
    QuantizedWeight,
    can_pack,
    int8_weight,
)
from specbench.backends.torch.kernels.native import Panels
from specbench.base.errors import UsageError
from specbench.options import QuantizedName

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGE_MODEL = 1 << 23
"""Weights in linear layers from which looking for memory to lay together is worth it."""

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names under which decoder layers keep linear layers that read the same input."""

_OWN_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Where a module keeps the hooks that are called before and after it."""


_RECORDING = "transformers.utils.output_capturing"
"""Where ``transformers`` has the hooks that it leaves on a model once hidden states were asked of it. They do nothing
in passes that ask for none, or get them otherwise."""


class Hooks:
    """Whether anything is called before or after modules: then they are not to be passed by.

    Args:
        modules: Those that would be.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._hooks = tuple(
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        )
        self._registered = -1

    def there(self) -> bool:
        """Looks again only if a hook was registered anywhere since there were none."""
        registered = RemovableHandle.next_id
        if self._registered == registered:
            return False
        of_all = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)
        if any(of_all) or any(
            getattr(hook, "__module__", None) != _RECORDING
            for hooks in self._hooks
            for hook in hooks.values()
        ):
            return True
        self._registered = registered
        return False


class _MergedProduct:
    """One product for several linear layers that read the same input.

    Whichever layer is called first computes it; the others take their parts, and with the last part it is let go. Where
    hooks may change what a layer reads, each computes its own.
    """

    def __init__(self, layer: PackedLinear | QuantizedLinear, sizes: Sequence[int]) -> None:
        self.layer, self.sizes = layer, tuple(sizes)
        self.hooks = Hooks(())  # of the layers
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        hooked = self.hooks.there()
        if hooked or self._input is not x or self._parts[index] is None:
            # Not called as a module: hooks of all modules see the layers that it stands for.
            self._input, self._parts = x, list(self.layer.forward(x).split(self.sizes, dim=-1))
        part, self._parts[index] = self._parts[index], None
        if hooked or not any(other is not None for other in self._parts):
            self._input = None
        assert part is not None
        return part


class MergedLinear(nn.Module):
    """One of several linear layers that are computed as one product (see ``_MergedProduct``)."""

    def __init__(self, join: _MergedProduct, index: int) -> None:
        super().__init__()
        self.join, self.index, self.layer = join, index, join.layer
        self.in_features, self.out_features = join.layer.in_features, join.sizes[index]

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own weight, [out, in], made anew at every call; for int8 a stand-in without values."""
        return self._own(self.join.layer.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        """[out] or ``None``."""
        bias = self.join.layer.bias
        return None if bias is None else self._own(bias)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = tensor.split(self.join.sizes, dim=0)[self.index]
        return own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], a view of the joined product."""
        part: torch.Tensor = self.join.part(self.index, x)
        return part

    def state_dict(self, *_: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """What a ``torch.nn.Linear`` would save, to the bit, and not the joined product.

        Raises:
            UsageError: The layers are int8 ones.
        """
        whole: dict[str, torch.Tensor] = {}
        self.join.layer._save_to_state_dict(whole, prefix, keep_vars)
        destination = {} if destination is None else destination
        destination.update((name, self._own(tensor).clone()) for name, tensor in whole.items())
        return destination

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, joined"


def pack_linears(model: PreTrainedModel) -> bool:
    """Replace the linear layers of a model by packed ones, one after another, so that no second copy of it is alive.

    Args:
        model: Changed in place.

    Returns:
        Whether anything was packed; False where the operators are missing or the model is not on the CPU.
    """
    return _replace(model, _packed)


class QuantizedLayers(Protocol):
    """Weights of a model that were rounded at another time, by the places of its layers."""

    def find(self, place: str) -> QuantizedWeight | None:
        """What is kept of a place; ``None`` for nothing."""

    def save(self, place: str, weight: QuantizedWeight) -> None:
        """Keep what was made for a place."""


def quantize_linears(
    model: PreTrainedModel, *, row_invariant: bool = True, layers: QuantizedLayers | None = None
) -> bool:
    """Replace the linear layers of a model by int8 ones in place: from then on the int8 model is the model.

    Args:
        model: Changed in place.
        row_invariant: See ``Int8Linear``.
        layers: Where rounded weights of this model are found and kept.
    """

    def quantized(place: str, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None) -> Int8Linear:
        known = None if layers is None else layers.find(place)
        if known is None:
            known = int8_weight(weight().detach())
            if layers is not None:
                layers.save(place, known)
        return Int8Linear(known, bias, row_invariant=row_invariant)

    return _replace(model, quantized)


def quantize_linears_int4(model: PreTrainedModel, layers: QuantizedLayers | None = None) -> bool:
    """The same with int4 ones.

    Args:
        model: Changed in place.
        layers: See ``quantize_linears``. Only what native products read is kept.
    """

    def rounded(place: str, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None) -> Int4Linear:
        known = None if layers is None else layers.find(place)
        if isinstance(known, Panels):
            return Int4Linear(known, bias)
        made = Int4Linear(weight().detach(), bias)
        if layers is not None and made.panels is not None:
            layers.save(place, made.panels)
        return made

    return _replace(model, rounded)


def trim_head(model: PreTrainedModel, rows: torch.Tensor) -> None:
    """Let a model compute some of its logits alone, in the order of ``rows``, int64. Its embeddings stay whole.

    Raises:
        UsageError: Its head is no plain linear layer, or int8 already.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    if not isinstance(head, nn.Linear | PackedLinear) or "forward" in vars(head):
        raise UsageError(
            "The drafter's head cannot be cut to some tokens: it is no plain linear layer.",
            "Load the drafter again without a device map, or choose another one.",
        )
    trimmed = nn.Linear(head.in_features, len(rows), head.bias is not None, device="meta")
    trimmed.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    untyped.set_output_embeddings(trimmed)


def has_layer(model: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether there are layers of a kind in a model."""
    return any(isinstance(module, kind) for module in model.modules())


def quantization_of(model: nn.Module) -> QuantizedName | None:
    """What linear layers of a model are rounded to; ``None`` for nothing."""
    return next((each.kind for each in model.modules() if isinstance(each, QuantizedLinear)), None)


def quantizes_activations(model: nn.Module) -> bool:
    """Whether layers of a model round what they are given to bytes."""
    products = (module.layer if isinstance(module, MergedLinear) else module for module in model.modules())
    return any(isinstance(product, QuantizedLinear) and product.quantizes_rows for product in products)


def int8_copy(model: PreTrainedModel, layers: QuantizedLayers | None = None) -> PreTrainedModel:
    """A drafter with int8 linear layers that shares everything else with the given model, packed or not.

    Args:
        model: Left as it is.
        layers: See ``quantize_linears``.
    """
    clone = _structural_copy(model)
    quantize_linears(clone, row_invariant=False, layers=layers)
    return clone


def int4_copy(model: PreTrainedModel, layers: QuantizedLayers | None = None) -> PreTrainedModel:
    """The same with int4 linear layers."""
    clone = _structural_copy(model)
    quantize_linears_int4(clone, layers)
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
    if getattr(config, "hidden_size_per_layer_input", 0):
        raise ValueError("its layers have embeddings of their own")
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


def float32_sample(model: PreTrainedModel) -> PreTrainedModel | None:
    """The model's first two decoder layers with copies of their weights in float32, where rounding hides nothing.

    Int8 layers stay what they are.

    Returns:
        ``None`` if its layers were not found.
    """
    try:
        clone = first_layers(model, min(2, model.config.get_text_config(decoder=True).num_hidden_layers))
    except (ValueError, UsageError):
        return None
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in clone.modules():
        for name, child in module.named_children():
            if isinstance(child, PackedLinear) or _is_part_of_packed(child):
                module._modules[name] = _unpacked(child)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().float(), requires_grad=False)
                module._parameters[name] = made[parameter]
    return clone


def _unpacked(layer: Any) -> nn.Linear:
    """A packed layer as an ordinary one."""
    linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    linear.weight = nn.Parameter(layer.weight, requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias, requires_grad=False)
    return linear


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


_Linear = nn.Linear | PackedLinear | MergedLinear
_Kind = Callable[[str, Callable[[], torch.Tensor], torch.Tensor | None], PackedLinear | QuantizedLinear]


def _packed(_: str, weight: Callable[[], torch.Tensor], bias: torch.Tensor | None) -> PackedLinear:
    return PackedLinear(weight(), bias)


class _Joined:
    """Puts weights together, those of one shape always in the same memory."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}

    def __call__(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """[out, in] each -> [all of out, in]; holds until the next call."""
        first, rows = weights[0], sum(len(weight) for weight in weights)
        key = (rows, first.shape[1], first.dtype, first.device)
        if key not in self._held:
            self._held[key] = first.new_empty(key[:2])
        return torch.cat(list(weights), out=self._held[key])


def _replace(model: nn.Module, kind: _Kind) -> bool:
    """Put layers of one kind, in huge pages, in the place of all linear layers that suit; shared layers stay shared.

    Args:
        model: Changed in place.
        kind: What to make of them: of a place's name, its weight and its bias. The weight of joined layers is
            theirs put together, in memory that those of other places use too: fresh memory costs more than copying.
    """
    # Only parents are remembered, so that nothing holds a layer's weights once its successor is there.
    places: dict[tuple[int, ...], list[tuple[str, nn.Module, list[str]]]] = {}
    for path, parent in model.named_modules():
        for names in _groups(parent):
            layers_there = tuple(id(parent._modules[name]) for name in names)
            places.setdefault(layers_there, []).append((path, parent, names))
    changed, joined = False, _Joined()
    large = sum(_weights_of(module) for module in model.modules()) >= _LARGE_MODEL
    laid: AbstractContextManager[list[tuple[int, int]]] = in_huge_pages() if large else nullcontext([])
    with laid as freed:
        for spots in places.values():
            path, parent, names = spots[0]
            layers: Any = [parent._modules[name] for name in names]
            freed += [
                (layer.weight.data_ptr(), layer.weight.nbytes)
                for layer in layers
                if isinstance(layer, nn.Linear)
            ]
            made = _build(f"{path}.{'+'.join(names)}", layers, kind, joined)
            if made == layers:
                continue
            changed = True
            for _, parent, names in spots:
                for name, new in zip(names, made, strict=True):
                    setattr(parent, name, new)
        if large:
            give_back_free_memory()
    return changed


def _groups(parent: nn.Module) -> list[list[str]]:
    """Names of a module's linear layers, those together that read the same input."""
    if isinstance(parent, MergedLinear):
        return []
    # named_children() would skip a layer's second name.
    names = [name for name, child in parent._modules.items() if _is_linear(child)]
    groups = [
        [*together]
        for together in _SAME_INPUT
        if all(name in names for name in together) and _joinable([parent._modules[name] for name in together])
    ]
    taken = {name for group in groups for name in group}
    return groups + [[name] for name in names if name not in taken]


def _weights_of(module: Any) -> int:
    return module.in_features * module.out_features if _is_linear(module) else 0


def _is_linear(module: nn.Module | None) -> bool:
    # Exactly nn.Linear: a subclass may compute something else, and so may a forward that was put in its place.
    return (type(module) is nn.Linear and "forward" not in vars(module)) or (
        isinstance(module, PackedLinear) or _is_part_of_packed(module)
    )


def _is_part_of_packed(module: nn.Module | None) -> bool:
    return isinstance(module, MergedLinear) and isinstance(module.join.layer, PackedLinear)


def _joinable(layers: Sequence[Any]) -> bool:
    joins = [layer.join if isinstance(layer, MergedLinear) else None for layer in layers]
    if any(joins):
        return all(join is joins[0] for join in joins)
    if any(isinstance(layer, PackedLinear) for layer in layers) or len({id(layer) for layer in layers}) < len(
        layers
    ):
        return False
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        for layer in layers
    )


def _build(place: str, layers: Sequence[_Linear], kind: _Kind, joined: _Joined) -> list[nn.Module]:
    """The layers that take the place of these, or these themselves."""
    first = layers[0]
    if kind is _packed and not (
        isinstance(first, nn.Linear) and can_pack(first.weight.dtype, first.weight.device)
    ):
        return list(layers)
    sizes: tuple[int, ...] = tuple(layer.out_features for layer in layers)

    def weight() -> torch.Tensor:
        if len(layers) == 1:
            return first.weight
        if isinstance(first, MergedLinear):
            return first.join.layer.weight
        return joined([layer.weight.detach() for layer in layers])

    bias = first.bias
    if isinstance(first, MergedLinear) and len(layers) > 1:
        bias = first.join.layer.bias
    elif bias is not None and len(layers) > 1:
        bias = torch.cat([layer.bias.detach() for layer in layers])  # type: ignore[union-attr]
    new = kind(place, weight, bias)
    if len(layers) == 1:
        _share_hooks(layers, [new])
        return [new]
    join = _MergedProduct(new, sizes)
    parts = [MergedLinear(join, index) for index in range(len(layers))]
    _share_hooks(layers, parts)
    join.hooks = Hooks(parts)
    return list(parts)


def _share_hooks(layers: Sequence[nn.Module], successors: Sequence[nn.Module]) -> None:
    """Let hooks of layers be those of what takes their place; they can be taken off as before."""
    for layer, successor in zip(layers, successors, strict=True):
        for hooks in _OWN_HOOKS:
            setattr(successor, hooks, getattr(layer, hooks))
