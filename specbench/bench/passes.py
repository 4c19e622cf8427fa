"""Times of forward passes: of the target by number of tokens, and of drafters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from random import Random
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from specbench.decoding.theory import PassCosts, fit_context, never_falling
from specbench.results.lines import CostLine

if TYPE_CHECKING:
    import torch

    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.protocols import Drafter

_CONTEXT = 256  # tokens of context at which passes are timed
_DRAFTED = 4  # tokens of the longer drafts, which show what passes after the first one take
_AGAIN, _FALL = 2, 0.1
"""How often all passes are timed again while one over fewer tokens seems to take this share longer than a wider one."""

Name = TypeVar("Name")


def pass_costs(lines: Sequence[CostLine]) -> PassCosts:
    """Return the median times of forward passes in lines of ``costs.jsonl``, fitted over lengths of context if there
    are several.
    """
    contexts = {line.context_tokens for line in lines if line.kind != "reading"}
    first = min(contexts, default=0)
    targets = _by_context(_medians(lines, "target", "tokens", "context_tokens"))
    drafts = _by_context(_medians(lines, "drafter", "drafter", "passes", "context_tokens"))
    drafters = {name: times for (name, passes), times in drafts.items() if passes == 1}
    fitted = {key: fit_context(times) for key, times in {**targets, **drafters}.items()}
    draft_s = {name: fitted[name][0] for name in drafters}
    later_s = _later_passes(drafts, {name: fitted[name][1] for name in drafters}, first)
    target = {n: fitted[n][0] for n in sorted(targets)}
    reading = _by_context(_medians(lines, "reading", "drafter", "context_tokens"))
    costs = PassCosts(
        target,
        draft_s,
        first,
        reading_s={name: dict(sorted(times.items())) for name, times in reading.items()},
        later_s=later_s,
    )
    if len(contexts) < 2:
        return costs
    errors = [error for _, _, each in fitted.values() for error in each]
    return msgspec.structs.replace(
        costs,
        context_s={n: fitted[n][1] for n in targets},
        error=math.sqrt(sum(error**2 for error in errors) / max(1, len(errors))),
    )


def _later_passes(
    drafts: Mapping[tuple[str, int], Mapping[int, float]], slopes: Mapping[str, float], first: int
) -> dict[str, float]:
    """Return the time of each pass after the first one of a draft, by drafter.

    Args:
        drafts: Times of drafts by drafter and passes, and then by context.
        slopes: The seconds by which the first pass grows with each token of context; those after it are taken to
            grow by as many.
        first: The context to return times at.
    """
    found: dict[str, list[float]] = {}
    for (name, passes), times in drafts.items():
        single = drafts.get((name, 1), {})
        for context in times.keys() & single.keys() if passes > 1 else ():
            later_s = (times[context] - single[context]) / (passes - 1)
            found.setdefault(name, []).append(max(0.0, later_s - slopes[name] * (context - first)))
    return {name: fmean(each) for name, each in found.items()}


def _by_context(medians: Mapping[Any, float]) -> dict[Any, dict[int, float]]:
    """Return times by what they are of, and then by context, which is the last part of their keys."""
    found: dict[Any, dict[int, float]] = {}
    for (*key, context), seconds in medians.items():
        found.setdefault(key[0] if len(key) == 1 else tuple(key), {})[context] = seconds
    return found


def _medians(lines: Sequence[CostLine], kind: str, *names: str) -> dict[Any, float]:
    """Return the median time of lines of a kind, by the fields in ``names``."""
    key = attrgetter(*names)
    times: dict[Any, list[float]] = {}
    for line in lines:
        if line.kind == kind:
            times.setdefault(key(line), []).extend(line.seconds)
    return {each: median(seconds) for each, seconds in times.items()}


def cost_widths(gammas: Sequence[int], nodes: Sequence[int] = ()) -> list[int]:
    """Return the numbers of tokens for which to time the target: one, n + 1 for each draft length n, and small ones
    between.

    Without ``gammas``, draft lengths up to 16 are used. ``nodes`` are the maximum numbers of nodes of draft trees.
    """
    longest = max((*(gammas or (16,)), *nodes)) + 1
    return sorted({*range(1, min(longest, 17) + 1), *(n + 1 for n in (*gammas, *nodes))})


class _Passes:
    """A target and drafters that have read the same context, whose passes are timed one by one.

    Attributes:
        reading: Seconds in which a drafter reads the context, by its name.
        passes: How many passes draft several tokens, by the drafter's name.
    """

    def __init__(self, scorer: Scorer, text: Sequence[int], clock: Clock) -> None:
        self._scorer, self._text, self._clock = scorer, text, clock
        self.reading: dict[str, float] = {}
        self.passes: dict[str, int] = {}

    def begin(self, drafters: Iterable[Drafter]) -> None:
        """Have the target and drafters read the context."""
        from specbench.decoding.protocols import ForwardRequest

        scorer, text = self._scorer, self._text
        scorer.begin()
        self.target(1)
        for drafter in dict.fromkeys(drafters):
            layers = drafter.traits.layers
            if layers:
                scorer.begin()
            drafter.begin(text)
            if layers:  # it needs the target's states
                states = scorer.score(ForwardRequest(scorer, text[:-1], rows=1, layers=layers)).hidden
                assert states is not None
                drafter.update(_no_tokens(text, states))
            self.draft(drafter)

    def target(self, tokens: int) -> float:
        """Time a pass of the target; of plain decoding, the second of two equal passes."""
        from specbench.decoding.protocols import ForwardRequest

        drafted = [self._text[i % len(self._text)] for i in range(tokens - 1)]
        took = 0.0
        for _ in range(2 if tokens == 1 else 1):
            began = self._clock()
            self._scorer.score(ForwardRequest(self._scorer, self._text, drafted))
            took = self._clock() - began
            self._scorer.rollback(len(self._text) - 1)
        return took

    def draft(self, drafter: Drafter, tokens: int = 1) -> float:
        """Time drafting tokens."""
        from specbench.decoding.protocols import StepPlan, run_to_end
        from specbench.decoding.sampling import Randomness, Sampling
        from specbench.policies import FixedLength

        name = drafter.traits.name
        plan = StepPlan(tokens, FixedLength(tokens), Sampling(), Randomness(0))
        began = self._clock()
        found = run_to_end(drafter.propose(self._text, plan))
        took = self._clock() - began
        self.reading[name] = self.reading.get(name, 0.0) + found.prefill_s
        if tokens > 1:
            self.passes[name] = len(found.tokens) if found.passes is None else found.passes
        drafter.update(_no_tokens(self._text))
        return took

    def drafting(self, drafter: Drafter, tokens: int = 1) -> float:
        """Time a draft with what it costs the target: its next pass finds less in the caches than one after a pass."""
        from specbench.drafters.parts import models_of

        took = self.draft(drafter, tokens)
        return took + (max(0.0, self.target(2) - self.target(2)) if models_of(drafter) else 0.0)


def time_passes(
    scorer: Scorer,
    drafters: Mapping[str, Drafter],
    prompt: Sequence[int],
    widths: Sequence[int],
    clock: Clock,
    rounds: int,
    order: Random,
    *,
    context: int | None = None,
) -> list[CostLine]:
    """Time forwards of a target and drafts of one and of several tokens in turn, after the same context. The target's
    cache is left empty.

    Args:
        scorer, drafters: The target's scorer, and drafters by name; one with several names is timed once.
        prompt: Tokens, repeated to fill the context.
        widths: Numbers of tokens in a forward pass of the target.
        clock: Clock of the target's device.
        rounds, order: Number of forward passes of each kind, and the random generator that shuffles them.
        context: Tokens of context; ``None`` for 256. A drafter that cannot read so many is not timed.
    """
    from specbench.drafters.parts import context_limit, without_guesses

    wanted = context or _CONTEXT
    limit = scorer.context_limit or wanted + max(widths)
    length = max(1, min(wanted, limit - max(widths)))
    text = (list(prompt) * (length // max(1, len(prompt)) + 1))[:length]
    drafters = {name: each for name, each in drafters.items() if (context_limit(each) or length) >= length}
    timed = _Passes(scorer, text, clock)
    timed.begin(drafters.values())
    jobs: dict[Any, Callable[[], float]] = {n: partial(timed.target, n) for n in widths}
    for drafter in drafters.values():
        jobs[drafter, "one"] = partial(timed.drafting, drafter)
        jobs[drafter, "several"] = partial(timed.drafting, drafter, tokens=_DRAFTED)
    with without_guesses(drafters.values()):
        times = time_in_turn(jobs, rounds, order)
        for _ in range(_AGAIN):
            if not _falls({n: median(times[n]) for n in widths}):
                break
            for job, more in time_in_turn(jobs, rounds, order).items():
                times[job] += more
    scorer.begin()
    lines = [CostLine(kind="target", tokens=n, seconds=times[n], context_tokens=length) for n in widths]
    for name, drafter in drafters.items():
        at: dict[str, Any] = {"drafter": name, "context_tokens": length}
        count, read_s = timed.passes[drafter.traits.name], timed.reading[drafter.traits.name]
        # A pass that drafts several tokens takes longer than one that drafts one.
        one = times[drafter, "several" if count == 1 else "one"]
        lines.append(CostLine(kind="drafter", seconds=one, **at))
        if count > 1:
            lines.append(CostLine(kind="drafter", seconds=times[drafter, "several"], passes=count, **at))
        if read_s > 0:
            lines.append(CostLine(kind="reading", seconds=[read_s], **at))
    return lines


def _falls(seconds: Mapping[int, float]) -> bool:
    """Return whether a pass seems to take clearly longer than one over more tokens, as on a disturbed machine."""
    return any((1 - _FALL) * seconds[n] > least for n, least in never_falling(seconds).items())


def _no_tokens(context: Sequence[int], states: torch.Tensor | None = None) -> StepOutcome:
    """Return an outcome without tokens, which rolls back a timed draft so that it can be repeated."""
    import torch

    from specbench.decoding.drafts import StepOutcome

    return StepOutcome(context, 0, torch.empty(1, 1), states=states)


def time_in_turn(
    jobs: Mapping[Name, Callable[[], float]], rounds: int, order: Random
) -> dict[Name, list[float]]:
    """Repeat measurements in rounds, each round with all of them in a new random order; return their times in seconds.

    A disturbance then affects a few times of each measurement, and not the median.
    """
    for measure in jobs.values():
        measure()  # every shape of pass once before
    times: dict[Name, list[float]] = {name: [] for name in jobs}
    names = list(jobs)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            times[name].append(round(jobs[name](), 9))
    return times
