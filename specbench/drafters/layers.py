"""The forms in which a target drafts for itself: which layers, in which precision, and the models made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from specbench.backends.torch.kernels.surgery import first_layers, int4_copy, int8_copy
from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbench.backends.torch.kernels.surgery import QuantizedLayers
    from specbench.specs.drafters import SelfForm


def check_form(form: SelfForm, config: PreTrainedConfig) -> None:
    """Refuse layers that a model of this configuration lacks, or cannot do without.

    Raises:
        UsageError: It cannot be.
    """
    text = config.get_text_config(decoder=True)
    total = text.num_hidden_layers
    if form.layers is not None and not 1 <= form.layers <= total:
        raise UsageError(
            f"The drafter {form} asks for {form.layers} layers, the target has {total}.",
            f"Give 1 to {total - 1}.",
        )
    if not form.skip:
        return
    possible = skippable_layers(config)
    if not possible:
        raise UsageError(
            "This target cannot skip layers: some of them go by the states of others.",
            "Use self:int8, or a drafter model.",
        )
    for layer in form.skip:
        if not 0 <= layer < total:
            raise UsageError(
                f"The drafter {form} skips layer {layer}, the target has {total}.",
                f"They are counted from 0 to {total - 1}.",
            )
        if layer not in possible:
            raise UsageError(
                f"Layer {layer} cannot be skipped: the first one of each kind tells how long the cache is.",
                "Leave it out of skip.",
            )


def skippable_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """The layers that a drafter on the target's cache can leave out, counted from 0.

    The length of the cache and the sizes of the masks are read off its first layer, and off the first of each kind
    (full attention, sliding window): these have to see every token. Models with convolution states, which know no
    length, or with layers that read the keys of others, can leave out none.
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
    layers: QuantizedLayers | None = None,
    *,
    int4: bool = False,
) -> PreTrainedModel:
    """A model of some layers of the given one, with its embeddings, final norm and head.

    What stays as it is is shared; quantized layers are made one by one, and none of those that are left out.

    Args:
        model: Packed or not; it is left alone.
        kept: The decoder layers to use, ascending. Each keeps its own place in a cache of the whole model.
        int8, int4: Quantize the linear layers.
        layers: Where those of the whole model, rounded so, are found and kept.

    Raises:
        ValueError: The list of decoder layers was not found.
        UsageError: The layers were wrapped, by a device map say.
    """
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(kept) == total:
        if int8:
            return int8_copy(model, layers)
        return int4_copy(model, layers) if int4 else first_layers(model, total)
    count = max(kept) + 1
    chosen = first_layers(model, count)
    if len(kept) < count:
        path = next(
            name
            for name, child in model.named_modules()
            if isinstance(child, nn.ModuleList) and len(child) == total
        )
        _keep(chosen, path, kept)
    return int8_copy(chosen) if int8 else int4_copy(chosen) if int4 else chosen


def _keep(model: PreTrainedModel, path: str, kept: Sequence[int]) -> None:
    """Take all but these from the list of decoder layers at ``path``; the list and its owner's configuration change."""
    owner: Any = model.get_submodule(path.rpartition(".")[0])
    name = path.rpartition(".")[2]
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[i] for i in kept]))
    owner.config.num_hidden_layers = len(kept)
    if getattr(owner.config, "layer_types", None):  # masks are chosen by place in the list
        owner.config.layer_types = [owner.config.layer_types[i] for i in kept]
