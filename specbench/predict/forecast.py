"""Tokens per step and speedup of drafters, by draft length and policy, from answers and the costs of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite, ratio, to_dict
from specbench.decoding.theory import PassCosts, relative_pass
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import FreeDrafter
from specbench.drafters.model import ModelDrafter
from specbench.policies import build_policy
from specbench.predict.answers import Answer, ReadAnswer
from specbench.predict.chances import chances_of, model_of, read_answer
from specbench.predict.law import Floats, expected_steps
from specbench.predict.rules import replay, walk_model
from specbench.results import stats

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.specs.policies import PolicySpec

_SAMPLES = 2
"""Steps of an answer from which a model drafts on, to count what policies draft after a wrong token."""

_SAMPLED = 16
"""The first answers, of which such steps are taken."""


@dataclass(eq=False)
class PredictedRow:
    """Expected counts of a drafter with one draft policy, an element or a row for each answer.

    Attributes:
        name: The policy as tables have it.
        gamma: The draft length; ``None`` if the policy decides.
    """

    name: str
    gamma: int | None
    steps: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    tested: list[Floats] = field(default_factory=list)
    accepted: list[Floats] = field(default_factory=list)

    def add(self, steps: float, drafted: float, passes: float, tested: Floats, accepted: Floats) -> None:
        """Add an answer."""
        self.steps.append(steps)
        self.drafted.append(drafted)
        self.passes.append(passes)
        self.tested.append(tested)
        self.accepted.append(accepted)

    @cached_property
    def by_place(self) -> list[float]:
        """Accepted over tested tokens by their place in the draft, NaN where none was tested."""
        tested, accepted = np.sum(self.tested, axis=0), np.sum(self.accepted, axis=0)
        return [ratio(float(a), float(t)) for a, t in zip(accepted, tested, strict=True)]


@dataclass(eq=False)
class Forecast:
    """What is expected of a drafter.

    Attributes:
        drafter: Its name.
        rows: A row for each draft length and policy.
        prompts, categories, tokens: Of the answers that count: the prompt's name, its kind, and how many tokens the
            steps emit.
        unsampled: Answers that were left out: sampled, without the probabilities that this drafter needs.
    """

    drafter: str
    rows: list[PredictedRow]
    prompts: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unsampled: int = 0

    def tokens_per_step(self, row: PredictedRow, category: str | None = None) -> Estimate:
        """Return all tokens over all steps, with an interval over prompts."""
        chosen = [category in (None, each) for each in self.categories]
        return stats.pooled_rate(
            np.array(self.tokens)[chosen], np.array(row.steps)[chosen], np.array(self.prompts)[chosen]
        )

    def per_step(self, row: PredictedRow) -> tuple[float, float]:
        """Return drafted tokens and forward passes of the drafter in a step, on average."""
        steps = math.fsum(row.steps)
        return ratio(math.fsum(row.drafted), steps), ratio(math.fsum(row.passes), steps)

    def speedup(self, row: PredictedRow, costs: PassCosts) -> Estimate:
        """Return the speedup over plain decoding, the geometric mean over prompts; NaN without the target's costs."""
        if not costs.target_s.get(1):
            return stats.geometric_mean([], [])
        found = []
        for tokens, steps, drafted, passes in zip(
            self.tokens, row.steps, row.drafted, row.passes, strict=True
        ):
            verify = costs.v(1) if not steps else _wide(costs, 1.0 + drafted / steps)
            found.append(ratio(tokens, steps * verify + drafting(costs, self.drafter, steps, passes)))
        return stats.geometric_mean(found, self.prompts)

    def pays_from(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the seconds of a target's pass over one token from which drafts save time; infinite if they never do.

        Where only one width of the target's passes is known, or none, others are taken to grow by ``SLOPE`` a token.
        """
        drafted, passes = self.per_step(row)
        tokens = self.tokens_per_step(row).value
        relative = costs if costs.target_s.get(1) else PassCosts({1: 1.0})
        gain = tokens - _wide(relative, 1.0 + drafted)
        drafting_s = _drafting_s(costs, self.drafter, 1.0, passes)
        return drafting_s / gain if gain > 0 else math.inf

    def perfect(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the speedup if every draft token were accepted at these costs; NaN without the target's."""
        if not costs.target_s.get(1):
            return math.nan
        drafted, passes = self.per_step(row)
        return ratio(drafted + 1.0, _wide(costs, 1.0 + drafted) + drafting(costs, self.drafter, 1.0, passes))

    def best(self, costs: PassCosts) -> PredictedRow:
        """Return the row with the highest speedup; without the target's costs the one that pays first."""
        if costs.target_s.get(1):
            return max(self.rows, key=lambda row: self.speedup(row, costs).value)
        return min(self.rows, key=lambda row: self.pays_from(row, costs))

    def to_dict(self, costs: PassCosts) -> Json:
        """Return all figures."""
        kinds = sorted({*self.categories} - {""})
        rows = []
        for row in self.rows:
            drafted, passes = self.per_step(row)
            figures = {
                "policy": row.name,
                "gamma": row.gamma,
                "tokens_per_step": to_dict(self.tokens_per_step(row)),
                "tokens_per_step_by_category": {
                    each: to_dict(self.tokens_per_step(row, each)) for each in kinds
                },
                "acceptance_by_position": row.by_place,
                "drafted_per_step": drafted,
                "passes_per_step": passes,
                "speedup": to_dict(self.speedup(row, costs)),
                "pays_from_target_pass_s": self.pays_from(row, costs),
                "speedup_if_perfect": self.perfect(row, costs),
            }
            rows.append(figures)
        best = self.best(costs).name if self.tokens else None
        found: Json = finite(
            {"drafter": self.drafter, "answers": len(self.tokens), "left_out": self.unsampled, "best": best,
             "rows": rows if self.tokens else []}
        )  # fmt: skip
        return found


def _wide(costs: PassCosts, tokens: float) -> float:
    """Return the time of a target's pass over so many tokens over that with one."""
    return relative_pass(costs.target_pass_s(tokens), costs.target_s[1])  # type: ignore[arg-type]


def _drafting_s(costs: PassCosts, drafter: str, drafts: float, passes: float) -> float:
    """Return the seconds of so many passes in so many drafts; a drafter without passes is asked once in each."""
    first = costs.drafter_s.get(drafter, 0.0)
    later = costs.later_s.get(drafter, first)
    return min(drafts, passes) * first + max(0.0, passes - drafts) * later if passes else drafts * first


def drafting(costs: PassCosts, drafter: str, drafts: float, passes: float) -> float:
    """Return ``_drafting_s`` over the time of a target's pass with one token."""
    return ratio(_drafting_s(costs, drafter, drafts, passes), costs.target_s[1])


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
        drafter: A loaded drafter, see ``chances.chances_of``; it is left without a context.
        answers: Answers of the target.
        gammas: Draft lengths, at least one.
        policies: Further draft policies, for chains; with a cascade none.
        report: Called with how many answers are done.

    Raises:
        UsageError: The drafter depends on the target, or a policy needs what it lacks.
    """
    fixed = [PredictedRow(f"γ={gamma}", gamma) for gamma in gammas]
    ruled = [_Ruled(PredictedRow(str(each), None), each) for each in policies]
    found = Forecast(drafter.traits.name, [*fixed, *(each.row for each in ruled)])
    if ruled:
        _check_policies(drafter, policies)
    longest = max(gammas)
    for done, answer in enumerate(answers):
        if report is not None:
            report(done)
        free = isinstance(drafter, FreeDrafter)
        if not (free or answer.sampling.greedy or answer.probabilities is not None):
            found.unsampled += 1
            continue
        read = None if free else read_answer(model_of(drafter), answer, known=bool(ruled))
        law = expected_steps(chances_of(drafter, answer, longest, read), gammas)
        for place, row in enumerate(fixed):
            row.add(
                float(law.steps[place]), float(law.drafted[place]), float(law.passes[place]), law.tested[place],
                law.accepted[place],
            )  # fmt: skip
        for each in ruled:
            each.add(drafter, answer, read, longest, _SAMPLES * (done < _SAMPLED))
        found.prompts.append(answer.name)
        found.categories.append(answer.category)
        found.tokens.append(law.tokens)
    for each in ruled:
        each.correct()
    return found


def _check_policies(drafter: Drafter, policies: Sequence[PolicySpec]) -> None:
    for each in policies:
        if each.tree or each.word in ("auto", "confidence-head"):
            reason = "drafts trees" if each.tree else "decides by what only a run has"
            raise UsageError(
                f"The draft policy {each.word} cannot be predicted: it {reason}.", "Leave it out, or run it."
            )
        if isinstance(drafter, CascadeDrafter):
            raise UsageError(
                "Of a cascade only fixed draft lengths are predicted.", "Leave --draft-policy out."
            )
        if each.needs_logits and isinstance(drafter, FreeDrafter):
            raise UsageError(
                f"The draft policy {each.word} reads the drafter's distribution, and {drafter.traits.name} has none.",
                "Leave it out.",
            )


@dataclass(eq=False)
class _Ruled:
    """A row that a policy fills; ``really`` and ``walked`` see ``rules.walk_model``."""

    row: PredictedRow
    spec: PolicySpec
    really: int = 0
    walked: int = 0

    def add(
        self, drafter: Drafter, answer: Answer, read: ReadAnswer | None, longest: int, samples: int
    ) -> None:
        """Add an answer."""
        policy = build_policy(self.spec)
        if isinstance(drafter, FreeDrafter):
            found = replay(drafter, answer, policy, longest)
        else:
            assert isinstance(drafter, ModelDrafter)
            assert read is not None
            found, really, walked = walk_model(drafter, answer, read, policy, longest, samples)
            self.really, self.walked = self.really + really, self.walked + walked
        passes = 0.0 if read is None else found.drafted
        self.row.add(found.steps, found.drafted, passes, found.tested, found.accepted)

    def correct(self) -> None:
        """Correct the number of drafted tokens by what the drafter really drafted in the sample."""
        share = self.really / self.walked if self.walked else 1.0
        self.row.drafted = [share * each for each in self.row.drafted]
        self.row.passes = [share * each for each in self.row.passes]
