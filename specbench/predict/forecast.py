"""Tokens per step and speedup of drafters, by draft length and policy, from answers and the costs of passes."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite, ratio, to_dict
from specbench.decoding.theory import PassCosts, reading_seconds, relative_pass
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import FreeDrafter
from specbench.policies import build_policy
from specbench.predict.chances import TargetStates, chances_of, model_of, read_answer, reads_alone
from specbench.predict.law import Answer, Counts, ReadAnswer, expected_steps
from specbench.predict.replay import UNTIMED, StepSeconds, StepStart, draft_on, replay
from specbench.results import stats
from specbench.specs.policies import Fixed

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, Scorer
    from specbench.specs.policies import PolicySpec

_WALKS = 16
"""Replays of a policy along a sampled answer."""

_SAMPLED = 16
"""Answers, spread over all, on which replays count a model's passes, and its drafts behind a wrong token."""

_STARTS = 2
"""Steps of each of these from which the model drafts on."""


@dataclass(eq=False)
class PredictedRow:
    """A drafter with one draft policy.

    Attributes:
        name: The policy as tables have it.
        spec: The policy.
        counts: What is expected, for each answer.
        drafted, passes: Of replays of fixed lengths on sampled answers: a pass also reads what lookup guesses.
        redrafted, really: Tokens drafted in some steps of other replays, by the replay and by the model itself.
    """

    name: str
    spec: PolicySpec
    counts: list[Counts] = field(default_factory=list)
    drafted: float = 0.0
    passes: float = 0.0
    redrafted: int = 0
    really: int = 0

    def per_step(self, counts: Counts | None = None) -> tuple[float, float]:
        """Return drafted tokens and forward passes of the drafter in a step, of all answers or one."""
        chosen = self.counts if counts is None else [counts]
        steps = math.fsum(each.steps for each in chosen)
        more = self.really / self.redrafted if self.redrafted else 1.0
        drafted, passes = (
            more * ratio(math.fsum(each), steps)
            for each in zip(*((each.drafted, each.passes) for each in chosen), strict=True)
        )
        return drafted, drafted * self.passes / self.drafted if self.drafted else passes

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
        return stats.pooled_rate(tokens, steps, [self.answers[i].name for i in chosen], least=1.0)

    def speedup(self, row: PredictedRow, costs: PassCosts) -> Estimate:
        """Return the speedup over plain decoding, the geometric mean over prompts; NaN without the target's costs.

        The drafter reads the prompt in the time of the first draft, as when it is measured.
        """
        found, reading = [], costs.reading_s.get(self.drafter, {})
        for answer, counts in zip(self.answers, row.counts, strict=True):
            plain_s = (len(answer.tokens) - 1) * costs.target_s.get(1, math.nan)
            steps_s = counts.steps * costs.step_s(self.drafter, *row.per_step(counts))
            found.append(ratio(plain_s, steps_s + reading_seconds(reading, len(answer.prompt))))
        return stats.geometric_mean(found, [each.name for each in self.answers])

    def pays_from(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the seconds of a target's pass over one token from which drafts save time; infinite if they never do.

        Without the target's own, wider passes are taken to grow by ``SLOPE`` a token.
        """
        drafted, passes = row.per_step()
        known = costs if costs.target_s else PassCosts({1: 1.0})
        wide = relative_pass(known.target_pass_s(1.0 + drafted), known.target_pass_s(1))
        gain = self.tokens_per_step(row).value - wide
        return costs.drafting_s(self.drafter, passes) / gain if gain > 0 else math.inf

    def perfect(self, row: PredictedRow, costs: PassCosts) -> float:
        """Return the speedup if every draft token were accepted at these costs; NaN without the target's."""
        drafted, passes = row.per_step()
        one_s = costs.target_s.get(1, math.nan)
        return ratio((drafted + 1.0) * one_s, costs.step_s(self.drafter, drafted, passes))

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


# -- computing them --------------------------------------------------------------------------------


def forecast(
    drafter: Drafter,
    answers: Sequence[Answer],
    gammas: Sequence[int],
    policies: Sequence[PolicySpec] = (),
    report: Callable[[int], None] | None = None,
    *,
    target: Scorer | None = None,
    costs: PassCosts | None = None,
    reads: MutableMapping[int, ReadAnswer] | None = None,
    most: int = _SAMPLED,
    on_cache: bool = True,
) -> Forecast:
    """Return what is expected of a drafter on answers.

    Args:
        drafter: A loaded drafter.
        answers: Answers of the target.
        gammas: Draft lengths, at least one.
        policies: Further draft policies.
        report: Called with how many answers are done.
        target: Reads the answers for drafters that need its hidden states or draft on its cache; ``None`` where it is
            not there.
        costs: Times of passes, for policies that decide by them.
        reads: What the drafter's model has read of the answers, by their number; filled, with logits.
        most: Answers on which a model's passes are counted, at most.
        on_cache: Whether the target reads along for drafters on its cache; without it they take less time to read, and
            accept a few percent less.

    Raises:
        UsageError: The drafter depends on the target, or a policy needs what it lacks.
    """
    free, alone, longest = isinstance(drafter, FreeDrafter), reads_alone(drafter), max(gammas)
    replayed = _is_replayed(drafter)
    if drafter.traits.several and any(not each.sampling.greedy for each in answers):
        raise UsageError(
            f"Sampled drafts of {drafter.traits.name} cannot be predicted.", "Leave it out, or run it."
        )
    _check_policies(drafter, policies, costs)
    if not free and not alone and target is None:
        read_answer(model_of(drafter), answers[0])  # says why
    redrafts = alone and not isinstance(drafter, CascadeDrafter)  # a cascade would copy what comes later
    rows = [*(PredictedRow(f"γ={g}", Fixed(g)) for g in gammas), *(PredictedRow(str(p), p) for p in policies)]
    usable = [each for each in answers if free or each.sampling.greedy or each.probabilities is not None]
    sampled = {*range(0, len(usable), max(1, len(usable) // most))}
    for done, answer in enumerate(usable):
        if report is not None:
            report(done)
        keep = done in sampled or bool(policies) or isinstance(drafter, CascadeDrafter) or reads is not None
        read, states = (None if reads is None else reads.get(done)), None
        fresh = alone and read is None
        if fresh:
            read = read_answer(model_of(drafter), answer, keep=keep, target=target if on_cache else None)
            if reads is not None:
                reads[done] = read
        elif target is not None and not free and not alone:
            states = TargetStates(target, drafter, answer)
        by_law = 0 if replayed else len(gammas)
        if not replayed:
            chances = chances_of(drafter, answer, longest, read, states)
            for row, counts in zip(rows, expected_steps(chances, answer.room(), gammas), strict=False):
                row.counts.append(counts)
                if alone and done in sampled:
                    again, _ = replay(drafter, answer, build_policy(row.spec), longest, read=read)
                    row.drafted, row.passes = row.drafted + again.drafted, row.passes + again.passes
        for row in rows[by_law:]:
            seconds = UNTIMED if costs is None else _step_seconds(drafter, answer, costs)
            starts = _replay(row, drafter, answer, longest, read, states, seconds)
            if fresh and redrafts and done in sampled and not row.spec.tree:
                some = starts[:: max(1, len(starts) // _STARTS)]
                row.redrafted += sum(each.drafted for each in some)
                row.really += draft_on(drafter, answer, some)
    return Forecast(drafter.traits.name, rows, usable, len(answers) - len(usable))


def _replay(
    row: PredictedRow,
    drafter: Drafter,
    answer: Answer,
    longest: int,
    read: ReadAnswer | None,
    states: TargetStates | None,
    seconds: StepSeconds,
) -> list[StepStart]:
    """Add the mean counts of a policy's replays along an answer to its row; return how the steps of one began."""
    seeds = range(1 if answer.sampling.greedy or read is None else _WALKS)
    walks = [
        replay(drafter, answer, build_policy(row.spec), longest, read=read, states=states, seconds=seconds,
               seed=seed)
        for seed in seeds
    ]  # fmt: skip
    counted = zip(*(counts for counts, _ in walks), strict=True)
    row.counts.append(Counts(*(np.mean(each, axis=0) for each in counted)))
    return walks[0][1]


def _is_replayed(drafter: Drafter) -> bool:
    """Return whether fixed lengths are replayed too: drafts of several drafters are trees, and forced tokens do not
    count towards their length.
    """
    free = drafter.free if isinstance(drafter, CascadeDrafter) else drafter
    return drafter.traits.several or (isinstance(free, FreeDrafter) and free.forces)


def _step_seconds(drafter: Drafter, answer: Answer, costs: PassCosts) -> StepSeconds:
    """Return what steps along an answer take; a prompt takes what the drafter was timed to read it in."""
    name, prompt, free = drafter.traits.name, len(answer.prompt), isinstance(drafter, FreeDrafter)
    reading_s = reading_seconds(costs.reading_s.get(name, {}), prompt)
    read_s = reading_s / prompt / drafter.traits.prior.reading_share

    def draft_s(passes: float) -> float:
        return costs.drafting_s(name, passes) if passes or free else 0.0

    return StepSeconds(draft_s, costs.target_pass_s, read_s)


def _check_policies(drafter: Drafter, policies: Sequence[PolicySpec], costs: PassCosts | None) -> None:
    free = isinstance(drafter, FreeDrafter)
    for each in policies:
        reason = ""
        if each.tree and (costs is None or not drafter.traits.trees):
            reason = "it drafts trees"
        elif each.word == "confidence-head" or (each.word == "auto" and costs is None):
            reason = "it decides by what only a run has"
        elif each.needs_logits and free:
            reason = f"it reads the drafter's distribution, and {drafter.traits.name} has none"
        if reason:
            raise UsageError(
                f"The draft policy {each.word} cannot be predicted: {reason}.", "Leave it out, or run it."
            )
