"""A drafter's distributions after the nodes of a tree, computed only as far as needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.decoding.logits import DraftVocabulary


class TokenDistribution(Protocol):
    """A drafter's distribution over the next token."""

    @property
    def q(self) -> torch.Tensor:
        """The whole distribution, float32 [vocab]."""

    def best(self, count: int) -> Sequence[int]:
        """Return the most probable tokens, without impossible ones."""

    def chance(self, token: int) -> float:
        """Return the probability of a token."""


class Scores:
    """A distribution from a model's scores, a row of those that are searched together."""

    def __init__(self, rows: _Rows, place: int) -> None:
        self._rows, self._place = rows, place

    @classmethod
    def of(
        cls, rows: torch.Tensor, *, normalized: bool, vocabulary: DraftVocabulary | None = None
    ) -> list[Scores]:
        """Return distributions for several rows.

        Args:
            rows: Float32 [rows, tokens], overwritten with probabilities when needed.
            normalized: Whether they are probabilities already.
            vocabulary: Their tokens; ``None`` for the target's first ones.
        """
        together = _Rows(rows, normalized, vocabulary)
        return [cls(together, place) for place in range(rows.shape[0])]

    @property
    def q(self) -> torch.Tensor:
        return self._rows.q(self._place)

    def best(self, count: int) -> Sequence[int]:
        return self._rows.best(count)[self._place][:count]

    def chance(self, token: int) -> float:
        return self._rows.chance(self._place, token)


class _Rows:
    """The rows that ``Scores`` of one forward pass share."""

    def __init__(self, rows: torch.Tensor, normalized: bool, vocabulary: DraftVocabulary | None) -> None:
        self._rows, self._normalized, self._vocabulary = rows, normalized, vocabulary
        self._count = 0
        self._best: list[list[int]] = []
        self._spread: dict[int, torch.Tensor] = {}

    def best(self, count: int) -> Sequence[list[int]]:
        """Return at least ``count`` of every row's largest possible tokens, by falling value."""
        if count > self._count or not self._best:
            self._count = count
            self._best = largest(self._rows, count, above=0.0 if self._normalized else -math.inf)
            if self._vocabulary is not None:
                self._best = [[self._vocabulary.ids[place] for place in best] for best in self._best]
        return self._best

    def q(self, row: int) -> torch.Tensor:
        if self._vocabulary is None:
            return self._distributions[row]
        if row not in self._spread:
            own = self._distributions[row : row + 1]
            self._spread[row] = self._vocabulary.spread(own, 0.0)[0]
        return self._spread[row]

    def chance(self, row: int, token: int) -> float:
        place = token if self._vocabulary is None else self._vocabulary.places[token]
        return float(self._chances[row, place])

    @property
    def _distributions(self) -> torch.Tensor:
        if not self._normalized:  # a softmax takes little longer than its sum
            for row in self._rows.split(1):  # for several rows torch starts threads
                torch.softmax(row, dim=-1, out=row)
            self._normalized = True
        return self._rows

    @cached_property
    def _chances(self) -> NDArray[np.float32]:
        return self._distributions.cpu().numpy()


class FixedCandidates:
    """A few certain candidates, from their probabilities in falling order."""

    def __init__(self, chances: Mapping[int, float]) -> None:
        self._chances = chances

    @property
    def q(self) -> torch.Tensor:
        raise AssertionError("tokens that are certain are not drawn")

    def best(self, count: int) -> Sequence[int]:
        return [*self._chances][:count]

    def chance(self, token: int) -> float:
        return self._chances[token]


def largest(rows: torch.Tensor, count: int, above: float = -math.inf) -> list[list[int]]:
    """Return the indices of every row's largest values, in falling order of value; equal values in order of index.

    Args:
        rows: Float32 [rows, vocab]; changed during the call, and restored.
        count: How many indices to return for each row, at most.
        above: Only values larger than this one are taken.
    """
    count = min(count, rows.shape[-1])
    if rows.device.type != "cpu":
        top = rows.topk(count)
        best, worth = top.indices.T.tolist(), top.values.T.tolist()
    else:
        values = rows.detach().numpy()
        every = np.arange(len(values))
        places, taken = [], []
        for _ in range(count):  # one after the other, each hidden from the next; faster than sorting
            places.append(values.argmax(axis=-1))
            taken.append(values[every, places[-1]])
            values[every, places[-1]] = -math.inf
        for place, value in zip(reversed(places), reversed(taken), strict=True):
            values[every, place] = value
        best, worth = np.array(places).tolist(), np.array(taken).tolist()
    return [
        [rank[row] for rank, value in zip(best, worth, strict=True) if value[row] > above]
        for row in range(rows.shape[0])
    ]
