"""Tokens per step and speedup of drafters, by draft length and policy, from answers and the costs of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite, ratio, to_dict
from specbench.decoding.theory import PassCosts, reading_seconds, relative_pass
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import FreeDrafter
from specbench.policies import build_policy
from specbench.predict.answers import Answer, Counts, ReadAnswer
from specbench.predict.chances import chances_of, model_of, read_answer
from specbench.predict.law import expected_steps
from specbench.predict.replay import draft_on, replay
from specbench.results import stats
from specbench.specs.policies import Fixed

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.specs.policies import PolicySpec

_WALKS = 16
"""Replays of a policy along a sampled answer."""

_SAMPLED = 16
"""Answers, spread over all, on which replays count a model's forward passes, and drafts behind a wrong token."""

_STARTS = 2
"""Steps of each of these from which the model drafts on."""


@dataclass(eq=False)
class PredictedRow:
    """A drafter with one draft policy.

    Attributes:
        name: The policy as tables have it.
        spec: The policy.
        counts: What is expected, for each answer.
        drafted, passes: Of replays on sampled answers.
        redrafted, really: Tokens drafted in some of their steps, by the replay and by the model itself.
    """

    name: str
    spec: PolicySpec
    counts: list[Counts] = field(default_factory=list)
    drafted: float = 0.0
    passes: float = 0.0
    redrafted: int = 0
    really: int = 0

    def sample(self, drafter: Drafter, answer: Answer, read: ReadAnswer | None, longest: int) -> None:
        """Replay an answer, which the model has just read."""
        counts, starts = replay(drafter, answer, read, build_policy(self.spec), longest)
        self.drafted += counts.drafted
        self.passes += counts.passes
        copies = isinstance(drafter, CascadeDrafter)  # now also what comes later in the answer
        if self.spec.word != "fixed" and not copies:
            some = starts[:: max(1, len(starts) // _STARTS)]
            self.redrafted += sum(each.drafted for each in some)
            self.really += draft_on(drafter, answer, some)

    def per_step(self, counts: Counts | None = None) -> tuple[float, float]:
        """Return drafted tokens and forward passes of the drafter in a step, of all answers or one."""
        chosen = self.counts if counts is None else [counts]
        drafted = ratio(math.fsum(each.drafted for each in chosen), math.fsum(each.steps for each in chosen))
        if self.redrafted:
            drafted *= self.really / self.redrafted
        return drafted, drafted * self.passes / self.drafted if self.drafted else 0.0

    @property
    def by_place(self) -> list[float]:
        """Accepted over tested tokens by their place in the draft, NaN where none was tested."""
        tested = np.sum([each.tested for each in self.counts], axis=0)
        accepted = np.sum([each.accepted for each in self.counts], axis=0)
        return [ratio(float(a), float(t)) for a, t in zip(accepted, tested, strict=True)]


@dataclass(eq=False)
class Forecast:
    """What is expected of a drafter.

    Attributes:
        drafter: Its name.
        rows: A row for each draft length and policy.
        answers: Those that count.
        unsampled: Answers that were left out: sampled, without the probabilities that this drafter needs.
    """

    drafter: str
    rows: list[PredictedRow]
    answers: list[Answer]
    unsampled: int

    def categories(self) -> list[str]:
        """Return the categories of answers."""
        return sorted({each.category for each in self.answers})

    def tokens_per_step(self, row: PredictedRow, category: str | None = None) -> Estimate:
        """Return all tokens over all steps, with an interval over prompts."""
        chosen = [i for i, each in enumerate(self.answers) if category in (None, each.category)]
        tokens = [len(self.answers[i].tokens) - 1 for i in chosen]
        steps = [row.counts[i].steps for i in chosen]
        return stats.pooled_rate(tokens, steps, [self.answers[i].name for i in chosen])

    def speedup(self, row: PredictedRow, costs: PassCosts) -> Estimate:
        """Return the speedup over plain decoding, the geometric mean over prompts; NaN without the target's costs.

        The drafter reads the prompt in the time of the first draft, as when it is measured.
        """
        found, reading = [], costs.reading_s.get(self.drafter, {})
        for answer, counts in zip(self.answers, row.counts, strict=True):
            plain_s = (len(answer.tokens) - 1) * costs.target_s.get(1, math.nan)
            steps_s = counts.steps * _step_s(row, costs, self.drafter, counts)
            found.append(ratio(plain_s, steps_s + reading_seconds(reading, len(answer.prompt))))
        return stats.geometric_mean(found, [each.name for each in self.answers])

    def pays_from(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the seconds of a target's pass over one token from which drafts save time; infinite if they never do.

        Without the target's own, wider passes are taken to grow by ``SLOPE`` a token.
        """
        drafted, passes = row.per_step()
        gain = self.tokens_per_step(row).value - _wide(costs, 1.0 + drafted)
        return _drafting_s(costs, self.drafter, passes) / gain if gain > 0 else math.inf

    def perfect(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the speedup if every draft token were accepted at these costs; NaN without the target's."""
        drafted, _ = row.per_step()
        one_s = costs.target_s.get(1, math.nan)
        return ratio((drafted + 1.0) * one_s, _step_s(row, costs, self.drafter))

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
            kinds = {kind: to_dict(self.tokens_per_step(row, kind)) for kind in self.categories() if kind}
            figures = {
                "policy": row.name,
                "gamma": row.spec.gamma if isinstance(row.spec, Fixed) else None,
                "tokens_per_step": to_dict(self.tokens_per_step(row)),
                "tokens_per_step_by_category": kinds,
                "acceptance_by_position": row.by_place,
                "drafted_per_step": drafted,
                "passes_per_step": passes,
                "speedup": to_dict(self.speedup(row, costs)),
                "pays_from_target_pass_s": self.pays_from(row, costs),
                "speedup_if_perfect": self.perfect(row, costs),
            }
            rows.append(figures)
        best = self.best(costs).name if rows else None
        whole = {"drafter": self.drafter, "answers": len(self.answers), "left_out": self.unsampled}
        found: Json = finite({**whole, "best": best, "rows": rows})
        return found


def _wide(costs: PassCosts, tokens: float) -> float:
    """Return the time of a target's pass over so many tokens over that with one."""
    known = costs if costs.target_s else PassCosts({1: 1.0})
    return relative_pass(known.target_pass_s(tokens), known.target_pass_s(1))


def _drafting_s(costs: PassCosts, drafter: str, passes: float) -> float:
    """Return the seconds of a draft of so many passes; a drafter without passes is asked once."""
    first = costs.drafter_s.get(drafter, 0.0)
    later = costs.later_s.get(drafter, first)
    return min(1.0, passes or 1.0) * first + max(0.0, passes - 1.0) * later


def _step_s(row: PredictedRow, costs: PassCosts, drafter: str, counts: Counts | None = None) -> float:
    """Return the mean seconds of the steps of an answer, of all answers without ``counts``."""
    if not costs.target_s:
        return math.nan
    drafted, passes = row.per_step(counts)
    return costs.target_pass_s(1.0 + drafted) + _drafting_s(costs, drafter, passes)


# -- computing them --------------------------------------------------------------------------------


def forecast(
    drafter: Drafter,
    answers: Sequence[Answer],
    gammas: Sequence[int],
    policies: Sequence[PolicySpec] = (),
    report: Callable[[int], None] | None = None,
) -> Forecast:
    """Return what is expected of a drafter on answers.

    Args:
        drafter: A loaded drafter, see ``chances.chances_of``.
        answers: Answers of the target.
        gammas: Draft lengths, at least one.
        policies: Further draft policies, for chains.
        report: Called with how many answers are done.

    Raises:
        UsageError: The drafter depends on the target, or a policy needs what it lacks.
    """
    _check_policies(drafter, policies)
    free, longest = isinstance(drafter, FreeDrafter), max(gammas)
    rows = [*(PredictedRow(f"γ={g}", Fixed(g)) for g in gammas), *(PredictedRow(str(p), p) for p in policies)]
    usable = [each for each in answers if free or each.sampling.greedy or each.probabilities is not None]
    sampled = {*range(0, 0 if free else len(usable), max(1, len(usable) // _SAMPLED))}
    for done, answer in enumerate(usable):
        if report is not None:
            report(done)
        keep = done in sampled or bool(policies)
        read = None if free else read_answer(model_of(drafter), answer, keep=keep)
        law = expected_steps(chances_of(drafter, answer, longest, read), answer.room(), gammas)
        law += [_replayed(drafter, answer, read, each, longest) for each in policies]
        for row, counts in zip(rows, law, strict=True):
            row.counts.append(counts)
            if done in sampled:
                row.sample(drafter, answer, read, longest)
    return Forecast(drafter.traits.name, rows, usable, len(answers) - len(usable))


def _replayed(
    drafter: Drafter, answer: Answer, read: ReadAnswer | None, spec: PolicySpec, longest: int
) -> Counts:
    """Return the mean counts of a policy's replays along an answer."""
    seeds = range(1 if answer.sampling.greedy or read is None else _WALKS)
    walks = [replay(drafter, answer, read, build_policy(spec), longest, seed)[0] for seed in seeds]
    return Counts(*(np.mean(each, axis=0) for each in zip(*walks, strict=True)))


def _check_policies(drafter: Drafter, policies: Sequence[PolicySpec]) -> None:
    for each in policies:
        if each.tree or each.word in ("auto", "confidence-head"):
            reason = "drafts trees" if each.tree else "decides by what only a run has"
            raise UsageError(
                f"The draft policy {each.word} cannot be predicted: it {reason}.", "Leave it out, or run it."
            )
        if each.needs_logits and isinstance(drafter, FreeDrafter):
            raise UsageError(
                f"The draft policy {each.word} reads the drafter's distribution, and {drafter.traits.name} has none.",
                "Leave it out.",
            )
