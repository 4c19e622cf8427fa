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
from accelerate.hooks import add_hook_to_module
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
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
)


def composite_class(config: PreTrainedConfig) -> Any:
    """Return the class of a whole model with a text part; ``None`` if the configuration is of no such model."""
    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    named = config.architectures or ()
    return whole if not named or whole is None or whole.__name__ in named else None


def causal_class(config: PreTrainedConfig) -> Any:
    """Return the causal class of a configuration; ``None`` if `transformers` has none."""
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


@functools.cache
def text_only(whole: Any) -> Any:
    """Return a class like that of a whole model, whose models have only a text part."""

    def make(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        with without_timm():
            whole.__init__(self, config, *args, **kwargs)
        _leave_out(self)

    return type(
        whole.__name__,
        (whole,),
        {"__init__": make, "__module__": whole.__module__, "__qualname__": whole.__qualname__},
    )


@contextmanager
def without_timm() -> Iterator[None]:
    """Make empty modules in place of parts that see by means of the package timm, which need not be installed."""
    own: Any = AutoModel.from_config

    def from_config(config: PreTrainedConfig, **kwargs: Any) -> Any:
        kind: Any = MODEL_MAPPING.get(type(config), None)
        return nn.Module() if kind is TimmWrapperModel else own(config, **kwargs)

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def _text_parts(model: Any) -> set[nn.Module]:
    return {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()} - {None}


def _leave_out(model: Any) -> None:
    """Remove what is neither the decoder nor the embeddings of a model, nor on the way to these."""
    text = _text_parts(model)

    def clear(module: Any) -> None:
        module._parameters.update(dict.fromkeys(module._parameters))
        module._is_hf_initialized = True  # nothing is left to initialize
        for name, child in module.named_children():
            if child in text:
                continue
            if text.isdisjoint(child.modules()):
                module._modules[name] = None
            else:
                clear(child)

    if model not in text:
        clear(model)
    kept = model.state_dict().keys()
    tied = model.all_tied_weights_keys.items()
    model.all_tied_weights_keys = {name: source for name, source in tied if {name, source} <= kept}


def unread_weights(config: PreTrainedConfig, names: Iterable[str]) -> set[str]:
    """Return which of a checkpoint's tensors belong to parts of the model that are not loaded."""
    whole = composite_class(config)
    if whole is None:
        return set()
    with torch.device("meta"):
        model = text_only(whole)(config)
    known, text = model.state_dict(), _text_parts(model)
    paths = tuple(f"{path}." if path else "" for path, module in model.named_modules() if module in text)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    unread = set()
    for name in sorted(
        names, key=dot_natural_key
    ):  # some rules wait for a name that comes first in this order
        own, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if not own.startswith(paths):
            unread.add(name)
    return unread


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the causal language model in a loaded model, over the same modules; the model itself if there is none."""
    whole: Any = model
    parts = (each for each in whole.modules() if each is not whole and isinstance(each, PreTrainedModel))
    causal: Any = next((each for each in parts if each.can_generate()), None)
    if causal is None:
        decoder = whole.get_decoder()
        found = causal_class(decoder.config)
        if found is None or isinstance(whole, found):
            return model
        with torch.device("meta"):
            causal = found(decoder.config)
        if type(causal.base_model) is not type(decoder):
            return model
        setattr(causal, causal.base_model_prefix, decoder)
        causal.set_output_embeddings(whole.get_output_embeddings())
    if "_hf_hook" in vars(whole):  # accelerate has spread it over devices
        add_hook_to_module(causal, whole._hf_hook)
        causal.hf_device_map = whole.hf_device_map
    causal.generation_config = whole.generation_config
    causal.config.architectures = whole.config.architectures
    head, embeddings = causal.get_output_embeddings(), causal.get_input_embeddings()
    causal.config.tie_word_embeddings = head.weight is embeddings.weight
    made: PreTrainedModel = causal
    return made
