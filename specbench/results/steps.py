"""The steps of many generations as one data frame."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from specbench.decoding.records import PARTS
from specbench.results.lines import STEP_FIGURES, StepLists

_LISTS = ("expected_acceptance", "closing", "parents", "experts", "experts_one")


def step_frame(steps: Mapping[int, StepLists], generations: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of outputs, a row per step.

    Its columns are the fields of ``StepLists``, with ``policy`` as a dict; ``output`` and ``config``, the index of the
    output and its row; ``prompt``, a number per prompt; ``alpha_sum``, the sum of the step's expected acceptances; and
    ``total_s``. A field that an output has no values of is ``None``.

    Args:
        steps: Those of the outputs that finished, by index.
        generations: All outputs.
    """
    lists, outputs = [*steps.values()], np.fromiter(steps, np.int64)
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
    columns["policy"] = pd.Series([*chain.from_iterable(map(_notes, lists))], dtype=object)
    by_step = chain.from_iterable(each.expected_acceptance for each in lists)
    sums = np.concatenate(([0.0], np.cumsum(np.fromiter(chain.from_iterable(by_step), float))))
    ends = np.cumsum(columns["tested"])
    columns["alpha_sum"] = sums[ends] - sums[ends - columns["tested"]]
    columns["total_s"] = np.asarray(sum(columns[f"{part}_s"] for part in PARTS))
    columns["output"] = np.repeat(outputs, counts)
    columns["config"] = np.repeat(generations["config"].to_numpy()[outputs], counts)
    columns["prompt"] = np.repeat(pd.factorize(generations["prompt"])[0][outputs], counts)
    return pd.DataFrame(columns)


def _notes(steps: StepLists) -> list[dict[str, float | None] | None]:
    """Return what the draft policy noted in each step."""
    if not steps.policy:
        return [None] * len(steps.drafted)
    return [
        dict(zip(steps.policy, values, strict=True)) for values in zip(*steps.policy.values(), strict=True)
    ]
