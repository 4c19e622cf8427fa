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
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from specbench.decoding.sampling import Sampling

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer of the target.

    Attributes:
        prompt: Token ids.
        tokens: Token ids, with the end token if it was emitted.
        sampling: The transforms of the target's logits.
        probabilities: p of each token after these transforms; ``None`` if it is not known, or decoding was greedy.
        limit: The longest answer that was asked for; ``None`` if it is not known.
        name: By which answers to the same prompt are recognized.
        pass_s: Seconds in which the target, decoding plainly, emitted a token; ``None`` if it is not known.
        end_ids: Tokens that could have ended it.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Sampling
    probabilities: Floats | None = None
    limit: int | None = None
    name: str = ""
    pass_s: float | None = None
    end_ids: Sequence[int] = ()

    @cached_property
    def transforms(self) -> Sampling:
        """The transforms for this output."""
        return self.sampling.at(len(self.prompt), self.end_ids)

    def room(self) -> NDArray[np.int64]:
        """Return how many tokens a draft after the first i tokens can have: one more token ends its step."""
        n = len(self.tokens)
        longest = np.iinfo(np.int64).max if self.limit is None else self.limit
        return np.maximum(longest - 1 - np.arange(n), 0)


class Counts(NamedTuple):
    """Counts of the steps that give an answer, or what is expected of them.

    Attributes:
        steps, drafted: Steps, and tokens drafted in them.
        passes: Forward passes of the drafter.
        tested, accepted: Tokens by their place in the draft, [longest draft].
    """

    steps: float
    drafted: float
    passes: float
    tested: Floats
    accepted: Floats


@dataclass(frozen=True, eq=False)
class Chances:
    """What a drafter does along an answer of n tokens.

    Attributes:
        accept: At [i, j] the chance that token j (from 0) of a draft after the first i tokens is accepted, if those
            before it are; 0 where there is no such token. Shape [n, longest draft].
        drafts: How many tokens a draft after the first i tokens has, if it is as long as it can be, [n].
        passes: At [i, j] the drafter's passes for token j of that draft.
    """

    accept: Floats
    drafts: NDArray[np.int64]
    passes: Floats


def expected_steps(chances: Chances, room: NDArray[np.int64], gammas: Sequence[int]) -> list[Counts]:
    """Return the expected counts with each of these draft lengths.

    Args:
        chances: What the drafter does.
        room: The longest draft after the first i tokens that fits (``Answer.room``), [n].
        gammas: Draft lengths, at most the longest of ``chances``.
    """
    n, longest = chances.accept.shape
    survival = np.concatenate([np.ones((n, 1)), np.cumprod(chances.accept, axis=1)], axis=1)
    drafted = np.minimum(np.minimum(chances.drafts, room), np.asarray(gammas)[:, None])
    reached = np.minimum(drafted, n - np.arange(n))  # of a draft that goes beyond the answer, what is within
    within = np.arange(longest) < reached[:, :, None]
    begins = np.zeros(
        (len(gammas), n + 1)
    )  # the chance that a step begins after i tokens; after all none does
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
    steps, tokens = begins.sum(axis=1).tolist(), (begins * drafted).sum(axis=1).tolist()
    together = np.concatenate([np.zeros((n, 1)), np.cumsum(chances.passes, axis=1)], axis=1)
    passes = (begins * together[np.arange(n), drafted]).sum(axis=1).tolist()
    tested, accepted = (weights * survival[:, :-1]).sum(axis=1), (weights * survival[:, 1:]).sum(axis=1)
    return list(map(Counts, steps, tokens, passes, tested, accepted))
