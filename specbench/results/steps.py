"""The steps of many generations as one data frame."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specbench.decoding.records import PARTS
from specbench.results.lines import STEP_FIGURES, StepLists

_LISTS = ("expected_acceptance", "closing", "parents", "experts", "experts_one")


def step_frame(generations: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of all finished generations of ``Results``, a row per step.

    Its columns are the fields of ``StepLists`` but ``policy``, and ``output``, the index of the generation; ``prompt``,
    a number per prompt; ``alpha_sum``, the sum of the step's expected acceptances; and ``total_s``. A field that a
    generation has no values of is ``None``.
    """
    done = (generations["status"] == "ok").to_numpy()
    lists: list[StepLists] = generations["steps"][done].tolist()
    counts = [len(each.drafted) for each in lists]
    columns: dict[str, Any] = {
        name: np.fromiter(
            chain.from_iterable(getattr(each, name) for each in lists), np.int64 if kind is int else float
        )
        for name, kind in STEP_FIGURES.items()
    }
    for name in _LISTS:
        values = (getattr(each, name) or [None] * len(each.drafted) for each in lists)
        columns[name] = pd.Series([*chain.from_iterable(values)], dtype=object)
    by_step = chain.from_iterable(each.expected_acceptance for each in lists)
    sums = np.concatenate(([0.0], np.cumsum(np.fromiter(chain.from_iterable(by_step), float))))
    ends = np.cumsum(columns["tested"])
    columns["alpha_sum"] = sums[ends] - sums[ends - columns["tested"]]
    columns["total_s"] = np.asarray(sum(columns[f"{part}_s"] for part in PARTS))
    columns["output"] = np.repeat(generations.index[done].to_numpy(), counts)
    columns["prompt"] = np.repeat(pd.factorize(generations["prompt"])[0][done], counts)
    return pd.DataFrame(columns)


def alpha_by_position(steps: pd.DataFrame, longest: int) -> list[float]:
    """Return the mean expected acceptance at positions 1 to ``longest``; NaN at positions where none was tested."""
    lists = steps["expected_acceptance"].tolist()
    at = ([each[i] for each in lists if len(each) > i] for i in range(longest))
    return [float(np.mean(values)) if values else float("nan") for values in at]


def at_least(lengths: pd.Series[int] | NDArray[Any], longest: int) -> list[int]:
    """Return how many of the lengths are at least 1, 2, ..., ``longest``."""
    counts = np.bincount(lengths, minlength=longest + 1)
    found: list[int] = counts[::-1].cumsum()[::-1][1 : longest + 1].tolist()
    return found
