"""GGUF files: reading their headers, and converting them into ordinary model folders.

``transformers`` reads the weights. It drops keys and tensors that it does not know, which would change the output
without a word, so a file is refused unless all of its keys are known here and all of its tensors are in the model.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedConfig

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.files import file_errors
from specbench.base.progress import Progress, announce, quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_config, check_memory
from specbench.models.gguf_tokenizers import ORIGINAL, build_tokenizer, end_ids

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
"""Architectures that can be converted, and their names in ``transformers``."""

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SETTINGS = {
    **_REQUIRED,
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Keys of an architecture, and the settings of its configuration that they become."""

_HARMLESS: Mapping[str, Sequence[Any]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (False,),
    "feed_forward_length": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.type": ("none", "linear", "yarn"),
}
"""Keys that are not read, with the values at which they change nothing."""

_MEANINGLESS = ("vocab_size", "rope.scaling.finetuned", "rope.scaling.original_context_length")
"""Keys that llama.cpp ignores, or that need not be read because of others."""

_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufHeader:
    """Facts from a GGUF file's header.

    Attributes:
        keys: What the file says of the model and its tokenizer.
        tensors: As the file has them, in place.
        shapes: Those of the tensors, as in torch.
        elements: Total number of weights.
        dtype: Dtype of the converted copy: the file's own, or bfloat16 for quantized files.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    shapes: Mapping[str, tuple[int, ...]]
    elements: int
    dtype: torch.dtype


class _Reader(GGUFReader):
    """The package's reader takes what lies beyond the end of a file for nothing, however often.

    It cuts an array for each value, which takes three times as long of a ``np.memmap``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        values = super()._get(offset, dtype, count, override_order)
        if len(values) < count:
            raise ValueError("it reaches beyond its end")
        return values


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's metadata and tensor table, and check that the file contains all tensors.

    Raises:
        RunError: The file cannot be read, is not a GGUF, or is damaged or truncated.
        UsageError: The file is one part of several.
    """
    with file_errors(f"The file {str(path)!r} cannot be read"):
        try:
            read = _Reader(path)
            keys = {name: field.contents() for name, field in read.fields.items()}
            if (keys.get("split.count") or 0) > 1:
                raise UsageError(
                    f"The GGUF file {str(path)!r} is one part of several.", "Merge the parts first."
                )
            architecture = str(keys["general.architecture"])
            # Modules would be made for all of them.
            if keys.get(f"{architecture}.block_count", 0) > len(read.tensors):
                raise ValueError("there are more layers than tensors")
            if not read.tensors:
                raise ValueError("there are no tensors")
        except (ArithmeticError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            why = excerpt(error).rstrip(".")
            raise RunError(
                f"The file {str(path)!r} is no GGUF file, or is damaged or truncated: {why}.",
                "Fetch it again.",
            ) from error
    tensors = {tensor.name: tensor for tensor in read.tensors}
    shapes = {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in read.tensors}
    kinds = {tensor.tensor_type for tensor in read.tensors}
    floats = [_FLOATS[kind] for kind in kinds if kind in _FLOATS]
    # Half-precision files keep their norms in float32: the narrower dtype is the model's.
    dtype = min(floats, key=lambda kind: kind.itemsize) if len(floats) == len(kinds) else torch.bfloat16
    return GgufHeader(architecture, keys, tensors, shapes, sum(map(math.prod, shapes.values())), dtype)


def convert_gguf(gguf: Path, folder: Path, *, name: str, progress: Progress | None = None) -> None:
    """Convert a GGUF file into an ordinary model folder: config, safetensors, tokenizer, generation config.

    Quantized weights become bfloat16: its rounding is small compared with that of 4 to 8 bits, and the copy needs half
    the space of an exact copy in float32.

    Args:
        folder: An empty folder to fill.
        name: The model's name in messages and in its configuration.

    Raises:
        RunError: The file is damaged, or does not fit into memory.
        UsageError: The model cannot be decoded speculatively, or this kind of GGUF cannot be converted.
    """
    header = read_gguf_header(gguf)
    announce(progress, f"converting {name} (the result is kept)")
    # An empty folder as the model's, so that other files beside the GGUF are not read.
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as empty,
        quiet_transformers(progress, f"converting {name}"),
    ):
        place: dict[str, Any] = {
            "pretrained_model_name_or_path": empty,
            "gguf_file": str(gguf.resolve()),
            "trust_remote_code": False,
            "local_files_only": True,
        }
        try:
            config = _read_config(header, name)
            check_config(config, name)
            # the weights as they are read, in float32, and the model they go into
            check_memory(header.elements * (4 + header.dtype.itemsize), name=name)
            tokenizer = build_tokenizer(header.keys, name)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                config=config,
                dtype=header.dtype,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                **place,
            )
            model, loaded = answer
            if missing := sorted(loaded["missing_keys"]):
                raise UsageError(f"The GGUF file {name!r} has no tensor for {missing[0]!r}.", ORIGINAL)
            if unread := _unread(header, model):
                raise UsageError(
                    f"The GGUF file {name!r} has {unread} numbers for which its model has no place.", ORIGINAL
                )
        except SpecbenchError:
            raise
        except Exception as error:  # of many kinds: unknown architectures, vocabularies, tensor names
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise UsageError(
                f"The GGUF file {name!r} (architecture {header.architecture!r}) cannot be converted:"
                f" {excerpt(error).rstrip('.')}.",
                ORIGINAL,
            ) from error
        for trace in ("_model_name_or_path", "quantization_config"):  # of the file, and of how it was read
            if hasattr(model.config, trace):
                delattr(model.config, trace)
        model.config.name_or_path = tokenizer.name_or_path = name
        model.generation_config.eos_token_id = end_ids(header.keys) or None
        announce(progress, f"writing the copy of {name}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # the weights are written for their owner only, which a shared cache is not
        shutil.copymode(folder / "config.json", path)


def _unread(header: GgufHeader, model: Any) -> int:
    """Return how many numbers of the file should be in the model and are not."""
    layers = model.config.num_hidden_layers
    stored = 0
    for name, shape in header.shapes.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        # Layers of multi-token prediction come after the model's own.
        if name != _FREQUENCIES and (layer is None or int(layer[1]) < layers):
            stored += math.prod(shape)
    held: dict[int, int] = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    return stored - sum(held.values())


def _read_config(header: GgufHeader, name: str) -> PreTrainedConfig:
    """Return the configuration of the model in a file; raise ``UsageError`` if a key is not known."""
    keys, start = header.keys, f"{header.architecture}."
    model_type = MODEL_TYPES.get(header.architecture)
    if model_type is None:
        raise UsageError(
            f"The GGUF file {name!r} (architecture {header.architecture!r}) cannot be converted; those of"
            f" {', '.join(sorted(MODEL_TYPES))} can.",
            ORIGINAL,
        )
    if keys.get("general.type", "model") != "model":
        raise UsageError(f"The GGUF file {name!r} is no model: its type is {keys['general.type']!r}.")
    facts = {key.removeprefix(start): value for key, value in keys.items() if key.startswith(start)}
    for key, value in facts.items():
        if isinstance(value, list) and len({*value}) == 1:  # the same for every layer
            facts[key] = value[0]
    for key in _REQUIRED:
        if key not in facts:
            raise UsageError(f"The GGUF file {name!r} does not say its {key!r}.", ORIGINAL)
    known = AutoConfig.for_model(model_type)
    heads = facts["attention.head_count"]
    settings = {"num_key_value_heads": heads, "head_dim": facts["embedding_length"] // max(heads, 1)}
    for key, own in _SETTINGS.items():
        if key in facts and (not key.startswith(("expert", "ssm")) or hasattr(known, own)):
            settings[own] = facts.pop(key)
    width = settings["head_dim"]
    rotated = facts.pop("rope.dimension_count", width)
    rope = {"rope_type": "default", "rope_theta": facts.pop("rope.freq_base", 10000.0)}
    if model_type.startswith("qwen3_5"):
        settings["num_hidden_layers"] -= facts.pop("nextn_predict_layers", 0)
        settings["full_attention_interval"] = facts.pop("full_attention_interval", 4)
        settings["linear_value_head_dim"] = facts.pop("ssm.inner_size") // settings["linear_num_value_heads"]
        # Sections are of positions in images; those of text are all the same.
        rope |= {"mrope_section": facts.pop("rope.dimension_sections")[:3], "mrope_interleaved": True}
        rope["partial_rotary_factor"] = rotated / width
    elif rotated != width:
        facts["rope.dimension_count"] = rotated
    elif model_type == "qwen3_moe":
        settings["norm_topk_prob"] = True
    if facts.get("attention.value_length") == width:
        facts.pop("attention.value_length")
    for key, value in sorted(facts.items()):
        if key not in _MEANINGLESS and value not in _HARMLESS.get(key, ()):
            raise UsageError(
                f"The GGUF file {name!r} has the key '{start}{key}' = {value!r}, which decides the output and cannot be"
                " converted.",
                ORIGINAL,
            )
    if _FREQUENCIES in header.tensors:
        rope |= _llama3(header.tensors[_FREQUENCIES], rope["rope_theta"], name)
    for kind, token in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = keys.get(f"tokenizer.ggml.{token}_token_id")
        if number is not None or kind != "unk":
            settings[f"{kind}_token_id"] = number
    config: PreTrainedConfig = AutoConfig.for_model(
        model_type,
        **settings,
        rope_parameters=rope,
        vocab_size=header.shapes["token_embd.weight"][0],
        tie_word_embeddings="output.weight" not in header.shapes,
    )
    return config


def _llama3(tensor: ReaderTensor, theta: float, name: str) -> dict[str, Any]:
    """Return the rotation of Llama 3.1 and its successors; raise ``UsageError`` if these factors are not theirs."""
    factors = tensor.data.view(np.float32) if tensor.tensor_type == GGMLQuantizationType.F32 else np.zeros(1)
    turns = 8192 / (2 * np.pi * theta ** (np.arange(len(factors)) / len(factors)))
    between = np.clip((turns - 1) / 3, 0, 1)
    if not np.allclose(factors, 1 / ((1 - between) / factors.max() + between), rtol=1e-4, atol=0):
        raise UsageError(
            f"The GGUF file {name!r} has the tensor {_FREQUENCIES!r} with other factors than Llama 3.1.",
            ORIGINAL,
        )
    return {
        "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
