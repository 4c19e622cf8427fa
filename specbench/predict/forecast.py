"""Tokens per step and speedup of drafters by draft length, from answers and the costs of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite, ratio, to_dict
from specbench.decoding.theory import PassCosts, reading_seconds, relative_pass
from specbench.drafters.free import FreeDrafter
from specbench.predict.chances import TargetStates, chances_of, model_of, read_answer, reads_alone
from specbench.predict.law import Answer, Counts, expected_steps
from specbench.results import stats

if TYPE_CHECKING:
    import torch

    from specbench.decoding.protocols import Drafter, Scorer


Report: TypeAlias = Callable[[str, int, int], None]
"""Receives a stage, how much of it is done, and of how much."""


@dataclass(eq=False)
class PredictedRow:
    """A drafter with one draft length, and what is expected of it for each answer."""

    gamma: int
    counts: list[Counts] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The row as tables have it."""
        return f"γ={self.gamma}"

    def per_step(self, counts: Counts | None = None) -> tuple[float, float]:
        """Return drafted tokens and forward passes of the drafter in a step, of all answers or one."""
        chosen = self.counts if counts is None else [counts]
        steps = math.fsum(one.steps for one in chosen)
        drafted = math.fsum(one.drafted for one in chosen)
        return ratio(drafted, steps), ratio(math.fsum(one.passes for one in chosen), steps)

    @property
    def by_place(self) -> list[float]:
        """Accepted over tested tokens by their place in the draft, NaN where none was tested."""
        tested = np.sum([counts.tested for counts in self.counts], axis=0)
        accepted = np.sum([counts.accepted for counts in self.counts], axis=0)
        return [ratio(float(a), float(t)) for a, t in zip(accepted, tested, strict=True)]


@dataclass(eq=False)
class Forecast:
    """What is expected of a drafter.

    Attributes:
        drafter: Its name.
        rows: A row for each draft length.
        answers: Those that count.
        unsampled: Answers that were left out: sampled, without the probabilities that this drafter needs.
    """

    drafter: str
    rows: list[PredictedRow]
    answers: list[Answer]
    unsampled: int

    def tokens_per_step(self, row: PredictedRow) -> Estimate:
        """Return all tokens over all steps, with an interval over prompts."""
        tokens = [len(answer.tokens) - 1 for answer in self.answers]
        steps = [counts.steps for counts in row.counts]
        return stats.pooled_rate(tokens, steps, [answer.name for answer in self.answers], least=1.0)

    def speedup(self, row: PredictedRow, costs: PassCosts) -> Estimate:
        """Return the speedup over plain decoding, the geometric mean over prompts; NaN without the target's costs.

        The drafter reads the prompt in the time of the first draft, as when it is measured.
        """
        ratios, reading = [], costs.reading_s.get(self.drafter, {})
        for answer, counts in zip(self.answers, row.counts, strict=True):
            plain_s = (len(answer.tokens) - 1) * costs.target_s.get(1, math.nan)
            steps_s = counts.steps * costs.step_s(self.drafter, *row.per_step(counts))
            ratios.append(ratio(plain_s, steps_s + reading_seconds(reading, len(answer.prompt))))
        return stats.geometric_mean(ratios, [answer.name for answer in self.answers])

    def pays_from(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the seconds of a target's pass over one token from which drafts save time; infinite if they never do.

        Without the target's own, wider passes are taken to grow by ``SLOPE`` a token.
        """
        drafted, passes = row.per_step()
        known = costs if costs.target_s else PassCosts({1: 1.0})
        wide = relative_pass(known.target_pass_s(1.0 + drafted), known.target_pass_s(1))
        gain = self.tokens_per_step(row).value - wide
        return costs.drafting_s(self.drafter, passes) / gain if gain > 0 else math.inf

    def best(self, costs: PassCosts) -> PredictedRow:
        """Return the row with the highest speedup; without the target's costs the one that pays first."""
        if costs.target_s:
            return max(self.rows, key=lambda row: self.speedup(row, costs).value)
        return min(self.rows, key=lambda row: self.pays_from(row, costs))

    def to_dict(self, costs: PassCosts) -> Json:
        """Return all figures."""
        rows = []
        for row in self.rows if self.answers else ():
            drafted, passes = row.per_step()
            figures = {
                "gamma": row.gamma,
                "tokens_per_step": to_dict(self.tokens_per_step(row)),
                "acceptance_by_position": row.by_place,
                "drafted_per_step": drafted,
                "passes_per_step": passes,
                "speedup": to_dict(self.speedup(row, costs)),
                "pays_from_target_pass_s": self.pays_from(row, costs),
            }
            rows.append(figures)
        best = self.best(costs).gamma if rows else None
        whole = {"drafter": self.drafter, "answers": len(self.answers), "left_out": self.unsampled}
        found: Json = finite({**whole, "best": best, "rows": rows})
        return found


def forecast(
    drafter: Drafter,
    answers: Sequence[Answer],
    gammas: Sequence[int],
    report: Report | None = None,
    *,
    target: Scorer | None = None,
    reads: MutableMapping[int, torch.Tensor] | None = None,
) -> Forecast:
    """Return what is expected of a drafter on answers.

    Args:
        drafter: A loaded drafter.
        answers: Answers of the target.
        gammas: Draft lengths, at least one.
        report: Called with a stage, how many answers are done, and of how many.
        target: Reads the answers for drafters that need its hidden states or draft on its cache; ``None`` where it is
            not there.
        reads: What the drafter's model has read of the answers, by their number (``read_answer``); filled.

    Raises:
        UsageError: The drafter depends on the target, or drafts trees.
    """
    free, alone, name = isinstance(drafter, FreeDrafter), reads_alone(drafter), drafter.traits.name
    if drafter.traits.several or not (free or alone or target is not None):
        raise UsageError(
            f"What {name} drafts cannot be predicted from answers here.",
            "Run it where the target is: specbench sweep.",
        )
    rows = list(map(PredictedRow, gammas))
    usable = [
        answer for answer in answers if free or answer.sampling.greedy or answer.probabilities is not None
    ]
    for done, answer in enumerate(usable):
        if report is not None:
            report(f"reading answers with {name}", done, len(usable))
        logits = states = None
        if alone:
            logits = None if reads is None else reads.get(done)
            logits = read_answer(model_of(drafter), answer, target) if logits is None else logits
            if reads is not None:
                reads[done] = logits
        elif target is not None and not free:
            states = TargetStates(target, drafter, answer)
        chances = chances_of(drafter, answer, max(gammas), logits, states)
        for row, counts in zip(rows, expected_steps(chances, answer.room(), gammas), strict=True):
            row.counts.append(counts)
    return Forecast(name, rows, usable, len(answers) - len(usable))
