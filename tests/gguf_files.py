"""Tiny GGUF files of every family that can be converted, written tensor by tensor with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, EXPERTS, CONTEXT = 2, 32, 48, 4, 2, 8, 4, 256
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
WORDS = [
    "in", "at", "th", "the", "he", "an", "Ġth", "Ġthe", "12", "123", "ĠĠ", "ĠĠĠĠ", "ing", "er", "re", "on"
]  # fmt: skip
VOCABULARY = [*bytes_to_unicode().values(), *WORDS, "<|end|>"]
SIZE = len(VOCABULARY)
WORDLESS = {
    "ggml.model": "gpt2",
    "ggml.pre": "gpt-2",
    "ggml.tokens": ["t", "1", *(f"t{token}" for token in range(1, SIZE - 1))],
    "ggml.merges": ["t 1"],
    "ggml.eos_token_id": SIZE - 1,
}
"""A tokenizer for models that are given token ids, whose tokens are words of their own."""


@dataclass(frozen=True)
class Family:
    """What a tiny file of an architecture holds: keys (without the architecture's name), and tensors by name."""

    keys: Mapping[str, Any]
    layer: Mapping[str, tuple[int, ...]]
    model: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def weights(**tensors: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape for name, shape in tensors.items()}


NORM = (HIDDEN,)
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
ROPE = {"rope.freq_base": 10000.0, "rope.dimension_count": HEAD}
HEADED = weights(attn_q=(Q, HIDDEN), attn_k=(KV, HIDDEN), attn_v=(KV, HIDDEN), attn_output=(HIDDEN, Q))
GATED = weights(ffn_gate=(INNER, HIDDEN), ffn_up=(INNER, HIDDEN), ffn_down=(HIDDEN, INNER))
NORMS = weights(attn_norm=NORM, ffn_norm=NORM)
QK_NORMS = weights(attn_q_norm=(HEAD,), attn_k_norm=(HEAD,))
QKV_BIAS = {"attn_q.bias": (Q,), "attn_k.bias": (KV,), "attn_v.bias": (KV,)}
MIXED = weights(
    ffn_gate_inp=(EXPERTS, HIDDEN),
    ffn_gate_exps=(EXPERTS, INNER, HIDDEN),
    ffn_up_exps=(EXPERTS, INNER, HIDDEN),
    ffn_down_exps=(EXPERTS, HIDDEN, INNER),
)
EXPERT_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": INNER}
LENGTHS = {"attention.key_length": HEAD, "attention.value_length": HEAD}
LAST = weights(output_norm=NORM)
HEAD_TENSOR = weights(output=(SIZE, HIDDEN))
DELTA = {
    **weights(attn_qkv=(64, HIDDEN), attn_gate=(32, HIDDEN), ssm_alpha=(4, HIDDEN), ssm_beta=(4, HIDDEN)),
    **weights(ssm_conv1d=(64, 4), ssm_norm=(8,), ssm_out=(HIDDEN, 32)),
    "ssm_dt.bias": (4,),
    "ssm_a": (4,),
}
QWEN35 = {
    **RMS, **LENGTHS, "rope.freq_base": 1e6, "rope.dimension_count": HEAD, "rope.dimension_sections": [2, 1, 1, 0],
    "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 32,
}  # fmt: skip
QWEN35_TENSORS = {
    **LAST,
    **HEAD_TENSOR,
    **{f"blk.0.{name}": shape for name, shape in DELTA.items()},
    **{
        f"blk.1.{name}": shape
        for name, shape in (HEADED | QK_NORMS | {"attn_q.weight": (2 * Q, HIDDEN)}).items()
    },
}
SHARED = weights(
    ffn_gate_inp_shexp=(HIDDEN,),
    ffn_gate_shexp=(INNER, HIDDEN),
    ffn_up_shexp=(INNER, HIDDEN),
    ffn_down_shexp=(HIDDEN, INNER),
)

FAMILIES = {
    "llama": Family({**RMS, **ROPE}, {**NORMS, **HEADED, **GATED}, LAST | HEAD_TENSOR),
    "qwen2": Family(RMS | {"rope.freq_base": 1e6}, {**NORMS, **HEADED, **QKV_BIAS, **GATED}, LAST),
    "qwen3": Family(
        {**RMS, **LENGTHS, "rope.freq_base": 1e6}, {**NORMS, **HEADED, **QK_NORMS, **GATED}, LAST | HEAD_TENSOR
    ),
    "qwen3moe": Family(
        {**RMS, **EXPERT_KEYS, **LENGTHS, "rope.freq_base": 1e6},
        {**NORMS, **HEADED, **QK_NORMS, **MIXED},
        LAST | HEAD_TENSOR,
    ),
    "qwen35": Family(QWEN35, weights(attn_norm=NORM, post_attention_norm=NORM) | GATED, QWEN35_TENSORS),
    "qwen35moe": Family(
        {**QWEN35, **EXPERT_KEYS, "expert_shared_feed_forward_length": INNER},
        weights(attn_norm=NORM, post_attention_norm=NORM) | MIXED | SHARED,
        QWEN35_TENSORS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """Something that a file says beside its family's usual keys.

    Attributes:
        architecture: The family.
        name: The fact as the documentation names it.
        keys, tensors: As for ``write_tiny``.
        refused: A word of the refusal, if the file is refused.
    """

    architecture: str
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    def __str__(self) -> str:
        return f"{self.architecture}: {self.name}"


def llama3_factors(theta: float, factor: float = 8.0, original: int = 8192) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1."""
    waves = 2 * np.pi * theta ** (np.arange(0, HEAD, 2) / HEAD)
    blend = np.clip((original / waves - 1) / 3, 0, 1)
    return np.asarray(1 / ((1 - blend) / factor + blend), dtype=np.float32)


_WIDE = {"attention.key_length": 16, "attention.value_length": 16}
_WIDE_HEADS = {"blk.*.attn_q.weight": (64, HIDDEN), "blk.*.attn_k.weight": (32, HIDDEN),
               "blk.*.attn_v.weight": (32, HIDDEN), "blk.*.attn_output.weight": (HIDDEN, 64)}  # fmt: skip
_WIDE_NORMS = {"blk.*.attn_q_norm.weight": (16,), "blk.*.attn_k_norm.weight": (16,)}
_TIED = {"output.weight": None}
_BIASES = {f"blk.*.{name}": shape for name, shape in QKV_BIAS.items()}
_BASE = {"rope.freq_base": 500000.0}

FACTS = [
    *(Fact(architecture, "its usual keys") for architecture in FAMILIES),
    Fact("llama", "`rope.freq_base`", _BASE),
    Fact("llama", "no `rope.freq_base`", {"rope.freq_base": None}),
    Fact("qwen2", "`output.weight`", tensors=HEAD_TENSOR),
    *(Fact(each, "no `output.weight`", tensors=_TIED) for each in ("llama", "qwen3")),
    Fact("llama", "`rope.scaling.factor`", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
         refused="rope.scaling.factor"),
    Fact("llama", "another `rope_freqs.weight`", tensors={"rope_freqs.weight": (4,)}, refused="rope_freqs.weight"),
    Fact("llama", "`rope_freqs.weight` of Llama 3.1", _BASE, {"rope_freqs.weight": llama3_factors(500000.0)}),
    Fact("llama", "`rope.scale_linear`", {"rope.scale_linear": 4.0}, refused="rope.scale_linear"),
    Fact("llama", "`rope.scaling.type`: longrope", {"rope.scaling.type": "longrope"}, refused="rope.scaling.type"),
    Fact("llama", "`attention.key_length`", _WIDE | {"rope.dimension_count": 16}, _WIDE_HEADS),
    Fact("llama", "`attention.sliding_window`", {"attention.sliding_window": 16}, refused="attention.sliding_window"),
    Fact("llama", "`rope.scaling.attn_factor`", {"rope.scaling.attn_factor": 1.3}, refused="rope.scaling.attn_factor"),
    Fact("llama", "biases", tensors=_BIASES, refused="128 numbers"),
    Fact("llama", "experts", {"expert_count": 4, "expert_used_count": 2}, refused="expert_count"),
    Fact("llama", "an unknown key", {"attention.scale": 0.7}, refused="attention.scale"),
    Fact("llama", "an unknown tensor", tensors={"blk.*.attn_q.scale": (1,)}, refused="cannot reshape"),
    Fact("llama", "a missing tensor", tensors={"blk.1.attn_q.weight": None}, refused="q_proj.weight"),
    Fact("llama", "other values than keys", {"attention.value_length": 4}, refused="attention.value_length"),
    Fact("llama", "`rope.dimension_count` below the head's", {"rope.dimension_count": 4}, refused="dimension_count"),
    Fact("qwen2", "`rope.dimension_count`", {"rope.dimension_count": HEAD}),
    Fact("qwen2", "no biases", tensors={f"blk.{at}.{name}": None for at in range(LAYERS) for name in QKV_BIAS},
         refused="bias"),
    Fact("qwen35", "layers of multi-token prediction", {"block_count": 3, "nextn_predict_layers": 1},
         {f"blk.2.{name}": shape for name, shape in (HEADED | QK_NORMS | {"attn_q.weight": (2 * Q, HIDDEN)}
          | weights(**{"nextn.eh_proj": (HIDDEN, 2 * HIDDEN), "nextn.enorm": NORM, "nextn.hnorm": NORM})).items()}),
    Fact("qwen3", "`attention.key_length`", _WIDE, _WIDE_HEADS | _WIDE_NORMS),
    Fact("qwen3moe", "`expert_weights_scale`", {"expert_weights_scale": 2.0}, refused="expert_weights_scale"),
]  # fmt: skip
"""What is compared with llama.cpp."""

PROMPT = [2 + 7 * token % 251 for token in range(100)]


def write_tiny(
    path: Path,
    architecture: str,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    seed: int = 0,
    blocks: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A file of a family; ``keys`` and ``tensors`` replace its own, and leave out those that are ``None``.

    With ``blocks``, matrices are stored in blocks of this kind.
    """
    family = FAMILIES[architecture]
    shapes: dict[str, Any] = {"token_embd.weight": (SIZE, HIDDEN), **family.model}
    layers = range((keys or {}).get("block_count", family.keys.get("block_count", LAYERS)))
    shapes |= {f"blk.{at}.{name}": shape for at in layers for name, shape in family.layer.items()}
    random = np.random.default_rng(seed)
    data = {name: _values(name, shape, random) for name, shape in shapes.items()}
    for name, given in (tensors or {}).items():
        for at in layers if name.startswith("blk.*.") else [0]:
            each = name.replace("*", str(at))
            data[each] = _values(each, given, random) if isinstance(given, tuple) else given
    facts: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        **family.keys,
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in facts.items():
        add(writer, name if name.startswith(("general.", "split.")) else f"{architecture}.{name}", value)
    for name, value in (WORDLESS if tokenizer is None else tokenizer).items():
        add(writer, f"tokenizer.{name}", value)
    for name, values in data.items():
        if values is not None and blocks and values.ndim > 1 and not values.shape[-1] % 32:
            writer.add_tensor(name, gguf.quantize(values, blocks), raw_dtype=blocks)
        elif values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(pre: str, **keys: Any) -> dict[str, Any]:
    """A tokenizer over bytes with a few merges, whose pre-tokenizer has this name."""

    def cut(word: str) -> str:
        at = next(at for at in range(len(word) - 1, 0, -1) if {word[:at], word[at:]} <= set(VOCABULARY))
        return f"{word[:at]} {word[at:]}"

    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": VOCABULARY,
        "ggml.token_type": [control if token == "<|end|>" else normal for token in VOCABULARY],
        "ggml.merges": [cut(word) for word in WORDS],
        "ggml.bos_token_id": SIZE - 1,
        "ggml.eos_token_id": SIZE - 1,
        **{f"ggml.{key}": value for key, value in keys.items()},
    }


TEXTS = [
    "the in",
    " the",
    "  the  in",
    "<s>the",
    "<|user|>\n the<|end|> 12<|user|>in",
    "été 中 123",
    "\tthe\n\nthe",
    "",
]

TOKENIZERS = {
    "no BOS": byte_level("gpt-2"),
    "BOS by default": byte_level("llama-bpe"),
    "BOS switched off": byte_level("llama-bpe", add_bos_token=False),
    "BOS switched on": byte_level("qwen2", add_bos_token=True),
    "EOS switched on": byte_level("qwen2", add_eos_token=True),
    "end of turn as a usual token": byte_level("smollm", token_type=[1] * SIZE),
}


def tokenizer_file(name: str, folder: Path) -> Path:
    keys = dict(TOKENIZERS[name])
    rows = len(keys["ggml.tokens"])
    return write_tiny(
        folder / "tiny.gguf",
        "llama",
        tensors={"token_embd.weight": (rows, 32), "output.weight": None},
        tokenizer=keys,
    )


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Weights that make a lively model: norms near 1, and linear layers that keep the size of what they read."""
    values = random.standard_normal(shape)
    if "norm" in name and name.endswith("weight"):
        values = 1 + values / 5
    elif name.endswith("ssm_a"):
        values = -np.exp(values / 2)
    elif name.startswith("rope_f"):
        values = 1 + abs(values)
    elif name == "token_embd.weight":
        values = values / 3
    elif len(shape) > 1:
        values = values * 1.5 / np.sqrt(shape[-1])
    elif len(shape) == 1:
        values = values / 5
    return np.ascontiguousarray(values, dtype=np.float32)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp's own converter gives such values; none for ``None``."""
    if value is not None:
        adders: dict[type, Any] = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }  # fmt: skip
        adders[type(value)](key, value)
