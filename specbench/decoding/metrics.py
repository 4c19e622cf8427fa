"""Metrics as pure functions over records; definitions: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
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


def mean_expected_acceptance(steps: Sequence[Step]) -> float | None:
    """Return α, the mean of ``sum_x min(p, q)`` over tested positions; ``None`` without any."""
    values = [value for step in steps for value in step.expected_acceptance]
    return _ratio(math.fsum(values), len(values))


def time_split(prefill: Prefill, steps: Sequence[Step]) -> tuple[float, StepTimes]:
    """Return the time to the first token, and those of the parts of all steps after it.

    The first token is the prefill's, or one of the first step without a first-target pass.
    """
    ttft_s = prefill.time_s
    if prefill.token is None and steps:
        ttft_s += steps[0].times.total_s
        steps = steps[1:]
    parts = {
        part.name: math.fsum(getattr(step.times, part.name) for step in steps) for part in fields(StepTimes)
    }
    return ttft_s, StepTimes(**parts)


def tokens_per_second(prefill: Prefill, steps: Sequence[Step]) -> float | None:
    """Return tokens after the first ones per second; ``None`` without any."""
    tokens = sum(len(step.tokens) for step in (steps if prefill.token is not None else steps[1:]))
    return _ratio(tokens, time_split(prefill, steps)[1].total_s) if tokens else None


def summary(generation: Generation) -> dict[str, Any]:
    """Return a generation's metrics as JSON; times in seconds, undefined rates ``None``.

    Examples:
        >>> figures = summary(result)
        >>> figures["new_tokens"], figures["finish_reason"]
        (16, 'length')
    """
    steps = generation.steps
    ttft_s, times = time_split(generation.prefill, steps)
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
        "time": {**asdict(times), "ttft_s": ttft_s, "decode_s": times.total_s},
        "tokens_per_second": tokens_per_second(generation.prefill, steps),
        "seed": generation.seed,
        "target": generation.target,
        "drafter": generation.drafter,
        "dtype": generation.dtype,
    }
