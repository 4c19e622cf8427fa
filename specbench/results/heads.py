"""How well trained heads draft in a run, compared with the measurements during their training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from specbench.base.record import NO_FIGURE, Estimate
from specbench.models.training_metadata import TrainingMeasurement, TrainingMetadata
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.summary import categorize
from specbench.rows import Row

PLACES = 4
"""Draft positions for which acceptance is reported during training."""


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A measurement of a head during its training.

    Attributes:
        tokens: Number of tokens the head had been trained on.
        kept: Accepted over tested by draft position, from 1 to ``PLACES``; NaN if none was tested.
        best: Whether training kept the weights of this measurement.
    """

    drafter: str
    tokens: int
    tokens_per_step: float
    kept: dict[str, float]
    best: bool


@dataclass(frozen=True, slots=True)
class HeadRow:
    """A configuration that drafts with a trained head, on one category; unknown values are NaN.

    Attributes:
        first, second: Accepted over tested at the first two draft positions.
        trained: Tokens per step on held-out prompts of the same category, measured when the head was trained.
        speedup, verdict, provisional: See ``specbench.results.summary.CategoryRow``.
    """

    config: Row
    category: str
    tokens_per_step: float
    first: float
    second: float
    trained: float
    speedup: Estimate
    verdict: stats.Verdict | None
    provisional: bool


def distinct_trainings(heads: Mapping[str, TrainingMetadata]) -> dict[str, TrainingMetadata]:
    """Return the training metadata of heads by drafter; a head that drafts alone and in a cascade is listed once."""
    found: dict[str, TrainingMetadata] = {}
    for name, training in heads.items():
        if training.measured and training not in found.values():
            found[name] = training
    return found


def best_measurement(training: TrainingMetadata) -> TrainingMeasurement:
    """Return the measurement of the weights that training kept."""
    return max(training.measured, key=lambda each: each.tokens_per_step)


def training_rows(results: Results) -> list[TrainingRow]:
    """Return measurements of heads during their training, a row per head and measurement."""
    found = []
    for name, training in distinct_trainings(results.run.heads).items():
        best = best_measurement(training)
        for each in training.measured:
            rates = [*each.accepted, *[math.nan] * PLACES][:PLACES]
            kept = {str(position): rate for position, rate in enumerate(rates, 1)}
            found.append(TrainingRow(name, each.tokens, each.tokens_per_step, kept, each is best))
    return found


def head_rows(results: Results) -> list[HeadRow]:
    """Return how well trained heads draft: a row for each category of each configuration that drafts with a head."""
    run, steps = results.run, results.steps
    speedups = {(row.config.id, row.category): row for row in categorize(results)}
    kinds = results.generations[["config", "category"]].fillna("")
    codes, pairs = pd.factorize(pd.MultiIndex.from_frame(kinds))
    found = {tuple(pairs[code]): mine for code, mine in steps.split(codes[steps.row]).items()}
    out = []
    for config in run.configs:
        training = run.heads.get(config.drafter)
        if training is None or not training.measured:
            continue
        for (config_id, category), mine in found.items():
            if config_id != config.id:
                continue
            row = speedups.get((config_id, category))
            first, second = mine.rates(2).tolist()
            out.append(
                HeadRow(
                    config,
                    category,
                    tokens_per_step=float(mine["emitted"].mean()),
                    first=first,
                    second=second,
                    trained=best_measurement(training).categories.get(category, math.nan),
                    speedup=NO_FIGURE if row is None else row.speedup,
                    verdict=None if row is None else row.verdict,
                    provisional=row is not None and row.provisional,
                )
            )
    return out
