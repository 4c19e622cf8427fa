"""An answer of the target, and what a drafter's model has read of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from specbench.decoding.logits import Logits

if TYPE_CHECKING:
    from specbench.decoding.sampling import Sampling
    from specbench.predict.law import Floats


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
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Sampling
    probabilities: Floats | None = None
    limit: int | None = None
    name: str = ""
    category: str = ""
    pass_s: float | None = None


class KnownLogits(Logits):
    """What policies read of logits, without the logits: those of a whole answer may not fit into memory.

    Args:
        size: Their number.
        entropy: Of their softmax, in nats.
        choice: The most likely token.
        log_chances: Log probabilities, at least of this one and of the answer's.
    """

    def __init__(self, size: int, entropy: float, choice: int, log_chances: Mapping[int, float]) -> None:
        super().__init__(torch.empty(0))
        self.size, self.entropy, self.choice = size, entropy, choice
        self._log_chances = log_chances

    def log_chance(self, token: int) -> float:
        return self._log_chances.get(token, -math.inf)


class ReadAnswer(NamedTuple):
    """A model's own pass over an answer.

    Attributes:
        chances: The chance that each token is accepted where the model drafts it, [n].
        readable: How many of the tokens it can draft, from the first: its context may be too short for others.
        known: What draft policies read of its logits, for each token; empty if it was not wanted.
    """

    chances: Floats
    readable: int
    known: Sequence[KnownLogits] = ()
