"""Enumerate every outcome of drawing and testing a small draft. Pure functions on tensors.

The draft is a tree of three nodes, or a chain of two, and the vocabulary has three tokens. Together the outcomes give
the exact distribution of the emitted tokens, so this shows what a wrong implementation really emits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.protocols import top
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verify import Verification

_PAIRS = (
    ((0.4, 0.5, 0.1), (0.2, 0.1, 0.7)),
    ((0.2, 0.7, 0.1), (0.6, 0.1, 0.3)),
    ((0.4, 0.6, 0.0), (0.1, 0.3, 0.6)),
)
"""p and q over three tokens: after the context, and in the next pair after the first token. Where (p - q)₊ had a single
token, it would hide what follows a rejection.
"""


def total_variation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the total variation of two distributions, [vocab] each, normalized here; 1 if one has no mass."""
    first, second = first.double(), second.double()
    distance = float((first / first.sum() - second / second.sum()).abs().sum() / 2)
    return 1.0 if math.isnan(distance) else distance


def method_error(verification: Verification, *, certain: bool) -> float:
    """Return the largest ``enumeration_error`` for several p and q."""
    rows = torch.tensor([*_PAIRS, _PAIRS[0]])  # [pairs, p or q, tokens]
    pairs = [(rows[i : i + 2, 0], rows[i : i + 2, 1]) for i in range(len(_PAIRS))]
    return max(enumeration_error(verification, p, q, certain=certain) for p, q in pairs)


def enumeration_error(
    verification: Verification, p: torch.Tensor, q: torch.Tensor, *, certain: bool = False
) -> float:
    """Return the total variation of the first two emitted tokens from the target's, over all outcomes.

    The draft has two nodes after the context and one after the first of them; for a method without trees it is a chain.
    Where a step emits one token, the second comes from the target.

    Args:
        verification: The method that draws the nodes and decides.
        p: The target's distributions after the context, and after every first token, [2, tokens].
        q: The drafter's distributions, in the same shape.
        certain: Whether the tokens of a chain are the likeliest ones, not drawn.
    """
    chain = not verification.takes_trees
    drawing = top if certain else verification.drawing
    emitted = torch.zeros(p.shape[-1], p.shape[-1], dtype=torch.float64)
    logits = p.log()
    sampling = Sampling(1.0)
    p = sampling.probabilities(logits, ()).double()
    outcomes: list[int] | None = []
    while outcomes is not None:
        random = _ScriptedRandomness(outcomes)
        tree = GrowingTree()
        first, second = Scores.of(q.clone(), normalized=True)
        tree.add(-1, drawing(first, 1 if chain else 2, random))
        tree.add(0, drawing(second, 1, random))
        draft = (
            Draft(tree.tokens, q=None if certain else q) if chain else tree
        )  # in the form in which chains come
        rows = logits[[0, *(int(parent < 0) for parent in tree.parents)]]
        tokens = verification.judge(draft, rows, (), sampling, random).tokens
        if len(tokens) > 1:
            emitted[tokens[0], tokens[1]] += random.weight
        else:
            emitted[tokens[0]] += random.weight * p[1] / p[1].sum()
        outcomes = random.next()
    return total_variation(emitted.flatten(), torch.outer(p[0], p[1]).flatten())


class _ScriptedRandomness(Randomness):
    """Randomness with given outcomes of the first events, and the first possible outcome of later ones.

    ``weight`` is the probability of all outcomes so far.

    Args:
        outcomes: For each event, the index of its outcome among the possible ones.
    """

    def __init__(self, outcomes: Sequence[int]) -> None:
        super().__init__(0)
        self._outcomes = list(outcomes)
        self._possible: list[int] = []  # number of possible outcomes, by event
        self.weight = 1.0

    def draw(self, probabilities: torch.Tensor) -> int:
        exact = probabilities.double()
        return self._take((exact / exact.sum()).tolist())

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        passed, ends = 1.0, []
        for chance in acceptance.double().tolist():
            ends.append(passed * (1.0 - chance))
            passed *= chance
        return self._take([*ends, passed]), [0.5] * len(acceptance)

    def _take(self, chances: Sequence[float]) -> int:
        possible = [outcome for outcome, chance in enumerate(chances) if chance > 0.0]
        event = len(self._possible)
        self._possible.append(len(possible))
        if event == len(self._outcomes):
            self._outcomes.append(0)
        if not possible:  # drawn from no mass
            self.weight = 0.0
            return 0
        outcome = possible[self._outcomes[event]]
        self.weight *= chances[outcome]
        return outcome

    def next(self) -> list[int] | None:
        """Return the next outcomes to enumerate (the last event changes first); ``None`` when all are enumerated."""
        outcomes = self._outcomes[: len(self._possible)]
        while outcomes:
            outcomes[-1] += 1
            if outcomes[-1] < self._possible[len(outcomes) - 1]:
                return outcomes
            outcomes.pop()
        return None
