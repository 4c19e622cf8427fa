"""Theory of speculative decoding: tokens per step, and the costs of steps and their forward passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from specbench.base.record import Seconds, ratio

SLOPE = 0.02
"""The assumed cost of another token in a target pass, in units of v(1)."""


def expected_tokens_by_position(rates: Iterable[float]) -> list[float]:
    """Return ``1 + Σ_{k≤γ} Π_{i≤k} a_i`` as item γ: the tokens of a step with γ drafts.

    It is equation 1 of Leviathan et al. 2023 with a rate for each position.

    Args:
        rates: a_1, a_2, ..., acceptance of tested positions; NaN (never tested) counts as 0.
    """
    survival = tokens = 1.0
    found = [tokens]
    for rate in rates:
        survival *= 0.0 if math.isnan(rate) else rate
        tokens += survival
        found.append(tokens)
    return found


def relative_pass(seconds: float, one_s: float) -> float:
    """Return the time of a target's pass over that with one token: at least 1, whatever noise says; NaN if that is 0.

    So no predicted speedup is higher than the tokens per step.
    """
    return max(ratio(seconds, one_s), 1.0)  # of NaN and 1 the first


PassSeconds = Mapping[Annotated[int, Meta(ge=1, lt=10**8)], Seconds]
"""Seconds of forward passes by tokens, nodes or requests; ascending. A coarse clock measures 0."""


class PassCosts(
    Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "target_s": "target_pass_s",
        "drafter_s": "drafter_pass_s",
        "later_s": "drafter_later_pass_s",
        "context": "context_tokens",
        "context_s": "target_context_s",
        "error": "context_error",
        "reading_s": "drafter_reading_s",
    },
):
    """Seconds of forward passes.

    Passes timed at several lengths of context are fitted by f(n) + k(n) · context, see ``fit_context``.

    Attributes:
        target_s: Of the target, by number of tokens, ascending; none longer than one with more tokens.
        drafter_s: Of drafting one token, by drafter: of the first pass of a draft.
        context: Tokens of context they were timed at, of several lengths the shortest; ``None`` if unknown.
        context_s: By which a target's pass takes longer with each further token of context, by number of tokens in the
            pass; empty if one length was timed.
        error: Root mean square of the fit's relative errors; ``None`` if one length was timed.
        reading_s: Seconds in which a drafter reads a context before it can draft, by drafter and tokens; empty without.
        later_s: Of each further pass of a chain, by drafter; where it was not timed, as the first.
    """

    target_s: PassSeconds
    drafter_s: Mapping[str, Seconds] = {}
    context: int | None = None
    context_s: PassSeconds = {}
    error: float | None = None
    reading_s: Mapping[str, PassSeconds] = {}
    later_s: Mapping[str, Seconds] = {}

    def __post_init__(self) -> None:
        force_setattr(self, "target_s", never_falling(self.target_s))
        force_setattr(self, "context_s", dict(sorted(self.context_s.items())))

    def target_pass_s(self, n: float) -> float:
        """Return the seconds of a target's pass with ``n`` tokens, by linear interpolation.

        Beyond the widest it follows the last two, never falling, or ``SLOPE`` after a single one.
        """
        return _prolonged(self.target_s, n)

    def drafting_s(self, drafter: str, passes: float) -> float:
        """Return the seconds of a draft of so many passes; a drafter without passes is asked once."""
        first = self.drafter_s.get(drafter, 0.0)
        later = self.later_s.get(drafter, first)
        return min(1.0, passes or 1.0) * first + max(0.0, passes - 1.0) * later

    def step_s(self, drafter: str, drafted: float, passes: float) -> float:
        """Return the seconds of a step: a draft of so many tokens and passes, and the target's pass over it.

        Expected tokens per step over this are the expected tokens per second. NaN without the target's times.
        """
        if not self.target_s:
            return math.nan
        return self.target_pass_s(1.0 + drafted) + self.drafting_s(drafter, passes)


def fit_context(times: Mapping[int, float]) -> tuple[float, float, list[float]]:
    """Fit times at several lengths of context by a line that never falls, so that relative errors are smallest.

    Args:
        times: Seconds by length of context, at least one.

    Returns:
        The line's seconds at the shortest length, its seconds per token, and the relative errors: fitted over measured,
        minus 1.
    """
    first = min(times)
    if len(times) == 1:
        return times[first], 0.0, [0.0]
    points = [(context - first, seconds, seconds**-2) for context, seconds in times.items() if seconds > 0]
    if not points:
        return 0.0, 0.0, []
    start, slope = fit_line(points)
    return start, slope, [(start + slope * x) / y - 1.0 for x, y, _ in points]


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a line that never falls to points (x, y, weight) by least squares; return its value at 0 and its slope."""
    total = sum(w for _, _, w in points)
    x_mean = sum(w * x for x, _, w in points) / total
    y_mean = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
    slope = 0.0
    if spread > 0:
        slope = max(0.0, sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread)
    return y_mean - slope * x_mean, slope


def _prolonged(points: Mapping[int, float], n: float) -> float:
    """See ``PassCosts.target_pass_s``."""
    *_, last = points
    if n <= last:
        return interpolate(points, n)
    rise = SLOPE * points[last]
    if len(points) > 1:
        *_, before, _ = points
        rise = max(0.0, (points[last] - points[before]) / (last - before))
    return points[last] + rise * (n - last)


def interpolate(points: Mapping[int, float], n: float) -> float:
    """Return the value at ``n``, linear between neighbors and constant beyond the ends; 0 without points."""
    below, above = None, None
    for width, value in points.items():
        if width == n:
            return value
        if width < n:
            below = (width, value)
        else:
            above = (width, value)
            break
    if below is None or above is None:
        known = below or above
        return known[1] if known else 0.0
    return below[1] + (above[1] - below[1]) * (n - below[0]) / (above[0] - below[0])


def reading_seconds(points: Mapping[int, float], tokens: float) -> float:
    """Return the seconds to read so many tokens: linear from 0 and between those given, beyond as between the last two;
    0 without any.
    """
    return _prolonged({0: 0.0, **points}, tokens) if points else 0.0


def never_falling(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return times by number of tokens, ascending, none longer than one with more tokens (it was disturbed)."""
    least = math.inf
    found = {}
    for n in sorted(seconds, reverse=True):
        found[n] = least = min(seconds[n], least)
    return dict(reversed(found.items()))
