"""An answer of the target, what a drafter's model has read of it, and counts of the steps that give it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

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
        category: Kind of prompt; empty if it has none.
        pass_s: Seconds in which the target, decoding plainly, emitted a token; ``None`` if it is not known.
        end_ids: Tokens that could have ended it.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Sampling
    probabilities: Floats | None = None
    limit: int | None = None
    name: str = ""
    category: str = ""
    pass_s: float | None = None
    end_ids: Sequence[int] = ()

    @cached_property
    def transforms(self) -> Sampling:
        """The transforms for this output."""
        return self.sampling.at(len(self.prompt), self.limit, self.end_ids)

    def room(self) -> NDArray[np.int64]:
        """Return how many tokens a draft after the first i tokens can have: one more token ends its step."""
        n = len(self.tokens)
        longest = np.iinfo(np.int64).max if self.limit is None else self.limit
        return np.maximum(longest - 1 - np.arange(n), 0)


class ReadAnswer(NamedTuple):
    """A model's own pass over an answer.

    Attributes:
        chances: The chance that each token is accepted where the model drafts it, [n].
        readable: How many of the tokens it can draft, from the first: its context may be too short for others.
        logits: The logits that each of these is drafted by, [readable, vocab]; ``None`` if they were not kept.
    """

    chances: Floats
    readable: int
    logits: torch.Tensor | None = None


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
