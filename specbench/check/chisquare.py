"""A χ² test of sampled tokens against the target's own probabilities, and its power. No models, no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

SIGNIFICANCE = 0.001
"""Probability that a lossless configuration fails the test."""

POWER = 0.95
"""Probability of finding a bias of the stated size."""

_MIN_VARIANCE = 10.0
"""Groups whose count has a smaller variance are merged: it is not close enough to normal."""


class TokenCounts:
    """Counts of sampled tokens by group, with the counts that the target's probabilities predict.

    Given the tokens before it, a sampled token is in group g with the target's probability s_g, independently of
    earlier tokens. So observed minus expected counts are a sum of terms, each with mean 0 and covariance diag(s) -
    s·sᵀ, and the squared length of this sum in units of the summed covariance follows χ². The contexts of tokens can
    differ.

    Attributes:
        tokens: Number of tokens counted.
        impossible: Number of tokens with probability 0.
    """

    def __init__(self, groups: int) -> None:
        self.tokens = self.impossible = 0
        self._excess = np.zeros(groups)
        self._covariance = np.zeros((groups, groups))

    def add(self, shares: Sequence[float], group: int | None) -> None:
        """Count a token.

        Args:
            shares: The target's probability of each group.
            group: The token's group; ``None`` for a token with probability 0.
        """
        expected = np.asarray(shares, dtype=np.float64)
        self.tokens += 1
        if group is None:
            self.impossible += 1
            return
        self._excess -= expected
        self._excess[group] += 1.0
        self._covariance += np.diag(expected) - np.outer(expected, expected)

    def test(self) -> tuple[int, float]:
        """Return degrees of freedom and p-value; (0, 1) for too few tokens."""
        excess, covariance = self._merge_groups()
        freedom = _rank(covariance)
        if self.impossible:
            return freedom, 0.0
        if freedom == 0:
            return 0, 1.0
        statistic = float(excess @ np.linalg.pinv(covariance, rcond=1e-9, hermitian=True) @ excess)
        return freedom, float(chi2.sf(statistic, freedom))

    @property
    def observed_bias(self) -> float:
        """Return the share of the tokens in another group than expected, including noise."""
        return float(np.abs(self._excess).sum()) / 2 / max(1, self.tokens)

    @property
    def smallest_bias(self) -> float | None:
        """Return the smallest share of tokens in a wrong group that the test finds with 95% power; ``None`` if there is
        none.

        A shift d of the groups' mean shares makes the statistic noncentral χ² with noncentrality λ = n²·dᵀV⁻¹d. Of all
        shifts with total variation b the hardest to find has λ = (2·b·n)² / max sᵀVs, over all signs s: the dual norm.
        """
        covariance = self._merge_groups()[1]
        freedom = _rank(covariance)
        if freedom == 0:
            return None
        signs = itertools.product((-1.0, 1.0), repeat=len(covariance))
        widest = max(float(np.array(s) @ covariance @ np.array(s)) for s in signs)
        threshold = chi2.isf(SIGNIFICANCE, freedom)
        noncentrality = float(brentq(lambda nc: ncx2.sf(threshold, freedom, nc) - POWER, 1e-3, 1e4))
        return min(1.0, math.sqrt(noncentrality * widest) / 2 / self.tokens)

    def _merge_groups(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return excess and covariance, with groups of too small a variance merged into the next larger one."""
        excess, covariance = self._excess, self._covariance
        while len(excess) > 1 and float(np.diag(covariance).min()) < _MIN_VARIANCE:
            first, second, *others = np.argsort(np.diag(covariance)).tolist()
            kept = np.eye(len(excess))[others]
            merging = np.vstack([kept, np.eye(len(excess))[[first, second]].sum(axis=0)])
            excess, covariance = merging @ excess, merging @ covariance @ merging.T
        return excess, covariance


def _rank(covariance: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(covariance, tol=1e-9 * max(1.0, covariance.max()), hermitian=True))
