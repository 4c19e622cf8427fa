"""Compute the distribution that a step emits from the step's own quantities. Pure functions on tensors.

At draft position i a step emits token x with probability

    e(x) = q(x)·a(x) + (1 - Σ_y q(y)·a(y))·c(x)

where q is the distribution of the drafted token, a(x) the acceptance probability of x, and c the distribution of the
correction token. With a = min(1, p/q) and c = norm(max(0, p - q)) this is p (Leviathan et al. 2023, A.1). The formula
holds for any a and c, so it shows what a wrong implementation really emits.

For trees, and for verification methods that test several draft tokens jointly, there is no such formula: instead, every
outcome of drawing and testing is enumerated, for a tree of three nodes and a vocabulary of three tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.verify import Verification, acceptance_probabilities

ENUMERATION_LIMIT = 1e-6
"""Total variation from p that rounding may cause in an enumeration."""

_FEW_TOKENS = 3
"""Size of the reduced vocabulary of an enumeration."""

_LARGEST_ERROR = 1e-5
_LARGEST_DRIFT = 1e-4


def acceptance_by_token(draft: Draft, p: torch.Tensor, i: int) -> torch.Tensor:
    """Return the acceptance probability of every token at position i, float64 [vocab], by the loop's own function.

    Args:
        draft: The step's draft; without ``q`` every token but the drafted one gets 0.
        p: The target's distributions, float32 [> i, vocab].
    """
    vocab = p.shape[-1]
    if draft.q is None:
        acceptance = torch.zeros(vocab, dtype=torch.float64, device=p.device)
        token = draft.tokens[i]
        acceptance[token] = acceptance_probabilities(Draft([token]), p[i : i + 1]).double()[0]
        return acceptance
    # One row per token, all of them views of the same distribution.
    every = Draft(list(range(vocab)), q=draft.q[i].expand(vocab, vocab))
    return acceptance_probabilities(every, p[i].expand(vocab, vocab)).double()


def emitted_distribution(
    draft: Draft, i: int, acceptance: torch.Tensor, closing: torch.Tensor
) -> torch.Tensor:
    """Return the distribution of the token at position i, given that those before it were accepted: float64 [vocab].

    Args:
        acceptance: Acceptance probability of every token, float64 [vocab].
        closing: The correction token's distribution, [vocab], not necessarily of sum 1.
    """
    if draft.q is not None:
        q = draft.q[i].double()
        q = q / q.sum()
    else:
        q = torch.zeros_like(acceptance)
        q[draft.tokens[i]] = 1.0
    accepted = q * acceptance
    closing = closing.double()
    return accepted + (1.0 - accepted.sum()) * closing / closing.sum()


def total_variation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the total variation of two distributions, [vocab] each, normalized here; 1 if one has no mass."""
    first, second = first.double(), second.double()
    distance = float((first / first.sum() - second / second.sum()).abs().sum() / 2)
    return 1.0 if math.isnan(distance) else distance


def error_limit(draft: Draft, p: torch.Tensor, i: int) -> float:
    """Return the total variation that rounding can cause at position i: 1e-5 plus the errors of the sums of p and q.

    On a CPU, a float32 softmax over 150,000 tokens sums to one only within some 1.5e-5. At most 1e-4 is allowed for it.
    """
    sums = [p[i].double().sum()]
    if draft.q is not None and i < len(draft.q):
        sums.append(draft.q[i].double().sum())
    drift = sum(abs(float(total) - 1.0) for total in sums)
    return _LARGEST_ERROR + min(drift, _LARGEST_DRIFT)


# -- enumeration -----------------------------------------------------------------------------------


def likely_tokens(p: torch.Tensor, q: torch.Tensor) -> list[int]:
    """Return three of the most probable tokens of two distributions, [vocab] each, including the best of each."""
    ranked = [int(p.argmax()), int(q.argmax()), *(p + q).topk(min(_FEW_TOKENS, len(p))).indices.tolist()]
    return list(dict.fromkeys(ranked))[:_FEW_TOKENS]


def enumeration_error(verification: Verification, p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the total variation of the first two emitted tokens from the target's, over all outcomes.

    The draft has two nodes after the context and one after the first of them; for a method without trees it is a chain.
    Where a step emits one token, the second comes from the target.

    Args:
        verification: The method that draws the nodes and decides.
        p: The target's distributions after the context, and after every first token, [2, tokens].
        q: The drafter's distributions, in the same shape.
    """
    chain = not verification.takes_trees
    emitted = torch.zeros(p.shape[-1], p.shape[-1], dtype=torch.float64)
    logits = p.log()
    sampling = Sampling(1.0)
    p = sampling.probabilities(logits, ()).double()
    outcomes: list[int] | None = []
    while outcomes is not None:
        random = _ScriptedRandomness(outcomes)
        tree = GrowingTree()
        first, second = Scores.of(q.clone(), normalized=True)
        tree.add(-1, verification.drawing(first, 1 if chain else 2, random))
        tree.add(0, verification.drawing(second, 1, random))
        draft = Draft(tree.tokens, q=q) if chain else tree  # in the form in which chains come
        rows = logits[[0, *(int(parent < 0) for parent in tree.parents)]]
        tokens = verification.judge(draft, rows, (), sampling, random).tokens
        if len(tokens) > 1:
            emitted[tokens[0], tokens[1]] += random.weight
        else:
            emitted[tokens[0]] += random.weight * p[1] / p[1].sum()
        outcomes = random.next()
    return total_variation(emitted.flatten(), torch.outer(p[0], p[1]).flatten())


class ForcedRandomness(Randomness):
    """Randomness that accepts a given number of tested tokens, and keeps what it was asked.

    Attributes:
        acceptance: The probabilities of the last test.
        drawn_from: The distribution of the last draw.
    """

    def __init__(self, accepted: int) -> None:
        super().__init__(0)
        self._accepted = accepted
        self.acceptance = self.drawn_from = torch.empty(0)

    def draw(self, probabilities: torch.Tensor) -> int:
        self.drawn_from = probabilities
        return int(probabilities.argmax())

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        self.acceptance = acceptance
        return self._accepted, [0.5] * len(acceptance)


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
