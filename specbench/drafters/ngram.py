"""N-gram drafter: drafts the most frequent continuations in prompt and output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from specbench.decoding.drafts import Guess
from specbench.drafters.free import FreeDrafter
from specbench.specs.drafters import NGram

if TYPE_CHECKING:
    from specbench.decoding.drafts import StepOutcome
    from specbench.decoding.sampling import Sampling


_Continuations: TypeAlias = dict[int, int]
"""How often each token came after one context; the token seen last is last."""


class NGramDrafter(FreeDrafter):
    """Drafts the most frequent continuation of the longest known context, until none is known.

    Continuations are counted for contexts of 1 to ``order - 1`` tokens in prompt and output; the longest known context
    decides, and of equally frequent tokens the last one seen. Work per token does not depend on the context's length.

    Args:
        spec: What is counted, and how it is drafted from.
    """

    def __init__(self, spec: NGram | None = None, target: Any = None) -> None:
        self.spec = spec or NGram()
        super().__init__(self.spec, target)
        self._continuations: dict[tuple[int, ...], _Continuations] = {}
        self._vocabulary: int | None = None
        self._device = torch.device("cpu")

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        if not self.spec.keep:
            self._continuations.clear()
        self._vocabulary = None

    def take_in(self, context: Sequence[int], first: int) -> None:
        if first == 0:  # later tokens are counted in update
            for i in range(len(context)):
                self._count(context, i)

    def guess(self, context: Sequence[int], drafted: Sequence[int], sampling: Sampling) -> Guess | None:
        """Guess by the longest known context."""
        known = self._longest_known([*context[-(self.spec.order - 1) :], *drafted][-(self.spec.order - 1) :])
        if known is None:
            return None
        sampled = self.spec.sample and not sampling.greedy and self._vocabulary is not None
        token = max(reversed(known), key=known.__getitem__)
        confidence = known[token] / (sum(known.values()) + 1)
        return Guess(token, confidence, self._distribution(known) if sampled else None)

    def _longest_known(self, tail: Sequence[int]) -> _Continuations | None:
        """Return the continuations of the longest known suffix of ``tail``."""
        for first in range(len(tail) - self.spec.min + 1):
            known = self._continuations.get(tuple(tail[first:]))
            if known is not None:
                return known
        return None

    def _distribution(self, known: _Continuations) -> torch.Tensor:
        """Return the normalized counts, float32 [vocab]."""
        counts = torch.tensor(list(known.values()), dtype=torch.float32)
        tokens = torch.tensor(list(known), device=self._device)
        q = torch.zeros(self._vocabulary or 0, device=self._device)
        return q.scatter_(0, tokens, (counts / counts.sum()).to(self._device))

    def update(self, outcome: StepOutcome) -> None:
        if not outcome.emitted:
            return
        context, logits = outcome.context, outcome.logits
        self._vocabulary = logits.shape[-1]
        self._device = logits.device
        fresh = len(context) - outcome.emitted
        if self._read == 0:
            self.read(context[:fresh])
        best: list[list[int]] = [[]] * outcome.emitted
        if self.spec.top_k > 1:
            best = outcome.deciding().topk(min(self.spec.top_k, logits.shape[-1]), dim=-1).indices.tolist()
        for i, ranked in enumerate(best, start=fresh):
            self._count(context, i, [token for token in reversed(ranked) if token != context[i]])

    def _count(self, context: Sequence[int], i: int, others: Sequence[int] = ()) -> None:
        """Count token ``i``, and ``others`` that were likely there, for every context before it."""
        for n in range(1, min(self.spec.order - 1, i) + 1):
            known = self._continuations.setdefault(tuple(context[i - n : i]), {})
            for token in (*others, context[i]):
                known[token] = known.pop(token, 0) + 1
