"""Drafting several tokens in one pass of a model, which reads masks after the context.

The model was trained to predict the next token at each mask. So every token of a draft is drawn from a distribution
that depends on the context and its place in the draft alone, and q of a draft is their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.decoding.protocols import ForwardRequest
from specbench.drafters.model import ModelDrafter

if TYPE_CHECKING:
    import torch

    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import Draft, StepOutcome
    from specbench.decoding.protocols import Decoding
    from specbench.decoding.sampling import Sampling


class ParallelDrafter(ModelDrafter):
    """Drafts a chain in one pass of a small model: PARD (An et al. 2025, arXiv 2504.18583).

    In a cascade the pass also reads the draft tokens before its first one.

    Args:
        scorer, name, clock: See ``ModelDrafter``.
        masks: The tokens that it reads after the context, one fewer than it drafts at most.
    """

    takes_guesses = False

    def __init__(self, scorer: Scorer, name: str, masks: Sequence[int], clock: Clock | None = None) -> None:
        super().__init__(scorer, name, clock)
        self.traits = replace(self.traits, trees=False)
        self._masks = tuple(masks)
        self._rows: torch.Tensor | None = None  # logits of the step's pass
        self._context_len = self._first = 0  # tokens of context and draft that it has read

    def _forget_prompt(self) -> None:
        super()._forget_prompt()
        self._rows = None

    def _room(self, context: Sequence[int], budget: int) -> int:
        return super()._room(context, min(budget, len(self._masks) + 1))

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        if self._rows is None:
            return super().can_read(context, drafted)
        return len(drafted) - self._first < len(self._rows)

    def has_read(self, draft: Draft) -> bool:
        return self._rows is not None and len(draft.tokens) - self._first < len(self._rows)

    def _next_logits(
        self,
        context: Sequence[int],
        draft: Draft,
        sampling: Sampling,
        limit: int,
    ) -> Decoding[torch.Tensor]:
        place = len(draft.tokens)
        if self._rows is None:
            room = super()._room(context, limit) - place
            tokens = [*draft.tokens, *self._masks[: room - 1]]
            request = ForwardRequest(self.scorer, context, tokens, rows=1 + len(tokens) - place)
            self._rows = yield from self._run(request, draft)
            self._context_len, self._first = len(context), place
        return self._rows[place - self._first][None]

    def update(self, outcome: StepOutcome) -> None:
        """Drop the masks, and what was rejected before them."""
        if self._rows is None:
            super().update(outcome)
            return
        self._rows = None
        read = [node for node in outcome.path if node < self._first]
        length = min(len(outcome.context) - 1, self._context_len + len(read))
        self.scorer.rollback(length, read)
