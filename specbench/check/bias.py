"""Tests of whether sampled answers have the distribution that they should have. Pure functions on arrays.

``compare_samples`` holds the answers of two servers against each other, ``compare_with_target`` the tokens of one
against the target's exact probabilities. Both give a p-value, and the smallest shift of probability mass that they
would have found. docs/check.md says what they find.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.01
"""Share of correct servers that are called biased."""

POWER = 0.95
"""Share of servers with the smallest detectable shift that are called biased."""

LOOKS = (0.125, 0.25, 0.5, 1.0)
"""Parts of the answers after which they are tested."""

_PERMUTATIONS, _SIMULATED = 1000, 4000
_PLANTED, _SURE = 60, 3.0
"""Samples by which a power of the test of two samples is estimated; standard deviations that make a direction sure."""

_CONTEXTS, _LEAST_VISITS = 100, 20
"""Contexts whose tokens are tested together, and how often each has to occur."""

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Answers = Sequence[Sequence[Sequence[Hashable]]]
"""Answers by prompt, each a sequence of tokens or words."""


@dataclass(frozen=True)
class Comparison:
    """What a test says.

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


# -- two samples -----------------------------------------------------------------------------------


def compare_samples(
    tested: Answers, reference: Answers, level: float | None = None, seed: int = 0
) -> Comparison:
    """Test whether two servers answer alike, by permutations of who gave which answer to the same prompt.

    The beginnings of an answer, of every length, and its pairs of neighboring tokens are *cells* of its prompt. Two
    statistics are standardized over the permutations, and the larger one counts (Westfall and Young 1993), which is
    exact for any number of prompts:

    - With a and b answers of the servers in a cell, the sum of ((a - b)² - (a + b)) / √(a + b) finds differences of
      any kind. It lies between the χ² of homogeneity and the discrepancy of a kernel (Gretton et al. 2012).
    - The difference between the servers' means of how frequent the pairs of an answer are (log(a + b)) finds answers
      that are too likely or too unlikely.

    Args:
        tested, reference: As many answers to each prompt from both servers.
        level: Largest p-value that counts, for what is detectable; ``None`` leaves that out.
    """
    random = np.random.default_rng(seed)
    statistics = _statistics([[*first, *second] for first, second in zip(tested, reference, strict=True)])
    number = len(tested[0])
    own = np.repeat([[True] * number + [False] * number], len(tested), axis=0)
    answers = np.arange(own.size).reshape(own.shape)
    permuted = (random.permuted(own, axis=1) for _ in range(_PERMUTATIONS))
    drawn = np.array([statistics(answers, labels) for labels in (own, *permuted)])
    mean, spread = drawn.mean(0), drawn.std(0) + 1e-12

    def largest(values: Floats) -> Floats:
        standard = (values - mean) / spread
        larger: Floats = np.maximum(standard[..., 0], np.abs(standard[..., 1]))
        return larger

    observed, *usual = largest(drawn)
    p = float(np.mean(largest(drawn) >= observed - 1e-9))
    limit = np.quantile(usual, 1 - (level or 0.0))

    def power(share: float) -> float:
        """Return the power against a server that gives a ``share`` of its answers in favor of one for each prompt."""
        hits, random = 0, np.random.default_rng(seed)
        for _ in range(_PLANTED):
            labels, favorites = random.permuted(own, axis=1), random.integers(2 * number, size=(len(own), 1))
            planted = labels & (random.random(own.shape) < share)
            replaced = np.where(planted, np.take_along_axis(answers, favorites, 1), answers)
            hits += bool(largest(statistics(replaced, labels)) > limit)
        return hits / _PLANTED

    likelier = float((drawn[0, 1] - mean[1]) / spread[1])
    detectable = None if level is None else _smallest(power)
    return Comparison(p, detectable, likelier > 0 if abs(likelier) > _SURE else None)


def _statistics(answers: Answers) -> Callable[[Integers, NDArray[np.bool_]], Floats]:
    """Return what computes both statistics of ``compare_samples``, for a choice of these answers by their numbers and
    for labels of those of the tested server.
    """
    numbers: defaultdict[Hashable, int] = defaultdict(count(1).__next__)
    beginnings, pairs = [], []
    for prompt, group in enumerate(answers):
        for answer in group:
            beginnings.append([numbers[prompt, tuple(answer[:end])] for end in range(1, len(answer) + 1)])
            pairs.append([*{numbers[prompt, "pair", pair] for pair in pairwise(answer)}])
    every_pair, size = _rectangle(pairs), len(numbers) + 1
    every_cell = np.concatenate([_rectangle(beginnings), every_pair], axis=1)

    def statistics(chosen: Integers, labels: NDArray[np.bool_]) -> Floats:
        tested = labels.ravel()
        cells, pairs = every_cell[chosen.ravel()], every_pair[chosen.ravel()]
        total = np.bincount(cells.ravel(), minlength=size)
        shared = np.flatnonzero(total[1:] > 1) + 1  # 0 is no cell
        both = total[shared].astype(float)
        off = (2 * np.bincount(cells[tested].ravel(), minlength=size)[shared] - both) ** 2 - both
        frequency = np.log(np.maximum(1, total))
        frequency[0] = 0.0
        scores = frequency[pairs].sum(1) / np.maximum(1, (pairs > 0).sum(1))
        return np.array([(off / np.sqrt(both)).sum(), scores[tested].mean() - scores[~tested].mean()])

    return statistics


def _rectangle(rows: Sequence[Sequence[int]]) -> Integers:
    """Return rows of different lengths as a matrix, filled up with 0."""
    return np.array(list(zip_longest(*rows, fillvalue=0)), np.int64).reshape(-1, len(rows)).T


# -- one sample ------------------------------------------------------------------------------------


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
