"""The law of the steps in which speculative decoding would have produced a known answer.

Let an answer x_1 ... x_n be drawn from the target's distributions p (after the transforms of sampling), and let q be
the drafter's. Where rejection sampling tests a draft, it either accepts the draft, which is x with probability
min(p(x), q(x)), or rejects it and corrects it to x with probability p(x) - min(p(x), q(x)). Both add up to p(x). So the
tokens are those of plain decoding, and given the token x of a tested position the test was passed with the chance

    a = min(1, q(x) / p(x))

whatever happened at other positions. Greedy decoding is a special case: a is 1 where the drafter's choice is x, else 0.
So is a token that is copied rather than drawn, for its q is one-hot: a is 1 where it is x, else 0.

Given the answer and these chances, the steps are therefore a Markov chain on its positions: a step that begins after i
tokens accepts the drafts i+1, i+2, ... until a test fails, and the next step begins after the token of that position,
or after one token more than the draft has. ``expected_steps`` follows the chain forwards, for many draft lengths
at once. Averaged over answers that are drawn from p, what it returns is exactly what decoding gives on average.

The prefill emits the first token, a draft is cut to what fits before the longest output, and an end token among the
accepted ones ends the output, as in ``decoding.loop``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chances:
    """What a drafter does along an answer of n tokens.

    Attributes:
        accept: At [i, j] the chance that token j (from 0) of a draft after the first i tokens is accepted, if those
            before it are; 0 where there is no such token. Shape [n, longest draft].
        drafts: How many tokens a draft after the first i tokens has, if it is as long as it can be, [n].
        drawn: Whether token j of that draft takes a forward pass, if those before it are accepted, like ``accept``.
        room: The longest draft after the first i tokens that fits before the longest output, [n].
    """

    accept: Floats
    drafts: NDArray[np.int64]
    drawn: NDArray[np.bool_]
    room: NDArray[np.int64]

    @classmethod
    def by_position(
        cls, chances: Floats, drafts: NDArray[np.int64], longest: int, limit: int | None
    ) -> Chances:
        """Return those of a drafter whose token depends on the tokens before it alone, and takes a forward pass.

        Args:
            chances: a of each token of the answer, [n].
            drafts: See the class.
            longest: The longest draft.
            limit: The longest output, in tokens; ``None`` for none.
        """
        padded = np.concatenate([chances, np.zeros(longest)])
        accept = np.lib.stride_tricks.sliding_window_view(padded, longest)[: len(chances)]
        return cls(accept, drafts, np.ones(accept.shape, np.bool_), room_before(len(chances), limit))


def room_before(tokens: int, limit: int | None) -> NDArray[np.int64]:
    """Return ``Chances.room`` of an answer with so many tokens; a step ends with a token that is not drafted."""
    if limit is None:
        return np.full(tokens, np.iinfo(np.int64).max)
    return np.maximum(limit - 1 - np.arange(tokens), 0)


@dataclass(frozen=True, eq=False)
class ExpectedSteps:
    """Expected counts of an answer's steps, a row for each draft length.

    Attributes:
        tokens: Tokens that the steps emit: all of the answer but the first.
        begins: The chance that a step begins after the first i tokens, [lengths, n].
        drafted: Drafted tokens, [lengths].
        passes: Forward passes of the drafter, [lengths]. Behind a rejected token they are counted as if it had been
            accepted: what is drafted there is not in the answer.
        tested, accepted: Tokens by their place in the draft, [lengths, longest draft].
    """

    tokens: int
    begins: Floats
    drafted: Floats
    passes: Floats
    tested: Floats
    accepted: Floats

    @property
    def steps(self) -> Floats:
        """[lengths]."""
        found: Floats = self.begins.sum(axis=1)
        return found


def expected_steps(chances: Chances, gammas: Sequence[int]) -> ExpectedSteps:
    """Return the expected steps with each of these draft lengths, at most the longest of ``chances``."""
    n, longest = chances.accept.shape
    places = np.arange(longest)
    survival = np.concatenate([np.ones((n, 1)), np.cumprod(chances.accept, axis=1)], axis=1)
    drafted = np.minimum(np.minimum(chances.drafts, chances.room), np.asarray(gammas)[:, None])
    reached = np.minimum(
        drafted, n - np.arange(n)
    )  # of a draft that goes beyond the answer, its part within it
    within = places < reached[:, :, None]
    begins = np.zeros((len(gammas), n + 1))  # after all n tokens no step begins
    begins[:, min(1, n)] = 1.0
    rows = np.arange(len(gammas))
    for i in range(1, n):
        here = begins[:, i]
        if not here.any():
            continue
        failing = (survival[i, :-1] - survival[i, 1:]) * within[:, i]  # by place, the first test that fails
        last = min(longest, n - i)
        begins[:, i + 1 : i + 1 + last] += here[:, None] * failing[:, :last]
        begins[rows, np.minimum(i + 1 + drafted[:, i], n)] += here * survival[i, reached[:, i]]
    begins = begins[:, :n]
    weights = begins[:, :, None] * within
    passes = np.concatenate([np.zeros((n, 1)), np.cumsum(chances.drawn, axis=1)], axis=1)
    return ExpectedSteps(
        tokens=n - 1,
        begins=begins,
        drafted=(begins * drafted).sum(axis=1),
        passes=(begins * passes[np.arange(n), drafted]).sum(axis=1),
        tested=(weights * survival[:, :-1]).sum(axis=1),
        accepted=(weights * survival[:, 1:]).sum(axis=1),
    )
