"""Choose what `specbench tune` races: configurations of a sweep's grid, and a selection by their predicted speedups.

Configurations far below the best prediction (``specbench.predict``) are not raced. All functions are pure. The settings
of an engine are predicted from other measurements, and selected alike (``select_in_time``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace as replace_fields

from msgspec.structs import replace

from specbench.results.run import Tuning
from specbench.rows import Row
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    Grammar,
    Lookup,
    SelfForm,
    SmallModel,
    Suffix,
    after_grammar,
    parse_drafter,
)
from specbench.specs.policies import PolicySpec, parse_policy

GAMMAS = (1, 2, 3, 4, 6, 8)
"""Draft lengths of the policy ``fixed``; only the one with the best prediction is raced."""

BLOCKS = 6
"""Blocks of the race that the time should suffice for."""

MIN_SHARE = 0.8
"""Smallest share of the best prediction at which a configuration is raced. The margin is for what predictions leave
out: other prompts, and passes that are slower within a step."""

NO_TIME = "no time"
SUPPORTED = "that "
"""Begins what a race needs for another engine: ``that vLLM supports``."""

_BLOCK_CHAIN = "auto:verification=block"
"""The chain of ``auto``, with block verification, above temperature 0."""

_FRONTS = ("lookup", "suffix")
"""Drafters without a model that are put before each model."""


# -- candidates ------------------------------------------------------------------------------------


def drafters_to_try(
    given: Sequence[DrafterSpec], forms: Sequence[SelfForm], *, formatted: bool = False
) -> list[DrafterSpec]:
    """Return drafters without a model, forms of the target, the given drafters, and cascades of these.

    Args:
        given: Drafters that the user gives; plain decoding is ignored.
        forms: Self-drafting forms of the target.
        formatted: Whether outputs have a format: forced tokens are drafted before everything else then.
    """
    given = [spec for spec in given if not spec.is_plain]
    backs = [spec for spec in (*forms, *given) if isinstance(spec, SelfForm | SmallModel)]
    cascades = [_cascade(front, back) for back in backs for front in _FRONTS]
    tried = dict.fromkeys([Lookup(), Suffix(), *forms, *given, *cascades])
    if formatted:  # where a drafter can draft what is not forced
        tried = dict.fromkeys([Grammar(), *(after_grammar(spec) or spec for spec in tried)])
    return list(tried)


def _cascade(front: str, back: SelfForm | SmallModel) -> Cascade:
    spec = parse_drafter(f"{front}+self:int8")
    assert isinstance(spec, Cascade)
    return replace_fields(spec, back=back)


def rules_to_try(*, greedy: bool, chained: bool) -> tuple[str, ...]:
    """Return the draft policies to try.

    Args:
        greedy: Whether the temperature is 0; otherwise block verification is tried too.
        chained: Whether forward passes must be bit-exact, so that only chains can be drafted.
    """
    block = () if greedy else (_BLOCK_CHAIN,)
    if chained:
        return ("auto", "fixed", *block)
    return ("auto", *block, "fixed", "dynamic-tree")


def is_tried(policy: PolicySpec, drafter: DrafterSpec) -> bool:
    """Return whether one of these policies is tried: block verification gains nothing for drafters without
    probabilities.
    """
    return drafter.has_logits or policy != parse_policy(_BLOCK_CHAIN)


# -- selection -------------------------------------------------------------------------------------


def select(
    configs: Sequence[Row],
    predicted: Mapping[str, float],
    *,
    plain_s: float,
    first_s: float,
    seconds: float,
    failed: Mapping[str, str],
    needed: Collection[str] = (),
) -> Tuning:
    """Select the configurations to race. Of fixed draft lengths, only each drafter's best is considered.

    Args:
        plain_s: Time of plain decoding for a whole output.
        first_s: Time to the first token, equal for all.
        seconds: Time for the candidates.
        failed: Errors by drafter.
        needed: See ``select_in_time``.
    """
    fixed = {config.id: config.drafter for config in configs if config.gamma is not None}
    first = {config.drafter: config.id for config in reversed(configs) if config.kind == "speculative"}
    known = {config.drafter for config in configs if config.id in predicted}
    others = slower_lengths(predicted, fixed, 1)
    selected = select_in_time(
        {name: value for name, value in predicted.items() if name not in others},
        lambda name: BLOCKS * (first_s + plain_s / max(predicted[name], 1e-9)),
        seconds,
        {name: drafter for drafter, name in first.items() if drafter not in known},
        failed,
        needed,
    )
    return replace(selected, predicted={name: round(value, 4) for name, value in predicted.items()})


def race_needs(
    drafters: Mapping[str, str], predicted: Mapping[str, float], asked: Mapping[str, Collection[str]]
) -> dict[str, Collection[str]]:
    """Return what has to be raced beside plain decoding: ids by what they stand for, one of which has to take part.

    Without the two drafters with the best predictions, and what was ``asked`` for, it is no race. Drafters without a
    prediction come last.

    Args:
        drafters: The drafter of each candidate.
        predicted: Predicted speedups by id.
        asked: Such as the drafters that the user named, and what an engine supports.
    """
    ranked = dict.fromkeys(drafters[name] for name in (*by_prediction(predicted), *drafters))
    best = {each: [name for name in drafters if drafters[name] == each] for each in list(ranked)[:2]}
    return {**best, **{what: names for what, names in asked.items() if names}}


def best_of_each(needs: Mapping[str, Collection[str]], predicted: Mapping[str, float]) -> set[str]:
    """Return the best prediction for everything that a race needs, as far as there is one."""
    ranked = by_prediction(predicted)
    return {name for names in needs.values() for name in [each for each in ranked if each in names][:1]}


def by_prediction(predicted: Mapping[str, float]) -> list[str]:
    """Return ids, the best prediction first."""
    return sorted(predicted, key=lambda name: -predicted[name])


def slower_lengths(predicted: Mapping[str, float], families: Mapping[str, str], most: int) -> list[str]:
    """Return the draft lengths that are not among the ``most`` best ones of their family."""
    taken, found = Counter[str](), []
    for name in by_prediction(predicted):
        if name in families:
            taken[families[name]] += 1
            found += [name] if taken[families[name]] > most else []
    return found


def select_in_time(
    predicted: Mapping[str, float],
    seconds_of: Callable[[str], float],
    seconds: float,
    families: Mapping[str, str],
    failed: Mapping[str, str],
    needed: Collection[str] = (),
) -> Tuning:
    """Select the candidates to race: the needed ones, and as many others as the time allows, by prediction.

    Other candidates predicted below ``MIN_SHARE`` of the best are not raced.

    Args:
        predicted: Predicted speedups by id.
        seconds_of: Returns how long ``BLOCKS`` blocks take a candidate.
        seconds: Time for all of them.
        families: What each candidate belongs to; those without a prediction have failed or were not tried.
        failed: Errors by family.
        needed: Ids that are raced in any case.
    """
    left_out: dict[str, str] = {}
    raced: list[str] = []
    ranked = by_prediction(predicted)
    best = max([1.0, *predicted.values()])
    for name in sorted(ranked, key=lambda name: name not in needed):
        if predicted[name] < MIN_SHARE * best and name not in needed:
            left_out[name] = f"predicted below {MIN_SHARE:g} of the best"
        elif raced and seconds_of(name) > seconds and name not in needed:
            left_out[name] = f"{NO_TIME} for {BLOCKS} blocks with it"
        else:
            raced.append(name)
            seconds -= seconds_of(name)
    for name, family in families.items():
        if name not in predicted:
            left_out[name] = f"failed: {failed[family]}" if family in failed else "it was not tried"
    return Tuning(predicted=dict(predicted), raced=sorted(raced, key=ranked.index), left_out=left_out)
