"""The chance that draft tokens are accepted, learned during one output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.policies.base import confidence, is_guess

if TYPE_CHECKING:
    from specbench.decoding.drafts import Draft
    from specbench.decoding.protocols import DrafterTraits
    from specbench.decoding.records import Step

_FLOOR, _CEILING = -4.0, 6.0

_RECENT = 0.1
"""Weight of an outcome in the average that detects changes: about the last twenty count."""

_CHANGE = 3.5
"""Acceptance has changed if that average is this many standard deviations from 0."""

_MEAN_LOG_ODDS = 2.0
"""The mean log-odds that drafters give their tokens."""

_PRIOR_LOG_ODDS = 2.0
"""The log-odds with which a drafter's first tokens are accepted, if nothing is known of it."""

_SLOPE = 0.3
"""How much the next token's log-odds of acceptance rise, in the prior, if those of the token before rise by 1."""

_NEW = 0.1
"""The weight of each step's last tested token in the running mean of these tokens."""


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
        self.intercept, self.slope = mean
        self._variance = tuple(d * d for d in deviation)
        self._drift = tuple(d * d for d in drift)
        self._p00, self._p11 = self._variance
        self._p01 = 0.0
        self._surprise = self._usual_surprise = 0.0

    @classmethod
    def of_matches(cls) -> OnlineLogistic:
        """Return the curve for copied tokens by the length of their match; its prior is that of lookup and n-grams."""
        return cls((-1.6, 1.6), (1.0, 0.4))

    def chance(self, x: float, deviations: float = 0.0) -> float:
        """Return the chance at ``x``, if the curve is so many standard deviations higher than learned."""
        height = self.intercept + self.slope * x
        if deviations:
            variance = self._p00 + 2.0 * self._p01 * x + self._p11 * x * x
            height += deviations * math.sqrt(max(variance, 0.0))
        return 1.0 / (1.0 + math.exp(-height))

    def learn(self, x: float, outcome: bool) -> None:
        """Learn the outcome of a token with ``x``."""
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
        self._surprise += _RECENT * (outcome - chance - self._surprise)
        self._usual_surprise += _RECENT * (information - self._usual_surprise)
        if self._surprise**2 > _CHANGE**2 * self._usual_surprise * _RECENT / (2 - _RECENT):
            self._p00, self._p11 = self._variance
            self._p01 = self._surprise = 0.0


class AcceptanceEstimator:
    """The acceptance of a drafter's tokens in one output, by position and by what the drafter says of them.

    A token that is drafted already is judged by its own log-odds, one that is not by those of the token before it.

    Args:
        drafter: What is known of the drafter.

    Attributes:
        survival: The chance that all tokens of the step's draft that were read so far are accepted.
    """

    def __init__(self, drafter: DrafterTraits) -> None:
        known = drafter.acceptance
        mean, deviation = (_PRIOR_LOG_ODDS, 1.0) if known is None else (log_odds(known), 0.6)
        # The priors lie between those of two pairs of models.
        self._next = OnlineLogistic((mean - _SLOPE * _MEAN_LOG_ODDS, _SLOPE), (deviation, 0.2))
        self._drawn = OnlineLogistic((drafter.even_odds, 1.0), (1.0, 0.3))
        self._matched = OnlineLogistic.of_matches()
        # Log-odds of the last tested token, and of such tokens in the mean.
        self._last = self._mean_last = _MEAN_LOG_ODDS
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step, with an empty draft."""
        self._log_odds: list[float] = []
        self.survival = 1.0

    def read(self, draft: Draft, count: int) -> None:
        """Read the first ``count`` tokens of the step's draft."""
        for i in range(len(self._log_odds), count):
            self._log_odds.append(log_odds(confidence(draft, i)))
            self.survival *= self._curve(draft, i).chance(self._log_odds[i])

    def next_chance(self, deviations: float = 0.0) -> float:
        """Return the chance that the model's next token is accepted if those read so far are.

        Args:
            deviations: By how many standard deviations acceptance is higher than learned.
        """
        before = self._log_odds[-1] if self._log_odds else self._last
        return self._next.chance(before, deviations)

    def guess_chance(self, draft: Draft) -> float:
        """Return the chance that the next token is accepted if it is the guess, which was found without the model."""
        assert draft.guess is not None
        return self._matched.chance(log_odds(draft.guess.match_confidence))

    def learn(self, draft: Draft | None, step: Step) -> None:
        """Learn from a finished step, and from a guess that was not drafted."""
        if draft is None or not step.tested:
            self._last = self._mean_last  # what was tested before says nothing of the next token
        if draft is None:
            return
        self.read(draft, step.tested)  # the last one may be unread
        for i in range(step.tested):
            accepted = i < step.accepted
            if draft.passes is None or not is_guess(draft, i):  # a cascade's model did not draft its guesses
                self._next.learn(self._last, accepted)
            self._curve(draft, i).learn(self._log_odds[i], accepted)
            self._last = self._log_odds[i]
        if step.tested:
            self._mean_last += _NEW * (self._last - self._mean_last)
        k, guess = len(draft.tokens), draft.guess
        if guess is not None and guess.q is None and step.accepted == k < len(step.tokens):
            self._matched.learn(log_odds(guess.match_confidence), step.tokens[k] == guess.token)

    def _curve(self, draft: Draft, i: int) -> OnlineLogistic:
        """Return the curve for token ``i``: match confidences and probabilities have different scales."""
        return self._matched if is_guess(draft, i) else self._drawn
