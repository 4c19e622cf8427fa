"""Metrics as pure functions over records; definitions: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from specbench.decoding.records import Generation, Prefill, Step, StepTimes


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def tokens_per_step(steps: Sequence[Step]) -> float | None:
    """Return emitted tokens over steps, without the prefill's token; ``None`` without steps."""
    return _ratio(sum(len(step.tokens) for step in steps), len(steps))


def acceptance_rate(steps: Sequence[Step]) -> float | None:
    """Return accepted over drafted tokens, including those after a rejection; ``None`` without drafts.

    A tree counts by its depth.
    """
    return _ratio(sum(step.accepted for step in steps), sum(step.gamma for step in steps))


def acceptance_by_position(steps: Sequence[Step]) -> list[float | None]:
    """Return accepted over tested tokens at draft positions 1, 2, ..., up to the longest draft."""
    return [
        _ratio(sum(step.accepted > i for step in steps), sum(step.tested > i for step in steps))
        for i in range(max((step.gamma for step in steps), default=0))
    ]


def kept_by_rank(counts: Mapping[tuple[int, int], Sequence[int]]) -> list[float]:
    """Return by rank how often such a candidate was accepted, over all depths.

    Args:
        counts: By (depth from 1, rank from 0), how many nodes were tested and accepted.
    """
    both: dict[int, tuple[int, int]] = {}
    for (_, rank), (tested, kept) in counts.items():
        before = both.get(rank, (0, 0))
        both[rank] = before[0] + tested, before[1] + kept
    return [both[rank][1] / both[rank][0] for rank in sorted(both)]


def mean_expected_acceptance(steps: Sequence[Step]) -> float | None:
    """Return α, the mean of ``sum_x min(p, q)`` over tested positions; ``None`` without any."""
    values = [value for step in steps for value in step.expected_acceptance]
    return _ratio(math.fsum(values), len(values))


@dataclass(frozen=True, slots=True)
class TimeSplit(StepTimes):
    """A generation's time, in seconds.

    ``ttft_s`` is the time to the first token (the prefill, or the first step without a first-target pass), ``decode_s``
    everything after it, the sum of five parts.
    """

    ttft_s: float = 0.0
    decode_s: float = 0.0


def _after_first_emission(prefill: Prefill, steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """Return the time to the first token and the steps after it."""
    if prefill.token is not None or not steps:
        return prefill.time_s, steps
    return prefill.time_s + steps[0].times.total_s, steps[1:]


def time_split(prefill: Prefill, steps: Sequence[Step]) -> TimeSplit:
    """Return a generation's times."""
    ttft, rest = _after_first_emission(prefill, steps)
    parts = {
        each.name: math.fsum(getattr(step.times, each.name) for step in rest) for each in fields(StepTimes)
    }
    return TimeSplit(ttft_s=ttft, decode_s=StepTimes(**parts).total_s, **parts)


def tokens_per_second(prefill: Prefill, steps: Sequence[Step]) -> float | None:
    """Return tokens after the first ones per second; ``None`` without any."""
    _, rest = _after_first_emission(prefill, steps)
    tokens = sum(len(step.tokens) for step in rest)
    return _ratio(tokens, time_split(prefill, steps).decode_s) if tokens else None


def summary(generation: Generation) -> dict[str, Any]:
    """Return a generation's metrics as JSON; times in seconds, undefined rates ``None``.

    Examples:
        >>> figures = summary(result)
        >>> figures["new_tokens"], figures["finish_reason"]
        (16, 'length')
    """
    steps = generation.steps
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "prompt_tokens": generation.prompt_tokens,
        "new_tokens": len(generation.token_ids),
        "finish_reason": generation.finish_reason,
        "steps": len(steps),
        "drafted": sum(step.gamma for step in steps),
        "accepted": sum(step.accepted for step in steps),
        "forced": sum(step.forced_accepted for step in steps),
        "corrected": sum(step.closing == "corrected" for step in steps),
        "nodes": sum(len(step.drafted) for step in steps),
        "acceptance_rate": acceptance_rate(steps),
        "tokens_per_step": tokens_per_step(steps),
        "alpha": mean_expected_acceptance(steps),
        "accepted_lengths": [step.accepted for step in steps],
        "gammas": [step.gamma for step in steps],
        "acceptance_by_position": acceptance_by_position(steps),
        "time": asdict(time_split(generation.prefill, steps)),
        "tokens_per_second": tokens_per_second(generation.prefill, steps),
        "seed": generation.seed,
        "target": generation.target,
        "drafter": generation.drafter,
        "dtype": generation.dtype,
        "lossless": generation.lossless,
    }
