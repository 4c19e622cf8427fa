"""The costs of forward passes of the drafter and the target, measured during the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING

from specbench.decoding.protocols import NewPrompt
from specbench.decoding.theory import SLOPE, fit_line, interpolate, never_falling

if TYPE_CHECKING:
    from specbench.decoding.records import Step

LATEST = 9
"""How many of the latest samples of a kind of pass are kept."""

_CHANGED = 1.5
"""Three drafts in a row that take this many times as long as expected, or as short, make earlier ones obsolete."""

ASSUMED_C = 0.2
"""The cost ratio assumed before a drafter's pass is measured."""

INSTANT = 1e-9
"""Times are at least this long, since a coarse clock may measure 0."""

_FIRST = 3
"""The longest draft before anything is timed."""

_FAR = 4
"""The assumed slope of the target's times counts like two samples: of one token, and of this many more."""

_NOISE = 0.07
"""The standard deviation of a sample, of its time: what is off the line by less is taken to lie on it."""

_EQUAL = 0.1
"""The weight, in samples, of the assumption that a draft's first pass takes as long as each later one."""


def passes_of(step: Step) -> int:
    """Return the drafter's passes of a step, which are as many as draft tokens if they were not counted."""
    return step.gamma if step.passes is None else step.passes


class CostTable:
    """Seconds of forward passes, by which a policy decides; only their ratios matter.

    Attributes:
        first_s, later_s: The time of a draft's first pass, and of each later one.
        timings: How many drafts were timed: 0 while their time is assumed, infinite without a model.
        longest: The longest draft whose time can be estimated.
        timed: The numbers of tokens whose passes of the target were timed, ascending; empty if that is not counted.
        restart_s: The time of the latest draft after steps without one; it may include reading what these emitted.
        reading_s: The time in which the drafter's model reads what it has not read before it can draft.
    """

    first_s: float
    later_s: float
    timings: float = math.inf
    longest: float = math.inf
    timed: Sequence[int] = ()
    restart_s: float = 0.0

    @property
    def reading_s(self) -> float:
        return 0.0

    def verify_s(self, n: int) -> float:
        """Return the time of a step without its draft, in which ``n`` tokens are verified."""
        raise NotImplementedError

    def step_s(self, passes: int, n: int) -> float:
        """Return the time of a step with so many passes of the drafter, in which ``n`` tokens are verified."""
        return self.drafting_s(passes) + self.verify_s(n)

    def samples(self, n: int) -> float:
        """Return how many steps that verify ``n`` tokens were timed; infinite if that is not counted."""
        return math.inf

    def drafting_s(self, passes: float, before: int = 0) -> float:
        """Return the time of so many passes of the drafter after ``before`` others in the same step."""
        if passes <= 0:
            return 0.0
        return (self.later_s if before else self.first_s) + (passes - 1) * self.later_s

    def begin(self, prompt: NewPrompt) -> None:
        """Start a prompt."""
        self._unread, self._share = prompt.unread, prompt.drafter.reading_share

    def observe(self, step: Step) -> None:
        """Measure a finished step."""
        if passes_of(step):
            self._unread = 0


class MeasuredCosts(CostTable):
    """Costs from the times of the steps of one output.

    Drafts are timed by number of passes, since a draft's first pass often takes longer than the next ones. A sample is
    scaled by how much faster or slower than usual the rest of its step was: a slow machine slows both models, and while
    nothing is drafted only the target's passes show that it has recovered.

    Until anything was timed, the target is assumed to read a token in no more than a pass over one.
    """

    def __init__(self) -> None:
        self.begin(NewPrompt())

    def begin(self, prompt: NewPrompt) -> None:
        super().begin(prompt)
        self._prefill_s = prompt.token_s
        # Of the latest drafts, by passes: seconds over those of the rest of the step, and its verified tokens.
        self._drafts: dict[int, deque[tuple[float, int]]] = {}
        # The last three of all these, with their passes.
        self._last: deque[tuple[int, tuple[float, int]]] = deque(maxlen=3)
        self._drafted = True  # in the last step
        self._rest = PassTimes()
        self.timings, self.longest, self.timed, self.restart_s = 0, _FIRST, (), 0.0
        self.first_s = self.later_s = ASSUMED_C * self._rest.first_s

    def verify_s(self, n: int) -> float:
        return self._rest.seconds(n)

    def samples(self, n: int) -> float:
        return len(self._rest.seen.get(n, ()))

    @property
    def reading_s(self) -> float:
        token_s = self._prefill_s if self._rest.seen else self._rest.first_s
        return self._share * self._unread * token_s

    def observe(self, step: Step) -> None:
        passes = passes_of(step)
        draft_s, rest_s = self._sample(step, passes)
        self._drafted = passes > 0
        super().observe(step)
        self._rest.add(step.verified, rest_s)
        self.timed = sorted(self._rest.seen)
        self.longest = max(_FIRST, 2 * (self.timed[-1] - 1))
        if draft_s is not None:
            self._add(passes, passes * draft_s / max(rest_s, INSTANT), step.verified)
        if not self._drafts:
            self.first_s = self.later_s = ASSUMED_C * self._rest.first_s
            return
        made = {
            k: [share * self._rest.seconds(n) for share, n in drafts] for k, drafts in self._drafts.items()
        }
        self.first_s, self.later_s = fit_drafts(made)

    def _add(self, passes: int, share: float, n: int) -> None:
        """Add the time of a draft, as a share of the rest of its step, in which ``n`` tokens were verified."""
        added = [(passes, (share, n))]
        self._last += added
        self.timings += 1
        ratios = [
            share * self._rest.seconds(n) / max(self.drafting_s(k), INSTANT) for k, (share, n) in self._last
        ]
        if self.timings > 3 and (min(ratios) > _CHANGED or max(ratios) < 1 / _CHANGED):
            self._drafts, self.timings, added = {}, 3, [*self._last]
        for k, sample in added:
            self._drafts.setdefault(k, deque(maxlen=LATEST)).append(sample)

    def _sample(self, step: Step, passes: int) -> tuple[float | None, float]:
        """Return seconds per drafter's pass, ``None`` where the step does not tell, and of the rest of the step."""
        times = step.times
        rest_s = times.total_s - times.draft_s
        passes -= times.draft_prefill_s > 0  # the pass that read the prompt gave the first token too
        if passes < 1:
            return None, rest_s
        draft_s = max(0.0, times.draft_s - times.draft_prefill_s)
        # After steps without a draft the first pass has read more than usual, and the time is only an upper bound.
        if not self._drafted:
            self.restart_s = draft_s
        if not self._drafted and draft_s >= (1 - 2 * _NOISE) * self.drafting_s(passes):
            self.timings += 1
            return None, rest_s
        return draft_s / passes, rest_s


class PassTimes:
    """Seconds by number of tokens, from samples.

    A time is the (lower) median of its latest samples, and none exceeds one with more tokens, so single disturbed
    samples do not count. It is pulled towards a straight line through all, the more the nearer it is (James and Stein
    1961) and the fewer its samples are, and that line towards a gentle slope.

    Attributes:
        seen: The latest samples by number of tokens.
        first_s: The line's time for one token.
    """

    def __init__(self) -> None:
        self.seen: dict[int, deque[float]] = {}
        self.first_s, self._slope_s = 1.0, SLOPE
        self._off_line: dict[int, float] = {}
        self._least_s = 1.0
        self._known: dict[int, float] = {}

    def seconds(self, n: int) -> float:
        """Return the time of ``n`` tokens."""
        if n not in self._known:
            line_s = self.first_s + self._slope_s * (n - 1)
            self._known[n] = max(line_s + interpolate(self._off_line, n), self._least_s)
        return self._known[n]

    def add(self, n: int, seconds: float) -> None:
        """Add a sample, fit a line through the medians, weighted by their samples, and keep the residuals."""
        self.seen.setdefault(n, deque(maxlen=LATEST)).append(seconds)
        weights = {n: float(len(made)) for n, made in self.seen.items()}
        medians = never_falling({n: median_low(made) for n, made in self.seen.items()})
        level = sum(w * medians[n] / (1 + SLOPE * (n - 1)) for n, w in weights.items()) / sum(
            weights.values()
        )
        points = [(n - 1, medians[n], w) for n, w in weights.items()]
        points += [(x, level * (1 + SLOPE * x), 1.0) for x in (0, _FAR)]
        self.first_s, self._slope_s = first, slope = fit_line(points)
        # n tokens never cost more together than separately.
        self._least_s = max(min(median_s / n for n, median_s in medians.items()), INSTANT)
        self._off_line = {}
        for n, median_s in medians.items():
            off, noise = median_s - first - slope * (n - 1), max(_NOISE * median_s, INSTANT)
            self._off_line[n] = off * weights[n] * off**2 / (weights[n] * off**2 + noise**2)
        self._known.clear()


def fit_drafts(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Return the time of a draft's first pass and of each later one, not above it, from times by number of passes k.

    A draft's first pass also reads what was accepted, and next to other programs finds its core taken.
    The two are drawn towards equal ones, which is what they are while all times are of one k.
    """
    medians = {k: max(median_low(made), INSTANT) for k, made in seconds.items()}
    # Least squares of relative errors; a long time, as disturbed ones are, weighs little.
    points = [(k, time, len(seconds[k]) / time**2) for k, time in medians.items()]
    equal_s = sum(w * k * time for k, time, w in points) / sum(w * k * k for k, _, w in points)
    more_s, later_s = fit_line([*points, (0, 0.0, _EQUAL / equal_s**2)])
    return (more_s + later_s, later_s) if more_s > 0 else (equal_s, equal_s)
