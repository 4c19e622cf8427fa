"""Sampled outputs: the exact distribution of every step, and on request tokens counted against the target's own p."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from specbench.check.chisquare import SIGNIFICANCE, TokenCounts
from specbench.check.exact import (
    ENUMERATION_LIMIT,
    acceptance_of_all,
    emitted,
    enumeration_error,
    error_limit,
    few_tokens,
    total_variation,
)
from specbench.check.invariants import Rules, Violation, check_observation, check_run, target_distributions
from specbench.check.observe import DecodingSetup, Drawn, Observation, Tested, observe
from specbench.decoding.drafts import Draft
from specbench.decoding.records import Prefill, Step
from specbench.decoding.sampling import Sampling
from specbench.decoding.verify import verification_of

_LIKELY = 0.02
"""Tokens with this probability or more are likely."""

_GROUPS = 6
"""The most probable token, likely and unlikely ones, each by whether the drafter gives it more than the target does."""

_ENUMERATED = 2
"""Places of an output at which every outcome of a verdict is gone through."""

Position = Literal["first", "corrected", "bonus", "target", "enumerated"]


@dataclass(frozen=True)
class ExactPosition:
    """A place where the emitted distribution is known whole.

    Attributes:
        prompt: Id of the prompt.
        step: Index of the step; ``None`` for the first-target pass.
        position: In the draft.
        kind: Where the closing token came from; ``first`` is the first-target token, and ``enumerated`` stands where
            all outcomes of a verdict on a few of the tokens were gone through.
        error: Total variation of what is emitted there from p.
        limit: What rounding may leave of it.
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
    """What the exact test of one prompt found.

    Attributes:
        prompt: Its id.
        steps: Steps looked at.
        positions: Where the distribution is known.
        acceptances: α of every tested draft, as the loop recorded it.
        violations: Invariants that do not hold.
    """

    prompt: str
    steps: int
    positions: tuple[ExactPosition, ...]
    acceptances: tuple[float, ...]
    violations: tuple[Violation, ...]

    @property
    def sound(self) -> bool:
        return all(place.sound for place in self.positions)


def check_exact(setup: DecodingSetup, name: str, prompt: Sequence[int]) -> ExactCase:
    """Sample one output, and compute from each step's own p, q, chances and draws what it emits.

    Every token that closes a step gives one place: at a rejection the formula of ``specbench.check.exact``, elsewhere
    the distribution it was drawn from. Half of the rejections are forced, so that all positions come up. Where the
    formula does not hold, all outcomes are gone through with the sharpest p and q that were met.
    """
    rules = Rules.of(setup, prompt, greedy=False)
    positions: list[ExactPosition] = []
    violations: list[Violation] = []
    sharp: list[_Sharp] = []
    acceptances: list[float] = []
    output: list[int] = []
    steps = 0
    before: Observation | None = None
    for seen in observe(setup, prompt, greedy=False, forcing=True):
        violations += check_observation(seen, before, rules)
        positions += _places(seen, name, rules)
        if not rules.tests_a_chain(seen) and seen.passes and seen.draft.tokens:
            sharp.append(_sharp(seen, rules.sampling))
        if isinstance(seen.record, Step):
            steps += 1
            acceptances += seen.record.expected_acceptance
        output += seen.tokens
        before = seen
    verification = verification_of(setup.sampling, rules.method)
    for place in heapq.nlargest(_ENUMERATED, sharp, key=lambda place: place.sharpness):
        # Of three tokens (p - q)₊ may leave a single one, which hides what comes next; then (q - p)₊ leaves two.
        p, q = place.p, place.q
        error = max(enumeration_error(verification, *each) for each in ((p, q), (q, p)))
        positions.append(ExactPosition(name, place.step, 0, "enumerated", error, ENUMERATION_LIMIT))
    reason = None if before is None else before.record.finish_reason
    violations += check_run(output, reason, rules)
    return ExactCase(name, steps, tuple(positions), tuple(acceptances), tuple(violations))


def _places(seen: Observation, name: str, rules: Rules) -> Iterator[ExactPosition]:
    """The distributions of the tokens that the step drew, against p."""
    draws = [event for event in seen.events if isinstance(event, Drawn)]
    tests = [event for event in seen.events if isinstance(event, Tested)]
    if len(seen.passes) != 1 or not draws:
        return  # an invariant that is complained of elsewhere
    step = seen.record.index if isinstance(seen.record, Step) else None
    draft = seen.draft
    p = target_distributions(seen, rules.sampling)

    def drawn_from_p(draw: Drawn, node: int, place: int, kind: Position) -> ExactPosition:
        error = total_variation(draw.distribution.to(p.device), p[node + 1])
        return ExactPosition(name, step, place, kind, error, error_limit(Draft(), p, node + 1))

    if not rules.tests_a_chain(seen):
        path: Sequence[int] = ()
        if isinstance(seen.record, Step):
            path = seen.record.path if seen.record.parents is not None else range(seen.record.accepted)
            if seen.record.closing is None or seen.record.closing == "corrected":
                return  # what that is drawn from depends on the drafts
        if max(path, default=-1) + 1 >= len(p):
            return  # an invariant, again
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
    acceptance = acceptance_of_all(draft, p, accepted)
    acceptance[draft.tokens[accepted]] = float(tests[0].acceptance[accepted])  # what was tested, to the bit
    closing = draws[0].distribution.to(p.device)
    error = total_variation(emitted(draft, accepted, acceptance, closing), p[accepted])
    yield ExactPosition(name, step, accepted, "corrected", error, error_limit(draft, p, accepted))
    sibling = seen.verified.child(accepted - 1, draws[0].token)
    if len(draws) == 2 and sibling is not None:
        yield drawn_from_p(draws[1], sibling, accepted + 1, "bonus")


@dataclass(frozen=True)
class _Sharp:
    """Distributions met in a step, cut down to a few tokens: behind the context and behind the first draft that was
    kept, else the context once more.

    Attributes:
        step: Its index.
        p, q: [2, tokens].
    """

    step: int | None
    p: torch.Tensor
    q: torch.Tensor

    @property
    def sharpness(self) -> float:
        """How far p and q are apart: where they are the same every verdict is right."""
        return total_variation(self.p[0], self.q[0])


def _sharp(seen: Observation, sampling: Sampling) -> _Sharp:
    p = target_distributions(seen, sampling).cpu()
    assert isinstance(seen.record, Step)
    kept = seen.record.path[:1] if seen.record.parents is not None else range(min(1, seen.record.accepted))
    nodes = [-1, *kept, -1][:2]
    q = [_drawn_from(seen.draft, node) for node in nodes]
    tokens = few_tokens(p[0], p[0] if q[0] is None else q[0])
    rows_p = [_share(p[node + 1][tokens]) for node in nodes]
    # Where all drafts are certain any q will do, and what p is turned round is not p.
    rows_q = [
        mine.flip(0) if row is None else _share(row[tokens]) for mine, row in zip(rows_p, q, strict=True)
    ]
    return _Sharp(seen.record.index, torch.stack(rows_p), torch.stack(rows_q))


def _drawn_from(draft: Draft, node: int) -> torch.Tensor | None:
    """What the first of the drafts behind a node was drawn from, [vocab]; ``None`` if they are certain."""
    return next((each.q.cpu() for each in draft.draws(node) if each.q is not None), None)


def _share(weights: torch.Tensor) -> torch.Tensor:
    """Of sum 1; all the same where there is nothing."""
    return (
        weights / weights.sum() if float(weights.sum()) > 0.0 else torch.full_like(weights, 1 / len(weights))
    )


@dataclass(frozen=True)
class SampledTest:
    """The χ² test of sampled tokens.

    Attributes:
        outputs, tokens: How many were sampled; the last output may have been cut off by the time limit.
        seconds: How long that took.
        freedom: Degrees of freedom; 0 where there were too few tokens to test.
        p_value: See ``TokenCounts``; 0 where a token came that the transforms rule out.
        limit: The p-value below which the tokens count as biased.
        observed: Share of the tokens in another group than expected, noise included.
        smallest: The smallest such share that this many tokens show with 95% power; ``None`` if there were too few.
        impossible: Tokens that the transforms rule out.
    """

    outputs: int
    tokens: int
    seconds: float
    freedom: int
    p_value: float
    limit: float
    observed: float
    smallest: float | None
    impossible: int

    @property
    def sound(self) -> bool:
        return self.p_value >= self.limit


def sample(
    setup: DecodingSetup,
    prompts: Sequence[Sequence[int]],
    *,
    bias: float,
    seconds: float,
    report: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> SampledTest:
    """Sample outputs of the prompts in turn, and count the tokens against the distributions that they should follow.

    Ends when a bias of the given size would be found, which does not depend on what was drawn but on the probabilities
    met, or when the time is up.

    Args:
        setup: What decodes.
        prompts: Token ids.
        bias: Share of tokens in a wrong group, see ``TokenCounts.smallest_bias``.
        seconds: Time limit, checked after every step.
        report: Called after every step with the seconds that sampling has taken.
        clock: In seconds.
    """
    counts, began, number, spent = TokenCounts(_GROUPS), clock(), 0, 0.0
    for number, prompt in enumerate(itertools.cycle(prompts), start=1):
        transforms = setup.transforms(prompt, greedy=False)
        for seen in observe(setup, prompt, greedy=False, seed=setup.seed + number):
            _count(seen, transforms, counts)
            spent = clock() - began
            report(spent)
            if spent >= seconds:
                break
        smallest = counts.smallest_bias
        if spent >= seconds or (smallest is not None and smallest <= bias):
            break
    freedom, p_value = counts.test()
    return SampledTest(
        outputs=number,
        tokens=counts.tokens,
        seconds=spent,
        freedom=freedom,
        p_value=p_value,
        limit=SIGNIFICANCE,
        observed=counts.observed_bias,
        smallest=counts.smallest_bias,
        impossible=counts.impossible,
    )


def _count(seen: Observation, sampling: Sampling, counts: TokenCounts) -> None:
    """Count the tokens of a step."""
    for i, (node, row) in enumerate(zip(seen.nodes, seen.deciding, strict=True)):
        token = seen.tokens[i]
        p = sampling.probabilities(row.unsqueeze(0), [*seen.context, *seen.tokens[:i]])[0]
        groups = _groups(p, _preferred(seen.draft, node, p))
        shares = torch.zeros(_GROUPS, dtype=torch.float64, device=p.device).index_add_(0, groups, p.double())
        counts.add((shares / shares.sum()).tolist(), int(groups[token]) if float(p[token]) > 0.0 else None)


def _groups(p: torch.Tensor, preferred: torch.Tensor) -> torch.Tensor:
    """The group of every token, int64 [vocab], see ``_GROUPS``."""
    likelihood = (p < _LIKELY).long() + 1
    likelihood[p.argmax()] = 0
    return 2 * likelihood + preferred


def _preferred(draft: Draft, node: int, p: torch.Tensor) -> torch.Tensor:
    """Which tokens the drafter gives more probability after a node than the target, bool [vocab].

    A group may depend on the tokens before, not on what was drafted by chance. Behind the context and in a chain, whose
    drafts up to a node are the tokens before, it does not; for other nodes of a tree the answer is: none.
    """
    preferred = torch.zeros_like(p, dtype=torch.bool)
    for tokens, q in draft.draws(node)[:1] if node < 0 or draft.parents is None else ():
        if q is None:
            preferred[list(tokens[:1])] = True
        else:
            preferred = q.to(p.device) > p
    return preferred
