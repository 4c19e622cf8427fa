"""The distribution that a step emits, computed from what the step itself used. Pure functions on tensors.

At draft position i a step emits token x with probability

    e(x) = q(x)·a(x) + (1 - Σ_y q(y)·a(y))·c(x)

where q is what the draft was drawn from, a(x) the chance that x would have been accepted, and c the distribution that
the corrected token is drawn from. With a = min(1, p/q) and c = norm(max(0, p - q)) this is p (Leviathan et al. 2023,
A.1). The formula holds whatever a and c are, so it shows what a wrong rule really emits.

Of trees, and of ways to verify that look at several drafts together, there is no such formula. For them every outcome
is gone through: all that may be drawn and all that may be tested, in a tree of three drafts over three tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from specbench.decoding.drafts import Draft, GrowingTree
from specbench.decoding.prospects import Scores
from specbench.decoding.sampling import Multinomial, Randomness
from specbench.decoding.verify import Verification, acceptance_probabilities

ENUMERATION_LIMIT = 1e-6
"""Total variation from p that rounding may leave where every outcome was gone through."""

_FEW = 3
"""Tokens that a vocabulary is cut down to."""

_LARGEST_ERROR = 1e-5
_LARGEST_DRIFT = 1e-4


def acceptance_of_all(draft: Draft, p: torch.Tensor, i: int) -> torch.Tensor:
    """The chance of acceptance of every token at position i, float64 [vocab], by the decoding loop's own function.

    Args:
        draft: The step's proposal; without ``q`` every token but the drafted one is impossible and gets 0.
        p: The target's distributions, float32 [> i, vocab].
        i: Position in the draft.
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


def emitted(draft: Draft, i: int, acceptance: torch.Tensor, closing: torch.Tensor) -> torch.Tensor:
    """The distribution of the token at position i, given that the drafts before it were accepted: float64 [vocab].

    Args:
        draft: The step's proposal.
        i: Position in the draft.
        acceptance: Chance of acceptance of every token, float64 [vocab].
        closing: What the corrected token is drawn from, [vocab], not necessarily of sum 1.
    """
    kept = _drafted(draft, i, acceptance) * acceptance
    closing = closing.double()
    return kept + (1.0 - kept.sum()) * closing / closing.sum()


def _drafted(draft: Draft, i: int, like: torch.Tensor) -> torch.Tensor:
    """What draft i was drawn from, float64 [vocab], of sum 1."""
    if draft.q is not None:
        q = draft.q[i].double()
        return q / q.sum()
    certain = torch.zeros_like(like)
    certain[draft.tokens[i]] = 1.0
    return certain


def total_variation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Half the sum of absolute differences of two distributions, [vocab] each, normalized here; 1 if one is none."""
    first, second = first.double(), second.double()
    distance = float((first / first.sum() - second / second.sum()).abs().sum() / 2)
    return 1.0 if math.isnan(distance) else distance


def error_limit(draft: Draft, p: torch.Tensor, i: int) -> float:
    """Total variation from p that rounding may leave at position i: 1e-5, and what p and q are off one in sum.

    A float32 softmax over 150,000 tokens sums to one only within some 1.5e-5 on a CPU. More than 1e-4 is not forgiven.
    """
    sums = [p[i].double().sum()]
    if draft.q is not None and i < len(draft.q):
        sums.append(draft.q[i].double().sum())
    drift = sum(abs(float(total) - 1.0) for total in sums)
    return _LARGEST_ERROR + min(drift, _LARGEST_DRIFT)


# -- every outcome ---------------------------------------------------------------------------------


def few_tokens(p: torch.Tensor, q: torch.Tensor) -> list[int]:
    """Some of the most probable tokens of two distributions, [vocab] each; one of either at least."""
    ranked = [int(p.argmax()), int(q.argmax()), *(p + q).topk(min(_FEW, len(p))).indices.tolist()]
    return list(dict.fromkeys(ranked))[:_FEW]


def enumeration_error(verification: Verification, p: torch.Tensor, q: torch.Tensor) -> float:
    """Total variation of the first two tokens from the target's, when all is drawn and tested in every way.

    Two drafts stand behind the context and one behind the first of them; of a way to verify that takes no trees one
    behind the other. Where a step emits one token, the second comes from the target.

    Args:
        verification: Draws the drafts and decides.
        p: The target's distributions behind the context, and behind every first token, [2, tokens].
        q: The drafter's.
    """
    found = torch.zeros(p.shape[-1], p.shape[-1], dtype=torch.float64)
    logits = p.log()
    sampling = Multinomial()
    p = sampling.probabilities(logits, ()).double()
    for random in _every_way():
        tree = GrowingTree()
        beside = 2 if verification.takes_trees else 1
        tree.add(-1, verification.drawing(Scores(q[0], normalized=True), beside, random))
        tree.add(0, verification.drawing(Scores(q[1], normalized=True), 1, random))
        draft: Draft = tree
        if not verification.takes_trees:
            draft = Draft(draft.tokens, q=q[: len(draft.tokens)])  # the form in which chains come
        rows = logits[[0, *(1 if parent < 0 else 0 for parent in tree.parents)]]
        tokens = verification.judge(draft, rows, (), sampling, random).tokens
        if len(tokens) > 1:
            found[tokens[0], tokens[1]] += random.weight
        else:
            found[tokens[0]] += random.weight * p[1] / p[1].sum()
    return total_variation(found.flatten(), torch.outer(p[0], p[1]).flatten())


def _every_way() -> Iterator[_Prescribed]:
    """Random events in all ways in which they can happen, one way after the other."""
    outcomes: list[int] | None = []
    while outcomes is not None:
        random = _Prescribed(outcomes)
        yield random
        outcomes = random.next()


class _Prescribed(Randomness):
    """Takes prescribed outcomes, the first possible one behind these, and keeps the chance of having taken them.

    Args:
        outcomes: By event, which of the possible ones.
    """

    def __init__(self, outcomes: Sequence[int]) -> None:
        super().__init__(0)
        self._outcomes = list(outcomes)
        self._possible: list[int] = []  # by event, how many outcomes it could have
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
        if not possible:  # drawn from nothing: what comes of it has no share in the distribution
            self.weight = 0.0
            return 0
        outcome = possible[self._outcomes[event]]
        self.weight *= chances[outcome]
        return outcome

    def next(self) -> list[int] | None:
        """The outcomes of the next way, the last event's changing first; ``None`` behind the last one."""
        outcomes = self._outcomes[: len(self._possible)]
        while outcomes:
            outcomes[-1] += 1
            if outcomes[-1] < self._possible[len(outcomes) - 1]:
                return outcomes
            outcomes.pop()
        return None
