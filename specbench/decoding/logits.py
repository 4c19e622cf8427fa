"""What a drafter's model says of the next token, over the tokens that it knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray


class DraftVocabulary:
    """The tokens that a drafter knows, where they are not the first ones of its target's in their order.

    Args:
        tokens: By the drafter's logit the target's token that it is of, int64, none of them twice.
        size: How many tokens the target has; ``None`` for as many as it needs.
    """

    def __init__(self, tokens: torch.Tensor, size: int | None = None) -> None:
        self.tokens = tokens
        self.size = size or int(tokens.max()) + 1

    @cached_property
    def ids(self) -> list[int]:
        """The same as a list."""
        return [int(token) for token in self.tokens.tolist()]

    @cached_property
    def places(self) -> Mapping[int, int]:
        """By token, which logit is its own."""
        return {token: place for place, token in enumerate(self.ids)}

    def spread(self, rows: torch.Tensor, filling: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """From [rows, own tokens] to [rows, size].

        Args:
            rows: What the drafter's tokens have.
            filling: What the others have.
            out: Where to put it; ``None`` for fresh memory.
        """
        wide = rows.new_empty(len(rows), self.size) if out is None else out
        return wide.fill_(filling).index_copy_(-1, self.tokens, rows)


class Logits:
    """Untransformed logits behind one position.

    Args:
        values: [tokens].
        vocabulary: Whose they are; ``None``: the first is the target's first.
    """

    def __init__(self, values: torch.Tensor, vocabulary: DraftVocabulary | None = None) -> None:
        self.values, self._vocabulary = values, vocabulary

    @classmethod
    def certain(cls, token: int) -> Logits:
        """Those of a drafter that knows one token only."""
        return cls(torch.zeros(1), DraftVocabulary(torch.tensor([token])))

    @cached_property
    def _known(self) -> NDArray[np.float32]:
        """The same where numpy works on them: an operator of torch takes longer to start than all of a few thousand."""
        return self.values.detach().float().cpu().numpy()

    @cached_property
    def log_sum(self) -> float:
        """log Σ exp: what they exceed log-probabilities by."""
        largest = float(self._known.max())
        if not math.isfinite(largest):
            return largest
        below = self._known - largest
        return largest + math.log(np.exp(below, out=below).sum())

    def token(self, place: int) -> int:
        """Whose logit stands there."""
        return place if self._vocabulary is None else self._vocabulary.ids[place]

    def log_chance(self, token: int) -> float:
        """log of a token's probability; -inf for one that they do not know."""
        place = token if self._vocabulary is None else self._vocabulary.places.get(token)
        return -math.inf if place is None else float(self._known[place]) - self.log_sum

    @property
    def q(self) -> torch.Tensor:
        """The untempered softmax, [tokens]."""
        return self.values.float().softmax(dim=-1)

    def best(self, count: int) -> list[int]:
        """The most probable tokens, by falling probability."""
        return [token for _, token in self.likeliest(count, -math.inf)]

    def chances(self, count: int) -> list[float]:
        """Their probabilities."""
        return [math.exp(log_chance) for log_chance, _ in self.likeliest(count, -math.inf)]

    def chance(self, token: int) -> float:
        """The probability of a token."""
        return math.exp(self.log_chance(token))

    def likeliest(self, count: int, least: float) -> list[tuple[float, int]]:
        """Up to so many of the most probable tokens behind their log-probabilities, of those that have ``least``.

        They are few among many thousands, and to sort these takes ten times as long as to compare them.
        """
        places = np.flatnonzero(self._known >= least + self.log_sum)
        values = self._known[places]
        best = np.argsort(-values, kind="stable")[:count]
        found = zip(values[best].tolist(), places[best].tolist(), strict=True)
        return [(value - self.log_sum, self.token(place)) for value, place in found]
