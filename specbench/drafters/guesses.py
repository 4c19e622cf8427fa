"""Prompt lookup inside a model's own chain: a forward pass of the drafter also reads tokens that lookup guesses.

As in verification, one pass gives the logits after each guess, and what follows a wrong one is dropped. The model still
draws every token from its own logits, so drafts are those without guesses and only take fewer passes. CS Drafting (Chen
et al. 2023, arXiv 2312.11462) calls this a vertical cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.drafters.lookup import LookupDrafter
from specbench.policies.acceptance import OnlineLogistic, log_odds

if TYPE_CHECKING:
    import torch

    from specbench.decoding.sampling import Sampling

_ROW_PRICE = 0.05
"""What one more row adds to a pass of a small model, as a share of it."""

_MOST = 4
"""Guesses in a pass; on a CPU rows beyond these cost more."""


class Guesses:
    """Guesses at the next tokens of a model's chain, and the logits of the pass that read them.

    A guess is read if the chance that its row is used is above the row's share of a pass. The row is used if the model
    draws the guessed token and the chain goes on. That chance is learned in each prompt by the length of the match.
    """

    def __init__(self) -> None:
        self._lookup = LookupDrafter()
        self._used = OnlineLogistic.of_matches()
        self.forget()

    def begin(self) -> None:
        """Start a new prompt."""
        self._lookup.begin(())
        self._used = OnlineLogistic.of_matches()
        self.forget()

    def forget(self) -> None:
        """Forget the last pass."""
        self._logits: torch.Tensor | None = None
        self._read: list[int] = []  # draft tokens and guesses after the context
        self._first = self._last = 0  # how many of these come before the first row, and the last used
        self._log_odds: list[float] = []  # by guess

    def find(
        self, context: Sequence[int], drafted: Sequence[int], most: int, sampling: Sampling
    ) -> list[int]:
        """Return up to ``most`` guesses after ``context + drafted`` that are worth reading."""
        self._lookup.read(context)
        self._log_odds = []
        guesses: list[int] = []
        chance = 1.0
        while len(guesses) < min(most, _MOST):
            guess = self._lookup.guess(context, [*drafted, *guesses], sampling)
            if guess is None:
                break
            match = log_odds(guess.match_confidence)
            chance *= self._used.chance(match)
            if chance < _ROW_PRICE:
                break
            guesses.append(guess.token)
            self._log_odds.append(match)
        return guesses

    def keep(self, drafted: Sequence[int], read: Sequence[int], logits: torch.Tensor) -> None:
        """Keep the logits after ``drafted`` and after each guess of those that were ``read``, [1 + guesses, vocab]."""
        self._logits, self._read = logits, [*read]
        self._first = self._last = len(drafted)

    def has_read(self, drafted: Sequence[int]) -> bool:
        """Return whether the last pass has given the logits after these draft tokens."""
        end = len(drafted)
        known = self._logits is not None and self._first <= end <= len(self._read)
        return known and self._read[:end] == drafted

    def row_after(self, drafted: Sequence[int]) -> torch.Tensor | None:
        """Return the logits after these draft tokens, [1, vocab], to use them; ``None`` if they are not known."""
        if self._logits is None or not self.has_read(drafted):
            return None
        self._last = len(drafted)
        row = self._last - self._first
        return self._logits[row : row + 1]

    def settle(self, drafted: Sequence[int]) -> int | None:
        """Learn from the last pass, now that its rows are used up, and forget it.

        Returns:
            How many of the draft tokens it has read, if it has also read wrong guesses; ``None`` otherwise.
        """
        if self._logits is None:
            return None
        used = self._last - self._first
        for i, match in enumerate(self._log_odds[: used + 1]):
            self._used.learn(match, i < used)
        pairs = enumerate(zip(self._read, drafted, strict=False))
        right = next((i for i, (read, token) in pairs if read != token), min(len(self._read), len(drafted)))
        wrong = right < len(self._read)
        self.forget()
        return right if wrong else None
