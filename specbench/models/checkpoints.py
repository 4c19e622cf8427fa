"""Checks of a model before its weights are loaded: its kind, its files, and whether it fits into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from specbench.backends.torch.recurrent import can_keep_states
from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.kernels.weights import bytes_per_weight
from specbench.models.composites import causal_class, composite_class, text_only
from specbench.models.devices import available_memory
from specbench.models.files import read_settings
from specbench.models.quantized import quantization_of
from specbench.options import QuantizedName

# -- configurations --------------------------------------------------------------------------------

MOST = 10_000
"""Far more layers or labels than any model has; `transformers` makes lists of both, however long."""


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """Read and check the configuration in a model folder.

    Raises:
        UsageError: The folder is not a model, or the model cannot be decoded speculatively.
        RunError: Its config.json is damaged, or has impossible values.
    """
    config = read_any_config(folder, name)
    check_config(config, name)
    whole, causal = composite_class(config), causal_class(text_config(config))
    if whole is not None and causal is not None:  # heads may name either as what they were trained for
        config.architectures = [whole.__name__, causal.__name__]
    quantization_of(config, name)  # refuses what cannot be unpacked
    return config


def read_any_config(folder: Path, name: str) -> PreTrainedConfig:
    """Read the configuration in a model folder, also of a model that cannot be decoded; see ``read_config``."""
    path, raw = folder / "config.json", read_settings(folder, name)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UsageError(f"The folder {name!r} is no model: its config.json names no model_type.")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise custom_code(f"The model {name} (type {kind!r})")
        raise UsageError(
            f"The model {name} is of a type that the installed transformers does not know: {kind!r}.",
            "Try a newer version of transformers.",
        )
    with quiet_transformers():
        try:
            config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(_facts_alone(raw))
            config = getattr(config, "thinker_config", config)  # of Qwen's models that also speak
            text = text_config(config)
            if text is not config and getattr(text, "quantization_config", None) is not None:  # Kimi K2.5's
                config.quantization_config = text.quantization_config
                del text.quantization_config
        except Exception as error:  # configuration classes check their values in many ways
            raise RunError(f"The file {str(path)!r} is damaged: {excerpt(error).rstrip('.')}.") from error
    config.name_or_path = str(folder)
    return config


IMPLEMENTATIONS = ("attn_implementation", "experts_implementation", "fusion_config")
"""Parts of the names of settings by which `transformers` chooses code, from the hub too."""
INNER_WORKINGS = ("attribute_map", "sub_configs", "configuration_files", "auto_map")
"""Settings that would rename others, skip them, or read them from other files."""
OUTPUTS = ("return_dict", "output_hidden_states", "output_attentions")
"""Settings that change the form of a model's outputs."""


def _facts_alone(raw: Any, name: str = "") -> Any:
    """Remove, at all levels, the settings that choose the code of a model, so that `transformers` uses its defaults.

    Raises:
        ValueError: A whole number is beyond 64 bits, or there are more layers or labels than any model has.
    """
    if isinstance(raw, list):
        return [_facts_alone(each, name) for each in raw]
    listed = name.endswith(("layer", "layers", "num_labels"))
    if isinstance(raw, int) and abs(raw) >= (MOST if listed else 2**63):
        raise ValueError(f"{name} is too large")
    if not isinstance(raw, dict):
        return raw
    return {
        key: _facts_alone(value, key)
        for key, value in raw.items()
        if key not in INNER_WORKINGS + OUTPUTS and not any(word in key for word in IMPLEMENTATIONS)
    }


def custom_code(what: str) -> UsageError:
    return UsageError(
        f"{what} needs code of its own, which is never run.",
        "Choose a model that transformers supports itself.",
    )


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse a model that cannot be decoded speculatively, by its configuration."""
    whole, model_class = composite_class(config), causal_class(config)
    if whole is not None:
        _check_type(config, name)
        text = text_config(config)
        check_class((causal_class(text) or whole) if whole.can_generate() else None, text, name)
        return
    causal = ("forcausallm", "lmheadmodel", *([model_class.__name__.lower()] if model_class else []))
    named = [str(architecture).lower() for architecture in config.architectures or ()]
    fits = not named or any(architecture.endswith(causal) for architecture in named)
    check_class(model_class if fits else None, config, name)


UNLISTED_ENCODERS = ("bert-generation",)
_WITHOUT_PADDING = "its positions leave out padding tokens, so that one in a draft moves the tokens after it"
_OF_GEMMA = "it drafts from the keys and values of a Gemma 4 target, so it can only be its drafter"
UNSUITABLE = {
    "inkling_text": "with a KV cache its logits are others than without one",
    "inkling2_text": "with a KV cache its logits are others than without one",
    "cpmant": "its cache counts positions of its own",
    "gemma4_assistant": _OF_GEMMA,
    "gemma4_unified_assistant": _OF_GEMMA,
    "minimax": "its lightning attention keeps a state, which cannot be rolled back",
    "moshi": "it decodes frames of sound, and its cache forgets what its attention still sees",
    "diffusion_gemma": "it writes blocks by diffusion",
    "evolla": "it reads proteins",
    "shieldgemma2": "it says of pictures whether they are harmless",
    "idefics": "it writes nothing without a picture",
    "paligemma": "tokens of its prompts attend to later ones",
    "unlimited_ocr": "its attention keeps the prompt and a window after it, which cannot be rolled back",
    "kosmos-2": "its masks know nothing of caches with room to grow",
    "kosmos-2.5": _WITHOUT_PADDING,
    "kosmos_2_5_text_model": _WITHOUT_PADDING,
    "qwen4_exp": "it keeps states of n-grams, which cannot be rolled back",
    "qwen4_exp_text": "it keeps states of n-grams, which cannot be rolled back",
    "reformer": "it keeps hash buckets in a cache of its own",
    "xlnet": "it is no causal language model, for a token's logits depend on later tokens",
}
"""Model types that `transformers` wrongly lists as causal language models with attention caches, and why.
Found with benchmarks/architectures.py."""


def check_class(model_class: Any, config: PreTrainedConfig, name: str) -> None:
    """Refuse a model that cannot be decoded speculatively, by its class, which is ``None`` if it is not causal."""
    kind = config.model_type
    _check_type(config, name)
    # An encoder of the BERT family would look at what comes after.
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in UNLISTED_ENCODERS
    if model_class is None or (encoder and not getattr(config, "is_decoder", True)):
        raise UsageError(
            f"The model {name} (type {kind!r}) is no causal language model.", "Choose one that is."
        )
    if getattr(model_class, "_is_stateful", False) and not can_keep_states(model_class):
        raise UsageError(
            f"The model {name} (type {kind!r}) keeps a recurrent state, which cannot be rolled back when a"
            " draft is rejected.",
            "Choose a model of a family that docs/models.md lists.",
        )


def _check_type(config: PreTrainedConfig, name: str) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"The model {name} (type {kind!r}) is an encoder-decoder model and no causal language model.",
            "Choose a decoder-only model.",
        )
    learned = getattr(config, "use_learned_position_embeddings", True)  # of TrOCR
    reason = UNSUITABLE.get(kind) if learned else _WITHOUT_PADDING
    if reason is not None:
        raise UsageError(
            f"The model {name} (type {kind!r}) cannot be decoded speculatively: {reason}.",
            "Choose a transformer with attention caches.",
        )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a multimodal configuration that describes the language model."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


# -- files -----------------------------------------------------------------------------------------


def read_tensors(path: Path, name: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file; raise ``RunError`` if it is damaged."""
    try:
        return load_file(path)
    except Exception as error:  # what parsers raise
        why = excerpt(error).rstrip(".")
        raise RunError(f"The weights of {name} in {path.name!r} are damaged: {why}.") from error


def fingerprint(
    facts: str, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None
) -> str:
    """Return a hash of 16 hex digits over a configuration and each tensor's name, shape, dtype, and outer 64 values.

    Args:
        tensors: The tensors by name; those without values (meta) add only the other facts.
        dtype: Dtype to convert values to first; ``None`` keeps each tensor's own.
    """
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {dtype or tensor.dtype}".encode())
        if tensor.device.type != "meta":
            flat = tensor.detach().reshape(-1)
            sample = torch.cat((flat[:64], flat[-64:])).to("cpu", dtype or tensor.dtype).contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# -- memory ----------------------------------------------------------------------------------------


def weights_of(config: PreTrainedConfig) -> int:
    """Return the number of weights of a model's text part, without tensors."""
    whole = composite_class(config)
    with torch.device("meta"), quiet_transformers():
        model = AutoModelForCausalLM.from_config(config) if whole is None else text_only(whole)(config)
    return sum(each.numel() for each in model.parameters())


def weight_memory(
    numbers: int, stored: torch.dtype | None, loaded: torch.dtype, quantize: QuantizedName | None
) -> int:
    """Return about how many bytes a model's weights take on a CPU while they are loaded and packed.

    Weights that are not converted remain mapped from their file until they are packed, and the system can free these
    pages when it needs memory. Other weights are all converted first.

    Args:
        stored: Dtype of the weights in the file; ``None`` if there are several, or it is not known.
        loaded: Dtype of the weights in memory, before linear layers are quantized.
    """
    wide = loaded.itemsize
    narrow = wide if quantize is None or stored != loaded else bytes_per_weight(quantize, wide)
    return int(numbers * narrow)


def check_memory(
    needed: int, *, name: str, device: torch.device | None = None, available: int | None = None
) -> None:
    """Raise ``RunError`` if a model needs more bytes than are ``available``, by default on the device."""
    if available is None:
        available = available_memory(device)
    if needed > available:
        where = f"memory on {device}" if device is not None and device.type == "cuda" else "memory"
        raise RunError(
            f"Loading {name} takes up to {needed / 1e9:.1f} GB of {where}, {available / 1e9:.1f} are free.",
            "Choose a smaller model or a narrower dtype, or close other programs.",
        )
