"""What the header of a GGUF file says of its model, as a configuration of `transformers`.

Every key of the architecture and every tensor is either in the table below, or is known not to matter, or the file is
refused: what llama.cpp reads and we do not would change the output without a word. Families are those of the last two
years.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specbench.base.errors import UsageError
from specbench.models.gguf_tokenizers import SAFETENSORS

_RMS = "attention.layer_norm_rms_epsilon"
_WINDOW = "attention.sliding_window"
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True)
class Family:
    """How files of an architecture are read.

    Attributes:
        model_type: Its name in `transformers`.
        keys: Keys of the file, and the settings that they become; the settings of ``_SIZES`` are common to all.
        layer: The tensors of a layer; "+" stands for a weight and a bias, "?" for a bias alone.
        defaults: Settings that no key has to tell.
        rotated: How much of a head its positions rotate: "all", or "part" (the file says how much).
        more: Sets what else follows from the facts.
    """

    model_type: str
    keys: Mapping[str, str]
    layer: str
    model: str = "output_norm output"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rotated: str = "all"
    more: Callable[[dict[str, Any]], None] | None = None


def _gemma3(settings: dict[str, Any]) -> None:
    """The largest Gemma 3 scales its attention by the width of its heads before they are widened."""
    widest = settings["num_hidden_layers"] == 62
    settings["query_pre_attn_scalar"] = (
        settings["hidden_size"] // settings["num_attention_heads"] if widest else settings["head_dim"]
    )
    local = {"rope_type": "default", "rope_theta": settings.pop("local_theta")}
    settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}


def _qwen35(settings: dict[str, Any]) -> None:
    """The layers of multi-token prediction at the end are no part of the model itself."""
    settings["num_hidden_layers"] -= settings["mtp"]
    settings["linear_value_head_dim"] //= settings["linear_num_value_heads"]
    sections = settings.pop("sections")[:3]  # of positions in images; those of text are all the same
    settings["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}


_HEADS = "attn_q attn_k attn_v attn_output"
_BIASED_HEADS = "attn_q+ attn_k+ attn_v+ attn_output"
_GATED = "ffn_gate ffn_up ffn_down"
_MIXED = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
_SHARED = "ffn_gate_inp_shexp ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_QK_NORMS = "attn_q_norm attn_k_norm"
_RMS_NORM = {_RMS: "rms_norm_eps"}
_DELTA = (
    f"attn_norm post_attention_norm {_HEADS} {_QK_NORMS} attn_qkv attn_gate"
    " ssm_alpha ssm_beta ssm_conv1d ssm_norm ssm_out ssm_dt? ssm_a"
)
_QWEN35 = {
    **_RMS_NORM,
    "full_attention_interval": "full_attention_interval",
    "nextn_predict_layers": "mtp",
    "rope.dimension_sections": "sections",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim",
}
_QWEN35_DEFAULTS = {"full_attention_interval": 4, "mtp": 0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", _RMS_NORM, f"attn_norm {_HEADS} ffn_norm {_GATED}"),
    "qwen2": Family("qwen2", _RMS_NORM, f"attn_norm {_BIASED_HEADS} ffn_norm {_GATED}"),
    "qwen3": Family("qwen3", _RMS_NORM, f"attn_norm {_HEADS} {_QK_NORMS} ffn_norm {_GATED}"),
    "qwen3moe": Family(
        "qwen3_moe", {**_RMS_NORM, **_EXPERTS}, f"attn_norm {_HEADS} {_QK_NORMS} ffn_norm {_MIXED}",
        defaults={"norm_topk_prob": True},
    ),
    "qwen35": Family(
        "qwen3_5_text", _QWEN35, f"{_DELTA} {_GATED}", defaults=_QWEN35_DEFAULTS, rotated="part", more=_qwen35,
    ),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        {**_QWEN35, **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        f"{_DELTA} {_MIXED} {_SHARED}", defaults=_QWEN35_DEFAULTS, rotated="part", more=_qwen35,
    ),
    "gemma3": Family(
        "gemma3_text", {**_RMS_NORM, _WINDOW: "sliding_window", "rope.freq_base_swa": "local_theta"},
        f"attn_norm post_attention_norm ffn_norm post_ffw_norm {_HEADS} {_GATED} {_QK_NORMS}",
        defaults={"local_theta": 10000.0}, more=_gemma3,
    ),
}  # fmt: skip

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (False,),
    "feed_forward_length": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
}
"""Keys that are not read here, with the values at which they change nothing; other values are refused."""

_MEANINGLESS = {"vocab_size", "rope.scaling.finetuned", "rope.dimension_count"}
"""Keys that llama.cpp ignores, or that only repeat what the tensors' shapes say."""

_FREQUENCIES = "rope_freqs.weight"


class _UnknownError(Exception):
    """A key with a value that cannot be converted."""


class _Facts:
    """The keys of an architecture, and which of them have been read."""

    def __init__(self, architecture: str, keys: Mapping[str, Any], file: str) -> None:
        start, self.file = f"{architecture}.", file
        self._values = {
            key.removeprefix(start): value for key, value in keys.items() if key.startswith(start)
        }
        self.unread = set(self._values)

    def take(self, key: str, *default: Any) -> Any:
        """Return a key's value, or the default; a list of equal values, one for each layer, is one value."""
        self.unread.discard(key)
        if key not in self._values and not default:
            raise UsageError(f"The GGUF file {self.file!r} does not say its {key!r}.", SAFETENSORS)
        value = self._values.get(key, *default)
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value

    def refuse_others(self) -> None:
        """Raise if a key is unread that could mean something."""
        for key in sorted(self.unread - _MEANINGLESS):
            if self._values[key] not in _NEUTRAL.get(key, ()):
                raise _UnknownError(key)


def read_config(
    architecture: str,
    keys: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    numbers: Callable[[str], list[float]],
    file: str,
) -> tuple[PreTrainedConfig, list[str]]:
    """Return the configuration of the model in a file, and the names of its tensors.

    Args:
        keys: What the header says.
        numbers: Reads a small tensor.
        file: The file as messages name it.

    Raises:
        UsageError: The architecture, a key or a tensor is not known.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        names = ", ".join(sorted(FAMILIES))
        raise UsageError(
            f"The GGUF file {file!r} (architecture {architecture!r}) cannot be converted; those of {names} can.",
            "Use the original checkpoint, in safetensors.",
        )
    if keys.get("general.type", "model") != "model":
        raise UsageError(f"The GGUF file {file!r} is no model: its type is {keys['general.type']!r}.")
    facts = _Facts(architecture, keys, file)
    try:
        settings = _settings(family, facts, shapes, numbers)
        facts.refuse_others()
    except _UnknownError as unknown:
        raise UsageError(
            f"The GGUF file {file!r} has the key '{architecture}.{unknown}' ="
            f" {keys.get(f'{architecture}.{unknown}')!r}, which decides the output and cannot be converted.",
            SAFETENSORS,
        ) from None
    extra = "|".join(rf"blk\.{settings['num_hidden_layers'] + i}\..*" for i in range(settings.pop("mtp", 0)))
    aside = re.compile(rf".*\.attn_rot_embd\.weight|{re.escape(_FREQUENCIES)}|{extra or '-'}")
    tensors = [name for name in shapes if not aside.fullmatch(name)]
    known = _known_tensors(family)
    for name in tensors:
        if not known.fullmatch(name):
            raise UsageError(
                f"The GGUF file {file!r} has the tensor {name!r}, which cannot be converted.", SAFETENSORS
            )
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        token = keys.get(f"tokenizer.ggml.{kind}_token_id")
        if token is not None or name != "unk":
            settings[f"{name}_token_id"] = token
    return AutoConfig.for_model(family.model_type, **settings), tensors


def _settings(
    family: Family, facts: _Facts, shapes: Mapping[str, Sequence[int]], numbers: Callable[[str], list[float]]
) -> dict[str, Any]:
    settings: dict[str, Any] = {name: facts.take(key) for key, name in _SIZES.items()}
    if "feed_forward_length" not in family.keys:
        settings["intermediate_size"] = facts.take("feed_forward_length", None)
    heads = settings["num_attention_heads"]
    settings["num_key_value_heads"] = facts.take("attention.head_count_kv", heads)
    head_dim = facts.take("attention.key_length", settings["hidden_size"] // max(heads, 1))
    if facts.take("attention.value_length", head_dim) != head_dim:
        raise _UnknownError("attention.value_length")
    settings["head_dim"] = head_dim
    settings |= family.defaults
    for key, name in family.keys.items():
        settings[name] = facts.take(key, *([settings[name]] if name in family.defaults else []))
    window = facts.take(_WINDOW, 0)
    if _WINDOW not in family.keys and 0 < window < settings["max_position_embeddings"]:
        raise _UnknownError(_WINDOW)
    settings["rope_parameters"] = _rotation(family, facts, settings, shapes, numbers)
    settings["vocab_size"] = shapes["token_embd.weight"][0]
    settings["tie_word_embeddings"] = "output.weight" not in shapes
    if family.more:
        family.more(settings)
    return settings


def _rotation(
    family: Family,
    facts: _Facts,
    settings: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    numbers: Callable[[str], list[float]],
) -> dict[str, Any]:
    """How positions rotate the heads."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.take("rope.freq_base", 10000.0)}
    share = facts.take("rope.dimension_count", settings["head_dim"]) / settings["head_dim"]
    if share != 1 and family.rotated != "part":
        raise _UnknownError("rope.dimension_count")
    if family.rotated == "part":
        rope["partial_rotary_factor"] = share
    kind = facts.take("rope.scaling.type", "linear")
    factor = facts.take("rope.scaling.factor", 0.0) or 1.0
    original = facts.take("rope.scaling.original_context_length", settings["max_position_embeddings"])
    if kind not in ("none", "linear", "yarn"):
        raise _UnknownError("rope.scaling.type")
    if _FREQUENCIES in shapes:
        if factor != 1:
            raise _UnknownError("rope.scaling.factor")
        scaled = _llama3(numbers(_FREQUENCIES), rope["rope_theta"])
        if scaled is None:
            raise UsageError(
                f"The GGUF file {facts.file!r} has the tensor {_FREQUENCIES!r} with other factors than Llama 3.1.",
                SAFETENSORS,
            )
        rope |= scaled
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope["attention_factor"] = 0.1 * math.log(factor) + 1
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _llama3(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The settings of Llama 3.1 and its successors, if the factors of the frequencies follow from them."""
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    for i, given in enumerate(factors):
        turns = original / (2 * math.pi * theta ** (i / len(factors)))
        between = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(given, 1 / ((1 - between) / factor + between), rel_tol=1e-4):
            return None
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


def _known_tensors(family: Family) -> re.Pattern[str]:
    """The names of the tensors that a file has."""
    parts = {"+": "(weight|bias)", "?": "bias"}

    def names(words: str) -> str:
        return "|".join(
            word if word == "ssm_a" else rf"{word.rstrip('+?')}\.{parts.get(word[-1], 'weight')}"
            for word in words.split()
        )

    return re.compile(rf"{names(f'token_embd {family.model}')}|blk\.\d+\.({names(family.layer)})")
