"""Load models and tokenizers from specs: a hub id, a folder, a .gguf file, or a built-in name.

A model that cannot be used is refused before its weights are loaded if possible, by its configuration, its class, the
headers of its files, or the free memory. Remote code is never run, and pickles are never read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, core_model_loading
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specbench.base.errors import RunError, SpecbenchError
from specbench.base.machine import give_back_free_memory
from specbench.base.progress import Progress, quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.decoding.formats import FormatCompiler
from specbench.decoding.model_defaults import ModelDefaults
from specbench.decoding.sampling import Sampling
from specbench.kernels import reads_bfloat16
from specbench.models.checkpoints import (
    check_class,
    check_memory,
    fingerprint,
    read_config,
    text_config,
    weight_memory,
    weights_of,
)
from specbench.models.composites import causal_class, composite_class, text_model, text_only, unread_weights
from specbench.models.devices import available_memory, check_options, resolve_device
from specbench.models.files import headers_digest, read_header, weight_files
from specbench.models.find import find_model
from specbench.models.quantized import quantization_of, stored_weights, unpacked_source
from specbench.models.tokenizers import end_ids_of, make_tokenizer, same_tokenizer
from specbench.options import DecodingOptions, LoadOptions, QuantizedName, quantized
from specbench.specs.models import ModelSpec, parse_model

_FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class WeightFiles(NamedTuple):
    """The safetensors files of a model.

    Attributes:
        place: Digest of the path of their folder.
        digest: Digest of the files' names, sizes, times and headers.
    """

    place: str
    digest: str
    numbers: int


class ModelText(NamedTuple):
    """What is known of a model before its weights are loaded; see ``LanguageModel``."""

    tokenizer: PreTrainedTokenizerBase | None
    context_limit: int | None


@dataclass(repr=False)
class LanguageModel:
    """A causal language model ready to decode with.

    Attributes:
        model: The model, in evaluation mode, without gradients.
        tokenizer: Its tokenizer; ``None`` if it was not requested.
        name: Hub id and revision, built-in name, or the folder's or file's own name; never a path.
        fingerprint: Short hash of configuration and weights.
        dtype: Dtype of the weights as loaded, such as "bfloat16".
        vocab_size: Number of logits, padding included.
        context_limit: The model's context length; ``None`` if its configuration sets no limit.
        end_ids: Every token id that ends a text, ascending; see ``end_ids_of``.
        quantize: The type that the caller must quantize the linear layers to.
        head_rows: Token ids of the logits that the trimmed head computes, in this order; ``None`` for all.
        identity: A fingerprint of the weights that does not depend on the dtype they are loaded in.
        notes: Notes for the user on how it was loaded; a target's include those of its drafters.
        slower: A sentence if it is slower than with dtype "auto", which would lose nothing; else empty.
        files: The files it was loaded from; ``None`` for a wrapped object.
        folder: The folder it was loaded from; ``None`` for a wrapped object.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    fingerprint: str
    dtype: str
    device: str
    vocab_size: int
    context_limit: int | None
    end_ids: tuple[int, ...]
    quantize: QuantizedName | None = None
    head_rows: tuple[int, ...] | None = None
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    identity: str = ""
    notes: list[str] = field(default_factory=list)
    slower: str = ""
    files: WeightFiles | None = None
    folder: Path | None = None

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.dtype} on {self.device})"

    @property
    def layers(self) -> int:
        return int(text_config(self.model.config).num_hidden_layers)

    @cached_property
    def formats(self) -> FormatCompiler:
        """Compiles the formats of its outputs."""
        return FormatCompiler(self.tokenizer, self.vocab_size, self.end_ids)

    def transforms(self, sampling: Sampling, decoding: DecodingOptions) -> Sampling:
        """Return the transforms with the model's own settings and the format of the output.

        Raises:
            UsageError: They cannot be applied to this model.
        """
        sampling = sampling.with_defaults(self.defaults.with_options(decoding), self.vocab_size)
        form = decoding.format
        return sampling.with_format(None if form is None else self.formats.compile(form))


def load_model(
    spec: str | ModelSpec,
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    tokenizer: bool = True,
    share_tokenizer_with: LanguageModel | None = None,
    before_weights: Callable[[ModelText], None] | None = None,
) -> LanguageModel:
    """Load a model and its tokenizer, after all checks that are possible without weights.

    Args:
        spec: The model; a string is read by ``parse_model``.
        options: Dtype, device, device map; ``None`` is ``LoadOptions()``.
        share_tokenizer_with: A model whose tokenizer is taken if its files are equal: making one takes a second.
        before_weights: Called with its tokenizer before weights are fetched or loaded, so that it can refuse.

    Raises:
        UsageError: There is no such model, device or dtype, or the model cannot be decoded speculatively.
        RunError: It cannot be fetched, is damaged, or does not fit into memory.
    """
    options = options or LoadOptions()
    check_options(options)
    named = parse_model(spec) if isinstance(spec, str) else spec
    source = find_model(named, progress=progress)
    folder, name = source.folder, source.spec.name
    config = read_config(folder, name)
    settings = quantization_of(config, name)
    words, other = None, share_tokenizer_with
    if other is not None and other.folder is not None and same_tokenizer(folder, other.folder):
        words = other.tokenizer
    if words is None and tokenizer:
        words = make_tokenizer(folder, name)
    if before_weights is not None:
        before_weights(ModelText(words, _context_limit(config)))
    if source.hub is not None:
        check = partial(_check_size, options, config, name)
        source.hub.fetch_weights(check_size=check)
    files = weight_files(folder, name)
    tensors = {key: facts for file in files for key, facts in read_header(file).items()}
    counts = Counter[torch.dtype]()
    for tensor in tensors.keys() - unread_weights(config, tensors):
        counts[_FLOATS.get(tensors[tensor].dtype, torch.uint8)] += prod(tensors[tensor].shape)
    dtype = resolve_dtype(options, config, counts)
    kinds = [kind for kind in counts if kind.is_floating_point]
    stored = kinds[0] if len(kinds) == 1 and settings is None else None
    numbers = weights_of(config) if settings is not None else sum(counts.values())
    placement = _placement(options, numbers, stored, dtype, name)
    model = text_model(_read_weights(folder, name, config, dtype, placement, files, progress))
    model.config.name_or_path = name
    loaded = wrap_model(model, words, name, quantize=quantized(options.dtype))
    if settings is not None:
        give_back_free_memory()
        method = settings["quant_method"]
        loaded.notes.append(
            f"The weights of {name} are quantized ({method}), and were unpacked to {dtype_name(dtype)}."
        )
    usual = resolve_dtype(replace(options, dtype="auto"), config, counts)
    if dtype == torch.float32 and usual == torch.bfloat16 and settings is None and source.spec.kind != "gguf":
        loaded.slower = f"{name} in float32 takes about twice as long as in its own bfloat16 (--dtype auto)."
    loaded.folder = folder
    place = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
    loaded.files = WeightFiles(place, headers_digest(folder, files), sum(counts.values()))
    return loaded


def load_config(spec: str | ModelSpec, *, progress: Progress | None = None) -> PreTrainedConfig:
    """Read and check a model's configuration; for errors see ``load_model``."""
    files = find_model(spec, progress=progress)
    return read_config(files.folder, files.spec.name)


def load_tokenizer(spec: str | ModelSpec, *, progress: Progress | None = None) -> PreTrainedTokenizerBase:
    """Load only a model's tokenizer; for errors see ``load_model``."""
    files = find_model(spec, progress=progress)
    return make_tokenizer(files.folder, files.spec.name)


def wrap_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    name: str | None = None,
    *,
    quantize: QuantizedName | None = None,
) -> LanguageModel:
    """Make a `LanguageModel` of loaded objects; the model goes into evaluation mode, without gradients.

    Raises:
        UsageError: The model cannot be decoded speculatively.
    """
    name = name or _name_of(model)
    if composite_class(model.config) is not None:
        model = text_model(model)
    check_class(type(model), model.config, name)
    untyped: Any = model
    untyped.eval().requires_grad_(False)
    head = untyped.get_output_embeddings()
    width = text_config(model.config).vocab_size if head is None else head.weight.shape[0]
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        fingerprint=_fingerprint(model),
        dtype=dtype_name(model.dtype),
        device=str(_input_device(model)),
        vocab_size=int(width),
        context_limit=_context_limit(model.config),
        end_ids=end_ids_of(model, tokenizer),
        quantize=quantize,
        defaults=ModelDefaults.of(getattr(model, "generation_config", None)),
        identity=_fingerprint(model, torch.bfloat16),
    )


def _check_size(options: LoadOptions, config: PreTrainedConfig, name: str, total: int) -> None:
    """Check roughly, before gigabytes are fetched; ``load_model`` checks exactly."""
    if isinstance(config.dtype, torch.dtype):
        counted = quantization_of(config, name) is not None or composite_class(config) is not None
        numbers = weights_of(config) if counted else total // config.dtype.itemsize
        loaded = resolve_dtype(options, config, Counter())
        _placement(options, numbers, config.dtype, loaded, name)


def _read_weights(
    folder: Path,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    placement: Any,
    files: Sequence[Path],
    progress: Progress | None,
) -> PreTrainedModel:
    """Load a model with its weights.

    Raises:
        RunError: They are damaged, incomplete or too large.
    """
    whole = composite_class(config)
    loader: Any = AutoModelForCausalLM if whole is None else text_only(whole)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(folder), "config": config}
    settings = quantization_of(config, name)
    # Threads of `transformers` keep much of what they free.
    one_thread = mock.patch.object(core_model_loading, "is_env_variable_true", return_value=True)
    with (
        quiet_transformers(progress, f"loading {name}"),
        one_thread if settings is not None else nullcontext(),
    ):
        try:
            if settings is not None:
                loader = causal_class(config) if whole is None else loader
                weights = stored_weights(files, settings, dtype)
                source = unpacked_source(folder, config, weights)
            model, report = loader.from_pretrained(
                **source,
                dtype=dtype,
                device_map=placement,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except SpecbenchError:
            raise
        except Exception as error:  # whatever a damaged file or an odd configuration sets off in there
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error):
                raise RunError(
                    f"There is not enough memory for {name}.", "Choose a smaller model or a narrower dtype."
                ) from error
            reason = excerpt(error).rstrip(".") or type(error).__name__
            raise RunError(f"The model {name} cannot be loaded: {reason}.") from error
    missing = sorted(report["missing_keys"])
    if missing:  # these would be random numbers
        raise RunError(
            f"The weights of {name} are incomplete: {len(missing)} of the model's tensors are not in them"
            f" (the first is {missing[0]})."
        )
    for parameter in model.parameters():  # what was unpacked may have another dtype, some layers keep float32
        if parameter.itemsize > 1 and parameter.dtype not in (dtype, torch.float32):
            parameter.data = parameter.data.to(dtype)
    found: PreTrainedModel = model
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(
    options: LoadOptions, config: PreTrainedConfig, counts: Counter[torch.dtype]
) -> torch.dtype:
    """Return the dtype to load weights in (docs/models.md).

    If the configuration has no dtype, it is the most frequent one in the files (``counts``).
    """
    if options.dtype != "auto" and quantized(options.dtype) is None:
        chosen: torch.dtype = getattr(torch, options.dtype)
        return chosen
    own = config.dtype or getattr(text_config(config), "dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own, None)
    if not isinstance(own, torch.dtype):
        floats = [kind for kind, _ in counts.most_common() if kind.is_floating_point and kind.itemsize > 1]
        own = floats[0] if floats else torch.float32
    if resolve_device(options.device).type != "cpu":
        return own
    return torch.bfloat16 if own == torch.bfloat16 and reads_bfloat16() else torch.float32


def _placement(
    options: LoadOptions,
    numbers: int,
    stored: torch.dtype | None,
    loaded: torch.dtype,
    name: str,
) -> Any:
    """Return the ``device_map`` of `from_pretrained`; refuse weights that do not fit (see ``weight_memory``)."""
    if options.device_map is not None:
        available = available_memory() + sum(
            available_memory(torch.device("cuda", index)) for index in range(torch.cuda.device_count())
        )
        check_memory(numbers * loaded.itemsize, name=name, available=available)
        return options.device_map
    device = resolve_device(options.device)
    if device.type != "cpu":
        check_memory(numbers * loaded.itemsize, name=name, device=device)
        return {"": device}
    needed = weight_memory(numbers, stored, loaded, quantized(options.dtype))
    check_memory(needed, name=name, device=device)
    return None


def _context_limit(config: PreTrainedConfig) -> int | None:
    """Return a model's context length in tokens.

    With YaRN scaling (Peng et al. 2023), configurations often give the training maximum, as for Qwen2.5; the context
    length is then factor × original maximum. With "longrope" (Ding et al. 2024) it is the original maximum: beyond,
    every position is rotated otherwise, and ``transformers`` chooses by the last position of a pass. For other scalings
    (Llama 3.1), the given maximum includes the scaling.
    """
    text = text_config(config)
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)  # MPT's
    if not limit:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [
        kind for kind in (rope, *rope.values()) if isinstance(kind, dict)
    ]  # of all layers, or by their type
    original = "original_max_position_embeddings"  # which transformers fills in
    if long := [kind[original] for kind in kinds if kind.get("rope_type") == "longrope"]:
        return int(min([limit, *long]))
    yarn = [kind for kind in kinds if kind.get("rope_type") == "yarn" and kind.get("factor")]
    return int(max([limit, *(kind["factor"] * kind[original] for kind in yarn)]))


def _name_of(model: PreTrainedModel) -> str:
    name = model.config.name_or_path
    if not name:
        return type(model).__name__
    return Path(name).name if os.path.isabs(name) or Path(name).exists() else name  # noqa: PTH117 - of any string


def _input_device(model: PreTrainedModel) -> torch.device:
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    if device.type == "meta":  # kept on the CPU by accelerate and moved for each pass
        hook = getattr(embeddings, "_hf_hook", None)
        device = torch.device(getattr(hook, "execution_device", None) or "cpu")
    return device


_UNSTABLE_SETTINGS = ("_name_or_path", "architectures", "transformers_version", "dtype", "use_cache")


def _fingerprint(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str:
    """Return the fingerprint of a model whose weights are not packed or quantized yet."""
    settings = model.config.to_diff_dict()
    config = {key: value for key, value in settings.items() if key not in _UNSTABLE_SETTINGS}
    return fingerprint(json.dumps(config, sort_keys=True, default=str), model.named_parameters(), dtype)
