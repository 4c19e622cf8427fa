"""Check sampled outputs: the exact distribution of every step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from specbench.check.exact import (
    ENUMERATION_LIMIT,
    acceptance_by_token,
    emitted_distribution,
    enumeration_error,
    error_limit,
    likely_tokens,
    total_variation,
)
from specbench.check.invariants import RunRules, Violation, check_observation, check_run, target_distributions
from specbench.check.observe import DecodingSetup, DrawEvent, Observation, observe
from specbench.decoding.drafts import Draft
from specbench.decoding.records import Prefill, Step
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import verification_of

_ENUMERATED = 2
"""Steps of an output whose outcomes are enumerated."""

Position = Literal["first", "corrected", "bonus", "target", "enumerated"]


@dataclass(frozen=True)
class ExactPosition:
    """A position whose emitted distribution is known exactly.

    Attributes:
        step: Index of the step; ``None`` for the prefill.
        kind: Kind of the step's last token; ``first`` for the prefill's token, ``enumerated`` for an enumeration of all
            outcomes over a few tokens.
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


def check_exact(setup: DecodingSetup, name: str, prompt: Sequence[int]) -> ExactCase:
    """Sample one output, and compute the emitted distributions from each step's own p, q, chances and draws.

    The last token of each step gives one position. After a rejection, its distribution follows from the formula of
    ``specbench.check.exact``; otherwise it is the distribution that the token was drawn from. Half of the rejections
    are forced, so that all positions occur. If the formula does not apply, all outcomes are enumerated for the steps in
    which p and q differ most.
    """
    rules = RunRules(setup, prompt, greedy=False)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    hard_cases: list[_HardCase] = []
    acceptances: list[float] = []
    output: list[int] = []
    steps = 0
    before: Observation | None = None
    for seen in observe(setup, prompt, greedy=False, forcing=True):
        violations += check_observation(seen, before, rules)
        positions += _exact_positions(seen, name, rules)
        if not rules.is_chain_test(seen) and seen.forwards and seen.draft.tokens:
            hard_cases.append(_hard_case(seen, rules.sampling))
        if isinstance(seen.record, Step):
            steps += 1
            acceptances += seen.record.expected_acceptance
        output += seen.tokens
        before = seen
    verification = verification_of(setup.sampling, rules.method)
    for case in heapq.nlargest(_ENUMERATED, hard_cases, key=lambda case: case.distance):
        # With three tokens (p - q)₊ may have a single one, which hides what follows; then (q - p)₊ has two.
        error = max(enumeration_error(verification, *each) for each in ((case.p, case.q), (case.q, case.p)))
        positions.append(ExactPosition(name, case.step, 0, "enumerated", error, ENUMERATION_LIMIT))
    reason = None if before is None else before.record.finish_reason
    violations += check_run(output, reason, rules)
    return ExactCase(name, steps, tuple(positions), tuple(acceptances), tuple(violations))


def _exact_positions(seen: Observation, name: str, rules: RunRules) -> Iterator[ExactPosition]:
    """Compare the distributions of the tokens that a step drew with p."""
    draws, tests = seen.draws, seen.tests
    if len(seen.forwards) != 1 or not draws:
        return  # a violation, reported elsewhere
    step = seen.record.index if isinstance(seen.record, Step) else None
    draft = seen.draft
    p = target_distributions(seen, rules.sampling)

    def drawn_from_p(draw: DrawEvent, node: int, position: int, kind: Position) -> ExactPosition:
        error = total_variation(draw.distribution.to(p.device), p[node + 1])
        return ExactPosition(name, step, position, kind, error, error_limit(Draft(), p, node + 1))

    if not rules.is_chain_test(seen):
        path: Sequence[int] = ()
        if isinstance(seen.record, Step):
            path = seen.record.path if seen.record.parents is not None else range(seen.record.accepted)
            if seen.record.closing is None or seen.record.closing == "corrected":
                return  # its distribution depends on the draft
        if max(path, default=-1) + 1 >= len(p):
            return  # a violation, too
        kind: Position = "first" if isinstance(seen.record, Prefill) else "bonus" if path else "target"
        yield drawn_from_p(draws[-1], path[-1] if path else -1, len(path), kind)
        return
    if len(draws) > 2 or len(tests) > 1:
        return
    accepted = tests[0].accepted if tests else 0
    if accepted >= len(draft.tokens):
        kind = "first" if isinstance(seen.record, Prefill) else "bonus" if draft.tokens else "target"
        yield drawn_from_p(draws[0], accepted - 1, accepted, kind)
        return
    acceptance = acceptance_by_token(draft, p, accepted)
    acceptance[draft.tokens[accepted]] = float(tests[0].acceptance[accepted])  # exactly what was used
    closing = draws[0].distribution.to(p.device)
    emitted = emitted_distribution(draft, accepted, acceptance, closing)
    error = total_variation(emitted, p[accepted])
    yield ExactPosition(name, step, accepted, "corrected", error, error_limit(draft, p, accepted))
    sibling = seen.verified.child(accepted - 1, draws[0].token)
    if len(draws) == 2 and sibling is not None:
        yield drawn_from_p(draws[1], sibling, accepted + 1, "bonus")


@dataclass(frozen=True)
class _HardCase:
    """Distributions of a step, reduced to a few tokens: after the context, and after the first accepted token.

    If no token was accepted, those after the context are used for both.
    """

    step: int | None
    p: torch.Tensor
    q: torch.Tensor

    @property
    def distance(self) -> float:
        """Return the total variation of p and q; if they are equal, every verdict is right."""
        return total_variation(self.p[0], self.q[0])


def _hard_case(seen: Observation, sampling: Sampling) -> _HardCase:
    p = target_distributions(seen, sampling).cpu()
    assert isinstance(seen.record, Step)
    kept = seen.record.path[:1] if seen.record.parents is not None else range(min(1, seen.record.accepted))
    nodes = [-1, *kept, -1][:2]
    q = [_drawn_from(seen.draft, node) for node in nodes]
    tokens = likely_tokens(p[0], p[0] if q[0] is None else q[0])
    rows_p = [_normalized(p[node + 1][tokens]) for node in nodes]
    # For drafters without q any distribution that differs from p will do.
    rows_q = [
        own.flip(0) if row is None else _normalized(row[tokens]) for own, row in zip(rows_p, q, strict=True)
    ]
    return _HardCase(seen.record.index, torch.stack(rows_p), torch.stack(rows_q))


def _drawn_from(draft: Draft, node: int) -> torch.Tensor | None:
    """Return the distribution of a node's first drawn child, [vocab]; ``None`` if no child was drawn."""
    return next((each.q.cpu() for each in draft.draws(node) if each.q is not None), None)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Return weights with sum 1; uniform ones where all are 0."""
    total = float(weights.sum())
    return weights / weights.sum() if total > 0.0 else torch.full_like(weights, 1 / len(weights))
