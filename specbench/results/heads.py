"""How well trained heads draft in a run, compared with the measurements during their training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import pandas as pd

from specbench.models.training_metadata import TrainingMeasurement, TrainingMetadata
from specbench.results.results import Results
from specbench.results.summary import categorize


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


def head_rows(results: Results) -> list[SimpleNamespace]:
    """Return how well trained heads draft: a row for each category of each configuration that drafts with a head.

    Returns:
        For each: ``cell``, its row of ``categorize``; ``first`` and ``second``, accepted over tested at the first two
        draft positions; ``trained``, tokens per step on held-out prompts of the same category when the head was
        trained. NaN stands for what was not tested or measured.
    """
    run, steps, rows = results.run, results.steps, results.generations
    kinds = pd.MultiIndex.from_arrays([rows["config"], rows["category"].replace(run.tasks).fillna("")])
    codes, pairs = pd.factorize(kinds)
    found = {pairs[code]: mine.rates(2).tolist() for code, mine in steps.split(codes[steps.row]).items()}
    cells = categorize(results)
    out = []
    for config in run.configs:
        training = run.heads.get(config.drafter)
        if training is None or not training.measured:
            continue
        trained = best_measurement(training).categories
        out += [
            SimpleNamespace(
                cell=cell, first=rates[0], second=rates[1], trained=trained.get(cell.category, math.nan)
            )
            for cell in cells
            if cell.config.id == config.id and (rates := found.get((config.id, cell.category)))
        ]
    return out
