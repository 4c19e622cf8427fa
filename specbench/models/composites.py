"""Models that also see or hear: their text part is loaded, and nothing else of them.

`transformers` loads such a checkpoint with the class of the whole model, whose other parts are left out before any
weight is read, so its own rules rename and convert the weights. Where the text part has a causal class of its own, a
model of that class takes the loaded modules; otherwise the class of the whole model is called with token ids alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, TimmWrapperModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)


def composite_class(config: PreTrainedConfig) -> Any:
    """Return the class of a whole model with a text part; ``None`` if the configuration is of no such model."""
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    whole = mapping[type(config)] if type(config) in mapping else None
    named = config.architectures or ()
    return whole if not named or whole is None or whole.__name__ in named else None


def causal_class(config: PreTrainedConfig) -> Any:
    """Return the causal class of a text configuration; ``None`` if `transformers` has none."""
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[type(config)] if type(config) in mapping else None


@functools.cache
def text_only(whole: Any) -> Any:
    """Return a class like that of a whole model, whose models have only a text part."""

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        with without_timm():
            whole.__init__(self, config, *args, **kwargs)
        _leave_out(self)

    names = {"__init__": __init__, "__module__": whole.__module__, "__qualname__": whole.__qualname__}
    return type(whole.__name__, (whole,), names)


@contextmanager
def without_timm() -> Iterator[None]:
    """Make empty modules in place of the vision parts that need the package timm."""

    def from_config(config: PreTrainedConfig, **kwargs: Any) -> nn.Module:
        kinds: Any = MODEL_MAPPING
        needs_timm = type(config) in kinds and kinds[type(config)] is TimmWrapperModel
        return nn.Module() if needs_timm else own(config, **kwargs)

    own = AutoModel.from_config
    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def _leave_out(model: Any) -> None:
    """Remove what is neither the decoder nor the embeddings of a model, on the way to these."""
    text = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()} - {None}

    def clear(module: nn.Module) -> None:
        module._parameters.update(dict.fromkeys(module._parameters))
        module._is_hf_initialized = True  # nothing is left to initialize
        for name, child in module.named_children():
            if child in text:
                continue
            if text.isdisjoint(child.modules()):
                module._modules[name] = None
            else:
                clear(child)

    clear(model)
    kept = model.state_dict().keys()
    tied = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {name: source for name, source in tied if {name, source} <= kept}


def unread_weights(config: PreTrainedConfig, names: Iterable[str]) -> set[str]:
    """Return which of a checkpoint's tensors belong to parts of the model that are not loaded."""
    whole_class = composite_class(config)
    if whole_class is None:
        return set()
    with torch.device("meta"), without_timm():
        whole = whole_class(config)
        read = text_only(whole_class)(config).state_dict().keys()
    rules = get_model_conversion_mapping(whole)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = whole.state_dict()
    unread = set()
    for name in sorted(names, key=dot_natural_key):
        own, _ = rename_source_key(name, renamings, converters, whole.base_model_prefix, known)
        if own in known and own not in read:
            unread.add(name)
    return unread


def text_model(model: Any) -> PreTrainedModel:
    """Return the causal language model that a loaded one contains, over the same modules; else the model itself."""
    parts = (each for each in model.modules() if each is not model and isinstance(each, PreTrainedModel))
    causal: Any = next((each for each in parts if each.can_generate()), None)
    if causal is None:
        decoder = model.get_decoder()
        found = causal_class(decoder.config)
        if found is None or isinstance(model, found):
            return model
        with torch.device("meta"):
            causal = found(decoder.config)
        if type(causal.base_model) is not type(decoder):
            return model
        setattr(causal, causal.base_model_prefix, decoder)
        causal.set_output_embeddings(model.get_output_embeddings())
    causal.generation_config = model.generation_config
    return causal.eval()
