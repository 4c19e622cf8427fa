"""Token Recycling: drafts the target's latest predictions after each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specbench.drafters.free import CandidateDrafter
from specbench.specs.drafters import Recycle

if TYPE_CHECKING:
    from specbench.decoding.clocks import Clock
    from specbench.decoding.drafts import StepOutcome

_CHANCES = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.01)
"""The probability of each rank to come next; later ones count as the last."""


class RecycleDrafter(CandidateDrafter):
    """Drafts from a table of each token's most probable successors (Luo et al. 2024, Token Recycling).

    The target's logits after a verified token, accepted or rejected, replace the entry of this token. Until then the
    entry has the token's successors in the prompt, the latest first.

    Args:
        spec: The number of successors per token.
        clock: Times the reading of the prompt.
    """

    def __init__(self, spec: Recycle | None = None, clock: Clock | None = None) -> None:
        self.spec = spec or Recycle()
        super().__init__(self.spec, clock)
        self._successors: dict[int, list[int]] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._successors = {}

    def take_in(self, context: Sequence[int], first: int) -> None:
        if first == 0:  # later tokens come with logits
            for token, successor in pairwise(context):
                others = [other for other in self._successors.get(token, ()) if other != successor]
                self._successors[token] = [successor, *others][: self.spec.top_k]

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        known = self._successors.get(drafted[-1] if drafted else context[-1], ())
        return {token: _CHANCES[min(rank, len(_CHANCES) - 1)] for rank, token in enumerate(known)}

    def update(self, outcome: StepOutcome) -> None:
        """Replace the entries of all verified tokens; accepted ones win."""
        if not outcome.emitted:
            return
        context, logits = outcome.context, outcome.logits
        before = len(context) - outcome.emitted
        if self._read == 0:
            self.read(context[:before])
        best = logits.topk(min(self.spec.top_k, logits.shape[-1]), dim=-1).indices.tolist()
        drafts = range(len(outcome.tokens))
        for token, row in zip(outcome.tokens, outcome.after(drafts), strict=True):
            self._successors[token] = best[row]
        kept = [0, *outcome.after(outcome.path[: outcome.emitted - 1])]
        self._successors.update(
            (token, best[row]) for token, row in zip(context[before - 1 : -1], kept, strict=True)
        )
