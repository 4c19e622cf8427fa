"""Estimates of a sweep's time and memory before any weights are loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.bench.grid import WARMUP_TOKENS, Sweep, SweepConfig, num_turns
from specbench.decoding.theory import PassCosts
from specbench.options import quantized
from specbench.specs.drafters import DrafterSpec, SelfForm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from specbench.base.progress import Progress
    from specbench.options import LoadOptions, QuantizedName
    from specbench.recipe import Recipe
    from specbench.specs.models import ModelSpec

_PROGRAM_BYTES = 700_000_000  # Python, torch and transformers themselves
_POLICY_GAMMA = 5  # about the tokens drafted in a step if the draft policy decides
_LETTERS_PER_TOKEN = 4
_LAYER_S = 0.0002  # time of a forward pass per layer that is not spent on weights
_PREFILL_GAIN = 20  # prompt tokens that take as long as one decoded token
_MAX_SAMPLE_BYTES = 256_000_000
_REQUEST = 0.25  # about the share by which another request lengthens a forward pass


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds that a sweep takes on a quiet machine, and a phrase on how they were estimated."""

    seconds: float
    source: str


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


def estimate_time(
    sweep: Sweep,
    base: Recipe,
    drafters: Sequence[DrafterSpec],
    folder: Path,
    *,
    progress: Progress | None = None,
) -> TimeEstimate:
    """Estimate the time of a sweep, from a stored run of the target on this processor if there is one.

    Otherwise it is estimated from the time to read as many weights from memory. The sweep's configurations name
    drafters by their specs.
    """
    stored = _stored_speeds(folder, base.target.name)
    if stored is not None:
        speeds, name = stored
        seconds = sum(_from_speeds(sweep, config, speeds) for config in sweep.configs)
        return TimeEstimate(seconds, f"from the speeds measured in {name}")
    token_s, draft_s = _calibrated(base, drafters, progress)
    seconds = sum(_from_passes(sweep, config, token_s, draft_s) for config in sweep.configs)
    return TimeEstimate(
        seconds,
        "roughly, from the speed at which this machine reads that many weights, as if no draft token were accepted",
    )


def slowdown(load_average: float | None, cores: int) -> float:
    """Return how many times longer work on all cores can take while ``load_average`` other processes run."""
    return 1.0 + (load_average or 0.0) / cores


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


# -- from a stored run -----------------------------------------------------------------------------


def _stored_speeds(folder: Path, name: str) -> tuple[dict[str, tuple[float, float]], str] | None:
    """Return mean TTFT and seconds per token by configuration,
    from the newest matching run, and the name of that run.
    """
    from specbench.bench.environment import describe_environment
    from specbench.results.store import distinct, read_lines, stored_runs

    cpu = describe_environment().cpu
    for path, run in stored_runs(folder):
        if run.target.name != name or run.environment.cpu != cpu:
            continue
        times: dict[str, list[tuple[float, float]]] = {}
        for each in distinct(read_lines(path, []), []):
            if each.line.warmup or each.line.run_id != run.run_id:
                continue
            for _, output in each.outputs():
                tokens = output.new_tokens - output.first_tokens
                if tokens > 0 and output.decode_s > 0:
                    times.setdefault(each.line.config, []).append((output.ttft_s, output.decode_s / tokens))
        plain = next(
            (
                config.id
                for config in run.configs
                if config.kind == "plain" and config.batch in (None, 1) and config.context is None
                if config.id in times
            ),
            None,
        )
        if plain is not None:
            speeds = {
                config: (
                    sum(first for first, _ in each) / len(each),
                    sum(token for _, token in each) / len(each),
                )
                for config, each in times.items()
            }
            return {"plain": speeds[plain], **speeds}, path.name
    return None


def _from_speeds(sweep: Sweep, config: SweepConfig, speeds: Mapping[str, tuple[float, float]]) -> float:
    first, token = speeds.get(config.id, speeds["plain"])
    if config.context is not None and config.id not in speeds:
        letters = sum(len(turn) for prompt in sweep.prompts for turn in prompt.turns)
        usual = max(1.0, letters / _LETTERS_PER_TOKEN / len(sweep.prompts))
        first *= config.context / usual
    batch = config.batch or 1
    share = 1 / batch if config.id in speeds else _share(batch)
    return _generations(sweep, batch) * share * (first + token * sweep.options.decoding.max_new_tokens)


def _share(batch: int) -> float:
    """Return roughly the time per request in a batch, as a share of the time of a single request."""
    return (1 + _REQUEST * (batch - 1)) / batch


def _generations(sweep: Sweep, batch: int) -> float:
    """Return the number of generations per configuration;
    a warm-up, a whole batch, counts in proportion to its length.
    """
    longest = sweep.options.decoding.max_new_tokens
    warmups = batch * sweep.options.warmup * min(WARMUP_TOKENS, longest) / longest
    return warmups + sweep.options.repeats * sum(num_turns(prompt, sweep.options) for prompt in sweep.prompts)


# -- from reading weights --------------------------------------------------------------------------


def _calibrated(
    base: Recipe, specs: Sequence[DrafterSpec], progress: Progress | None
) -> tuple[float, dict[str, float]]:
    """Return the seconds for one token of the target, and of each drafter."""
    target = _size(base.target, progress)
    weights = int(target.parameters * _bytes_per_number(base.models.target))
    rate = _bytes_per_second(weights)
    layers_s = target.layers * _LAYER_S
    sizes = {str(spec): _drafter_bytes(spec, base, target, progress) for spec in specs}
    drafters = {name: size / rate + layers_s if size else 0.0 for name, size in sizes.items()}
    return weights / rate + layers_s, drafters


def _from_passes(sweep: Sweep, config: SweepConfig, token_s: float, draft_s: Mapping[str, float]) -> float:
    passes, drafted = _drafted(config)
    verify_s = PassCosts({1: token_s}).target_pass_s(1 + drafted)
    step_s = verify_s + passes * draft_s.get(config.drafter, 0.0)
    letters = sum(len(turn) for prompt in sweep.prompts for turn in prompt.turns)
    tokens = letters / _LETTERS_PER_TOKEN if config.context is None else len(sweep.prompts) * config.context
    prefill_s = sweep.options.repeats * tokens / _PREFILL_GAIN * token_s
    batch = config.batch or 1
    steps = _generations(sweep, batch) * _share(batch) * sweep.options.decoding.max_new_tokens
    return prefill_s + steps * step_s


def _drafted(config: SweepConfig) -> tuple[int, int]:
    """Return roughly the drafter's forward passes per step, and the drafted tokens per step."""
    if config.drafter == "none":
        return 0, 0
    if config.kind == "speculative" and (nodes := config.policy_spec.nodes):
        return config.policy_spec.depth or min(_POLICY_GAMMA, nodes), nodes
    gamma = _POLICY_GAMMA if config.gamma is None else config.gamma
    return gamma, gamma


def _bytes_per_second(weights: int) -> float:
    """Measure the speed at which a matrix-vector product reads ``weights`` bytes, or a sample of them."""
    import torch

    size = max(1_000_000, min(weights, _MAX_SAMPLE_BYTES))
    matrix, vector = torch.ones(size // (1024 * 4), 1024), torch.ones(1, 1024)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        torch.nn.functional.linear(vector, matrix)
        times.append(time.perf_counter() - began)
    return size / min(times)


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
        return (_drafter_bytes(spec, base, target, progress),) * 2
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


def _bytes_per_number(options: LoadOptions) -> float:
    """Return the bytes of one weight; "auto" counts as half precision on devices that compute in it."""
    from specbench.backends.torch.kernels.instructions import has_bfloat16
    from specbench.backends.torch.kernels.linear import bytes_per_weight
    from specbench.models.devices import resolve_device

    rounded = quantized(options.dtype)
    if rounded is None and options.dtype != "auto":
        return 4 if options.dtype == "float32" else 2
    wide = 2 if resolve_device(options.device).type != "cpu" or has_bfloat16() else 4
    return wide if rounded is None else bytes_per_weight(rounded, wide)


def _drafter_bytes(spec: DrafterSpec, base: Recipe, target: _Size, progress: Progress | None) -> int:
    from specbench.backends.torch.kernels.linear import bytes_per_weight
    from specbench.models.devices import resolve_device

    own, options = spec.model_part, base.models.drafter
    if isinstance(own, SelfForm):  # unquantized layers share the target's weights
        if own.int4:
            return int(target.parameters * bytes_per_weight("int4", 2))
        return target.parameters if own.int8 else 0
    if own.model_spec is None:
        return 0
    on_cpu = resolve_device(options.device).type == "cpu"
    number = 1 if options.dtype == "auto" and on_cpu else _bytes_per_number(options)
    return int(_drafter_size(own.model_spec, base, target, progress).parameters * number)
