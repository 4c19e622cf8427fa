"""Check sampled outputs: what every step draws from, and the verification that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from specbench.check.exact import enumeration_error, likely_tokens, total_variation
from specbench.check.invariants import RunRules, Violation, checked, target_distributions
from specbench.check.observe import Observation
from specbench.decoding.drafts import Draft
from specbench.decoding.records import Step
from specbench.decoding.request import Request

LARGEST_ERROR = 1e-5
"""Total variation that rounding may cause."""

_EQUAL = 1e-3
"""Total variation up to which p and q are too close for an enumeration to show anything."""

Position = Literal["first", "enumerated", "corrected", "bonus", "target"]


@dataclass(frozen=True)
class ExactPosition:
    """A position whose emitted distribution is known exactly.

    Attributes:
        step: Index of the step; ``None`` for the prefill.
        kind: ``enumerated`` for all outcomes of the verification over a few tokens; else the kind of the step's last
            token, ``first`` for the prefill's.
        error: Total variation of the emitted distribution from p.
    """

    prompt: str
    step: int | None
    position: int
    kind: Position
    error: float

    @property
    def sound(self) -> bool:
        return self.error < LARGEST_ERROR


@dataclass(frozen=True)
class ExactCase:
    """The exact test of one prompt, with its numbers of steps and of tested draft tokens."""

    prompt: str
    steps: int
    tested: int
    positions: tuple[ExactPosition, ...]
    violations: tuple[Violation, ...]

    @property
    def sound(self) -> bool:
        return all(position.sound for position in self.positions)


def check_exact(request: Request, name: str) -> ExactCase:
    """Sample one output, and compare the distributions that its tokens come from with p.

    The last token of each step is drawn from p, or after a rejection from what is left of it, norm((p - q)₊). Every
    test of a draft token is an invariant. Whether both together give p is enumerated over a few tokens: once for each
    output where min(1, p/q) tests drafts, in every step with other verification methods.
    """
    rules = RunRules(request)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    steps = tested = 0
    for seen in checked(request, rules, violations):
        step = seen.record if isinstance(seen.record, Step) else None
        places = [*_drawn(seen, rules)]
        if not (rules.is_chain_test and any(position.kind == "enumerated" for position in positions)):
            places += _enumerated(seen, rules)
        positions += [ExactPosition(name, None if step is None else step.index, *place) for place in places]
        if step is not None:
            steps, tested = steps + 1, tested + step.tested
    return ExactCase(name, steps, tested, tuple(positions), tuple(violations))


def _drawn(seen: Observation, rules: RunRules) -> Iterator[tuple[int, Position, float]]:
    """Compare the distribution of a step's last token with the right one; yield its place, kind and error."""
    draws, tests, draft = seen.draws, seen.tests, seen.draft
    if len(seen.forwards) != 1 or not draws:
        return  # a violation, reported elsewhere
    step = seen.record if isinstance(seen.record, Step) else None
    p = target_distributions(seen, rules.sampling)
    used = draws[-1].distribution.to(p.device)
    path: Sequence[int] = ()
    if rules.is_chain_test:
        if len(draws) > 1 or len(tests) > 1:
            return
        path = range(tests[0].accepted if tests else 0)
        if len(path) < len(draft.tokens):
            rest = _rest(draft, p[len(path)], len(path))
            # A wrong distribution after a rejection is as wrong as rejections are frequent.
            error = total_variation(used, rest) * float(rest.sum()) if float(rest.sum()) > 0.0 else 0.0
            yield len(path), "corrected", error
            return
    elif step is not None:
        path = step.path if step.parents is not None else range(step.accepted)
        if step.closing is None or step.closing == "corrected" or max(path, default=-1) + 1 >= len(p):
            return  # its distribution depends on the draft, or it is a violation, too
    kind: Position = "first" if step is None else "bonus" if path else "target"
    yield len(path), kind, total_variation(used, p[path[-1] + 1 if path else 0])


def _rest(draft: Draft, p: torch.Tensor, i: int) -> torch.Tensor:
    """Return (p - q)₊ where token ``i`` of a chain is rejected, [vocab]."""
    q = torch.zeros_like(p) if draft.q is None else draft.q[i]
    rest = (p - q).clamp_min(0.0)
    if draft.q is None:
        rest[draft.tokens[i]] = 0.0
    return rest


def _enumerated(seen: Observation, rules: RunRules) -> Iterator[tuple[int, Position, float]]:
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
        certain = rules.is_chain_test and first_q is None
        errors = [
            enumeration_error(rules.verification, *pair, certain=certain)
            for pair in ((rows_p, q), (q, rows_p))
        ]
        yield i, "enumerated", max(errors)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Return weights with sum 1; uniform ones where all are 0."""
    total = float(weights.sum())
    return weights / weights.sum() if total > 0.0 else torch.full_like(weights, 1 / len(weights))
