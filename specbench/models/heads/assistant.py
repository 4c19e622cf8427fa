"""Gemma 4's assistant, as its authors write it. It attends to keys and values of its target."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.assistant import Assistant, AssistantScorer, shared_layers
from specbench.backends.torch.caches import NoKVCache
from specbench.backends.torch.head_scorers import OfTarget
from specbench.base.errors import UsageError
from specbench.models.checkpoints import read_any_config, text_config
from specbench.models.head_files import HeadFiles
from specbench.models.heads.base import OwnHead, Tensors, TrainedHead, register, usual

_OTHER = "Choose the assistant of this target."


def _check(files: HeadFiles, target: PreTrainedConfig) -> None:
    """Refuse a target of another family, or whose keys have another size."""
    name, text = files.name, cast("Any", text_config(target))
    own = cast("Any", text_config(read_any_config(files.folder, name)))
    if text.model_type != own.model_type:
        raise UsageError(
            f"{name} is an assistant of a target of type {own.model_type!r}, not of {text.model_type!r}.",
            _OTHER,
        )
    shared = shared_layers(text, own)
    for number, kind in enumerate(own.layer_types):
        if kind not in shared:
            raise UsageError(f"{name} attends to layers with {kind}, which the target does not have.", _OTHER)
        ours, theirs = own.per_layer_config[number], text.per_layer_config[shared[kind][0]]
        if ours.head_dim != theirs.head_dim or ours.num_attention_heads % theirs.num_key_value_heads:
            raise UsageError(
                f"{name} attends with {ours.num_attention_heads} heads of size {ours.head_dim} to layers of the target"
                f" with {theirs.num_key_value_heads} of size {theirs.head_dim}.",
                _OTHER,
            )


def _convert(files: HeadFiles, stored: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    tensors, target_tokens = usual(files, stored)
    if (tied := tensors.pop("embed_tokens.weight", None)) is not None:
        tensors.setdefault("lm_head.weight", tied)
    return tensors, target_tokens


def _scorer(module: Assistant, target: OfTarget) -> AssistantScorer:
    assert target.config is not None
    if isinstance(target.cache, NoKVCache):
        raise UsageError(
            "Gemma 4's assistant attends to the target's keys and values, which --cache none does not keep.",
            "Choose another cache.",
        )
    shared = shared_layers(text_config(target.config), module.shape.layer)
    return AssistantScorer(module, target, shared)


@register("assistant", _scorer, check=_check, convert=_convert)
def _module(head: TrainedHead, target: PreTrainedConfig, own_head: OwnHead) -> nn.Module:
    config: Any = read_any_config(head.files.folder, head.name)
    layers: Any = text_config(config)
    ordered = None
    if config.use_ordered_embeddings:
        groups, best = ordered = config.num_centroids, config.centroid_intermediate_top_k
        if not 0 < best <= groups or layers.vocab_size % groups:
            raise head.files.damaged(
                f"{layers.vocab_size} tokens are not in {groups} groups, of which {best} get logits"
            )
    with torch.device("meta"):
        module = Assistant(layers, config.backbone_hidden_size, ordered)
    head.fill(module, head.tensors)
    return module
