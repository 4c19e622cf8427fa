"""The drafter of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import Asking, LengthPolicy

if TYPE_CHECKING:
    import torch

    from specbench.decoding.sampling import Randomness, Sampling

__all__ = ["NoDraft"]


class NoDraft:
    """Proposes nothing, so that every step is a plain target pass: plain decoding."""

    name = "none"
    epoch = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def begin(self, prompt: Sequence[int]) -> None:
        """Nothing to prepare."""

    def propose(
        self, context: Sequence[int], room: int, policy: LengthPolicy, sampling: Sampling, random: Randomness
    ) -> Asking[Draft]:
        yield from ()  # no passes
        return Draft()

    def commit(self, context: Sequence[int], emitted: int, logits: torch.Tensor) -> None:
        """Nothing to learn."""

    def keep(self, length: int, path: Sequence[int] = ()) -> None:
        """Nothing to roll back."""
