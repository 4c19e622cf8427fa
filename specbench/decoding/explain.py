"""Makes records. The clock has stopped by then, because α costs work per position and vocabulary entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.decoding.drafts import Draft
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import ForwardOutput
from specbench.decoding.records import Closing, DraftVerdict, FinishReason, Prefill, Step, StepTimes
from specbench.decoding.request import Request
from specbench.decoding.verify import Verdict, expected_acceptance

if TYPE_CHECKING:
    import torch


def record_of(
    request: Request,
    before: Prefill | Step | None,
    draft: Draft,
    verdict: Verdict,
    read: ForwardOutput,
    context: Sequence[int],
    emitted: int,
    finished: FinishReason | None,
    times: StepTimes,
) -> Prefill | Step:
    """Return the record of a round of the loop: of the prefill if there was none before, else of a step.

    Args:
        request: The request.
        before: The record of the last round.
        draft, verdict: The draft and its verdict.
        read: What the target's pass returned.
        context: All tokens, including the new ones.
        emitted: How many of the verdict's tokens are output; fewer than all if a stop came among them.
        finished: Why the output ends here; ``None`` if it continues.
        times: See ``Step``.
    """
    position, logits = len(context) - emitted, read.logits if request.trace else None
    if before is None:
        probability = None if logits is None else _closing_probability(verdict, logits)
        return Prefill(position, context[-1], times.total_s, finished, probability)
    nodes, chain, accepted = len(draft.tokens), draft.parents is None, verdict.accepted
    rejected = accepted < nodes if chain else (-1, *verdict.path)[-1] in (draft.parents or ())
    closing: Closing = "corrected" if rejected else "bonus" if nodes else "target"
    cut = emitted <= accepted
    tested = emitted if cut else accepted + (closing == "corrected")
    return Step(
        index=before.index + 1 if isinstance(before, Step) else 0,
        position=position,
        drafted=tuple(draft.tokens),
        accepted=min(accepted, emitted),
        tested=tested,
        tokens=tuple(verdict.tokens[:emitted]),
        closing=None if cut else closing,
        expected_acceptance=expected_acceptance(draft, verdict, tested),
        times=times,
        finish_reason=finished,
        policy=dict(request.policy.notes()),
        verdicts=None if logits is None else _verdicts(draft, verdict, tested, logits),
        closing_probability=None
        if logits is None or cut
        else _closing_probability(verdict, logits, accepted),
        passes=draft.passes,
        parents=None if chain else tuple(draft.parents or ()),
        path=() if chain else tuple(verdict.path),
        forced=tuple(i for i, source in enumerate(draft.sources) if source == "forced"),
        experts=read.experts,
    )


def _verdicts(draft: Draft, verdict: Verdict, tested: int, logits: torch.Tensor) -> tuple[DraftVerdict, ...]:
    """Return the trace's entry for every draft token."""
    kept = set(verdict.path)
    looked = set((-1, *verdict.path)[:tested])
    if tested >= len(verdict.path):  # no stop cut the verdict short
        looked |= verdict.rows.keys()
    places = (draft.candidates or {}).items()
    drawn = {
        (node, token): q for node, draws in places for tokens, q in draws if q is not None for token in tokens
    }
    verdicts = []
    for i, token in enumerate(draft.tokens):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        seen = parent in looked
        q = drawn.get((parent, token)) if draft.q is None else draft.q[i]
        if q is not None:
            chance = float(q[token])
        elif isinstance(source := draft.source(i), Logits):
            chance = math.exp(source.log_chance(token))
        else:
            chance = draft.chance(i)
        if parent in verdict.rows:
            p = verdict.rows[parent]
        elif seen:
            p = logits[parent + 1].float().softmax(dim=-1) if verdict.p is None else verdict.p[parent + 1]
        verdicts.append(
            DraftVerdict(
                token=token,
                q=chance,
                p=float(p[token]) if seen else None,
                r=verdict.r[i] if seen and verdict.r else None,
                verdict="untested" if not seen else "accepted" if i in kept else "rejected",
            )
        )
    return tuple(verdicts)


def _closing_probability(verdict: Verdict, logits: torch.Tensor, accepted: int = 0) -> float:
    """Return the closing token's probability in its distribution (greedy: the untempered softmax)."""
    token, distribution = verdict.tokens[accepted], verdict.closing_distribution
    if distribution is None:
        distribution = logits[verdict.path[accepted - 1] + 1 if accepted else 0].float().softmax(dim=-1)
    return float(distribution[token] / distribution.sum())
