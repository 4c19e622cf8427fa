"""Sampled outputs: the exact distribution of every step, then many short outputs against the target's own p."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.check.chisquare import (
    Branch,
    Cells,
    chi_square,
    freedom,
    plan_cells,
    runs_needed,
    share,
)
from specbench.check.exact import (
    ENUMERATION_LIMIT,
    acceptance_of_all,
    bias_without_adjustment,
    emitted,
    enumeration_error,
    error_limit,
    few_tokens,
    total_variation,
)
from specbench.check.invariants import Rules, Violation, check_observation, check_run, target_distributions
from specbench.check.memo import MemoScorer
from specbench.check.observe import DecodingSetup, Drawn, Observation, Tested, observe
from specbench.decoding.clocks import Stopwatch, clock_for
from specbench.decoding.drafts import Draft
from specbench.decoding.loop import driven
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import DraftPolicy, Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verify import verification_of

__all__ = [
    "CONTEXTS",
    "DEPTH",
    "Candidate",
    "ContextPlan",
    "ExactCase",
    "ExactPosition",
    "SampledTest",
    "check_exact",
    "choose_contexts",
    "plan_context",
    "sample_context",
]

CONTEXTS = 4
"""Fixed contexts that are sampled from."""

DEPTH = 3
"""Tokens sampled behind each of them; the drafts there are two tokens long at most."""

_EARLY_LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
_EARLY_SHARE = 0.1
"""Looks before all is sampled, as shares of the outputs, and what they may spend of the significance together.

Each look tests at its own part of it, so that all of them reject a sound decoder no more often than one test would: the
union bound, whatever the looks have in common. (Spending the error over looks: Lan & DeMets, Biometrika 70, 1983.)
"""

_WORTH = 3.0
"""A deeper token is tested if that takes no more than so many times the samples of the first one."""

_SIGHT = 0.01
"""Tokens more probable than this are expected to get cells."""

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
class Candidate:
    """A context that the sampled test may use.

    Attributes:
        prompt: Id of the prompt.
        context: Prompt and output so far.
        emitted: How many of these are output.
        sharpness: How wrong a decoder without the residual adjustment would be there, as total variation; weighted by
            the share of p that lies in tokens with cells of their own.
    """

    prompt: str
    context: tuple[int, ...]
    emitted: int
    sharpness: float


@dataclass(frozen=True)
class ExactCase:
    """What the exact test of one prompt found.

    Attributes:
        prompt: Its id.
        steps: Steps looked at.
        positions: Where the distribution is known.
        acceptances: α of every tested draft, as the loop recorded it.
        candidates: Contexts for the sampled test.
        violations: Invariants that do not hold.
    """

    prompt: str
    steps: int
    positions: tuple[ExactPosition, ...]
    acceptances: tuple[float, ...]
    candidates: tuple[Candidate, ...]
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
    candidates: list[Candidate] = []
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
            candidate = _candidate(seen, name, len(output), rules.sampling)
            if candidate is not None:
                candidates.append(candidate)
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
    return ExactCase(name, steps, tuple(positions), tuple(acceptances), tuple(candidates), tuple(violations))


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
    return next((each.q.cpu() for each in draft.behind(node) if each.q is not None), None)


def _share(weights: torch.Tensor) -> torch.Tensor:
    """Of sum 1; all the same where there is nothing."""
    return (
        weights / weights.sum() if float(weights.sum()) > 0.0 else torch.full_like(weights, 1 / len(weights))
    )


def _candidate(seen: Observation, name: str, emitted_before: int, sampling: Sampling) -> Candidate | None:
    if emitted_before < 1 or not seen.proposals or not seen.passes:
        return None
    p = target_distributions(seen, sampling)[:1]
    first = seen.draft.behind(-1)[:1]
    draft = Draft([seen.draft.tokens[each.node] for each in first])
    draft.q = next((each.q[None] for each in first if each.q is not None), None)
    visible = float(p[0][p[0] >= _SIGHT].sum())
    sharpness = visible * bias_without_adjustment(draft, p, 0) if draft.tokens else 0.0
    return Candidate(name, seen.context, emitted_before, sharpness)


def choose_contexts(
    candidates: Sequence[Candidate], room: int | None, count: int = CONTEXTS
) -> list[Candidate]:
    """The sharpest contexts, from as many prompts as there are.

    Args:
        candidates: What the exact test met.
        room: The target's context limit, ``None`` for none.
        count: How many at most.
    """
    fitting = [c for c in candidates if room is None or len(c.context) + DEPTH <= room]
    ranked = sorted(fitting, key=lambda c: (-c.sharpness, c.prompt, c.emitted))
    taken: dict[str, int] = defaultdict(int)
    rounds = []
    for candidate in ranked:
        rounds.append((taken[candidate.prompt], candidate))
        taken[candidate.prompt] += 1
    rounds.sort(key=lambda pair: pair[0])  # stable: within a round the sharpest first
    return [candidate for _, candidate in rounds[:count]]


@dataclass(frozen=True)
class ContextPlan:
    """What is sampled behind one context.

    Attributes:
        candidate: The context.
        runs: Outputs to sample.
        depths: Cells of the 1st, 2nd, ... token behind it; empty where a token is not tested.
        early: Numbers of outputs at which to look before all are there, with the cells of each look.
    """

    candidate: Candidate
    runs: int
    depths: tuple[tuple[Cells, ...], ...]
    early: tuple[tuple[int, tuple[tuple[Cells, ...], ...]], ...] = ()

    @property
    def tests(self) -> int:
        """Number of χ² tests."""
        return sum(bool(cells) for cells in self.depths)


def plan_context(
    target: MemoScorer, sampling: Sampling, candidate: Candidate, bias: float, significance: float
) -> ContextPlan:
    """Choose cells and the number of samples from the target's own probabilities, before anything is sampled.

    The first token behind the context decides the number, so that a bias of the stated size is found with 95% power.
    Deeper ones are tested too where they need at most three times as many, and then all get as many as the neediest.
    The power is that of the last look, with what the early ones leave of the significance.
    """
    significance *= 1 - _EARLY_SHARE
    sampling = _behind(sampling, candidate.context)
    branches = [Branch((), 1.0, _probabilities(target, sampling, candidate.context))]
    runs, cells = _settle(branches, bias, significance)
    depths, tested = [tuple(cells)], [branches]
    needed = runs
    for _ in range(1, DEPTH):
        branches = [
            Branch(tokens, weight, _probabilities(target, sampling, (*candidate.context, *tokens)))
            for tokens, weight in _reached(cells)
        ]
        cells = plan_cells(branches, runs)
        asks = runs_needed(bias, significance, freedom(cells), share(cells)) if cells else 0
        worth = bool(cells) and asks <= _WORTH * runs
        depths.append(tuple(cells) if worth else ())
        tested.append(branches if worth else [])
        if worth:
            needed = max(needed, asks)
    early = (math.ceil(needed * share) for share in _EARLY_LOOKS)
    # No more cells than the last look has: outputs are not followed behind others.
    looks = tuple((n, tuple(tuple(plan_cells(each, min(n, runs))) for each in tested)) for n in early)
    return ContextPlan(candidate, needed, tuple(depths), looks)


def _settle(branches: Sequence[Branch], bias: float, significance: float) -> tuple[int, list[Cells]]:
    """Runs and cells that fit each other: more runs allow for more cells, which need more runs."""
    runs = runs_needed(bias, significance, 1)
    while True:
        cells = plan_cells(branches, runs)
        asks = runs_needed(bias, significance, max(1, freedom(cells)), share(cells) or 1.0)
        if asks <= runs:
            return runs, cells
        runs = asks


def _reached(cells: Sequence[Cells]) -> Iterator[tuple[tuple[int, ...], float]]:
    """The branches behind the cells, and their probabilities."""
    for each in cells:
        for token, probability in zip(each.tokens, each.probabilities, strict=True):
            yield (*each.branch, token), each.weight * probability


def _behind(sampling: Sampling, context: Sequence[int]) -> Sampling:
    """The transforms of outputs that begin behind a context, as ``sample_context`` decodes them."""
    return sampling.at(len(context), len(context) + DEPTH, ())


def _probabilities(target: MemoScorer, sampling: Sampling, context: Sequence[int]) -> NDArray[np.float64]:
    p = sampling.probabilities(target.row(context).unsqueeze(0), context)[0].double().cpu().numpy()
    return np.asarray(p / p.sum(), dtype=np.float64)


@dataclass(frozen=True)
class SampledTest:
    """One χ² test.

    Attributes:
        prompt: Id of the prompt.
        context: Tokens of output before the sampled ones.
        token: Which token of the output, counted from 1.
        runs: Outputs that were sampled.
        tested: How many of them fell into tested branches.
        freedom: Degrees of freedom.
        p_value: See ``TestOutcome``; 0 where something impossible was sampled.
        limit: The p-value below which the token counts as biased.
        bias: Observed total variation over the cells, noise included.
    """

    prompt: str
    context: int
    token: int
    runs: int
    tested: int
    freedom: int
    p_value: float
    limit: float
    bias: float

    @property
    def sound(self) -> bool:
        return self.p_value >= self.limit


Told = Callable[[int], None]


def sample_context(
    setup: DecodingSetup, target: MemoScorer, plan: ContextPlan, limit: float, told: Told | None = None
) -> list[SampledTest]:
    """Decode as often as planned behind one context, and test what came; a look that proves a bias is the last.

    Args:
        setup: What ``memoised`` made; its end tokens and stop strings are left out of the sampled outputs.
        target: What it returned beside.
        plan: For one context.
        limit: Significance of each test, over all of its looks.
        told: Called behind every output with how many there are; ``None`` for nobody.
    """
    context = plan.candidate.context
    looks = dict(plan.early)
    branches = [each.branch for cells in plan.depths for each in cells]
    prefixes = {branch[:end] for branch in branches for end in range(len(branch) + 1)}
    request = Request(
        prompt=context,
        target=setup.target,
        drafter=setup.drafter,
        policy=DraftPolicy.of(setup.policy),
        sampling=setup.sampling,
        random=Randomness(setup.seed, setup.target.device),
        max_new_tokens=DEPTH,
        first_target=False,
        residual_adjustment=setup.residual_adjustment,
    )
    watch = Stopwatch(clock_for(str(setup.target.device)))
    counts: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(DEPTH)]
    for run in range(plan.runs):
        tokens: list[int] = []
        for record in driven(setup.decoder(request, watch)):
            if isinstance(record, Step):
                tokens += record.tokens
            if tuple(tokens) not in prefixes:
                break  # nothing is tested behind these tokens, and going on would cost passes
        for depth, token in enumerate(tokens[:DEPTH]):
            prefix = tuple(tokens[:depth])
            if prefix in prefixes:
                counts[depth][prefix][token] += 1
        if told is not None:
            told(run + 1)
        if run + 1 in looks and run + 1 < plan.runs:
            share = _EARLY_SHARE / len(looks)
            tests = _tests(setup, target, plan, looks[run + 1], counts, run + 1, limit * share)
            if not all(test.sound for test in tests):
                return tests
    return _tests(setup, target, plan, plan.depths, counts, plan.runs, limit * (1 - _EARLY_SHARE))


def _tests(
    setup: DecodingSetup,
    target: MemoScorer,
    plan: ContextPlan,
    depths: Sequence[Sequence[Cells]],
    counts: Sequence[dict[tuple[int, ...], Counter[int]]],
    runs: int,
    limit: float,
) -> list[SampledTest]:
    """The tests of one look at what was counted in ``runs`` outputs."""
    context = plan.candidate.context
    impossible = _impossible(target, _behind(setup.sampling, context), context, counts)
    tests = []
    for depth, cells in enumerate(depths):
        if not cells:
            continue
        outcome = chi_square(cells, counts[depth])
        tests.append(
            SampledTest(
                prompt=plan.candidate.prompt,
                context=plan.candidate.emitted,
                token=plan.candidate.emitted + depth + 1,
                runs=runs,
                tested=outcome.runs,
                freedom=outcome.freedom,
                p_value=0.0 if depth in impossible else outcome.p_value,
                limit=limit,
                bias=outcome.bias,
            )
        )
    return tests


def _impossible(
    target: MemoScorer,
    sampling: Sampling,
    context: Sequence[int],
    counts: Sequence[dict[tuple[int, ...], Counter[int]]],
) -> set[int]:
    """Depths at which a token came that the transforms rule out."""
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.defaults):
        return set()
    return {
        depth
        for depth, branches in enumerate(counts)
        for branch, seen in branches.items()
        if any(_probabilities(target, sampling, (*context, *branch))[token] == 0 for token in seen)
    }
