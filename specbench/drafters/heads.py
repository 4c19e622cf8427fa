"""Trained heads as drafters, on the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.drafters.model import ModelDrafter

if TYPE_CHECKING:
    from specbench.backends.torch.head_scorers import HeadScorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import StepOutcome


class HeadDrafter(ModelDrafter):
    """Drafts with a trained head, see ``ModelDrafter``. It drafts nothing before the target's first forward pass."""

    scorer: HeadScorer  # type: ignore[assignment]
    takes_guesses = False  # after a token the head reads its own hidden state, which is not known of guesses

    def __init__(self, scorer: HeadScorer, name: str, clock: Clock | None = None) -> None:
        super().__init__(scorer, name, clock)  # type: ignore[arg-type]
        self.traits = replace(
            self.traits, layers=scorer.layers, predicts_acceptance=scorer.predicts_acceptance
        )

    def _predicted_acceptance(self) -> float | None:
        predicted = self.scorer.acceptance
        return None if predicted is None else float(predicted[-1])

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        return self.scorer.can_read(context, drafted)

    def unread(self, prompt: Sequence[int]) -> int:
        return super().unread(prompt) if self.scorer.reads_context else 0

    def _room(self, context: Sequence[int], budget: int) -> int:
        longest = self.scorer.longest
        return super()._room(context, budget if longest is None else min(budget, longest))

    def update(self, outcome: StepOutcome) -> None:
        """Drop all entries of drafts; the head reads accepted tokens again, with the target's states."""
        length = len(outcome.context) - 1
        if outcome.states is not None:
            self.scorer.take_states(length, outcome.states)
        self.scorer.rollback(length, outcome.path)
