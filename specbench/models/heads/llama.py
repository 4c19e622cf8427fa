"""Heads of Llama's decoder layers: what EAGLE and block drafters have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbench.backends.torch.head_scorers import HeadScorer
from specbench.backends.torch.heads import EagleShape
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import text_config
from specbench.models.head_files import HeadFiles
from specbench.models.heads import base
from specbench.models.heads.base import OwnHead, TrainedHead

_SETTINGS = (
    "attention_bias", "dtype", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "torch_dtype", "vocab_size",
)  # fmt: skip

Make: TypeAlias = Callable[[HeadFiles, EagleShape], nn.Module]
"""Makes a module without weights, of the files of a head and the structure of its layers."""


def _layer_config(files: HeadFiles) -> LlamaConfig:
    """Return the configuration of a head's decoder layers; raise ``RunError`` if it is damaged."""
    given = {key: files.layer_settings.get(key) for key in _SETTINGS}
    try:
        return LlamaConfig(**{key: value for key, value in given.items() if value is not None})
    except Exception as error:  # configuration classes check their values in many ways
        raise files.damaged(excerpt(error).rstrip(".")) from error


def register(kind: str, scorer: Callable[..., HeadScorer], **more: Any) -> Callable[[Make], Make]:
    """Register a format of heads of such layers; the decorated function makes its module without weights."""

    def add(make: Make) -> Make:
        of_layers: Any = {"check": lambda files, _: _layer_config(files), "context_limit": _context_limit}
        base.register(kind, scorer, **of_layers, **more)(partial(_module, make))
        return make

    return add


def _context_limit(files: HeadFiles) -> int:
    return int(_layer_config(files).max_position_embeddings)


def _module(make: Make, head: TrainedHead, target: PreTrainedConfig, own_head: OwnHead) -> nn.Module:
    files = head.files
    # DSpark's confidence head decides how much is verified, which is up to draft policies here.
    tensors = {
        name: tensor for name, tensor in head.tensors.items() if not name.startswith("confidence_head.")
    }
    shape = _shape(files, tensors, len(files.layers(text_config(target).num_hidden_layers)))
    with torch.device("meta"):
        module: Any = make(files, shape)
    module.rotary_emb = LlamaRotaryEmbedding(shape.layer)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = head.rows(own_head, shape.layer.vocab_size)
    head.fill(module, tensors)
    return module


def _shape(files: HeadFiles, names: Collection[str], states: int) -> EagleShape:
    """Return the structure of a head that reads so many states, by its configuration and its tensors' names."""
    layer, biased = _layer_config(files), [name.split(".") for name in names if name.endswith(".bias")]
    # DSpark's own part has linear layers of the same names.
    biases = {name[-2] for name in biased if name[0] != "markov_head"}
    biases |= {"q_proj", "k_proj", "v_proj"} if layer.attention_bias else set()
    biases |= {"gate_proj", "up_proj", "down_proj"} if layer.mlp_bias else set()
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return EagleShape(
        states=states,
        width=files.width(),
        vocab=files.number("draft_vocab_size", layer.vocab_size),
        layer=layer,
        layers=files.number("num_hidden_layers", 1),
        embeds="embed_tokens.weight" in names,
        biases=frozenset(biases),
        head_norms=any("q_norm" in name for name in names),
        **{name: bool(files.settings.get(name)) for name in norms},
    )
