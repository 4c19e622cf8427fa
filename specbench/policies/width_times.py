"""Times of forward passes by number of tokens, and of drafts, from samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from specbench.decoding.theory import SLOPE, fit_line, interpolate, never_falling

LATEST_STEPS = 9
"""How many of the latest steps count, for each number of verified tokens, and of a draft's passes."""

_FAR = 4
"""The assumed slope weighs as much as one step with one token and one with this many more."""

_EQUAL = 0.1
"""The weight, in samples, of the assumption that a draft's first pass takes as long as each later one."""

INSTANT = 1e-9
"""A lower bound for times, as clocks may be coarse."""


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
    """The time of a pass over n tokens."""

    n: int
    seconds: float


class WidthTimes:
    """Seconds by number of tokens, from samples.

    A time is the (lower) median of its latest samples, and none exceeds one with more tokens, so single disturbed
    samples do not count. Rarely seen numbers of tokens are pulled towards a straight line through the others, and that
    line towards a gentle slope.

    Args:
        first: Number of tokens at which the assumed slope begins; ``None``: at the fewest tokens seen.

    Attributes:
        widest: The most tokens of a sample.
        count: Samples so far.
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
        self._known: dict[int, float] = {}

    def add(self, n: int, seconds: float, step: int = 1, when: int = 0) -> None:
        """Add a sample.

        Args:
            n: Its number of tokens. Those up to the same multiple of ``step`` count as one, along the line.
            when: Its time, see ``forget``.
        """
        place, slope = step * -(-n // step), self.slope_s
        self._latest[place] = when
        self._samples.setdefault(place, deque(maxlen=LATEST_STEPS)).append(_Sample(n, seconds))
        self.widest = max(self.widest, n)
        self.count += 1
        if step == 1:
            self._medians[place] = median_low(each.seconds for each in self._samples[place])
        else:
            for each, samples in self._samples.items():
                self._medians[each] = median_low(made.seconds + slope * (each - made.n) for made in samples)
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
        """The line's time for another token; 0 without samples."""
        return self._line[1] if self._samples else 0.0

    def __call__(self, n: int) -> float:
        """Return the time of ``n`` tokens."""
        if n not in self._known:
            first, slope = self._line
            self._known[n] = max(first + slope * (n - 1) + interpolate(self._off_line, n), self._least)
        return self._known[n]

    def _fit(self) -> None:
        """Fit a line through the medians, weighted by their samples, and keep the residuals."""
        medians = never_falling(self._medians)
        weights = {n: float(len(self._samples[n])) for n in medians}
        level = sum(w * medians[n] / (1 + SLOPE * (n - 1)) for n, w in weights.items()) / sum(
            weights.values()
        )
        points = [(n - 1, medians[n], w) for n, w in weights.items()]
        start = min(medians) if self._first is None else self._first
        points += [(x, level * (1 + SLOPE * x), 1.0) for x in (start - 1, start - 1 + _FAR)]
        # n tokens never cost more together than separately.
        self._least = max(min(seconds / n for n, seconds in medians.items()), INSTANT)
        first, slope = self._line = fit_line(points)
        self._off_line = {
            n: (seconds - first - slope * (n - 1)) * weights[n] / (weights[n] + 1.0)
            for n, seconds in medians.items()
        }
        self._known.clear()
