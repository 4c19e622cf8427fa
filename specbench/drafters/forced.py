"""Forced tokens in a chain that is being drafted, and a draft policy that does not see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import DraftPolicy
from specbench.specs.policies import LONGEST_DRAFT

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.protocols import StepPlan


def forced_token(context: Sequence[int], draft: Draft, plan: StepPlan) -> int | None:
    """Return the only token that the format allows after a draft; ``None`` if there is none, or no room for it."""
    if len(draft.tokens) >= min(plan.budget, LONGEST_DRAFT):
        return None
    mask = plan.sampling.mask_after(context, draft.tokens)
    return None if mask is None else mask.only


class UnforcedPolicy(DraftPolicy):
    """Shows a draft policy a chain without its forced tokens, which it neither chose nor can learn from.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self.name, self.unconditional = policy.name, policy.unconditional
        self._policy, self._seen = policy, Draft()

    def begin_step(self, budget: int) -> int:
        self._seen = Draft(match_confidence=[])
        return self._policy.begin_step(budget)

    def expand(self, draft: Draft) -> Sequence[int]:
        return (len(draft.tokens) - 1,) if self._policy.expand(self.update(draft)) else ()

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        seen = self.update(draft)
        return self._policy.num_children(seen, (len(seen.tokens) - 1,), distributions)

    def prefers_model(self, draft: Draft) -> bool:
        return self._policy.prefers_model(self.update(draft))

    def update(self, draft: Draft) -> Draft:
        """Return what the policy sees of a draft: always the same object, since policies keep it until they learn."""
        seen, forced = self._seen, {*draft.forced}
        seen.tokens = [token for i, token in enumerate(draft.tokens) if i not in forced]
        guessed = draft.match_confidence or []
        seen.match_confidence = [each for i, each in enumerate(guessed) if i not in forced]
        if draft.logits is not None:
            seen.logits = [each for i, each in enumerate(draft.logits) if i not in forced]
        seen.passes, seen.next_is_read = draft.passes, draft.next_is_read
        seen.rejected_guess = draft.rejected_guess
        return seen
