"""Latencies of requests decoded in batches, and how speedups depend on batch size and length of context."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean
from types import SimpleNamespace
from typing import TypeAlias

import pandas as pd

from specbench.base.textsafe import one_line
from specbench.results.results import Results
from specbench.results.run import RIVALS, RunWarning
from specbench.results.summary import Summary, SummaryRow

PERCENTILES = ("p50", "p95", "p99")
"""Of latencies."""


def request_rows(results: Results, summary: Summary) -> list[SimpleNamespace]:
    """Return the latencies of each configuration that decodes requests in batches, in the order of the run.

    Returns:
        For each: ``config`` and ``overall``, its row of the summary; the number of ``requests``; ``ttft_s`` and
        ``latency_s``, from arrival to the first emission and to the end, ``token_s`` per token after the first
        emission, and ``queued_s``, each by the names in ``PERCENTILES``, over all requests (linear interpolation);
        ``pool_peak_blocks`` and ``pool_peak_bytes``, maxima of the target's pool of KV cache blocks.
    """
    found = []
    for overall in summary.rows:
        config = overall.config.id
        done = results.done[(results.done["config"] == config) & (results.done["group"] != "")]
        if done.empty:
            continue
        groups = results.groups[results.groups["config"] == config]
        speed = done["tokens_per_second"]
        found.append(
            SimpleNamespace(
                config=overall.config,
                overall=overall,
                requests=len(done),
                ttft_s=_percentiles(done["ttft_s"]),
                token_s=_percentiles(1.0 / speed.where(speed > 0)),
                latency_s=_percentiles(done["total_s"]),
                queued_s=_percentiles(done["queued_s"]),
                pool_peak_blocks=float(groups["pool_peak_blocks"].max()),
                pool_peak_bytes=float(groups["pool_peak_bytes"].max()),
            )
        )
    return found


def _percentiles(values: pd.Series[float]) -> dict[str, float]:
    return {name: float(values.astype(float).quantile(int(name[1:]) / 100)) for name in PERCENTILES}


Curve: TypeAlias = list[SummaryRow]
"""A drafter with a draft policy, or a server, by rising batch size or length of context: rows with speedups."""


def size_of(row: SummaryRow) -> int:
    """Return the length of context or the batch size of a configuration."""
    return row.config.condition.context or row.config.condition.batch or 1


def curves_of(rows: Iterable[SummaryRow]) -> list[Curve]:
    """Return the curves at all temperatures: one for each drafter with a draft policy, or server; the best first."""
    found: dict[tuple[str, str, int | None, float], list[SummaryRow]] = {}
    for row in rows:
        config = row.config
        if config.kind in RIVALS and not row.is_baseline and row.speedup.value > 0:
            key = (config.drafter, config.draft_policy, config.gamma, config.condition.temperature)
            found.setdefault(key, []).append(row)
    curves = [sorted(each, key=size_of) for each in found.values()]
    return sorted(curves, key=lambda curve: -fmean(math.log(row.speedup.value) for row in curve))


def batch_curves(summary: Summary) -> list[Curve]:
    """Return the curves by batch size, with as many clients as the batch size; see ``curves_of``."""
    return curves_of(row for row in summary.rows if row.config.condition.is_closed)


def context_curves(summary: Summary) -> list[Curve]:
    """Return the curves by length of context, see ``curves_of``."""
    return curves_of(row for row in summary.rows if row.config.condition.context is not None)


_BLIND = 1 / 3
"""A drafter is called blind at a context where it surely accepts less than this share of what it does at the
shortest."""


def blind_drafters(summary: Summary) -> Iterator[RunWarning]:
    """Yield a warning for each drafter whose drafts stop, or stop being accepted, from some length of context on."""
    named: set[tuple[str, float]] = set()
    curves = sorted(context_curves(summary), key=lambda curve: curve[0].config.gamma is None)
    for first, *longer in curves:  # fixed lengths first: a policy may have stopped for other reasons
        key = (first.config.drafter, first.config.condition.temperature)
        row = next((row for row in longer if _is_blind(row, first)), None)
        if row is None or key in named or first.config.kind == "server":
            continue
        named.add(key)
        at, name = f"{size_of(row):,} tokens of context", one_line(first.config.drafter)
        message = f"{name} drafts nothing at {at}: that is beyond the context that it can read."
        if row.mean_gamma > 0:
            message = (
                f"{name} is blind at {at}: {row.acceptance_tested.value:.0%} of its tested drafts are accepted there,"
                f" {first.acceptance_tested.value:.0%} at {size_of(first):,}."
            )
        data = {"context": size_of(row)}
        yield RunWarning("blind-drafter", "warning", message, "Use it for shorter contexts.", data)


def _is_blind(row: SummaryRow, first: SummaryRow) -> bool:
    """Return whether a row accepts surely much less than the first of its curve, or drafts nothing at all."""
    if not first.mean_gamma > 0 or not row.mean_gamma > 0:
        return first.mean_gamma > 0 and row.config.gamma is not None
    before, after = first.acceptance_tested, row.acceptance_tested
    high = after.value if after.high is None else after.high
    return high < _BLIND * (before.value if before.low is None else before.low)
