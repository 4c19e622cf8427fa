"""Up to how many requests side by side does a drafter pay? Predicted, from its steps and from passes that are shared.

A rule that looks at costs would draft less in a batch than it did for one request, so this is about the drafts it made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean
from typing import Any

from specbench.decoding.theory import SharedCosts, predicted_throughput_ratio

BATCHES = (2, 4, 8, 16)
"""Requests side by side, of which passes are timed."""


def mean_rows(rows: Iterable[Mapping[str, Any]]) -> float:
    """Tokens that a request's step brought to the target's pass, on average, over lines of ``generations.jsonl``."""
    steps = [row["steps"] for row in rows]
    drafts: list[int] = [
        sum(pair) for each in steps for pair in zip(each["nodes"], each["siblings"], strict=True)
    ]
    return 1.0 + mean(drafts)


def predicted_at(batch: int, rows: Iterable[Mapping[str, Any]], drafter: str, costs: SharedCosts) -> float:
    """Throughput over that of plain decoding with so many requests, the reading of prompts left out.

    Args:
        batch: How many.
        rows: Lines of ``generations.jsonl`` of one configuration.
        drafter: Its name.
        costs: Of passes that so many requests share.
    """
    rows = list(rows)
    steps = [row["steps"] for row in rows]
    emitted, passes = (mean(n for each in steps for n in each[name]) for name in ("emitted", "passes"))
    return predicted_throughput_ratio(
        tokens=emitted,
        plain_s=costs.target_pass_s(batch, 1),
        step_s=passes * costs.drafter_s[drafter][batch] + costs.target_pass_s(batch, mean_rows(rows)),
        first_s=0.0,
        behind=1.0,
    )
