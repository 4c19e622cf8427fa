"""Check sampled outputs: what every step draws from, and the verification that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from specbench.check.exact import method_error, total_variation
from specbench.check.invariants import RunRules, Violation, checked, target_distributions
from specbench.check.observe import Observation
from specbench.decoding.drafts import Draft
from specbench.decoding.records import Step
from specbench.decoding.request import Request

LARGEST_ERROR = 1e-5
"""Total variation that rounding may cause."""

Position = Literal["first", "enumerated", "corrected", "bonus", "target"]


@dataclass(frozen=True)
class ExactPosition:
    """A position whose emitted distribution is known exactly.

    Attributes:
        step: Index of the step; ``None`` for the prefill.
        kind: The kind of the step's last token, ``first`` for the prefill's; ``enumerated`` for all outcomes of the
            verification method over a few tokens, of no step.
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

    The last token of a step is drawn from p, or where the ratio test has rejected one from norm((p - q)₊); each ratio
    test is an invariant. Whether the verification method as a whole gives p is enumerated over a few
    tokens.
    """
    rules = RunRules(request)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    steps = tested = 0
    certain = rules.is_chain_test
    for seen in checked(request, rules, violations):
        step = seen.record if isinstance(seen.record, Step) else None
        index = None if step is None else step.index
        positions += [ExactPosition(name, index, *place) for place in _drawn(seen, rules)]
        if step is not None:
            steps, tested = steps + 1, tested + step.tested
            certain = certain and seen.draft.q is None
    if tested:
        positions.append(
            ExactPosition(name, None, 0, "enumerated", method_error(rules.verification, certain=certain))
        )
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
