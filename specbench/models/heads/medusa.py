"""Medusa, as vLLM writes it, and ``specbench train``."""

from __future__ import annotations

import re

import torch
from torch import nn
from transformers import PreTrainedConfig

from specbench.backends.torch.head_scorers import MedusaScorer
from specbench.backends.torch.heads import MedusaHeads
from specbench.models.head_files import HeadFiles
from specbench.models.heads.base import OwnHead, Tensors, TrainedHead, checked_tokens, register


def _convert(files: HeadFiles, tensors: Tensors) -> tuple[Tensors, torch.Tensor | None]:
    """Rename tensors, and trim projections to a draft vocabulary if they have all tokens."""
    found = tensors.pop("token_map", None)
    target_tokens = checked_tokens(files, "truncated_vocab_size", found)
    own: Tensors = {}
    for name, tensor in tensors.items():
        plain = re.sub(r"^lm_head\.", "lm_heads.0.", name)
        if target_tokens is not None and plain.startswith("lm_heads."):
            tensor = tensor[target_tokens] if len(tensor) > len(target_tokens) else tensor
        own[plain] = tensor
    return own, target_tokens


@register("medusa", MedusaScorer, convert=_convert)
def _module(head: TrainedHead, target: PreTrainedConfig, own_head: OwnHead) -> nn.Module:
    files, tensors = head.files, dict(head.tensors)
    shared = bool(files.settings.get("original_lm_head"))
    if shared and "lm_heads.0.weight" not in tensors:
        tensors["lm_heads.0.weight"] = head.rows(own_head, files.number("vocab_size"))
    projection = tensors.get("lm_heads.0.weight", torch.empty(1, 1))
    heads = [int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))]
    count = files.number("num_heads", 1)
    with torch.device("meta"):
        module = MedusaHeads(
            1 + max(heads, default=count - 1),
            files.number("num_hidden_layers", 1),
            files.number("hidden_size", projection.shape[1]),
            files.number("truncated_vocab_size", files.number("vocab_size", len(projection))),
            shared=shared,
        )
    head.fill(module, tensors)
    return module
