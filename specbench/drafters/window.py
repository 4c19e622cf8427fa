"""Drafting with a small model that reads only the beginning and the end of a long context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.drafters.model import ModelDrafter

if TYPE_CHECKING:
    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.protocols import ScorerLike

SINKS = 4
"""Tokens at the beginning that are always read: models attend to them whatever they are (Xiao et al. 2024)."""


class WindowDrafter(ModelDrafter):
    """Drafts after the first ``SINKS`` tokens of the context and its last ones, as if nothing stood between them.

    So its passes, its cache and its reading of the prompt do not grow with the context, and its positions stay among
    those that it was trained on. What it reads begins at the same token until that is ``window`` tokens and half as
    many more ago. Then it begins ``window`` tokens ago, and these are read again.

    Args:
        scorer, name, clock: See ``ModelDrafter``.
        window: How many of the last tokens are read at least.
    """

    def __init__(self, scorer: Scorer, name: str, window: int, clock: Clock | None = None) -> None:
        super().__init__(scorer, name, clock)
        self.window = window
        self._start = SINKS

    @property
    def context_limit(self) -> int | None:
        return None

    def fork(self, scorer_like: ScorerLike) -> WindowDrafter:
        return type(self)(scorer_like(self.scorer), self.name, self.window, self._clock)

    def begin(self, prompt: Sequence[int]) -> None:
        self._start = SINKS
        super().begin(prompt)

    def resume(self, prompt: Sequence[int], cached_tokens: int) -> None:
        if cached_tokens < self._start:
            self.begin(prompt)
        else:
            super().resume(prompt, self._own_length(cached_tokens))

    def _own_context(self, context: Sequence[int]) -> Sequence[int]:
        if len(context) - self._start > self.window + self.window // 2:
            self._start = len(context) - self.window
            self._forget()
        return context if self._start == SINKS else (*context[:SINKS], *context[self._start :])

    def _forget(self) -> None:
        """Drop what follows the first tokens from the cache."""
        if self.scorer.cached_len > SINKS:
            try:
                self.scorer.rollback(SINKS)
            except ValueError:  # a cache that has given up what would be needed
                self.scorer.cache.reset()

    def _own_length(self, length: int) -> int:
        return length - self._start + SINKS
