"""Self-drafters: cheaper forms of the target, with fewer layers or quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.backends.torch.kernels.surgery import first_layers, quantized_copy
from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbench.backends.torch.kernels.surgery import KeptLayers
    from specbench.specs.drafters import SelfForm


def check_form(form: SelfForm, config: PreTrainedConfig) -> None:
    """Raise ``UsageError`` for layers that a model of this configuration lacks or cannot skip."""
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    if form.layers is not None and not 1 <= form.layers <= total:
        raise UsageError(
            f"The drafter {form} uses {form.layers} layers, but the target has {total}.",
            f"Give 1 to {total - 1}.",
        )
    if not form.skip:
        return
    possible = skippable_layers(config)
    if not possible:
        raise UsageError(
            "This target cannot skip layers: some of its layers use the states of others.",
            "Use self:int8, or a drafter model.",
        )
    for layer in form.skip:
        if not 0 <= layer < total:
            raise UsageError(
                f"The drafter {form} skips layer {layer}, but the target has {total} layers.",
                f"Layers are counted from 0 to {total - 1}.",
            )
        if layer not in possible:
            raise UsageError(
                f"Layer {layer} cannot be skipped: the length of the cache is read from the first layer of each kind.",
                "Remove it from skip=.",
            )


def skippable_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the layers that a self-drafter can skip, counted from 0.

    The first layer of each kind (full attention, sliding window) determines cache length and masks, so it must see
    every token. Models with recurrent layers, or with layers that share keys, can skip none.
    """
    text = config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    dependent = getattr(text, "num_kv_shared_layers", 0) or len(layers) != text.num_hidden_layers
    if dependent or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return ()
    kinds = [type(layer) for layer in layers]
    return tuple(i for i, kind in enumerate(kinds) if i and kinds.index(kind) != i)


def cheaper_form(
    model: PreTrainedModel,
    kept: Sequence[int],
    int8: bool,
    layers: KeptLayers | None = None,
    *,
    int4: bool = False,
) -> PreTrainedModel:
    """Return a model of some layers of the given one, which shares all unquantized weights.

    Args:
        model: The model, packed or not; it is not changed.
        kept: The decoder layers to use, ascending. Each keeps its place in the whole model's cache.
        int8, int4: Whether to quantize the linear layers.
        layers: A store of the whole model's quantized layers.

    Raises:
        ValueError: The list of decoder layers was not found.
        UsageError: The layers are wrapped, for example by a device map.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(kept) == total:
        if int8:
            return quantized_copy(model, "int8", layers)
        return quantized_copy(model, "int4", layers) if int4 else first_layers(model, total)
    count = max(kept) + 1
    chosen = first_layers(model, count)
    if len(kept) < count:
        path = next(
            name
            for name, child in model.named_modules()
            if isinstance(child, nn.ModuleList) and len(child) == total
        )
        _keep(chosen, path, kept)
    return quantized_copy(chosen) if int8 else quantized_copy(chosen, "int4") if int4 else chosen


def _keep(model: PreTrainedModel, path: str, kept: Sequence[int]) -> None:
    """Keep only these of the decoder layers at ``path``."""
    owner: Any = model.get_submodule(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[i] for i in kept]))
    owner.config.num_hidden_layers = len(kept)
    if getattr(owner.config, "layer_types", None):  # masks are chosen by place in the list
        owner.config.layer_types = [owner.config.layer_types[i] for i in kept]
