"""Loading what `specbench tune` tries: the target, with the cache it is quickest with, and drafters that fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from specbench.backends.torch.kernels.native import is_available
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import RunError, UsageError
from specbench.bench.engines.own import ModelEngine
from specbench.bench.estimate import estimate_memory
from specbench.bench.grid import build_configs
from specbench.bench.passes import time_in_turn
from specbench.decoding.clocks import clock_for
from specbench.export.registry import load_engines
from specbench.generate import encode_prompt
from specbench.models.calibrations import read_choice
from specbench.models.devices import resolve_device
from specbench.models.drafters import choice_key
from specbench.models.prepare import LoadedDrafter, prepare, prepare_drafters
from specbench.models.target import Target, default_cache
from specbench.models.training_metadata import is_packaged
from specbench.options import quantized
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.specs.drafters import Cascade, DrafterSpec, SelfForm, SmallModel, parse_drafter
from specbench.specs.models import PACKAGED_HEADS, parse_model
from specbench.tune.candidates import drafters_to_try, is_tried

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.bench.grid import Sweep, SweepConfig, SweepOptions
    from specbench.options import CacheKind, ModelOptions
    from specbench.specs.models import ModelSpec
    from specbench.specs.rules import RuleSpec

_INT8, _INT4 = SelfForm(int8=True), SelfForm(int4=True)
_CONTEXT, _DRAFTED, _ROUNDS = 256, 4, 12
"""Of the passes that caches are compared by: tokens before them, drafts in the wide ones, and how often."""


@dataclass(frozen=True)
class Loaded:
    """What can be raced.

    Attributes:
        engine: With the target and all drafters.
        cache: The kind that all decode with.
        notes: What there is to say about the choice, a sentence each.
    """

    engine: ModelEngine
    cache: CacheKind
    notes: tuple[str, ...]


def load_candidates(
    target: ModelSpec,
    given: Sequence[DrafterSpec],
    models: ModelOptions,
    sweep: Sweep,
    *,
    cache: CacheKind | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load the target and all drafters to try, those that are given checked before (``check_engine``).

    Args:
        target: The target.
        given: Drafters that the user names, beside those that are always tried.
        models: How weights are loaded.
        sweep: Prompts and options, for the memory they take; its configurations are not read.
        cache: Kind of cache; ``None`` for the one that passes are surely quicker with, or the default.
        progress: Told how far loading has come.

    Raises:
        UsageError: What cannot be, such as a given drafter that does not fit the target.
        RunError: The target could not be loaded.
    """
    own, given = _own_forms(models), [*given, *_packaged(target)]
    fitting, notes = _fitting(target, list(dict.fromkeys([*given, *own])), models, sweep, progress)
    ready, _ = prepare(target, (), models, cache=cache, progress=progress)
    rounded = ready.rounded is not None
    kind = cache or default_cache(ready.language_model.model.config, rounded=rounded)
    if cache is None and not rounded:
        prompt = [] if ready.tokenizer is None else encode_prompt(ready.tokenizer, sweep.prompts[0].turns[0])
        ready, kind, note = quickest_cache(ready, kind, prompt)
        notes += [note] if note else []
    asked = [_resolved(spec, ready) for spec in fitting if spec in given]
    forms = [form for form in own if form in fitting]
    with suppress(UsageError):  # nothing is calibrated for this target
        forms.append(read_choice(choice_key(ready)).form)
    load = partial(prepare_drafters, ready, cache=kind, progress=progress)
    try:
        loaded_drafters = load(drafters_to_try(asked, forms), models)
    except UsageError as error:
        if not forms:
            raise
        notes.append(f"The target's own forms are left out: {error.message}")
        loaded_drafters = load(drafters_to_try(asked, []), models)
    small, in_int4 = _small_models(loaded_drafters), replace(models, drafter_dtype="int4")
    if small and _tries_int4(models.drafter_dtype, models.drafter_device):
        alone, both = (
            estimate_memory(sweep, Recipe(target, models=in_int4), drafters, progress=progress)
            for drafters in ((), tuple(small))
        )
        if both.total - alone.total <= both.available:
            loaded_drafters += load(small, in_int4)
        else:
            notes.append("Small models are not tried in int4 as well: there is no memory left for them.")
    engine = ModelEngine(
        ready,
        {each.name: each.outcome for each in loaded_drafters},
        {each.name: each.spec for each in loaded_drafters},
        fingerprints={each.name: each.weights for each in loaded_drafters if each.models},
        heads={each.name: each.training for each in loaded_drafters if each.training is not None},
    )
    return Loaded(engine, kind, tuple(notes))


def _packaged(target: ModelSpec) -> list[DrafterSpec]:
    """The head that comes with specbench for a target, if one does."""
    return [
        parse_drafter(alias)
        for alias, model in PACKAGED_HEADS.items()
        if parse_model(model) == target and is_packaged(alias)
    ]


def configurations(options: SweepOptions, engine: ModelEngine, base: Recipe) -> list[SweepConfig]:
    """The grid of everything that is loaded; a static tree of it only where one is calibrated."""

    def fitted(rule: RuleSpec, drafter: str, temperature: float) -> RuleSpec:
        return engine.calibrated(rule, drafter, temperature)[0]

    grid = build_configs(
        options, engine.specs, engine.fingerprints, fitted, base=base, dtypes=engine.drafter_dtypes
    )
    return [each for each in grid if each.kind == "plain" or is_tried(each.rule, engine.specs[each.drafter])]


def exportable(configs: Iterable[SweepConfig], engine: ModelEngine) -> list[set[str]]:
    """For each engine that settings are exported to the ids of those configurations whose drafters it has."""
    groups = []
    for other in load_engines().values():
        names = {name for name, spec in engine.specs.items() if other.exports(spec, engine.heads.get(name))}
        groups.append({each.id for each in configs if each.drafter in names})
    return groups


def _tries_int4(dtype: str, device: str) -> bool:
    """Whether weights are tried in 4 bits too: where no dtype is asked for, and passes over them are quicker so."""
    return dtype == "auto" and resolve_device(device).type == "cpu" and is_available()


def _small_models(loaded_drafters: Iterable[LoadedDrafter]) -> list[DrafterSpec]:
    """What drafts with a model of its own, alone or in a cascade. Heads do not: in 4 bits they are no quicker."""
    return [
        each.spec
        for each in loaded_drafters
        if isinstance(each.spec.model_part, SmallModel)
        and each.training is None
        and not isinstance(each.outcome, RunError)
    ]


def _own_forms(models: ModelOptions) -> list[SelfForm]:
    """Forms of the target that are tried without calibration; int4 only where its passes are quicker for it."""
    if resolve_device(models.device).type != "cpu" or quantized(models.dtype) is not None:
        return []
    return [_INT8, _INT4] if is_available() else [_INT8]


def _fitting(
    target: ModelSpec,
    drafters: Sequence[DrafterSpec],
    models: ModelOptions,
    sweep: Sweep,
    progress: Progress | None,
) -> tuple[list[DrafterSpec], list[str]]:
    """The drafters that there is memory for, one beside the other, and what there is to say of the others."""
    kept: list[DrafterSpec] = []
    notes = []
    for spec in drafters:
        need = estimate_memory(sweep, Recipe(target, models=models), (*kept, spec), progress=progress)
        if need.total <= need.available:
            kept.append(spec)
            continue
        needed, free = (f"{size / 1e9:.1f} GB" for size in (need.total, need.available))
        notes.append(f"{spec} is left out: with it {needed} of memory are needed, and {free} are free.")
    return kept, notes


def _resolved(spec: DrafterSpec, target: Target) -> DrafterSpec:
    """A drafter with the calibrated form in its place, so that none is tried twice."""
    if isinstance(spec, Cascade) and isinstance(spec.back, SelfForm) and spec.back.calibrated:
        return replace(spec, back=read_choice(choice_key(target)).form)
    if isinstance(spec, SelfForm) and spec.calibrated:
        return read_choice(choice_key(target)).form
    return spec


# -- caches ----------------------------------------------------------------------------------------


def quickest_cache(
    target: Target, usual: CacheKind, prompt: Sequence[int]
) -> tuple[Target, CacheKind, str | None]:
    """A target with the preallocated cache if passes are surely quicker with it, else as it is.

    Passes of one token and of several are timed in turn behind the same context. What is drafted does not depend on the
    cache, so no drafter is needed to choose one.

    Args:
        target: With the usual kind.
        usual: That kind.
        prompt: Tokens, repeated to fill the context; empty for any.

    Returns:
        The target, its kind of cache, and a sentence if it is another one than the usual.
    """
    other: CacheKind = "preallocated"
    scorer, model = target.scorer, target.language_model.model
    if usual == other:
        return target, usual, None
    try:
        second = Scorer(model, other, context_limit=scorer.context_limit)
    except UsageError:  # a kind of layer that it does not hold
        return target, usual, None
    clock = clock_for(str(scorer.device))
    room = scorer.context_limit or _CONTEXT + _DRAFTED + 1
    length = max(1, min(_CONTEXT, room - _DRAFTED - 1))
    tokens = list(prompt) or [0]
    context = (tokens * (length // len(tokens) + 1))[:length]

    def passes(each: Scorer) -> float:
        began = clock.now()
        for drafted in ([], context[:_DRAFTED]):
            each.logits(context, drafted)
            each.rollback(length - 1)
        return clock.now() - began

    scorers: Mapping[CacheKind, Scorer] = {usual: scorer, other: second}
    for each in scorers.values():
        each.begin()
        each.logits(context)
        each.rollback(length - 1)
    times = time_in_turn({kind: partial(passes, each) for kind, each in scorers.items()}, _ROUNDS, Random(0))
    for each in scorers.values():
        each.begin()
    ratios = np.array(times[other]) / np.array(times[usual])
    ratio = stats.geometric_mean(ratios, [0] * _ROUNDS, range(_ROUNDS))
    if ratio.low is None or ratio.high is None or ratio.high >= 1.0:
        return target, usual, None
    share = f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    note = f"A pass with the cache {other} takes {share} times as long as with {usual}: all decode with it."
    return replace(target, scorer=second), other, note
