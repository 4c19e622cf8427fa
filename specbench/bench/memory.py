"""Estimates of a sweep's memory before any weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specbench.bench.grid import Sweep, num_turns
from specbench.options import quantized
from specbench.specs.drafters import DrafterSpec, SelfForm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from specbench.base.progress import Progress
    from specbench.options import LoadOptions, QuantizedName
    from specbench.recipe import Recipe
    from specbench.specs.models import ModelSpec

_PROGRAM_BYTES = 700_000_000  # Python, torch and transformers themselves
_LETTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The largest number of bytes that a sweep needs, by part, and the number available."""

    parts: Mapping[str, int]
    available: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class _Size:
    config: PreTrainedConfig
    parameters: int
    layers: int
    cache_values: int  # numbers per token in the KV cache


def estimate_memory(
    sweep: Sweep, base: Recipe, drafters: Sequence[DrafterSpec] = (), *, progress: Progress | None = None
) -> MemoryEstimate:
    """Estimate the memory of weights, caches and the program on the target's device.

    Raises:
        UsageError: A model does not exist.
    """
    from specbench.models.devices import available_memory, resolve_device

    device = resolve_device(base.models.device)
    target = _size(base.target, progress)
    weights, width = _weights(target, base.models.target)
    parts, peak = {"program": _PROGRAM_BYTES}, 0

    def load(name: str, kept: int, most: int) -> None:
        nonlocal peak
        peak = max(peak, sum(parts.values()) + most)
        parts[name] = kept

    load("target", *weights)
    if sweep.options.uses_transformers:
        load("target for transformers", *weights)
    for spec in drafters:
        load(str(spec), *_drafter_weights(spec, base, target, progress))
    longest = max(sum(map(len, prompt.turns)) for prompt in sweep.prompts) // _LETTERS_PER_TOKEN
    longest = max(longest, *sweep.options.contexts, 0)
    turns = max(num_turns(prompt, sweep.options) for prompt in sweep.prompts)
    tokens = longest + turns * sweep.options.decoding.max_new_tokens
    sequences = (2 + max(sweep.options.beams, default=0)) * max(sweep.options.batches, default=1)
    parts["cache"] = sequences * tokens * target.cache_values * width
    parts["more while loading"] = max(0, peak - sum(parts.values()))
    return MemoryEstimate(
        {name: size for name, size in parts.items() if size},
        available_memory(None if device.type == "cpu" else device),
    )


# -- sizes -----------------------------------------------------------------------------------------


def _size(spec: ModelSpec, progress: Progress | None) -> _Size:
    """Return the size of a model, computed from its configuration only."""
    import torch
    from transformers import AutoModelForCausalLM

    from specbench.models.head_files import find_head
    from specbench.models.load import load_config

    if (trained := find_head(spec, progress)) is not None:
        return _Size(trained.sizes, trained.parameters, layers=0, cache_values=0)
    config: PreTrainedConfig = load_config(spec, progress=progress)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text: Any = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return _Size(
        config=config,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        cache_values=2 * text.num_hidden_layers * heads * head,
    )


def _weights(
    size: _Size, options: LoadOptions, *, rounded: QuantizedName | None = None
) -> tuple[tuple[int, int], int]:
    """Return the bytes of a model's weights after loading,
    the peak while loading, and the bytes of an unquantized number.
    """
    from specbench.models.checkpoints import weight_memory
    from specbench.models.devices import resolve_device
    from specbench.models.load import resolve_dtype

    loaded = resolve_dtype(options, size.config, Counter())
    if resolve_device(options.device).type != "cpu":
        return (size.parameters * loaded.itemsize,) * 2, loaded.itemsize
    stored: Any = size.config.dtype
    rounded = quantized(options.dtype) or rounded
    return weight_memory(size.config, size.parameters, stored, loaded, quantize=rounded), loaded.itemsize


def _drafter_weights(
    spec: DrafterSpec, base: Recipe, target: _Size, progress: Progress | None
) -> tuple[int, int]:
    """Return the bytes that a drafter adds: after loading, and the peak while loading."""
    if len(spec.parts) > 1:
        added = [_drafter_weights(part, base, target, progress) for part in spec.parts]
        kept = sum(end for end, _ in added)
        return kept, kept + max(most - end for end, most in added)
    if spec.model_spec is None:
        return (_self_bytes(spec, target),) * 2
    options = base.models.drafter
    rounded: QuantizedName | None = "int8" if options.dtype == "auto" else None
    return _weights(_drafter_size(spec.model_spec, base, target, progress), options, rounded=rounded)[0]


def _drafter_size(spec: ModelSpec, base: Recipe, target: _Size, progress: Progress | None) -> _Size:
    """Return the size of a drafter's own model; that of MTP layers is known by the target's checkpoint."""
    from specbench.models.mtp_layouts import mtp_layers_of

    if spec.kind != "mtp":
        return _size(spec, progress)
    found = mtp_layers_of(base.target)
    return replace(target, parameters=target.parameters // target.layers if found is None else found.weights)


def _self_bytes(spec: DrafterSpec, target: _Size) -> int:
    """Return the bytes of a drafter without a model of its own; unquantized layers share the target's weights."""
    from specbench.backends.torch.kernels.linear import bytes_per_weight

    own = spec.model_part
    if not isinstance(own, SelfForm):
        return 0
    return int(target.parameters * bytes_per_weight("int4", 2)) if own.int4 else target.parameters * own.int8
