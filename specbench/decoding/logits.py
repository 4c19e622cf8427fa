"""A drafter's logits, and the tokens they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.base.errors import RunError


class NoTokenError(RunError):
    """No token can be chosen by some logits."""

    def __init__(self) -> None:
        super().__init__(
            "The target's logits are not numbers (NaN), or all of a row are -inf.",
            "Use another dtype, such as bfloat16 or float32.",
        )


class DraftVocabulary:
    """A drafter's vocabulary, where it is not the first part of the target's.

    Args:
        tokens: The target's token of each of the drafter's logits, int64, without repeats.
        size: The size of the target's vocabulary; ``None`` for the smallest possible.
    """

    def __init__(self, tokens: torch.Tensor, size: int | None = None) -> None:
        self.tokens = tokens
        self.size = size or int(tokens.max()) + 1

    @cached_property
    def ids(self) -> list[int]:
        """``tokens`` as a list."""
        return [int(token) for token in self.tokens.tolist()]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """The index of each token's logit."""
        return {token: place for place, token in enumerate(self.ids)}

    def spread(self, rows: torch.Tensor, filling: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """Spread [rows, own tokens] to [rows, size].

        Args:
            rows: The values of the drafter's tokens.
            filling: The value of all others.
            out: Memory for the result; ``None`` to allocate it.
        """
        wide = rows.new_empty(len(rows), self.size) if out is None else out
        return wide.fill_(filling).index_copy_(-1, self.tokens, rows)


class Logits:
    """Untransformed logits at one position.

    Args:
        values: [tokens].
        vocabulary: The tokens they belong to; ``None`` for the target's first ones.

    Attributes:
        size: Number of logits.
    """

    def __init__(self, values: torch.Tensor, vocabulary: DraftVocabulary | None = None) -> None:
        self.values, self._vocabulary = values, vocabulary
        self.size = values.shape[-1]

    @cached_property
    def _known(self) -> NDArray[np.float32]:
        """The values for numpy, which is faster than torch on few elements."""
        return self.values.detach().float().cpu().numpy()

    @cached_property
    def log_sum(self) -> float:
        """log Σ exp of the values; raises ``NoTokenError`` if that is no number."""
        largest = float(self._known.max())
        if not math.isfinite(largest):
            raise NoTokenError
        below = self._known - largest
        return largest + math.log(np.exp(below, out=below).sum())

    @cached_property
    def entropy(self) -> float:
        """The entropy of the softmax, in nats."""
        return max(0.0, float(torch.special.entr(self.values.float().softmax(dim=-1)).sum()))

    def token(self, place: int) -> int:
        """Return the token of a logit."""
        return place if self._vocabulary is None else self._vocabulary.ids[place]

    def log_chance(self, token: int) -> float:
        """Return the log of a token's probability; -inf for unknown ones."""
        place = token if self._vocabulary is None else self._vocabulary.places.get(token)
        return -math.inf if place is None else float(self._known[place]) - self.log_sum

    @property
    def q(self) -> torch.Tensor:
        """The untempered softmax, [tokens]; raises ``NoTokenError`` if it is none."""
        q = self.values.float().softmax(dim=-1)
        if math.isnan(q[0]):
            raise NoTokenError
        return q

    def best(self, count: int) -> list[int]:
        """Return the most probable tokens, in that order."""
        ranked: list[int] = np.argsort(-self._known, kind="stable")[:count].tolist()
        return list(map(self.token, ranked))

    def chance(self, token: int) -> float:
        """Return the probability of a token."""
        return math.exp(self.log_chance(token))
