"""The drafter of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Drafter, DrafterTraits

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan


class NoDraft(Drafter):
    """Proposes nothing, so that every step is one of plain decoding."""

    def __init__(self) -> None:
        super().__init__(DrafterTraits("none"))

    def fork(self, scorer_like: ScorerLike) -> NoDraft:
        return NoDraft()

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        yield from ()
        return Draft()
