"""The record of a step: what was drafted and kept, and, for a trace, with which probabilities.

It is made after the clock was read, for α costs a pass over the vocabulary per position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from specbench.decoding.protocols import Draft
from specbench.decoding.records import Closing, DraftVerdict, FinishReason, Step, StepTimes
from specbench.decoding.verify import Verdict, expected_acceptance

if TYPE_CHECKING:
    import torch

__all__ = ["closing_of", "closing_probability", "step_of"]


def step_of(
    index: int,
    position: int,
    draft: Draft,
    tree: Draft,
    verdict: Verdict,
    kept: int,
    finished: FinishReason | None,
    times: StepTimes,
    policy: Mapping[str, float],
    logits: torch.Tensor | None,
) -> Step:
    """The record of a step.

    Args:
        index, position, times, policy: See ``Step``.
        draft: The chain that was drafted.
        tree: The same with the siblings verified beside it.
        verdict: On the tree.
        kept: How many of its tokens a stop has left.
        finished: Why the output ends here; ``None`` if it does not.
        logits: The target's, [verified, vocab], if a trace was asked for.
    """
    gamma, accepted = len(draft.tokens), verdict.accepted
    cut = kept <= accepted
    closing = closing_of(accepted, gamma)
    tested = kept if cut else accepted + (closing == "corrected")
    beside = zip((tree.parents or ())[gamma:], tree.tokens[gamma:], strict=True)
    return Step(
        index=index,
        position=position,
        drafted=tuple(draft.tokens),
        accepted=min(accepted, kept),
        tested=tested,
        tokens=tuple(verdict.tokens[:kept]),
        closing=None if cut else closing,
        expected_acceptance=expected_acceptance(draft, verdict, tested),
        times=times,
        finish_reason=finished,
        policy=dict(policy),
        verdicts=None if logits is None else _verdicts(draft, verdict, tested, logits),
        closing_probability=None if logits is None or cut else closing_probability(verdict, logits),
        siblings=tuple((parent + 1, token) for parent, token in beside),
        passes=draft.passes,
    )


def closing_of(accepted: int, gamma: int) -> Closing:
    """Where the token behind the accepted ones of γ drafts comes from."""
    if accepted < gamma:
        return "corrected"
    return "bonus" if gamma else "target"


def _verdicts(draft: Draft, verdict: Verdict, tested: int, logits: torch.Tensor) -> tuple[DraftVerdict, ...]:
    """What a trace shows of every draft; in greedy decoding the numbers are read off the untempered softmax."""
    p = logits.float().softmax(dim=-1) if verdict.p is None else verdict.p
    verdicts = []
    for i, token in enumerate(draft.tokens):
        if draft.q is not None:
            q = float(draft.q[i, token])
        elif draft.logits is not None:
            q = float(draft.logits[i].float().softmax(dim=-1)[token])
        else:
            q = 1.0
        seen = i < tested
        verdicts.append(
            DraftVerdict(
                token=token,
                q=q,
                p=float(p[i, token]) if seen else None,
                r=verdict.r[i] if seen and verdict.r else None,
                verdict="untested" if not seen else "accepted" if i < verdict.accepted else "rejected",
            )
        )
    return tuple(verdicts)


def closing_probability(verdict: Verdict, logits: torch.Tensor) -> float:
    """Probability of the closing token under what it was drawn from (greedy: the untempered softmax)."""
    token = verdict.tokens[verdict.accepted]
    if verdict.closing_distribution is None:
        return float(logits[verdict.accepted].float().softmax(dim=-1)[token])
    return float(verdict.closing_distribution[token] / verdict.closing_distribution.sum())
