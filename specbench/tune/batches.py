"""Up to how many requests side by side does a drafter pay? Predicted, from its steps and from passes that are shared.

A rule that looks at costs would draft less in a batch than it did for one request, so this is about the drafts it made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from specbench.decoding.theory import SharedCosts, predicted_throughput_ratio
from specbench.results.lines import StepLists

BATCHES = (2, 4, 8, 16)
"""Requests side by side, of which passes are timed."""


def mean_rows(generations: Iterable[StepLists]) -> float:
    """Tokens that a request's step brought to the target's pass, on average."""
    return 1.0 + mean(
        sum(pair) for steps in generations for pair in zip(steps.nodes, steps.siblings, strict=True)
    )


def predicted_at(batch: int, generations: Sequence[StepLists], drafter: str, costs: SharedCosts) -> float:
    """Throughput over that of plain decoding with so many requests, the reading of prompts left out.

    Args:
        batch: How many.
        generations: The steps of each of one configuration.
        drafter: Its name.
        costs: Of passes that so many requests share.
    """
    emitted = mean(n for steps in generations for n in steps.emitted)
    passes = mean(n for steps in generations for n in steps.passes)
    return predicted_throughput_ratio(
        tokens=emitted,
        plain_s=costs.target_pass_s(batch, 1),
        step_s=passes * costs.drafter_s[drafter][batch] + costs.target_pass_s(batch, mean_rows(generations)),
        first_s=0.0,
        behind=1.0,
    )
