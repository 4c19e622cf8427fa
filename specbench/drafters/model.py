"""A small model as drafter, and a target that drafts for itself on its own cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specbench.drafters.base import Draft
from specbench.measure import Clock, clock_for
from specbench.scorer import Scorer

if TYPE_CHECKING:
    from specbench.lengths import LengthPolicy
    from specbench.sampling import Randomness, Sampling

__all__ = ["ModelDrafter", "SelfDrafter"]


class ModelDrafter:
    """Drafts with a causal language model that keeps its own cache and reads the prompt at its first proposal.

    Args:
        scorer: The model; its logits must be as wide as the target's.
        name: How the command line names it.
        clock: Tells the prefill from the rest; ``None`` for the one right for the model's device.
    """

    def __init__(self, scorer: Scorer, name: str, clock: Clock | None = None) -> None:
        self.scorer = scorer
        self.name = name
        self._clock = clock or clock_for(str(scorer.device))
        self._has_read = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._has_read = False
        self.scorer.begin()

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        """Draft token by token; nothing once the context is behind the model's own limit or holds ids it lacks."""
        limit = policy.begin(max(0, min(room, self._room(context))))
        draft = Draft(logits=[])
        distributions: list[torch.Tensor] = []
        while len(draft.tokens) < limit and policy.another(draft):
            logits = self._next_logits(context, draft)
            if not policy.look(logits[0]):
                break
            if sampling.greedy:
                token = sampling.choose(logits, context, draft.tokens)[0]
            else:
                distributions.append(sampling.probabilities(logits, context, draft.tokens)[0])
                token = random.draw(distributions[-1])
            draft.logits.append(logits[0])  # type: ignore[union-attr]
            draft.tokens.append(token)
        if distributions:
            draft.q = torch.stack(distributions)
        return draft

    def _next_logits(self, context: Sequence[int], draft: Draft) -> torch.Tensor:
        """Logits behind context and draft, [1, vocab]; the first pass over a prompt is timed as prefill."""
        if self._has_read or self.scorer.cache.length:
            return self.scorer.logits(context, draft.tokens, rows=1)
        self._has_read = True
        began = self._clock.now()
        logits = self.scorer.logits(context, rows=1)
        draft.prefill_s = self._clock.now() - began
        return logits

    def _room(self, context: Sequence[int]) -> int:
        """How many tokens this model can draft behind the context; 0 or less for none."""
        fresh = context[self.scorer.cache.length :]
        if any(token >= self.scorer.embeddings for token in fresh):
            return 0  # a padding id of the target's wider vocabulary
        limit = self.scorer.context_limit
        # The last draft is never fed, so one more token fits than the context has room for.
        return sys.maxsize if limit is None else limit - len(context) + 1

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """A model learns nothing between steps; it reads the new tokens when it drafts next."""

    def rollback(self, length: int) -> None:
        self.scorer.rollback(length)


class SelfDrafter(ModelDrafter):
    """Drafts with a cheaper form of the target on top of the target's own cache.

    The drafts' keys and values are taken off the cache again before the target verifies, so that what the target reads
    is its own work alone. No second prefill is needed.

    Args:
        scorer: The cheaper form, sharing the target's cache object.
        name: How the command line names it.
        clock: See ``ModelDrafter``.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """The target has just emptied the cache they share."""
        self._has_read = False

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Draft:
        verified = self.scorer.cache.length
        draft = super().propose(context, room, policy, sampling, random)
        if self.scorer.cache.length > verified:
            self.scorer.rollback(verified)
        return draft

    def rollback(self, length: int) -> None:
        """The target rolls their cache back."""
