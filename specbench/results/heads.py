"""How trained heads do in a run, beside what was measured when they were trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specbench.base.record import NO_FIGURE, Estimate
from specbench.models.training_metadata import TrainingMeasurement, TrainingMetadata
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import RunConfig
from specbench.results.summary import categorize

PLACES = 4
"""Of a draft, whose acceptance is told while a head learns."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A measure of a head while it learnt.

    Attributes:
        drafter: Its name.
        tokens: Trained on.
        tokens_per_step: Of the decoder with it.
        kept: Of the drafts tested at that place the share kept, by place from 1 to ``PLACES``; NaN if none was tested.
        best: Whether it is the head that was kept.
    """

    drafter: str
    tokens: int
    tokens_per_step: float
    kept: dict[str, float]
    best: bool


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A configuration that drafts with a trained head, on a category. NaN where there is nothing to go by.

    Attributes:
        config: Which.
        category: Of the prompts.
        tokens_per_step: Measured.
        first, second: Of the drafts tested at the first two positions the shares that were kept.
        trained: Tokens per step on held-out prompts of a category of that name when the head was trained.
        speedup, verdict, provisional: As of ``specbench.results.summary.CategoryRow``.
    """

    config: RunConfig
    category: str
    tokens_per_step: float
    first: float
    second: float
    trained: float
    speedup: Estimate
    verdict: stats.Verdict | None
    provisional: bool


def with_measurements(heads: Mapping[str, TrainingMetadata]) -> dict[str, TrainingMetadata]:
    """Those heads of a run that were measured while they were trained, by the names of their drafters."""
    return {name: training for name, training in heads.items() if training.measured}


def distinct_trainings(heads: Mapping[str, TrainingMetadata]) -> dict[str, TrainingMetadata]:
    """The same, with each training once: a head that drafts alone and in a cascade learnt once."""
    told: dict[str, TrainingMetadata] = {}
    for name, training in with_measurements(heads).items():
        if training not in told.values():
            told[name] = training
    return told


def best_measurement(training: TrainingMetadata) -> TrainingMeasurement:
    """What was measured of the head as it was kept."""
    return max(training.measured, key=lambda each: each.tokens_per_step)


def training_rows(results: Results) -> list[TrainingRow]:
    """How trained heads did while they learnt, a row per head and measure."""
    return [
        TrainingRow(
            name,
            each.tokens,
            each.tokens_per_step,
            {
                str(place + 1): share
                for place, share in enumerate([*each.accepted, *[math.nan] * PLACES][:PLACES])
            },
            each is best_measurement(training),
        )
        for name, training in distinct_trainings(results.run.heads).items()
        for each in training.measured
    ]


def head_rows(results: Results) -> list[HeadRow]:
    """Trained heads by category, a row per configuration that drafts with one and category."""
    run, generations, steps = results.run, results.generations, results.steps
    told = with_measurements(run.heads)
    configs = {config.id: config for config in run.configs}
    order = {config: number for number, config in enumerate(configs)}
    speedups = {(row.config.id, row.category): row for row in categorize(results).rows}
    kinds = generations[["config", "category"]].fillna("").to_numpy().tolist()
    pairs = list(dict.fromkeys((str(config), str(category)) for config, category in kinds))
    place = {pair: number for number, pair in enumerate(pairs)}
    codes = np.array([place[str(config), str(category)] for config, category in kinds], dtype=np.intp)
    found = {pairs[code]: mine for code, mine in steps.split(codes[steps.row]).items()}
    out = []
    for (config, category), mine in sorted(found.items(), key=lambda each: order[each[0][0]]):
        drafter = configs[config].drafter
        if drafter not in told:
            continue
        first, second = mine.rates(2).tolist()
        row = speedups.get((config, category))
        out.append(
            HeadRow(
                configs[config],
                category,
                float(mine["emitted"].mean()),
                first,
                second,
                best_measurement(told[drafter]).categories.get(category, math.nan),
                NO_FIGURE if row is None else row.speedup,
                None if row is None else row.verdict,
                provisional=row is not None and row.provisional,
            )
        )
    return out
