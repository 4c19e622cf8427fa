"""A target that drafts in its own pass: PaSS (Monea et al. 2023, arXiv 2311.13581).

A few learned embeddings stand behind the context as if they were tokens. One pass of the target, frozen, gives the next
token's own distribution and behind each of them a guess at the token one place further on. So a draft of L + 1 tokens
costs one pass, whatever L is.

This is the form in which one pass drafts and the next one verifies. The other one, with such rows behind every node of
a verification, saves the drafting pass, but its passes are (γ + 1)(L + 1) rows wide: beyond nine rows a CPU takes
longer for each, and targets that take no trees (int8 ones, sliding windows) could not have it at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbench.decoding.protocols import ForwardRequest
from specbench.drafters.model import SelfDrafter

if TYPE_CHECKING:
    import torch

    from specbench.backends.torch.scorer import Scorer
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import Draft, GrowingTree
    from specbench.decoding.protocols import Decoding, ScorerLike


class LookAheadDrafter(SelfDrafter):
    """Drafts with the target and look-ahead embeddings, on the target's own cache.

    Every token is drawn from its own marginal, which does not depend on the tokens drafted before it: on a chain the
    product of these is q, and the nodes of a tree each draw candidates of their own.

    Args:
        scorer: The target with more embeddings than it has tokens, sharing the target's cache object.
        ahead: The ids of these embeddings.
        name: How the command line names it.
        clock: See ``ModelDrafter``.
    """

    takes_trees = True  # they are verified by the target, and cost it no pass over a tree before

    def __init__(self, scorer: Scorer, ahead: Sequence[int], name: str, clock: Clock | None = None) -> None:
        super().__init__(scorer, name, clock)
        self._ahead = tuple(ahead)
        self._first = 0  # drafts in front of the guesses
        self._guesses: torch.Tensor | None = None

    def fork(self, scorer_like: ScorerLike) -> LookAheadDrafter:
        return LookAheadDrafter(scorer_like(self.scorer), self._ahead, self.name, self._clock)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        self._guesses = None
        with super().drafting():
            yield

    def _next_logits(self, context: Sequence[int], draft: Draft) -> Decoding[torch.Tensor]:
        place = len(draft.tokens)
        if self._guesses is None or place - self._first >= len(self._guesses):
            if self._guesses is not None:
                self.scorer.rollback(len(context) + self._first)
            self._first = place
            draft.passes = (draft.passes or 0) + 1
            tokens = [*draft.tokens, *self._ahead]
            self._guesses = (
                yield ForwardRequest(self.scorer, context, tokens, rows=len(self._ahead) + 1)
            ).logits
        return self._guesses[place - self._first][None]

    def _frontier_logits(
        self, context: Sequence[int], tree: GrowingTree, rows: int
    ) -> Decoding[torch.Tensor]:
        if not self._read_nodes:
            return (yield from self._next_logits(context, tree))
        assert self._guesses is not None
        return self._guesses[tree.depths[self._read_nodes[-1]]][None].expand(rows, -1)

    def _room(self, context: Sequence[int]) -> int:
        return min(super()._room(context), len(self._ahead) + 1)

    def can_read(self, context: Sequence[int], drafted: Sequence[int]) -> bool:
        limit = self.scorer.context_limit
        fits = limit is None or len(context) + len(drafted) + len(self._ahead) <= limit
        return fits and super().can_read(context, drafted)
