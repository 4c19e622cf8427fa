"""The chance that a draft token is accepted, learned during the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FLOOR, _CEILING = -4.0, 6.0

_LATELY = 0.1
"""Weight of an outcome in the average that detects changes: about the last twenty count."""

_TOO_MUCH = 3.5
"""Standard deviations of that average which count as a change."""


def log_odds(probability: float) -> float:
    """Return ``log(p / (1 - p))``, clipped to -4 to 6, beyond which drafters' probabilities say nothing more."""
    if probability >= 1.0:
        return _CEILING
    if not probability > 0.0:
        return _FLOOR
    return min(max(math.log(probability / (1.0 - probability)), _FLOOR), _CEILING)


class OnlineLogistic:
    """The chance 1 / (1 + exp(-(intercept + slope·x))), whose two numbers are learned from one outcome after the other.

    Logistic regression by an extended Kalman filter: the pair has a normal prior; an outcome moves its mean by a Newton
    step and narrows its covariance, to which drift adds a little, up to the prior's. When outcomes differ from the
    prediction by more than chance, the covariance is set back to the prior's.

    Args:
        mean: Initial intercept and slope.
        deviation: Their standard deviations.
        drift: The standard deviation that each gains per outcome.
    """

    def __init__(
        self, mean: Sequence[float], deviation: Sequence[float], drift: Sequence[float] = (0.02, 0.005)
    ) -> None:
        self._mean = tuple(mean)
        self._variance = tuple(d * d for d in deviation)
        self._drift = tuple(d * d for d in drift)
        self.reset()

    def expect(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        """Set the prior, and return to it if nothing has been learned."""
        self._mean, self._variance = tuple(mean), tuple(d * d for d in deviation)
        if not self._learned:
            self.reset()

    def reset(self) -> None:
        """Return to the prior."""
        self._learned = False
        self.intercept, self.slope = self._mean
        self._p00, self._p11 = self._variance
        self._p01 = 0.0
        self._surprise = self._usual_surprise = 0.0

    def chance(self, x: float) -> float:
        """Return the chance at ``x``."""
        return 1.0 / (1.0 + math.exp(-(self.intercept + self.slope * x)))

    def upper_chance(self, x: float) -> float:
        """Return the chance at ``x`` if the curve is a standard deviation higher."""
        return self._off(x, 1.0)

    def lower_chance(self, x: float) -> float:
        """Return the chance at ``x`` if the curve is a standard deviation lower."""
        return self._off(x, -1.0)

    def _off(self, x: float, deviations: float) -> float:
        variance = self._p00 + 2.0 * self._p01 * x + self._p11 * x * x
        mean = self.intercept + self.slope * x
        return 1.0 / (1.0 + math.exp(-(mean + deviations * math.sqrt(max(variance, 0.0)))))

    def learn(self, x: float, outcome: bool) -> None:
        """Learn the outcome of a token with ``x``."""
        self._learned = True
        chance = self.chance(x)
        information = max(chance * (1.0 - chance), 1e-3)
        g0 = self._p00 + self._p01 * x
        g1 = self._p01 + self._p11 * x
        scale = 1.0 / (1.0 + information * (g0 + g1 * x))
        error = (outcome - chance) * scale
        self.intercept += g0 * error
        self.slope += g1 * error
        shrink = information * scale
        self._p00 = min(self._p00 - g0 * g0 * shrink + self._drift[0], self._variance[0])
        self._p11 = min(self._p11 - g1 * g1 * shrink + self._drift[1], self._variance[1])
        self._p01 -= g0 * g1 * shrink
        self._surprise += _LATELY * (outcome - chance - self._surprise)
        self._usual_surprise += _LATELY * (information - self._usual_surprise)
        if self._surprise**2 > _TOO_MUCH**2 * self._usual_surprise * _LATELY / (2 - _LATELY):
            self._forget()

    def _forget(self) -> None:
        """Keep the curve, but trust it no more than the prior."""
        self._p00, self._p11 = self._variance
        self._p01 = self._surprise = 0.0
