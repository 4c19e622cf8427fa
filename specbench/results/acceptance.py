"""Which drafted tokens were accepted, by their position in the draft."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np

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
        for least, counts in [(False, _of_steps(row)) if row.reports_steps else _of_server(row)]
        for place, (drafted, tested, accepted, alpha) in enumerate(counts, 1)
    ]


def _of_steps(row: Figures) -> Iterator[tuple[int, int, int, float]]:
    """Yield how many were drafted, tested and accepted at each position, and their mean α (unknown of servers)."""
    steps = row.steps
    for place in range(1, int(steps["drafted"].max()) + 1 if len(steps) else 1):
        drafted, tested, accepted = (
            int((steps[name] >= place).sum()) for name in ("drafted", "tested", "accepted")
        )
        alphas = [each[place - 1] for each in steps["expected_acceptance"] if each and len(each) >= place]
        yield drafted, tested, accepted, float(np.mean(alphas)) if alphas else math.nan


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
