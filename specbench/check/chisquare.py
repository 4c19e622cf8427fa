"""One-sample χ² tests of sampled tokens, and how many samples they need. No models, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, ncx2

__all__ = [
    "POWER",
    "SIGNIFICANCE",
    "Branch",
    "Cells",
    "TestOutcome",
    "chi_square",
    "freedom",
    "plan_cells",
    "power",
    "runs_needed",
    "share",
]

SIGNIFICANCE = 0.001
"""Of all tests of a check together: a sound configuration comes out wrong once in a thousand checks."""

POWER = 0.95
"""Chance with which a bias of the stated size is found, by every single test."""

_LEAST_EXPECTED = 5.0
_MOST_CELLS = 24
"""More cells see finer biases and need more samples for the coarse ones."""

_MOST_RUNS = 1e12
_TINY = 1e-300


@dataclass(frozen=True)
class Branch:
    """A context that sampled outputs reach.

    Attributes:
        tokens: What was sampled behind the fixed context.
        weight: Probability of sampling just these.
        p: The target's distribution there, float64 [vocab], of sum 1.
    """

    tokens: tuple[int, ...]
    weight: float
    p: NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """How the tokens behind one branch are counted: some by themselves, all others together.

    Attributes:
        branch: The tokens before them.
        weight: Probability of getting there.
        tokens: Those with a cell of their own.
        probabilities: Of these, given the branch.
        rest: Of all others together; 0 if there are no others.
    """

    branch: tuple[int, ...]
    weight: float
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    rest: float

    @property
    def freedom(self) -> int:
        """Degrees of freedom: cells minus one."""
        return len(self.tokens) + (self.rest > 0) - 1


@dataclass(frozen=True)
class TestOutcome:
    """A χ² test.

    Attributes:
        runs: Samples that fell into tested branches.
        statistic: Sum of (observed - expected)² / expected.
        freedom: Degrees of freedom.
        p_value: Chance of so large a statistic, or a larger one, if the samples follow the probabilities.
        bias: Total variation between what was observed and expected over the cells; it holds noise too.
    """

    __test__ = False  # no test class of pytest

    runs: int
    statistic: float
    freedom: int
    p_value: float
    bias: float


def plan_cells(branches: Sequence[Branch], runs: int) -> list[Cells]:
    """Choose, before anything is sampled, which tokens of which branches get cells.

    The tokens with the largest expected counts get one each, at most 24 and none below 5 expected counts. The others
    behind a branch are pooled; where that pool would be too small, the branch's smallest cell joins it.

    Args:
        branches: Contexts of one depth.
        runs: Samples in all.

    Returns:
        One entry per branch that has at least two cells.
    """
    found: list[tuple[float, int, int]] = []
    for index, branch in enumerate(branches):
        expected = runs * branch.weight * branch.p
        large = np.flatnonzero(expected >= _LEAST_EXPECTED).tolist()
        found += [(float(expected[token]), index, token) for token in large]
    found.sort(key=lambda cell: (-cell[0], cell[1], cell[2]))
    kept: dict[int, list[int]] = {}
    for _, index, token in found[:_MOST_CELLS]:
        kept.setdefault(index, []).append(token)
    planned = []
    for index in sorted(kept):
        cells = _branch_cells(branches[index], kept[index], runs)
        if cells.freedom > 0:
            planned.append(cells)
    return planned


def _branch_cells(branch: Branch, tokens: list[int], runs: int) -> Cells:
    tokens = list(tokens)  # the most probable first
    possible = int(np.count_nonzero(branch.p))
    while True:
        others = len(tokens) < possible
        rest = max(_TINY, 1.0 - float(branch.p[tokens].sum())) if others else 0.0
        if not others or not tokens or runs * branch.weight * rest >= _LEAST_EXPECTED:
            break
        tokens.pop()
    return Cells(
        branch.tokens,
        branch.weight,
        tuple(tokens),
        tuple(float(p) for p in branch.p[tokens]),
        rest,
    )


def freedom(cells: Sequence[Cells]) -> int:
    """Degrees of freedom of one test over the cells of several branches."""
    return sum(each.freedom for each in cells)


def share(cells: Sequence[Cells]) -> float:
    """Which share of the samples falls into branches that are tested."""
    return min(1.0, sum(each.weight for each in cells))


def power(runs: float, bias: float, significance: float, freedom: int, share: float = 1.0) -> float:
    """Chance that a χ² test finds a bias.

    Of all ways to move a total variation of ``bias`` between the cells, the hardest to find is the one that shifts
    every cell by 2·bias of itself, up or down (Cauchy-Schwarz: Σδ²/p >= (Σ|δ|)² = (2·bias)²). The statistic is then
    noncentral χ² with noncentrality runs·share·(2·bias)².

    Args:
        runs: Samples.
        bias: Total variation between the true distribution and the tested one, over the cells.
        significance: Of this test.
        freedom: Degrees of freedom.
        share: Of the samples that fall into tested branches.
    """
    threshold = chi2.isf(significance, freedom)
    return float(ncx2.sf(threshold, freedom, runs * share * (2 * bias) ** 2))


def runs_needed(bias: float, significance: float, freedom: int, share: float = 1.0) -> int:
    """The fewest samples with which ``power`` is 95%."""
    low, high = 1.0, _MOST_RUNS
    for _ in range(100):
        middle = math.sqrt(low * high)
        enough = power(middle, bias, significance, freedom, share) >= POWER
        low, high = (low, middle) if enough else (middle, high)
    return math.ceil(high)


def chi_square(cells: Sequence[Cells], counts: Mapping[tuple[int, ...], Mapping[int, int]]) -> TestOutcome:
    """Test samples against the probabilities, in one test over several branches.

    Given how often each branch was reached, the tokens behind it are independent draws, so the statistics of the
    branches add up.

    Args:
        cells: See ``plan_cells``.
        counts: By branch and token, how often it was sampled.
    """
    statistic, degrees, total, apart = 0.0, 0, 0, 0.0
    for each in cells:
        seen = counts.get(each.branch, {})
        runs = sum(seen.values())
        if runs == 0:
            continue
        observed = [seen.get(token, 0) for token in each.tokens]
        expected = [runs * p for p in each.probabilities]
        others = runs - sum(observed)
        if each.rest > 0:
            observed.append(others)
            expected.append(runs * each.rest)
        elif others:
            statistic = math.inf  # something impossible was sampled
        statistic += sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
        degrees += each.freedom
        total += runs
        apart += sum(abs(o - e) for o, e in zip(observed, expected, strict=True)) / 2
    if degrees == 0:
        return TestOutcome(0, 0.0, 0, 1.0, 0.0)
    return TestOutcome(
        total, statistic, degrees, float(chi2.sf(statistic, degrees)), apart / total if total else 0.0
    )
