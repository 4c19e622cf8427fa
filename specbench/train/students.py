"""What the kinds of heads in training share: their files, and the sizes of their layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from specbench.base.files import write_bytes, write_text
from specbench.base.record import Json

if TYPE_CHECKING:
    from specbench.models.target import Target
    from specbench.train.eagle_student import EagleStudent


def write_head(folder: Path, student: EagleStudent, target: Target) -> None:
    """Write a head's files, each of them atomically; raise ``OSError`` if they cannot be written."""
    vocab = student.draft_vocab.cpu()
    # The target's token is d + d2t[d], and t2d marks the draft vocabulary.
    drafted = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, vocab, True)
    own = {"lm_head.weight": student.rows, "d2t": vocab - torch.arange(len(vocab)), "t2d": drafted}
    stored = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in (student.tensors() | own).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    write_text(folder / "config.json", json.dumps(_config(student, target), indent=1) + "\n")


def _config(student: EagleStudent, target: Target) -> Json:
    """Return the ``config.json``."""
    return student.settings() | {
        "speculators_model_type": student.algorithm,
        "speculators_version": "0.3.0",
        "draft_vocab_size": len(student.draft_vocab),
        "speculators_config": {
            "algorithm": student.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": student.depth}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.language_model.model.config.architectures or [],
            },
        },
        "dtype": "bfloat16",
        "target": target.name,
        "target_fingerprint": target.language_model.identity,
    }


FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Models whose decoder layers are Llama's, except for biases and norms of attention heads."""

_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "vocab_size",
)  # fmt: skip
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
_MORE = ("model_type", "hidden_act", "num_hidden_layers", "attention_bias", "mlp_bias")


def layer_settings(config: PreTrainedConfig) -> Json:
    """Return what a head's ``config.json`` says of its decoder layers."""
    known = config.to_dict()
    return {name: known[name] for name in (*_SIZES, *_ROPE, *_MORE) if known.get(name) is not None}


def layer_config(target: PreTrainedConfig) -> LlamaConfig:
    """Return the configuration of decoder layers of the target's size."""
    names = (*_SIZES, *_ROPE) if target.model_type in FAMILY else _SIZES
    # Attributes have the usual names, also where to_dict() has others.
    known = {name: value for name in names if (value := getattr(target, name, None)) is not None}
    return LlamaConfig(**{"intermediate_size": 4 * known["hidden_size"], **known})


def start_from_highest(fc: nn.Linear, width: int) -> None:
    """Let the layer that joins states begin as the highest of them, [width], with small random weights for the rest."""
    with torch.no_grad():
        fc.weight.mul_(0.1)
        fc.weight[:, -width:] += torch.eye(width)
