"""What a drafter expects behind a node of a tree, looked at only as far as somebody asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

__all__ = ["Known", "Prospects", "Scores", "largest"]

_STRIDE = 64
"""Values in a column: as many as make both halves of the search short."""


class Prospects(Protocol):
    """A drafter's distribution over the next token."""

    @property
    def q(self) -> torch.Tensor:
        """All of it, float32 [vocab]."""
        ...

    def best(self, count: int) -> Sequence[int]:
        """The most probable tokens that are possible at all, by falling probability."""
        ...

    def chances(self, count: int) -> Sequence[float]:
        """Their probabilities."""
        ...

    def chance(self, token: int) -> float:
        """The probability of a token."""
        ...


class Scores:
    """A row of a model: scores whose softmax is meant, or a distribution.

    Args:
        row: Float32 [vocab].
        normalised: Whether it is a distribution.
    """

    def __init__(self, row: torch.Tensor, *, normalised: bool) -> None:
        self._row, self._normalised = row, normalised
        self._found: list[int] = []

    @cached_property
    def q(self) -> torch.Tensor:
        return self._row if self._normalised else self._row.softmax(dim=-1)

    @cached_property
    def _log_total(self) -> float:
        """Of a softmax. torch's own takes several times as long for one row."""
        if self._row.device.type != "cpu":
            return float(self._row.logsumexp(dim=-1))
        values = self._row.detach().numpy()
        highest = float(values.max())
        return highest + math.log(float(np.exp(values - highest).sum(dtype=np.float64)))

    def best(self, count: int) -> Sequence[int]:
        if len(self._found) < min(count, len(self._row)):
            self._found = largest(self._row, count)
        impossible = 0.0 if self._normalised else -math.inf
        return [token for token in self._found[:count] if float(self._row[token]) > impossible]

    def chances(self, count: int) -> Sequence[float]:
        return [self.chance(token) for token in self.best(count)]

    def chance(self, token: int) -> float:
        value = float(self._row[token])
        return value if self._normalised else math.exp(value - self._log_total)


class Known:
    """A few tokens that a drafter without a model knows.

    Args:
        chances: By token, falling.
    """

    def __init__(self, chances: Mapping[int, float]) -> None:
        self._chances = chances

    @property
    def q(self) -> torch.Tensor:
        raise AssertionError("tokens that are certain are not drawn")

    def best(self, count: int) -> Sequence[int]:
        return [*self._chances][:count]

    def chances(self, count: int) -> Sequence[float]:
        return [*self._chances.values()][:count]

    def chance(self, token: int) -> float:
        return self._chances[token]


def largest(row: torch.Tensor, count: int) -> list[int]:
    """The indices of the largest values of a row, [vocab], by falling value; of equals the first come first.

    On a CPU the row is laid out in columns whose highest values are found at once; only the columns with the highest
    ones are looked through: half the time of ``topk``.
    """
    count = min(count, len(row))
    if count < 1:
        return []
    width = len(row) // _STRIDE
    if row.device.type != "cpu" or width < 2 * count or row.dtype != torch.float32:
        return [int(index) for index in row.topk(count).indices.tolist()]
    values = row.detach().numpy()
    if count == 1:
        return [int(values.argmax())]
    whole = width * _STRIDE
    highest = values[:whole].reshape(_STRIDE, width).max(axis=0)
    columns = np.argpartition(highest, width - count)[width - count :]
    places = np.concatenate(
        [(np.arange(_STRIDE)[:, None] * width + columns).ravel(), np.arange(whole, len(values))]
    )
    order = np.lexsort((places, -values[places]))[:count]
    return [int(place) for place in places[order]]
