"""The distribution that a step emits, computed from what the step itself used. Pure functions on tensors.

At draft position i a step emits token x with probability

    e(x) = q(x)·a(x) + (1 - Σ_y q(y)·a(y))·c(x)

where q is what the draft was drawn from, a(x) the chance that x would have been accepted, and c the distribution that
the corrected token is drawn from. With a = min(1, p/q) and c = norm(max(0, p - q)) this is p (Leviathan et al. 2023,
A.1). The formula holds whatever a and c are, so it shows what a wrong rule really emits.
"""

from __future__ import annotations

import math

import torch

from specbench.decoding.drafts import Draft
from specbench.decoding.verify import acceptance_probabilities

__all__ = ["acceptance_of_all", "bias_without_adjustment", "emitted", "error_limit", "total_variation"]

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
    """Half the sum of absolute differences of two distributions, [vocab] each, normalised here; 1 if one is none."""
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


def bias_without_adjustment(draft: Draft, p: torch.Tensor, i: int) -> float:
    """How wrong position i would be if corrected tokens were drawn from p: how sharply this place tests a decoder."""
    return total_variation(emitted(draft, i, acceptance_of_all(draft, p, i), p[i]), p[i])
