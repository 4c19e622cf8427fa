"""Self-drafters: cheaper forms of the target, with fewer layers or quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.backends.torch.submodels import first_layers, quantized_copy
from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbench.kernels.weights import KeptLayers
    from specbench.options import QuantizedName
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
    rounded: QuantizedName | None = None,
    layers: KeptLayers | None = None,
) -> PreTrainedModel:
    """Return a model of some layers of the given one, which shares all unquantized weights.

    Args:
        model: The model, packed or not; it is not changed.
        kept: The decoder layers to use, ascending. Each keeps its place in the whole model's cache.
        rounded: What the linear layers are quantized to; ``None`` if they are not.
        layers: A store of the whole model's quantized layers.

    Raises:
        ValueError: The list of decoder layers was not found.
        UsageError: The layers are wrapped, for example by a device map.
    """
    if rounded is not None and len(kept) == model.config.get_text_config(decoder=True).num_hidden_layers:
        return quantized_copy(model, rounded, layers)
    count = max(kept) + 1
    chosen = first_layers(model, count, skip={*range(count)}.difference(kept))
    return chosen if rounded is None else quantized_copy(chosen, rounded)
