"""Times of forward passes by number of tokens, or by the experts that they read, and of drafts, from samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import NamedTuple

from specbench.decoding.theory import SLOPE, interpolate, never_falling

LATEST_STEPS = 9
"""How many of the latest steps count, for each number of verified tokens, and of a draft's passes."""

_FAR = 4
"""The assumed slope weighs as much as one step with one token and one with this many more."""

_EXPERTS_SHARE = 0.7
"""The assumed share of a pass over one token that it takes to read experts."""

_EXPERTS_PULL = 9.0
"""How many samples a number of tokens needs for half of its distance from a line over experts to count: such a line
holds better than one over tokens (in simulations ``auto`` gains 1% by 9 over 1)."""

_EQUAL = 0.1
"""The weight, in samples, of the assumption that a draft's first pass takes as long as each later one."""

_GROWTH = 0.9
"""The r of ``ExpertRows`` before several tokens were seen."""

_COUNTS = 32
"""How many counts of experts are kept, for each number of tokens."""

_HALVINGS = 20
"""Steps of the search for r, which make it exact to 1e-6."""

INSTANT = 1e-9
"""A lower bound for times, as clocks may be coarse."""


class ExpertRows:
    """Experts that passes over 1, 2, ... tokens read, over those of one token, from the counts of passes.

    Each further token adds r times as many experts as the one before, so that n tokens read (1 - r^n) / (1 - r): with
    independent choices of k out of N experts r is 1 - k / N. r is fitted to the means of the numbers of tokens that
    were seen. Such a number has its own mean, which counts the more the more often it was seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._known: list[float] = [0.0, 1.0]
        self._growth = _GROWTH

    def add(self, n: int, ratio: float) -> None:
        """Add the count of a pass over ``n`` tokens."""
        self._seen.setdefault(n, deque(maxlen=_COUNTS)).append(ratio)
        self._known = [0.0, 1.0]
        points = [(each, fmean(seen), len(seen)) for each, seen in self._seen.items() if each > 1]
        if points:
            low, high = 0.0, 1.0
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                misses = sum(count * (_series(middle, each) - mean) for each, mean, count in points)
                low, high = (middle, high) if misses < 0 else (low, middle)
            self._growth = (low + high) / 2

    def __call__(self, n: int) -> float:
        """Return how many times the experts of one token a pass over ``n`` reads; never less than over fewer."""
        for each in range(len(self._known), n + 1):
            expected, seen = _series(self._growth, each), self._seen.get(each, ())
            self._known.append(max(self._known[-1], (expected + sum(seen)) / (1 + len(seen))))
        return self._known[n]


def _series(ratio: float, n: int) -> float:
    """Return 1 + ratio + ... over ``n`` terms."""
    return float(n) if ratio >= 1.0 else (1.0 - ratio**n) / (1.0 - ratio)


def fit_drafts(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Return the time of a draft's first pass and of each later one, not above it, from times by number of passes k.

    A draft's first pass also reads what was accepted, and next to other programs finds its core taken.
    The two are drawn towards equal ones, which is what they are while all times are of one k.
    """
    # Least squares of the relative errors of more + k · later; a long time, as disturbed ones are, weighs little.
    ones = k1 = kk = t1 = kt = 0.0
    for k, made in seconds.items():
        median = max(median_low(made), INSTANT)
        weight = len(made) / median**2
        ones += weight
        k1 += weight * k
        kk += weight * k * k
        t1 += weight * median
        kt += weight * k * median
    ones += _EQUAL * (kk / kt) ** 2
    more = max(0.0, (kk * t1 - k1 * kt) / (kk * ones - k1 * k1))
    later = (kt - more * k1) / kk
    return (more + later, later) if later >= 0.0 else (t1 / ones, 0.0)


class _Sample(NamedTuple):
    """The time of a pass over n tokens; ``place``: where it lies on the line."""

    n: int
    place: float
    seconds: float


class WidthTimes:
    """Seconds by number of tokens, from samples.

    A time is the (lower) median of its latest samples, and none exceeds one with more tokens, so single disturbed
    samples do not count. Rarely seen numbers of tokens are pulled towards a straight line through the others, and that
    line towards a gentle slope. The line is over the number of tokens, or over the experts read if samples have them:
    time = a + b · experts, and what is left by number of tokens. Then each sample counts with its own experts, and a
    number of tokens with those that it is expected to read (``ExpertRows``).

    Args:
        first: Number of tokens at which the assumed slope begins; ``None``: at the fewest tokens seen.

    Attributes:
        widest: The most tokens of a sample.
        count: Samples so far.
        experts: Experts by number of tokens; ``None`` without.
    """

    def __init__(self, first: int | None = 1) -> None:
        self._first = first
        self._samples: dict[int, deque[_Sample]] = {}
        self._latest: dict[int, int] = {}
        self._medians: dict[int, float] = {}
        self._line = (1.0, SLOPE)
        self._off_line: dict[int, float] = {}
        self._least = 1.0
        self.widest = self.count = 0
        self.experts: ExpertRows | None = None
        self._known: dict[int, float] = {}

    def add(self, n: int, seconds: float, step: int = 1, when: int = 0, experts: float | None = None) -> None:
        """Add a sample.

        Args:
            n: Its number of tokens. Those up to the same multiple of ``step`` count as one, along the line.
            when: Its time, see ``forget``.
            experts: The experts that it read, over those of one token.
        """
        if experts is not None:
            if self.experts is None:
                self.forget(math.inf)  # what was timed without experts lies on another line
                self.experts = ExpertRows()
            self.experts.add(n, experts)
        place, slope = step * -(-n // step), self.slope_s
        self._latest[place] = when
        own = self._place(n) if experts is None else experts - 1.0
        self._samples.setdefault(place, deque(maxlen=LATEST_STEPS)).append(_Sample(n, own, seconds))
        self.widest = max(self.widest, n)
        self.count += 1
        if step == 1 and self.experts is None:
            self._medians[place] = median_low(each.seconds for each in self._samples[place])
        else:
            for each, samples in self._samples.items():
                here = self._place(each)
                self._medians[each] = median_low(
                    made.seconds + slope * (here - made.place) for made in samples
                )
        self._fit()

    def forget(self, before: float) -> None:
        """Drop numbers of tokens whose latest sample was taken before."""
        old = [place for place, when in self._latest.items() if when < before]
        if not old:
            return
        for place in old:
            del self._samples[place], self._medians[place], self._latest[place]
        self.count = sum(map(len, self._samples.values()))
        self.widest = max((made.n for samples in self._samples.values() for made in samples), default=0)
        self._known.clear()
        if self._samples:
            self._fit()

    def samples(self, n: int) -> int:
        """Return the number of samples of ``n`` tokens."""
        return len(self._samples.get(n, ()))

    @property
    def seen(self) -> Sequence[int]:
        """The numbers of tokens with samples, ascending."""
        return sorted(self._samples)

    @property
    def any(self) -> bool:
        """Whether there are samples."""
        return bool(self._samples)

    @property
    def first_s(self) -> float:
        """The line's time for one token."""
        return self._line[0]

    @property
    def slope_s(self) -> float:
        """The line's time for another token, or for as many experts as one token reads; 0 without samples."""
        return self._line[1] if self._samples else 0.0

    @property
    def error(self) -> float:
        """The median distance of samples from the line, over their times; 0 without samples."""
        first, slope = self._line
        made = [each for samples in self._samples.values() for each in samples if each.seconds > 0]
        return median_low(abs(first + slope * e.place - e.seconds) / e.seconds for e in made) if made else 0.0

    def __call__(self, n: int) -> float:
        """Return the time of ``n`` tokens."""
        if n not in self._known:
            first, slope = self._line
            self._known[n] = max(first + slope * self._place(n) + interpolate(self._off_line, n), self._least)
        return self._known[n]

    def _place(self, n: int) -> float:
        """Return where ``n`` tokens lie on the line; 0 for one."""
        return n - 1.0 if self.experts is None else self.experts(n) - 1.0

    def _fit(self) -> None:
        """Fit a line through the medians, weighted by their samples, and keep the residuals."""
        medians = never_falling(self._medians)
        weights = {n: float(len(self._samples[n])) for n in medians}
        places = {n: self._place(n) for n in medians}
        assumed, pull = (SLOPE, 1.0) if self.experts is None else (_EXPERTS_SHARE, _EXPERTS_PULL)
        level = sum(w * medians[n] / (1 + assumed * places[n]) for n, w in weights.items()) / sum(
            weights.values()
        )
        points = [(places[n], medians[n], w) for n, w in weights.items()]
        start = min(medians) if self._first is None else self._first
        far = (self._place(start), self._place(start + _FAR))
        points += [(x, level * (1 + assumed * x), 1.0) for x in far]
        # n tokens never cost more together than separately.
        self._least = max(min(seconds / n for n, seconds in medians.items()), INSTANT)
        total = sum(w for _, _, w in points)
        x_mean = sum(w * x for x, _, w in points) / total
        y_mean = sum(w * y for _, y, w in points) / total
        spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
        slope = (
            max(0.0, sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread) if spread else 0.0
        )
        first = y_mean - slope * x_mean
        self._line = (first, slope)
        self._off_line = {
            n: (seconds - first - slope * places[n]) * weights[n] / (weights[n] + pull)
            for n, seconds in medians.items()
        }
        self._known.clear()
