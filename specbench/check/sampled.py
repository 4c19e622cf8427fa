"""Check sampled outputs: the exact distribution of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
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

_EQUAL = 1e-3
"""Total variation up to which p and q are too close for an enumeration to show anything."""

Position = Literal["first", "tested", "enumerated", "bonus", "target"]


@dataclass(frozen=True)
class ExactPosition:
    """A position whose emitted distribution is known exactly.

    Attributes:
        step: Index of the step; ``None`` for the prefill.
        kind: ``tested`` for a tested draft token, whether it was accepted or not, ``enumerated`` where that takes an
            enumeration over a few tokens; else the kind of the step's last token, ``first`` for the prefill's.
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
    """The exact test of one prompt."""

    prompt: str
    steps: int
    positions: tuple[ExactPosition, ...]
    violations: tuple[Violation, ...]

    @property
    def sound(self) -> bool:
        return all(position.sound for position in self.positions)


def check_exact(request: Request, name: str) -> ExactCase:
    """Sample one output, and compute the emitted distributions from each step's own p, q, chances and draws.

    At every tested position the verification is asked what it does with an acceptance and with a rejection, whatever
    the step's own draw was; the distribution follows from the formula of ``specbench.check.exact``, or from an
    enumeration over a few tokens where that does not apply, and once for each output with chains: where p and q are
    equal, it tries another q. The last token of each step gives another position: the distribution that it was really
    drawn from. Half of the outcomes of tests are forced, so that all of them occur.
    """
    rules = RunRules(request)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    steps = 0
    for seen in checked(request, rules, violations, forcing=True):
        step = seen.record.index if isinstance(seen.record, Step) else None
        positions += [ExactPosition(name, step, *place) for place in _positions(seen, rules)]
        if rules.is_chain_test and not any(position.kind == "enumerated" for position in positions):
            positions += [ExactPosition(name, step, *place) for place in _enumerated(seen, rules)]
        steps += step is not None
    return ExactCase(name, steps, tuple(positions), tuple(violations))


def _positions(seen: Observation, rules: RunRules) -> Iterator[tuple[int, Position, float, float]]:
    """Compare the distributions of a step's tokens with p; yield place, kind, error and its limit."""
    draws, tests, draft = seen.draws, seen.tests, seen.draft
    if len(seen.forwards) != 1 or not draws:
        return  # a violation, reported elsewhere
    step = seen.record if isinstance(seen.record, Step) else None
    p = target_distributions(seen, rules.sampling)
    path: Sequence[int] = ()
    if rules.is_chain_test:
        if len(draws) > 1 or len(tests) > 1:
            return
        accepted = tests[0].accepted if tests else 0
        path = range(accepted)
        for i in range(min(accepted + 1, len(draft.tokens))):
            used, closing = tests[0].acceptance, draws[0].distribution
            if i < accepted:
                forced = ForcedRandomness(i)
                rules.verification.judge(draft, seen.forwards[0].logits, seen.context, rules.sampling, forced)
                used, closing = forced.acceptance, forced.drawn_from
            acceptance = acceptance_by_token(draft, p, i)
            acceptance[draft.tokens[i]] = float(used[i])  # exactly what was used
            error = total_variation(emitted_distribution(draft, i, acceptance, closing.to(p.device)), p[i])
            yield i, "tested", error, error_limit(draft, p, i)
        if accepted < len(draft.tokens):
            return
    elif step is not None:
        path = step.path if step.parents is not None else range(step.accepted)
        yield from _enumerated(seen, rules)
        if step.closing is None or step.closing == "corrected" or max(path, default=-1) + 1 >= len(p):
            return  # its distribution depends on the draft, or it is a violation, too
    node = path[-1] if path else -1
    kind: Position = "first" if step is None else "bonus" if path else "target"
    error = total_variation(draws[-1].distribution.to(p.device), p[node + 1])
    yield len(path), kind, error, error_limit(Draft(), p, node + 1)


def _enumerated(seen: Observation, rules: RunRules) -> Iterator[tuple[int, Position, float, float]]:
    """Yield the errors over all outcomes of drawing and testing two drafts in a row, over the likeliest tokens: after
    the context, and after each accepted node.
    """
    step, draft = seen.record, seen.draft
    if not isinstance(step, Step) or len(seen.forwards) != 1:
        return
    p = target_distributions(seen, rules.sampling).cpu()
    path = step.path if step.parents is not None else range(step.accepted)
    nodes = [node for node in (-1, *path) if node + 1 < len(p) and draft.draws(node)]
    drawn = [
        next((draws.q.cpu() for draws in draft.draws(node) if draws.q is not None), None) for node in nodes
    ]
    pairs = zip(nodes, drawn, strict=True)
    for i, both in enumerate(pairwise([*pairs, *zip(nodes[-1:], drawn[-1:], strict=True)])):
        (node, first_q), _ = both
        tokens = likely_tokens(p[node + 1], p[node + 1] if first_q is None else first_q)
        rows_p = torch.stack([_normalized(p[node + 1][tokens]) for node, _ in both])
        # For drafters without q any distribution that differs from p will do.
        rows_q = [
            own.flip(0) if q is None else _normalized(q[tokens])
            for own, (_, q) in zip(rows_p, both, strict=True)
        ]
        q = torch.stack(rows_q)
        # With three tokens (p - q)₊ may have a single one, which hides what follows; then (q - p)₊ has two. If p and q
        # are equal, every verdict is right.
        if total_variation(rows_p[0], q[0]) <= _EQUAL:
            q = rows_p.flip(-1)
        error = max(enumeration_error(rules.verification, *pair) for pair in ((rows_p, q), (q, rows_p)))
        yield i, "enumerated", error, ENUMERATION_LIMIT


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Return weights with sum 1; uniform ones where all are 0."""
    total = float(weights.sum())
    return weights / weights.sum() if total > 0.0 else torch.full_like(weights, 1 / len(weights))
