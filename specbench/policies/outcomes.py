"""Policies by outcomes: the two of `transformers`, and the one of a drafter that predicts its own acceptance."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specbench.decoding.protocols import NewPrompt
from specbench.policies.base import ChainPolicy, confidence
from specbench.specs.policies import Confidence, ConfidenceHead, Heuristic

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft
    from specbench.decoding.records import Step

_ENOUGH = 6
"""Tested tokens before the threshold adapts, as in `transformers`."""


class HeuristicLength(ChainPolicy):
    """Drafts two tokens more after a step in which all were accepted, one less after any other."""

    spec: Heuristic

    def begin(self, prompt: NewPrompt) -> None:  # noqa: ARG002
        self.gamma = self.spec.first

    def begin_step(self, budget: int) -> int:
        return min(self.gamma, budget)

    def observe(self, step: Step) -> None:
        if step.gamma == 0 or step.closing is None:
            return  # nothing was drafted, or a stop came first
        change = 2 if step.accepted == step.gamma else -1
        self.gamma = min(max(self.gamma + change, self.spec.gamma_min), self.gamma_max)

    def notes(self) -> Mapping[str, float]:
        return {"gamma": float(self.gamma)}


class ConfidenceLength(ChainPolicy):
    """Stops after a token whose probability ``q_i(t_i)`` is below a threshold.

    With ``adapt`` the threshold moves after each step to where ``FPR + 3·(1 - TPR)`` of "confident" against "accepted"
    was least in the drafts tested so far, once there are six with both outcomes among them.
    """

    spec: Confidence

    def begin(self, prompt: NewPrompt) -> None:  # noqa: ARG002
        self.threshold = self.spec.threshold
        self._draft: Draft | None = None
        self._seen: list[float] = []
        self._accepted: list[float] = []
        self._rejected: list[float] = []

    def begin_step(self, budget: int) -> int:
        self._draft, self._seen = None, []
        return super().begin_step(budget)

    def should_continue(self, draft: Draft) -> bool:
        self._draft = draft
        self._read(draft, len(draft.tokens))
        return not self._seen or self._seen[-1] >= self.threshold

    def _read(self, draft: Draft, count: int) -> None:
        """Add the confidences of the first ``count`` tokens to ``_seen``."""
        self._seen += [confidence(draft, i) for i in range(len(self._seen), count)]

    def observe(self, step: Step) -> None:
        if not self.spec.adapt or self._draft is None:
            return
        self._read(self._draft, step.tested)  # the last one may not have been asked about
        for i in range(step.tested):
            insort(self._accepted if i < step.accepted else self._rejected, self._seen[i])
        self._draft = None
        if self._accepted and self._rejected and len(self._accepted) + len(self._rejected) >= _ENOUGH:
            self.threshold = best_threshold(self._accepted, self._rejected)

    def notes(self) -> Mapping[str, float]:
        return {"threshold": self.threshold}


class ConfidenceHeadLength(ChainPolicy):
    """Ends a draft where its predicted chance to be accepted so far falls below a threshold (DSpark, arXiv 2607.05147).

    The chance is the product of the predictions of the confidence head. A prediction depends on the tokens before the
    one that it is for, and this token is drawn only if the draft goes on; so outputs keep the target's distribution.
    """

    spec: ConfidenceHead
    needs_acceptance = True
    _survival = 1.0

    def begin_step(self, budget: int) -> int:
        self._survival = 1.0
        return super().begin_step(budget)

    def num_children(
        self,
        draft: Draft,  # noqa: ARG002
        nodes: Sequence[int],  # noqa: ARG002
        distributions: Sequence[TokenDistribution],
    ) -> Sequence[int]:
        predicted = getattr(distributions[0], "acceptance", None)
        self._survival *= 1.0 if predicted is None else predicted  # a cascade's copied tokens have none
        return (int(self._survival >= self.spec.threshold),)

    def notes(self) -> Mapping[str, float]:
        return {"survival": self._survival}


def best_threshold(accepted: Sequence[float], rejected: Sequence[float]) -> float:
    """Return the confidence with the least ``FPR + 3·(1 - TPR)``; the highest of equally good ones.

    A draft counts as confident from the threshold upwards; TPR is the share of such among the accepted, FPR among the
    rejected.

    Args:
        accepted: Confidences of accepted drafts, at least one, ascending.
        rejected: Those of rejected ones, likewise.
    """

    def cost(threshold: float) -> float:
        kept, lost = bisect_left(rejected, threshold), bisect_left(accepted, threshold)
        return (len(rejected) - kept) / len(rejected) + 3 * lost / len(accepted)

    return min(sorted({*accepted, *rejected}, reverse=True), key=cost)
