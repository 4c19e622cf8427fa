"""Ratios with intervals: pure functions on arrays. Definitions and their pitfalls: docs/metrics.md.

The unit of replication is the prompt. Measurements of one prompt (its repeats, the turns of its conversation) are
averaged first, on the log scale: more repeats make a prompt's mean more precise but never count as more prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import ArrayLike, NDArray

from specbench.base.record import Estimate

CONFIDENCE = 0.95
"""Nominal coverage of intervals."""

AT_EVERY_LOOK = 0.9925
"""Nominal coverage of each interval in a run that may stop at any of several looks, so that those of all looks hold
together as often as a single interval of ``CONFIDENCE`` (benchmarks/interval_coverage.py)."""

WIDEST = 10.0
"""Largest ratio of an interval's ends that are shown: those of two repeats or of a race's first blocks say nothing."""

FEWEST = 3
"""Fewest prompts, or groups of requests, that have an interval: of two, it is as good as without ends."""

FEW = 4
"""So many values, if all are equal, have an interval without width; fewer say nothing of others."""

STEEPEST = 0.95
"""Limit of skewness × quantile / sqrt(n) in the correction for skewness. Near 1 its inverse becomes vertical: the
interval of a few values with an outlier would get several times as wide without covering the mean more often."""

_ROUNDING = 1e-13
"""Logarithms of ratios of equal values are at most this far from 0."""

Floats: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = Sequence[Any] | NDArray[Any]
Verdict = Literal["faster", "slower", "cannot tell"]
Basis = Literal["prompts", "repeats"]

WIDENED = 1.5
"""Factor by which intervals of ratios are widened, on the logarithmic scale, on a busy machine."""

PROVISIONAL = (
    "faster?, slower?: the machine was busy, so the intervals of ratios are 1.5 times as wide (on the logarithmic"
    " scale). Measure again on a quiet machine."
)
"""Explains provisional verdicts below tables."""


# --- Means and intervals --------------------------------------------------------------------------


def nested_means(
    values: ArrayLike, prompts: Labels, repeats: Labels | None = None
) -> tuple[NDArray[Any], Floats]:
    """Return the mean of each prompt: first over its turns in each repeat, then over the repeats.

    Args:
        values: Measured values, shape [values]. NaN is left out.
        prompts: The prompt of each value.
        repeats: The repeat of each value; ``None`` averages all values of a prompt together.

    Returns:
        The labels of the prompts in sorted order, and their means.
    """
    data = np.asarray(values, dtype=np.float64)
    keep = ~np.isnan(data)
    data = data[keep]
    names, prompt = np.unique(np.asarray(prompts)[keep], return_inverse=True)
    if repeats is not None and len(data):
        _, repeat = np.unique(np.asarray(repeats)[keep], return_inverse=True)
        cells, cell = np.unique(prompt * (int(repeat.max()) + 1) + repeat, return_inverse=True)
        data = _group_means(data, cell, len(cells))
        prompt = cells // (int(repeat.max()) + 1)
    return names, _group_means(data, prompt, len(names))


def mean_interval(
    values: ArrayLike, confidence: float = CONFIDENCE, fewest: int = FEWEST
) -> tuple[float, float] | None:
    """Return an interval for the population mean of ``values``; ``None`` for fewer than ``fewest``."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < fewest:
        return None
    low, high = mean_intervals(data, confidence)
    return float(low), float(high)


def mean_intervals(samples: ArrayLike, confidence: float = CONFIDENCE) -> tuple[Floats, Floats]:
    """Return the ends of an interval for the population mean of each of several samples.

    Two intervals are computed, and each end is the outer one of the two. Student's t covers normal and heavy-tailed
    values, but too rarely the long side of skewed values. Its inverse cubic transformation by the sample's skewness
    (P. Hall, J. R. Statist. Soc. B 54, 1992, with t in place of normal quantiles) covers skewed values, but is too
    short for heavy tails. The skewness uses the unbiased third moment (H. Cramér, Mathematical Methods of Statistics,
    1946, section 27.6), since the plain third moment of a few values is much too small; it is limited to
    ``STEEPEST``. benchmarks/interval_coverage.py measures the coverage.

    Args:
        samples: Samples of n values each, shape [..., n], n at least 2.
        confidence: Intended coverage.

    Returns:
        Lower and upper ends, shape [...].
    """
    data = np.asarray(samples, dtype=np.float64)
    n = data.shape[-1]
    mean = data.mean(axis=-1)
    spread = data.std(axis=-1, ddof=1)
    quantile, root = _t_quantile(0.5 + confidence / 2, n - 1), math.sqrt(n)
    third = ((data - mean[..., None]) ** 3).mean(axis=-1) * (n * n / ((n - 1) * (n - 2)) if n > 2 else 0.0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        skewness = np.where(spread > 0.0, third / spread**3, 0.0)
    limit = STEEPEST * root / quantile
    skewness = np.clip(np.nan_to_num(skewness), -limit, limit)
    error = spread / root
    low = mean - error * np.maximum(quantile, _skewed_quantile(quantile, skewness, n))
    high = mean - error * np.minimum(-quantile, _skewed_quantile(-quantile, skewness, n))
    return low, high


def upper_bound(
    values: ArrayLike, error: float, groups: Labels | None = None, *, doubt: float = 0.0
) -> float:
    """Return a bound that the population mean of ``values`` exceeds with probability ``error``.

    The bound is Student's t, which assumes normal values. The correction for skewness in ``mean_interval`` is not used:
    its cubic polynomial is made for small deviations and diverges at the small probabilities that races use. The bound
    is infinite for fewer than two values.

    Args:
        values: The sample, shape [n].
        error: Probability of exceeding the bound.
        groups: The group of each value, if values were drawn from all groups in turn. Chance then does not decide how
            many values a group has, so only the variance within groups counts (proportional stratified sampling,
            Cochran 1977, section 5.6). Groups are used if each has at least two values. ``None`` is one group.
        doubt: Standard deviation of an error that all values have in common.
    """
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    if n < 2:
        return math.inf
    names, group = np.unique(np.zeros(n) if groups is None else np.asarray(groups), return_inverse=True)
    if n < 2 * len(names):
        names, group = names[:1], np.zeros(n, dtype=np.intp)
    rest = data - _group_means(data, group, len(names))[group]
    freedom = n - len(names)
    scatter = math.sqrt(float(rest @ rest) / freedom)
    return float(data.mean() + _t_quantile(1.0 - error, freedom) * math.hypot(scatter / math.sqrt(n), doubt))


@lru_cache(maxsize=256)
def _t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, from the median on.

    With t = sqrt(freedom) tan(angle), the density of the angle is a power of its cosine. Its distribution is concave,
    so that Newton's method comes from below.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    places, weights = np.polynomial.legendre.leggauss(64)
    angle, step = 0.0, 1.0
    while step > 1e-15 * angle and (density := math.cos(angle) ** (freedom - 1)):
        area = angle / 2 * float(weights @ np.cos(angle / 2 * (places + 1)) ** (freedom - 1))
        step = ((probability - 0.5) / scale - area) / density
        angle += step
    return math.sqrt(freedom) * math.tan(angle)


def _skewed_quantile(quantile: float, skewness: Floats, n: int) -> Floats:
    """Return the quantile of the t statistic of skewed values, by the inverse of Hall's cubic transformation."""
    straight = np.abs(skewness) < 1e-6  # the transformation tends to the identity
    bent = np.where(straight, 1.0, skewness)
    inner = 1.0 + bent * (quantile / math.sqrt(n) - bent / (6.0 * n))
    return np.where(straight, quantile, math.sqrt(n) * 3.0 / bent * (np.cbrt(inner) - 1.0))


def geometric_mean(
    values: ArrayLike, prompts: Labels, repeats: Labels | None = None, confidence: float = CONFIDENCE
) -> Estimate:
    """Return the geometric mean over prompts, of ratios or of speeds.

    Args:
        values: Positive, shape [values]: ratios of generations paired by prompt, turn and repeat, or speeds. NaN is
            left out.
        prompts, repeats: The prompt and the repeat of each value.
        confidence: Coverage of the interval.

    Returns:
        The estimate. With one or two prompts, the interval is over repeats, and the estimate's basis says so.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log(np.asarray(values, dtype=np.float64))
    logs[~np.isfinite(logs)] = np.nan
    names, means = nested_means(logs, prompts, repeats)
    if not len(names):
        return Estimate(math.nan, None, None, 0, None)
    interval = mean_interval(means, confidence)
    basis: Basis = "prompts"
    if interval is None and repeats is not None:
        interval = mean_interval(nested_means(logs, repeats)[1], confidence, fewest=2)
        basis = "repeats"
    return _exponential(float(means.mean()), interval, len(names), basis)


def pooled_rate(
    numerators: ArrayLike,
    denominators: ArrayLike,
    prompts: Labels,
    *,
    least: float = 0.0,
    most: float = math.inf,
) -> Estimate:
    """Return a ratio of sums, such as accepted over drafted tokens, with a jackknife interval over the prompts.

    Long outputs weigh more. The interval ends at ``least`` and ``most``, between which the rate always lies.
    """
    sums = _sums_by_prompt(prompts, numerators, denominators)

    def rate(n: Floats, d: Floats) -> Floats:
        return n / d

    value, interval = _jackknife(rate, sums, CONFIDENCE)
    count = sums.shape[1]
    if interval is None or not _telling(*interval, count):
        return Estimate(value, None, None, count, None)
    low, high = interval
    return Estimate(value, max(low, min(least, value)), min(high, max(most, value)), count, "prompts")


def pooled_speedup(
    tokens: ArrayLike,
    seconds: ArrayLike,
    base_tokens: ArrayLike,
    base_seconds: ArrayLike,
    prompts: Labels,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Return all tokens over all seconds relative to the baseline, with a jackknife interval over the prompts.

    It compares the times for all prompts together: prompts with long outputs and slow decoding weigh more, so it can
    be above 1 when the geometric mean over prompts is below, or the other way around.
    """
    sums = _sums_by_prompt(prompts, tokens, seconds, base_tokens, base_seconds)

    def log_ratio(t: Floats, s: Floats, bt: Floats, bs: Floats) -> Floats:
        return np.log(t / s * bs / bt)

    value, interval = _jackknife(log_ratio, sums, confidence)
    return _exponential(value, interval, sums.shape[1], "prompts")


def _sums_by_prompt(prompts: Labels, *columns: ArrayLike) -> Floats:
    """Return the sum of each column by prompt, shape [columns, prompts],
    without entries that have a NaN in any column.
    """
    data = np.array([np.asarray(column, dtype=np.float64) for column in columns])
    keep = ~np.isnan(data).any(axis=0)
    names, prompt = np.unique(np.asarray(prompts)[keep], return_inverse=True)
    sums = [np.bincount(prompt, weights=row, minlength=len(names)) for row in data[:, keep]]
    return np.array(sums, dtype=np.float64).reshape(len(columns), len(names))


def _jackknife(statistic: Any, sums: Floats, confidence: float) -> tuple[float, tuple[float, float] | None]:
    """Return a statistic of the total sums, and an interval from the mean of its pseudo-values (Tukey 1958)."""
    count = sums.shape[1]
    if not count:
        return math.nan, None
    total = sums.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(*total))
        without = np.asarray(statistic(*(total[:, None] - sums))) if count > 1 else np.empty(0)
    if not math.isfinite(value) or not np.isfinite(without).all():
        return (value if math.isfinite(value) else math.nan), None
    return value, mean_interval(count * value - (count - 1) * without, confidence)


def _group_means(values: Floats, group: NDArray[np.intp], groups: int) -> Floats:
    counts = np.bincount(group, minlength=groups)
    means: Floats = np.bincount(group, weights=values, minlength=groups) / np.maximum(counts, 1)
    return means


def _exponential(value: float, interval: tuple[float, float] | None, prompts: int, basis: Basis) -> Estimate:
    """Return the estimate whose logarithm and log interval are given; what rounding makes of equal values is 1."""
    value, *ends = (0.0 if abs(each) < _ROUNDING else each for each in (value, *(interval or ())))
    if ends:
        # numpy's exp overflows to inf where math's raises: two prompts far apart can have an interval without an end.
        with np.errstate(over="ignore"):
            low, high = (float(np.exp(end)) for end in ends)
        if _telling(low, high, prompts):
            return Estimate(math.exp(value), low, high, prompts, basis)
    return Estimate(math.exp(value), None, None, prompts, None)


def _telling(low: float, high: float, count: int) -> bool:
    """Return whether an interval of ``count`` values has ends, and a width unless the equal values are many."""
    return math.isfinite(low) and math.isfinite(high) and (count >= FEW or high > low * (1 + 1e-9))


# --- Comparing ------------------------------------------------------------------------------------


def verdict(ratio: Estimate, basis: Basis = "prompts") -> Verdict:
    """Return the verdict on a speed ratio: whether its interval, the one that is shown, lies wholly above or below 1.

    No other rule says "faster" of measurements. An interval over the repeats of one prompt says nothing of others; with
    the basis "repeats", the verdict is on these prompts alone.
    """
    if ratio.basis not in ("prompts", basis) or ratio.low is None or ratio.high is None:
        return "cannot tell"
    return "faster" if ratio.low > 1.0 else "slower" if ratio.high < 1.0 else "cannot tell"


def verdict_text(verdict: str | None, provisional: bool) -> str:
    """Return a verdict as text for tables, with a question mark if it is provisional; a dash for a baseline."""
    if verdict is None:
        return "–"
    return f"{verdict}?" if provisional and verdict != "cannot tell" else verdict


def widened(ratio: Estimate) -> Estimate:
    """Return a ratio as other programs let it be known: with an interval that is wider by ``WIDENED``."""
    if ratio.low is None or ratio.high is None:
        return ratio
    low, high = (ratio.value * (end / ratio.value) ** WIDENED for end in (ratio.low, ratio.high))
    return structs.replace(ratio, low=low, high=high)


def compare(
    a: tuple[ArrayLike, Labels, Labels],
    b: tuple[ArrayLike, Labels, Labels],
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Return the ratio of A over B, paired by prompt, of values measured at different times, such as two runs.

    Values measured in turns are better paired one by one: divide them and take ``geometric_mean``. Across machines,
    the values must be speedups, each over the baseline of its own run.

    Args:
        a, b: Positive speeds or speedups with their prompts and repeats, shape [values] each. Prompts that only one of
            A and B has are left out.
        confidence: Coverage of the interval.
    """
    means = [
        dict(zip(*nested_means(np.log(np.asarray(values, dtype=np.float64)), prompts, repeats), strict=True))
        for values, prompts, repeats in (a, b)
    ]
    common = [prompt for prompt in means[0] if prompt in means[1]]
    if not common:
        return Estimate(math.nan, None, None, 0, None)
    differences = np.array([means[0][prompt] - means[1][prompt] for prompt in common])
    interval = mean_interval(differences, confidence)
    return _exponential(float(differences.mean()), interval, len(common), "prompts")


# --- As text --------------------------------------------------------------------------------------


def decimals(value: float, digits: int = 2) -> str:
    """Format a number with ``digits`` decimals, or fewer if it is 10 or more, without an exponent."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    rounded = float(f"{value:.{digits}e}")  # 9.999 is shown as 10.0, and so has two digits in front
    before = 1 if rounded < 1 else int(math.log10(rounded)) + 1
    return f"{value:.{max(0, digits + 1 - before)}f}"


def ratio_text(ratio: Estimate, times: str = "×") -> str:
    """Format a ratio with its interval, as ``2.10× [1.93, 2.31]``, or as ``2.10× [too few to say]``.

    An end that is not exactly 1 is never shown as 1, since the verdict depends on which side of 1 it is.
    """
    if math.isnan(ratio.value):
        return "–"
    if ratio.low is None or ratio.high is None or ratio.high > WIDEST * ratio.low:
        return f"{decimals(ratio.value)}{times} [too few to say]"
    ends = (ratio.low, ratio.high)
    digits = 2
    while digits < 9 and any(end != 1.0 and float(f"{end:.{digits}f}") == 1.0 for end in ends):
        digits += 1
    mark = "*" if ratio.basis == "repeats" else ""
    value, low, high = (decimals(each, digits) for each in (ratio.value, *ends))
    return f"{value}{times} [{low}, {high}]{mark}"
