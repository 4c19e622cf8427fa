"""Forward passes of a drafter's model that are answered from its one pass over an answer.

Behind a token that is not the answer's, the logits at the places of the answer's next tokens stand for those that only
the drafter could give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from specbench.decoding.protocols import ForwardOutput, ForwardRequest
from specbench.drafters.parts import models_of

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.predict.answers import Answer, ReadAnswer


@contextmanager
def known_passes(drafter: Drafter, answer: Answer, read: ReadAnswer | None) -> Iterator[None]:
    """Within the block, answer the passes of a drafter's model from what it has read; without that, let it run."""
    models: list[Any] = models_of(drafter) if read is not None else []
    scorers = [model.scorer for model in models]
    try:
        for model in models:
            model.scorer = _KnownPasses(model.scorer, len(answer.prompt), read)
        yield
    finally:
        for model, scorer in zip(models, scorers, strict=True):
            model.scorer = scorer


class _KnownPasses:
    """A scorer that gives logits that are known, whatever it is fed."""

    def __init__(self, scorer: Any, prompt: int, read: Any) -> None:
        self._scorer, self._prompt, self._logits = scorer, prompt, read.logits
        self.cached_len = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def begin(self) -> None:
        self.cached_len = 0

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.cached_len = min(self.cached_len, length)

    def score(self, request: ForwardRequest) -> ForwardOutput:
        self.cached_len = len(request.context) + len(request.tokens)
        first, depths = len(request.context) - self._prompt, [0]
        for i in range(len(request.tokens)):
            parent = i - 1 if request.parents is None else request.parents[i]
            depths.append(depths[parent + 1] + 1)
        last = len(self._logits) - 1
        wanted = depths[-(request.rows or 1) :]
        return ForwardOutput(self._logits[[min(first + depth, last) for depth in wanted]])


class KnownTests:
    """Transforms by which a model draws the answer's token as often as that is accepted, and else another one."""

    def __init__(self, sampling: Sampling, answer: Answer, read: ReadAnswer) -> None:
        self._sampling, self._answer, self._read = sampling, answer, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampling, name)

    def probabilities(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the distribution to draw from, [1, vocab]; for the arguments see ``Sampling``."""
        answer, n = self._answer, len(self._answer.tokens)
        first = len(context) - len(answer.prompt)
        place = first + len(drafted)
        q = torch.zeros(logits.shape) if out is None else out.zero_()
        token = int(answer.tokens[place]) if place < n else -1
        chance = 0.0
        if token >= 0 and list(drafted) == list(answer.tokens[first:place]):
            chance = float(self._read.chances[place])
        other = next(each for each in logits[0].topk(2).indices.tolist() if each != token)
        q[0, other] = 1.0 - chance
        if chance:
            q[0, token] = chance
        return q
