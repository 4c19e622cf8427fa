"""Models made of parts of a loaded one, whose weights they share; self-drafters among them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench import kernels
from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbench.kernels.weights import KeptLayers
    from specbench.options import QuantizedName
    from specbench.specs.drafters import SelfForm


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers; raise ``ValueError`` if they were not found."""
    return _list_of_layers(model)[2]


def _list_of_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList]:
    """Return the module that has the list of decoder layers, the list's name, and the list."""
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(lists) != 1:
        raise ValueError(f"the decoder layers of {type(model).__name__} were not found")
    return lists[0]


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a model of the first ``count`` decoder layers with its own final norm and head; all weights are shared.

    Raises:
        ValueError: The list of decoder layers was not found, ``count`` is not between 1 and its length, or layers keep
            recurrent states, which have no length, so that a cache cannot tell that some layers are missing.
    """
    config = model.config.get_text_config(decoder=True)
    total = config.num_hidden_layers
    if not 1 <= count <= total:
        raise ValueError(f"{count} layers were requested, but the model has {total}")
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers):
        raise ValueError("some of its layers are recurrent")
    if getattr(config, "hidden_size_per_layer_input", 0):
        raise ValueError("its layers have embeddings of their own")
    clone = structural_copy(model)
    parent, name, layers = _list_of_layers(clone)
    setattr(parent, name, nn.ModuleList([*layers][:count]))
    short: Any = copy.copy(parent.config)
    short.num_hidden_layers = count
    for module in clone.modules():
        if getattr(module, "config", None) is parent.config and module is not parent:
            module.config = short
    parent.config = short
    return clone


def check_form(form: SelfForm, config: PreTrainedConfig) -> None:
    """Raise ``UsageError`` for layers that a model of this configuration lacks."""
    total = config.get_text_config(decoder=True).num_hidden_layers
    if form.layers is not None and not 1 <= form.layers <= total:
        raise UsageError(
            f"The drafter {form} uses {form.layers} layers, but the target has {total}.",
            f"Give 1 to {total - 1}.",
        )


def cheaper_form(
    model: PreTrainedModel,
    count: int,
    rounded: QuantizedName | None = None,
    layers: KeptLayers | None = None,
) -> PreTrainedModel:
    """Return a self-drafter: a model of the first layers of the given one, which shares all unquantized weights.

    Args:
        model: The model, packed or not; it is not changed.
        count: How many decoder layers it has.
        rounded: What the linear layers are quantized to; ``None`` if they are not.
        layers: A store of the whole model's quantized layers; ``None`` for a form of some layers.

    Raises:
        ValueError: The list of decoder layers was not found.
        UsageError: The layers are wrapped, for example by a device map.
    """
    whole = rounded is not None and count == model.config.get_text_config(decoder=True).num_hidden_layers
    form = structural_copy(model) if whole else first_layers(model, count)
    if rounded is not None:
        kernels.quantize(form, rounded, layers)
    return form


def float32_sample(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a model of the first two decoder layers with copies of their weights in float32, where rounding hides
    nothing.

    Int8 layers stay as they are. ``None`` if the layers were not found.
    """
    try:
        clone = first_layers(model, min(2, model.config.get_text_config(decoder=True).num_hidden_layers))
    except (ValueError, UsageError):
        return None
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in clone.modules():
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) and (dense := kernels.unpack(child)) is not None:
                module._modules[name] = dense
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().float(), requires_grad=False)
                module._parameters[name] = made[parameter]
    return clone


def structural_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the tree of modules, over the same parameters and buffers.

    Raises:
        UsageError: A module has its own ``forward``, which is bound to the original and would run that.
    """
    clones: dict[int, nn.Module] = {}

    def clone(module: nn.Module) -> nn.Module:
        if id(module) not in clones:
            if "forward" in vars(module):
                raise UsageError(
                    "The target cannot draft for itself: a device map or a compiler has wrapped its layers.",
                    "Take another --cache than compiled and one --device, or use a drafter model.",
                )
            copied = copy.copy(module)
            clones[id(module)] = copied
            copied._modules = {
                name: None if child is None else clone(child) for name, child in module._modules.items()
            }
            copied._parameters = dict(module._parameters)
            copied._buffers = dict(module._buffers)
        return clones[id(module)]

    return clone(model)  # type: ignore[return-value]


def trim_head(model: PreTrainedModel, rows: Tensor) -> None:
    """Make a model compute only the logits of ``rows``, int64, in this order. Its embeddings are not trimmed.

    Raises:
        UsageError: Its head is not an ordinary linear layer, or quantized.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    dense = None if "forward" in vars(head) else kernels.unpack(head)
    if dense is None:
        raise UsageError(
            "The drafter's vocabulary cannot be trimmed: its head is not an ordinary linear layer.",
            "Load the drafter again without a device map, or choose another one.",
        )
    for name, parameter in dense._parameters.items():
        if parameter is not None:
            dense._parameters[name] = nn.Parameter(parameter.detach()[rows], requires_grad=False)
    dense.out_features = len(rows)
    untyped.set_output_embeddings(dense)
