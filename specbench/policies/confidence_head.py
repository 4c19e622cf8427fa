"""The policy of a drafter that predicts the acceptance of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.policies.base import ChainPolicy

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft


class ConfidenceHeadLength(ChainPolicy):
    """Ends a draft where its predicted chance to be accepted so far falls below a threshold (DSpark, arXiv 2607.05147).

    The chance is the product of the predictions of the confidence head. A prediction depends on the tokens before the
    one that it is for, and this token is drawn only if the draft goes on; so outputs keep the target's distribution.

    Args:
        threshold: From 0 (never stops) to 1.
        gamma_max: The most tokens drafted in a step.
    """

    needs_acceptance = True

    def __init__(self, threshold: float = 0.2, gamma_max: int = 16) -> None:
        super().__init__("confidence-head", gamma_max, threshold=threshold)
        self.threshold, self._survival = threshold, 1.0

    def begin(self, budget: int) -> int:
        self._survival = 1.0
        return super().begin(budget)

    def num_children(
        self,
        draft: Draft,  # noqa: ARG002
        nodes: Sequence[int],  # noqa: ARG002
        distributions: Sequence[TokenDistribution],
    ) -> Sequence[int]:
        predicted = getattr(distributions[0], "acceptance", None)
        self._survival *= 1.0 if predicted is None else predicted  # a cascade's copied tokens have none
        return (int(self._survival >= self.threshold),)

    def notes(self) -> Mapping[str, float]:
        return {"survival": self._survival}
