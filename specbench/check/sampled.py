"""Check sampled outputs: the exact distribution of every step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from specbench.check.exact import (
    ENUMERATION_LIMIT,
    ForcedRandomness,
    acceptance_by_token,
    emitted_distribution,
    enumeration_error,
    error_limit,
    likely_tokens,
    total_variation,
)
from specbench.check.invariants import RunRules, Violation, checked, target_distributions
from specbench.check.observe import Observation
from specbench.decoding.drafts import Draft
from specbench.decoding.records import Step
from specbench.decoding.request import Request
from specbench.decoding.verify import Verification

_ENUMERATED = 2
"""Steps of an output whose outcomes are enumerated."""

_EQUAL = 1e-3
"""Total variation up to which p and q are too close for an enumeration to show anything."""

Position = Literal["first", "tested", "corrected", "bonus", "target", "enumerated"]


@dataclass(frozen=True)
class ExactPosition:
    """A position whose emitted distribution is known exactly.

    Attributes:
        step: Index of the step; ``None`` for the prefill.
        kind: ``tested`` for a tested draft token, whether it was accepted or not; else the kind of the step's last
            token, ``first`` for the prefill's; ``enumerated`` for the outcomes of two drafts, over a few tokens.
        error: Total variation of the emitted distribution from p.
        limit: The error that rounding may cause.
    """

    prompt: str
    step: int | None
    position: int
    kind: Position
    error: float
    limit: float

    @property
    def sound(self) -> bool:
        return self.error < self.limit


@dataclass(frozen=True)
class ExactCase:
    """The exact test of one prompt.

    Attributes:
        acceptances: α of every tested token, as recorded by the loop.
    """

    prompt: str
    steps: int
    positions: tuple[ExactPosition, ...]
    acceptances: tuple[float, ...]
    violations: tuple[Violation, ...]

    @property
    def sound(self) -> bool:
        return all(each.sound for each in self.positions)


def check_exact(request: Request, name: str) -> ExactCase:
    """Sample one output, and compute the emitted distributions from each step's own p, q, chances and draws.

    At every tested position the verification is asked what it does with an acceptance and with a rejection, whatever
    the step's own draw was; the distribution follows from the formula of ``specbench.check.exact``, or from an
    enumeration over a few tokens where that does not apply. The last token of each step gives another position: the
    distribution that it was really drawn from. Half of the outcomes of tests are forced, so that all of them occur. Two
    drafts at a time are enumerated for the steps in which p and q differ most.
    """
    rules = RunRules(request)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    hard_cases: list[_Reduced] = []
    acceptances: list[float] = []
    steps = 0
    for seen in checked(request, rules, violations, forcing=True):
        positions += _exact_positions(seen, name, rules)
        if isinstance(seen.record, Step) and seen.draft.tokens and len(seen.forwards) == 1:
            hard_case, tested = _reduced(seen, name, rules)
            hard_cases.append(hard_case)
            positions += tested
        if isinstance(seen.record, Step):
            steps += 1
            acceptances += seen.record.expected_acceptance
    for case in heapq.nlargest(_ENUMERATED, hard_cases, key=lambda case: case.distance):
        positions.append(
            ExactPosition(name, case.step, 0, "enumerated", case.error(rules.verification), ENUMERATION_LIMIT)
        )
    return ExactCase(name, steps, tuple(positions), tuple(acceptances), tuple(violations))


def _exact_positions(seen: Observation, name: str, rules: RunRules) -> Iterator[ExactPosition]:
    """Compare the distributions of the tokens that a step drew with p."""
    draws, tests, draft = seen.draws, seen.tests, seen.draft
    if len(seen.forwards) != 1 or not draws:
        return  # a violation, reported elsewhere
    step = seen.record if isinstance(seen.record, Step) else None
    made = partial(ExactPosition, name, None if step is None else step.index)
    p = target_distributions(seen, rules.sampling)

    def by_formula(i: int, kind: Position, used: torch.Tensor, closing: torch.Tensor) -> ExactPosition:
        acceptance = acceptance_by_token(draft, p, i)
        acceptance[draft.tokens[i]] = float(used[i])  # exactly what was used
        error = total_variation(emitted_distribution(draft, i, acceptance, closing.to(p.device)), p[i])
        return made(i, kind, error, error_limit(draft, p, i))

    path: Sequence[int] = ()
    if rules.is_chain_test:
        if len(draws) > 1 or len(tests) > 1:
            return
        path = range(tests[0].accepted if tests else 0)
        accepted = len(path)
        for i in range(min(accepted + 1, len(draft.tokens))):
            forced = ForcedRandomness(i)
            rules.verification.judge(draft, seen.forwards[0].logits, seen.context, rules.sampling, forced)
            yield by_formula(i, "tested", forced.acceptance, forced.drawn_from)
        if accepted < len(draft.tokens):
            yield by_formula(accepted, "corrected", tests[0].acceptance, draws[0].distribution)
            return
    elif step is not None:
        path = _accepted(step)
        if step.closing is None or step.closing == "corrected" or max(path, default=-1) + 1 >= len(p):
            return  # its distribution depends on the draft, or it is a violation, too
    node = path[-1] if path else -1
    kind: Position = "first" if step is None else "bonus" if path else "target"
    error = total_variation(draws[-1].distribution.to(p.device), p[node + 1])
    yield made(len(path), kind, error, error_limit(Draft(), p, node + 1))


def _accepted(step: Step) -> Sequence[int]:
    """Return the accepted nodes."""
    return step.path if step.parents is not None else range(step.accepted)


@dataclass(frozen=True)
class _Reduced:
    """Distributions of a step, reduced to a few tokens: after one node, or after the context and an accepted token.

    Attributes:
        p, q: [1 or 2, tokens].
    """

    step: int
    p: torch.Tensor
    q: torch.Tensor

    @property
    def distance(self) -> float:
        """Return the total variation of p and q."""
        return total_variation(self.p[0], self.q[0])

    def error(self, verification: Verification) -> float:
        """Return the error over all outcomes of drawing and testing."""
        # With three tokens (p - q)₊ may have a single one, which hides what follows; then (q - p)₊ has two. If p and q
        # are equal, every verdict is right.
        q = self.q if self.distance > _EQUAL else self.p.flip(-1)
        pairs = ((self.p, q), (q, self.p))
        return max(enumeration_error(verification, *each) for each in pairs)


def _reduced(seen: Observation, name: str, rules: RunRules) -> tuple[_Reduced, list[ExactPosition]]:
    """Return a step reduced to its first two tokens, and its tested positions where no formula applies."""
    p = target_distributions(seen, rules.sampling).cpu()
    step = seen.record
    assert isinstance(step, Step)

    def reduced(*nodes: int) -> _Reduced:
        """Reduce the distributions after nodes to the likeliest tokens after the first of them."""
        drawn = [_drawn_from(seen.draft, node) for node in nodes]
        tokens = likely_tokens(p[nodes[0] + 1], p[nodes[0] + 1] if drawn[0] is None else drawn[0])
        rows_p = [_normalized(p[node + 1][tokens]) for node in nodes]
        # For drafters without q any distribution that differs from p will do.
        rows_q = [
            own.flip(0) if row is None else _normalized(row[tokens])
            for own, row in zip(rows_p, drawn, strict=True)
        ]
        return _Reduced(step.index, torch.stack(rows_p), torch.stack(rows_q))

    nodes = [node for node in (-1, *_accepted(step)) if node + 1 < len(p) and seen.draft.draws(node)]
    positions = [
        ExactPosition(
            name, step.index, i, "tested", reduced(node).error(rules.verification), ENUMERATION_LIMIT
        )
        for i, node in enumerate(() if rules.is_chain_test else nodes)
    ]
    return reduced(*(-1,) if rules.is_chain_test else (-1, (*nodes, -1, -1)[1])), positions


def _drawn_from(draft: Draft, node: int) -> torch.Tensor | None:
    """Return the distribution of a node's first drawn child, [vocab]; ``None`` if no child was drawn."""
    return next((each.q.cpu() for each in draft.draws(node) if each.q is not None), None)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Return weights with sum 1; uniform ones where all are 0."""
    total = float(weights.sum())
    return weights / weights.sum() if total > 0.0 else torch.full_like(weights, 1 / len(weights))
