"""Figures of a run, as pure functions over its records. Definitions and their pitfalls: docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from specbench.decoding.records import Generation, Prefill, Step, StepTimes


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def tokens_per_step(steps: Sequence[Step]) -> float | None:
    """Block efficiency: emitted tokens over steps; ``None`` without steps. The first-target token belongs to none."""
    return _ratio(sum(len(step.tokens) for step in steps), len(steps))


def acceptance_rate(steps: Sequence[Step]) -> float | None:
    """Accepted over drafted tokens of the run; ``None`` if nothing was drafted.

    Drafts behind a rejection count as drafted here, unlike in ``acceptance_by_position``. Of a tree its depth counts.
    """
    return _ratio(sum(step.accepted for step in steps), sum(step.gamma for step in steps))


@dataclass(frozen=True, slots=True)
class PositionRate:
    """How one draft position, of a tree a depth, fared: in how many steps it was drafted, tested and accepted."""

    position: int
    drafted: int
    tested: int
    accepted: int

    @property
    def rate(self) -> float | None:
        """Share accepted of those tested."""
        return _ratio(self.accepted, self.tested)

    @property
    def rate_of_drafted(self) -> float | None:
        """Share accepted of those drafted: it falls with the position even where each test is as likely to pass."""
        return _ratio(self.accepted, self.drafted)


def acceptance_by_position(steps: Sequence[Step]) -> list[PositionRate]:
    """Acceptance at draft positions 1, 2, ..., up to the longest draft."""
    longest = max((step.gamma for step in steps), default=0)
    return [
        PositionRate(
            position=i + 1,
            drafted=sum(step.gamma > i for step in steps),
            tested=sum(step.tested > i for step in steps),
            accepted=sum(step.accepted > i for step in steps),
        )
        for i in range(longest)
    ]


def count_ranks(steps: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[tuple[int, int], list[int]]:
    """By depth, from 1, and rank, from 0: of how many nodes of trees it was tested which is kept, and how many were.

    Args:
        steps: Of each its ``widths`` and ``ranks``, see ``Step``.
    """
    counts: dict[tuple[int, int], list[int]] = {}
    for stood, kept in steps:
        for depth, width in enumerate(stood, start=1):
            for rank in range(width):
                counts.setdefault((depth, rank), [0, 0])[0] += 1
        for depth, rank in enumerate(kept, start=1):
            counts.setdefault((depth, rank), [0, 0])[1] += 1
    return counts


def kept_by_rank(counts: Mapping[tuple[int, int], Sequence[int]]) -> list[float]:
    """By rank, whatever the depth: at how large a share of the nodes with such a candidate it was the one kept.

    Args:
        counts: As ``count_ranks`` gives them.
    """
    both: dict[int, tuple[int, int]] = {}
    for (_, rank), (tested, kept) in counts.items():
        before = both.get(rank, (0, 0))
        both[rank] = before[0] + tested, before[1] + kept
    return [both[rank][1] / both[rank][0] for rank in sorted(both)]


def mean_expected_acceptance(steps: Sequence[Step]) -> float | None:
    """α: the mean of ``sum_x min(p, q)`` over all tested positions; ``None`` if none was tested."""
    values = [value for step in steps for value in step.expected_acceptance]
    return _ratio(math.fsum(values), len(values))


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of a generation went, in seconds.

    ``ttft_s`` is the time to the first emission (the target's prefill, or the whole first step without a first-target
    pass); ``decode_s`` is everything after it and the sum of its five parts. ``draft_prefill_s`` is the part of
    ``draft_s`` in which the drafter read the prompt.
    """

    ttft_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    accept_s: float
    rollback_s: float
    other_s: float
    draft_prefill_s: float

    @property
    def overhead_share(self) -> float | None:
        """Share of the decode time that is neither drafting nor verifying."""
        return _ratio(self.accept_s + self.rollback_s + self.other_s, self.decode_s)


def _after_first_emission(prefill: Prefill, steps: Sequence[Step]) -> tuple[float, Sequence[Step]]:
    """Time to the first emission and the steps behind it."""
    if prefill.token is not None or not steps:
        return prefill.time_s, steps
    return prefill.time_s + steps[0].times.total_s, steps[1:]


def time_split(prefill: Prefill, steps: Sequence[Step]) -> TimeSplit:
    """Add up the time of a generation."""
    ttft, rest = _after_first_emission(prefill, steps)
    parts = {
        each.name: math.fsum(getattr(step.times, each.name) for step in rest) for each in fields(StepTimes)
    }
    return TimeSplit(ttft_s=ttft, decode_s=StepTimes(**parts).total_s, **parts)


def tokens_per_second(prefill: Prefill, steps: Sequence[Step]) -> float | None:
    """Tokens behind the first emission over the time behind it; ``None`` if nothing came behind it."""
    _, rest = _after_first_emission(prefill, steps)
    tokens = sum(len(step.tokens) for step in rest)
    return _ratio(tokens, time_split(prefill, steps).decode_s) if tokens else None


def summary(generation: Generation) -> dict[str, Any]:
    """The figures of one generation, ready for JSON; times in seconds, rates ``None`` where they have no meaning."""
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
        "nodes": sum(len(step.drafted) for step in steps),
        "gained_by_siblings": sum(step.gained for step in steps),
        "acceptance_rate": acceptance_rate(steps),
        "tokens_per_step": tokens_per_step(steps),
        "alpha": mean_expected_acceptance(steps),
        "accepted_lengths": [step.accepted for step in steps],
        "gammas": [step.gamma for step in steps],
        "acceptance_by_position": [rate.rate for rate in acceptance_by_position(steps)],
        "time": asdict(time_split(generation.prefill, steps)),
        "tokens_per_second": tokens_per_second(generation.prefill, steps),
        "seed": generation.seed,
        "target": generation.target,
        "drafter": generation.drafter,
        "dtype": generation.dtype,
        "lossless": generation.lossless,
    }
