"""Choose what `specbench tune` races: configurations of a sweep's grid, and a selection by their predicted speedups.

Configurations far below the best prediction (``specbench.predict``) are not raced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from specbench.base.errors import UsageError
from specbench.models.find import require_models
from specbench.recipe import Recipe
from specbench.results.run import Tuning
from specbench.rows import Row
from specbench.specs.drafters import (
    Cascade,
    DrafterSpec,
    Grammar,
    Lookup,
    SelfForm,
    Several,
    SmallModel,
    Suffix,
    after_grammar,
    parse_drafter,
)
from specbench.specs.policies import Auto, DynamicTree, Fixed, PolicySpec

if TYPE_CHECKING:
    pass

GAMMAS = (1, 2, 3, 4, 6, 8)
"""Draft lengths of the policy ``fixed``; only the one with the best prediction is raced."""

BLOCKS = 6
"""Blocks of the race that the time should suffice for."""

MIN_SHARE = 0.8
"""Smallest share of the best prediction at which a configuration is raced. The margin is for what predictions leave
out: other prompts, and passes that are slower within a step."""

NO_TIME = "no time"

BLOCK_CHAIN = Auto(verification="block")
"""The chain of ``auto``, with block verification, above temperature 0; it gains nothing for drafters without
probabilities."""

_FRONTS = [cast("Cascade", parse_drafter(f"{front}+self:int8")) for front in ("lookup", "suffix")]
"""Cascades of drafters without a model before each model, which takes the place of ``self``."""


# -- candidates ------------------------------------------------------------------------------------


def given_drafters(base: Recipe, drafters: Sequence[str]) -> list[DrafterSpec]:
    """Return drafters that the user named.

    Raises:
        UsageError: A drafter is none, or cannot be predicted.
    """
    given = [spec for spec in map(parse_drafter, dict.fromkeys(drafters)) if not spec.is_plain]
    for spec in given:
        if isinstance(spec, Several):
            raise UsageError(
                f"The drafter {spec} cannot be predicted.", "Measure it with `specbench sweep --until sure`."
            )
        replace(base, drafter=spec).check("timing")
    require_models(base.target, *(part.model for spec in given for part in spec.models))
    return given


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
    cascades = [replace(front, back=back) for back in backs for front in _FRONTS]
    tried = dict.fromkeys([Lookup(), Suffix(), *forms, *given, *cascades])
    if formatted:  # where a drafter can draft what is not forced
        tried = dict.fromkeys([Grammar(), *(after_grammar(spec) or spec for spec in tried)])
    return list(tried)


def rules_to_try(*, greedy: bool, chained: bool) -> tuple[PolicySpec, ...]:
    """Return the draft policies to try.

    Args:
        greedy: Whether the temperature is 0; otherwise block verification is tried too.
        chained: Whether forward passes must be bit-exact, so that only chains can be drafted.
    """
    block = () if greedy else (BLOCK_CHAIN,)
    if chained:
        return (Auto(), Fixed(), *block)
    return (Auto(), *block, Fixed(), DynamicTree())


# -- selection -------------------------------------------------------------------------------------


def with_policies(rows: Sequence[Row], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return predictions of draft lengths, and with them those of other policies: their drafter's best length."""
    best: dict[str, float] = {}
    for row in rows:
        best[row.drafter] = max(best.get(row.drafter, 0.0), predicted.get(row.id, 0.0))
    others = {row.id: best[row.drafter] for row in rows if row.gamma is None and best[row.drafter] > 0}
    return {**predicted, **others}


def race_needs(
    drafters: Mapping[str, str], predicted: Mapping[str, float], asked: Mapping[str, Collection[str]]
) -> dict[str, Collection[str]]:
    """Return what has to be raced beside plain decoding: ids by what they stand for, one of which has to take part.

    Without the two drafters with the best predictions, and what was ``asked`` for, it is no race. Drafters without a
    prediction come last.

    Args:
        drafters: The drafter of each candidate.
        predicted: Predicted speedups by id.
        asked: Such as the drafters that the user named.
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


def select(
    predicted: Mapping[str, float],
    seconds_of: Callable[[str], float],
    seconds: float,
    families: Mapping[str, str],
    failed: Mapping[str, str],
    *,
    lengths: Collection[str] = (),
    needed: Collection[str] = (),
) -> Tuning:
    """Select the candidates to race: the needed ones, and as many others as the time allows, by prediction.

    Other candidates predicted below ``MIN_SHARE`` of the best are not raced, nor are the slower lengths of a family.

    Args:
        predicted: Predicted speedups by id.
        seconds_of: Returns how long ``BLOCKS`` blocks take a candidate.
        seconds: Time for all of them.
        families: What each candidate belongs to: its drafter. One without any prediction has failed or was not tried.
        failed: Errors by family.
        lengths: Ids that differ from others of their family in the draft length alone; one of a family is raced.
        needed: Ids that are raced in any case.
    """
    ranked, taken = by_prediction(predicted), set[str]()
    for name in [name for name in ranked if name in lengths]:
        if families[name] in taken:
            ranked.remove(name)
        taken.add(families[name])
    left_out: dict[str, str] = {}
    raced: list[str] = []
    best = max([1.0, *predicted.values()])
    for name in sorted(ranked, key=lambda name: name not in needed):
        if predicted[name] < MIN_SHARE * best and name not in needed:
            left_out[name] = f"predicted below {MIN_SHARE:g} of the best"
        elif raced and seconds_of(name) > seconds and name not in needed:
            left_out[name] = f"{NO_TIME} for {BLOCKS} blocks with it"
        else:
            raced.append(name)
            seconds -= seconds_of(name)
    known = {families[name] for name in predicted if name in families}
    for name, family in families.items():
        if family not in known:
            known.add(family)
            left_out[name] = f"failed: {failed[family]}" if family in failed else "it was not tried"
    rounded = {name: round(value, 4) for name, value in predicted.items()}
    return Tuning(predicted=rounded, raced=sorted(raced, key=ranked.index), left_out=left_out)
