"""Token Recycling: what the target thought might follow each token, when it last saw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from specbench.decoding.verify import deciding
from specbench.drafters.free import CandidateDrafter
from specbench.specs.drafters import Recycle

if TYPE_CHECKING:
    import torch

    from specbench.decoding.clocks import Clock

_CHANCES = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.01)
"""By rank, how often that successor comes next; later ones count as the last."""


class RecycleDrafter(CandidateDrafter):
    """Drafts from a table of each token's most probable successors (Luo et al. 2024, Token Recycling).

    Every verified row of the target's logits renews the entry of the token it stands behind, of rejected drafts too
    (in a cascade of emitted tokens alone). Before the target has said
    anything of a token, its successors are those it had in the prompt, the latest first.

    The table has an entry for each token seen, and work per token does not depend on their number.

    Args:
        spec: How many successors each token has.
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
        if first == 0:  # later tokens come with rows
            for token, successor in pairwise(context):
                others = [other for other in self._successors.get(token, ()) if other != successor]
                self._successors[token] = [successor, *others][: self.spec.top_k]

    def candidates(self, context: Sequence[int], drafted: Sequence[int]) -> Mapping[int, float]:
        known = self._successors.get(drafted[-1] if drafted else context[-1], ())
        return {token: _CHANCES[min(rank, len(_CHANCES) - 1)] for rank, token in enumerate(known)}

    def learn(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Rejected drafts teach too: what would have followed them is known."""
        self._renew(tokens, logits[1 : len(tokens) + 1])

    def commit(
        self, context: Sequence[int], emitted: int, logits: torch.Tensor, path: Sequence[int] = ()
    ) -> None:
        before = len(context) - emitted
        if self._read == 0:
            self.read(context[:before])
        self._renew(context[before - 1 : -1], deciding(logits, path)[:emitted])

    def _renew(self, tokens: Sequence[int], logits: torch.Tensor) -> None:
        """Take the entries of ``tokens`` from the logits behind each, [tokens, vocab]."""
        best = logits.topk(min(self.spec.top_k, logits.shape[-1]), dim=-1).indices.tolist()
        self._successors.update(zip(tokens, best, strict=True))
