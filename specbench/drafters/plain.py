"""The drafter of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Drafter
from specbench.decoding.verdicts import top

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness, Sampling


class NoDraft(Drafter):
    """Proposes nothing, so that every step is one of plain decoding."""

    def __init__(self) -> None:
        super().__init__("none")

    def fork(self, scorer_like: ScorerLike) -> NoDraft:
        return NoDraft()

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Decoding[Draft]:
        yield from ()
        return Draft()
