"""Which drafted tokens were accepted: by position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pandas as pd

from specbench.base.record import ratio
from specbench.results.metrics import Figures
from specbench.results.summary import Summary


def positions(summary: Summary) -> list[SimpleNamespace]:
    """Return acceptance by draft position, for each configuration from the first position to the last.

    Returns:
        For each: ``config``, ``position`` from 1; ``drafted``, ``tested`` and ``accepted``, in how many steps; ``rate``
        and ``rate_of_drafted``, accepted over tested, and over drafted; ``alpha``, the mean of ``sum_x min(p, q)`` over
        tested tokens; and ``least``. Of a server whose drafts differ in length, counts after the first position are
        upper bounds and rates lower bounds: ``least``.
    """
    return [
        SimpleNamespace(
            config=row.config,
            position=place,
            drafted=drafted,
            tested=tested,
            accepted=accepted,
            rate=ratio(accepted, tested),
            rate_of_drafted=ratio(accepted, drafted),
            alpha=alpha,
            least=least and place > 1,
        )
        for row in summary.rows
        for least, counts in [_of_server(row) if row.is_server else (False, _of_steps(row))]
        for place, (drafted, tested, accepted, alpha) in enumerate(counts, 1)
    ]


def _of_steps(row: Figures) -> Iterator[tuple[int, int, int, float]]:
    """Return how many were drafted, tested and accepted at each position, and their α."""
    longest = int(row.steps["drafted"].max()) if len(row.steps) else 0
    counts = [_at_least(row.steps[name], longest) for name in ("drafted", "tested", "accepted")]
    return zip(*counts, _alpha_by_position(row.steps, longest), strict=True)


def _of_server(row: Figures) -> tuple[bool, list[tuple[int, int, int, float]]]:
    """Return the same as a server reported it, with each answer or else for groups of answers, and whether these are
    bounds: drafts differ in length.
    """
    reports = row.answers[row.answers["accepted_at"].notna()]
    if reports.empty:
        reports = row.groups[row.groups["accepted_at"].notna()]
    kept = [int(sum(counts)) for counts in zip_longest(*reports["accepted_at"], fillvalue=0)]
    drafts, drafted = int(reports["drafts"].sum()), int(reports["drafted"].sum())
    tested = [drafts, *kept]
    counts = [(drafts, *each, math.nan) for each in zip(tested, kept, strict=False)] if drafts else []
    return drafted < drafts * len(kept), counts


def _alpha_by_position(steps: pd.DataFrame, longest: int) -> list[float]:
    """Return the mean expected acceptance at positions 1 to ``longest``; NaN at positions where none was tested."""
    lists = steps["expected_acceptance"].tolist()
    at = ([each[i] for each in lists if len(each) > i] for i in range(longest))
    return [float(np.mean(values)) if values else float("nan") for values in at]


def _at_least(lengths: pd.Series[int], longest: int) -> list[int]:
    """Return how many of the lengths are at least 1, 2, ..., ``longest``."""
    counts = np.bincount(lengths, minlength=longest + 1)
    found: list[int] = counts[::-1].cumsum()[::-1][1 : longest + 1].tolist()
    return found
