"""A test of whether sampled tokens have their exact distributions. Pure functions on arrays.

It gives a p-value, and the smallest shift of probability mass that it would have found. docs/check.md says what it
finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.01
"""Share of correct servers that are called biased."""

POWER = 0.95
"""Share of servers with the smallest detectable shift that are called biased."""

_SIMULATED, _SURE = 4000, 3.0
"""Simulated samples; standard deviations that make a direction sure."""

_CONTEXTS, _LEAST_VISITS = 100, 20
"""Contexts whose tokens are tested together, and how often each has to occur."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Comparison:
    """What the test says.

    Attributes:
        p: Probability of a sample at least as far off, if the distributions are equal.
        detectable: Share of probability mass whose shift would be found with probability ``POWER``; ``None`` if no
            shift would.
        peaked: Whether likely tokens are too frequent (true) or too rare; ``None`` if neither is sure.
    """

    p: float
    detectable: float | None
    peaked: bool | None


def level_at(fraction: float, before: float) -> float:
    """Return the level of a look at a ``fraction`` of a sample, where the last look was at the fraction ``before``.

    The looks share ``LEVEL`` in proportion to what each adds to the sample (linear spending, Lan and DeMets 1983,
    without the gain from their correlation). So all of them together give at most that many false alarms.
    """
    return LEVEL * (fraction - before)


def _smallest(power: Callable[[float], float]) -> float | None:
    """Return the smallest share with a power of ``POWER``, within a tenth of itself; ``None`` if there is none."""
    low, high = 1e-4, 1.0
    if power(high) < POWER:
        return None
    while high > 1.1 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


@dataclass(frozen=True)
class Positions:
    """Sampled tokens with the exact distributions that they should have, in the order of their answers.

    Attributes:
        probabilities: Those of the likeliest tokens, descending, and of all others together, [positions, tokens].
        tokens: Which of these each token is, [positions].
        answers: The number of each position's answer, ascending, [positions].
        contexts: A number for what stands before each token; equal for equal contexts, [positions].
    """

    probabilities: Floats
    tokens: Integers
    answers: Integers
    contexts: Integers


def compare_with_target(sample: Positions, level: float | None = None, seed: int = 0) -> Comparison:
    """Test whether tokens have their exact distributions.

    Given all that stands before it, each token has a known distribution, however the ones before were drawn. So what
    sums up over positions is a martingale, and positions may be pooled. Two tests share the level:

    - The likeliest token of probability p becomes a random number between 0 and p, the next one the next interval, and
      so on: these numbers are independent and uniform (Rosenblatt 1952). Neyman's smooth test (1937) of order 3 finds
      output that is too peaked, too flat or cut off; a product of neighbors is its fourth term, and finds random
      numbers that are used again. Under no bias the sum of squares has a χ² distribution with 4 degrees of freedom.
    - Where answers share a context, Pearson's χ² of its tokens finds any bias, such as towards the drafter's. The
      χ² of all contexts together are compared with those of simulated tokens.
    """
    if not len(sample.tokens):
        return Comparison(1.0, None, None)
    random = np.random.default_rng(seed)
    upper = sample.probabilities.cumsum(1)
    positions = np.arange(len(sample.tokens))
    own = sample.probabilities[positions, sample.tokens]
    uniform = upper[positions, sample.tokens] - own * random.random(len(own))
    terms = _legendre(np.clip(uniform, 0.0, 1.0))
    follows = np.r_[False, np.diff(sample.answers) == 0]
    serial = np.where(follows, terms[:, 0] * np.roll(terms[:, 0], 1), 0.0)
    sums = np.array([*terms.sum(0), serial.sum()])
    weights = np.array([len(own)] * terms.shape[1] + [follows.sum()])
    smooth = float((sums**2 / np.maximum(1, weights)).sum())
    p = min(1.0, 2 * min(float(_smooth_tail(smooth)), _contexts_p(sample, random)))
    likelier = -float(sums[0]) / math.sqrt(max(1, len(own)))
    detectable = None if level is None else _detectable(sample, level, random)
    return Comparison(p, detectable, likelier > 0 if abs(likelier) > _SURE else None)


def _legendre(values: Floats) -> Floats:
    """Return the first orthonormal Legendre polynomials on [0, 1], without the constant one, [values, order]."""
    x = 2 * values - 1
    return np.stack(
        [math.sqrt(3) * x, math.sqrt(5) * (3 * x**2 - 1) / 2, math.sqrt(7) * (5 * x**3 - 3 * x) / 2], 1
    )


def _smooth_tail(square: Floats | float) -> Floats:
    """Return the probability that χ² with 4 degrees of freedom is larger."""
    half = np.asarray(square) / 2
    return np.exp(-half) * (1 + half)


def _contexts_p(sample: Positions, random: np.random.Generator) -> float:
    """Return the p-value of the χ² of the most frequent contexts; 1 if answers share none."""
    numbers, first, visits = np.unique(sample.contexts, return_index=True, return_counts=True)
    chosen = np.argsort(-visits)[:_CONTEXTS]
    chosen = chosen[visits[chosen] >= _LEAST_VISITS]
    if not len(chosen):
        return 1.0
    observed, simulated = 0.0, np.zeros(_SIMULATED)
    for number in chosen:
        expected = sample.probabilities[first[number]]
        expected = expected / expected.sum()
        kept = expected * visits[number] >= 1  # the others are one category together
        categories = np.where(kept, np.cumsum(kept) - 1, kept.sum())
        expected = np.bincount(categories, expected)
        expected = expected[expected > 0]
        counts = np.bincount(
            categories[sample.tokens[sample.contexts == numbers[number]]], minlength=len(expected)
        )
        draws = random.multinomial(visits[number], expected, _SIMULATED)
        scale = visits[number] * expected
        observed += float(((counts[: len(scale)] - scale) ** 2 / scale).sum())
        simulated += ((draws - scale) ** 2 / scale).sum(1)
    return float(1 + (simulated >= observed - 1e-9).sum()) / (1 + _SIMULATED)


def _detectable(sample: Positions, level: float, random: np.random.Generator) -> float | None:
    """Return the share of mass whose shift to the likeliest tokens the smooth test finds."""
    likeliest = sample.probabilities[:, 0]
    drift = _legendre(likeliest * random.random(len(likeliest))).mean(0)
    shift = math.sqrt(len(likeliest) * float((drift**2).sum()))
    normal = random.normal(size=(_SIMULATED, 4))

    def power(share: float) -> float:
        squares = ((normal + np.array([share * shift, 0, 0, 0])) ** 2).sum(1)
        return float((_smooth_tail(squares) <= level / 2).mean())

    share = _smallest(power)
    return None if share is None else share * float((1 - likeliest).mean())
