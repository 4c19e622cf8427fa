"""The decoding loop. There is one, for every drafter, cache, draft-length rule and sampling setting.

Plain decoding is this loop with the drafter that proposes nothing, so a baseline differs from a speculative run in
nothing else. The loop knows token ids only and yields records; it prints nothing and keeps no statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from specbench.decoding.clocks import Clock, WallClock
from specbench.decoding.protocols import Draft, Drafter, LengthPolicy, Scorer, Sibling
from specbench.decoding.records import DraftVerdict, FinishReason, Prefill, Step, StepTimes
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.verify import Verdict, expected_acceptance, judge
from specbench.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["decode_steps"]


def decode_steps(
    prompt: Sequence[int],
    target: Scorer,
    drafter: Drafter,
    *,
    policy: LengthPolicy,
    sampling: Sampling,
    random: Randomness,
    max_new_tokens: int,
    stops: StopRules | None = None,
    first_target: bool = True,
    residual_adjustment: bool = True,
    clock: Clock | None = None,
    trace: bool = False,
) -> Iterator[Prefill | Step]:
    """Decode one prompt: a ``Prefill``, then one ``Step`` per round. The last record has a ``finish_reason``.

    Args:
        prompt: Token ids, at least one.
        target: The model whose output distribution is kept.
        drafter: Proposes tokens.
        policy: Decides how many.
        sampling: The transforms of both models.
        random: The source of every random draw.
        max_new_tokens: The output never gets longer, at least 1.
        stops: Where the output ends before that; ``None`` for nowhere.
        first_target: Let the target read the prompt and emit the first token before anything is drafted.
        residual_adjustment: False draws corrected tokens from p: not lossless, for demonstration.
        clock: Times the steps; the consumer's time between two records is never counted.
        trace: Put every draft's q, p, r and verdict into the records.

    Raises:
        UsageError: The prompt is empty or longer than the target's context, or ``max_new_tokens`` is below 1; between
            two records: another context was begun with the target or the drafter.
    """
    _check(prompt, target, max_new_tokens)
    stops = stops or StopRules()
    clock = clock or WallClock()
    context = list(prompt)
    end = len(prompt) + max_new_tokens
    limit = end if target.context_limit is None else min(end, target.context_limit)

    def end_of(reason: str | None) -> FinishReason | None:
        if reason is None and len(context) >= limit:
            reason = "length" if len(context) >= end else "context-limit"
        return reason  # type: ignore[return-value]

    sampling = sampling.at(len(prompt), limit, stops.end_ids)
    # A sibling's logits follow another context than the draft's, which transforms that look back would need.
    branching = sampling.greedy and not sampling.looks_back and policy.most_siblings > 0
    branching = branching and target.takes_siblings
    target.begin()
    drafter.begin(prompt)
    epochs = _epochs(target, drafter)
    policy.reset()
    if len(context) >= limit:
        yield Prefill(len(prompt), None, 0.0, "context-limit")
        return
    finished = None
    if first_target:
        began = clock.now()
        logits = target.logits(context)
        verdict = judge(Draft(), logits, context, sampling, random)
        _, reason = stops.cut(verdict.tokens)
        probability = _closing_probability(verdict, logits) if trace else None
        context += verdict.tokens
        drafter.commit(context, 1, logits)
        finished = end_of(reason)
        target.rollback(len(context) - 1)
        yield Prefill(len(prompt), verdict.tokens[0], clock.now() - began, finished, probability)
    else:
        yield Prefill(len(prompt), None, 0.0)

    index = 0
    step: Step | None = None
    while finished is None:
        if _epochs(target, drafter) != epochs:
            raise UsageError(
                "This generation was interrupted by another one on its target or its drafter.",
                "Let one finish before the next begins, or give each a target and a drafter of its own.",
            )
        began = clock.now()
        if step is not None:
            policy.observe(step)  # here, where its time counts
        room = limit - len(context) - 1
        draft = drafter.propose(context, room, policy, sampling, random)
        siblings = policy.siblings(draft) if branching else ()
        drafted = clock.now()
        logits = (
            target.logits(context, draft.tokens, siblings=siblings)
            if siblings
            else target.logits(context, draft.tokens)
        )
        verified = clock.now()
        verdict = judge(
            draft, logits, context, sampling, random,
            residual_adjustment=residual_adjustment, siblings=siblings,
        )  # fmt: skip
        kept, reason = stops.cut(verdict.tokens)
        judged = clock.now()
        position = len(context)
        verified_drafts = position + verdict.accepted
        context += verdict.tokens[:kept]
        finished = end_of(reason)
        drafter.commit(context, kept, _rows_behind(logits, draft, verdict))
        committed = clock.now()
        if verdict.sibling is not None:
            target.move(position + len(draft.tokens) + verdict.sibling, verified_drafts)
        target.rollback(len(context) - 1)
        drafter.rollback(min(len(context) - 1, verified_drafts))  # a drafter has not read the sibling
        ended = clock.now()
        step = _record(
            index, position, draft, siblings, verdict, kept, finished, policy,
            StepTimes(
                draft_s=drafted - began,
                verify_s=verified - drafted,
                accept_s=judged - verified,
                rollback_s=ended - committed,
                other_s=committed - judged,
                draft_prefill_s=draft.prefill_s,
            ),
            logits if trace else None,
        )  # fmt: skip
        yield step
        index += 1
    if step is not None:
        policy.observe(step)


def _epochs(target: Scorer, drafter: Drafter) -> tuple[object, object]:
    """What changes when a target or drafter is set on another context; stand-ins may do without."""
    return getattr(target, "epoch", None), getattr(drafter, "epoch", None)


def _check(prompt: Sequence[int], target: Scorer, max_new_tokens: int) -> None:
    if not prompt:
        raise UsageError("The prompt is empty.", "Give at least one token.")
    if max_new_tokens < 1:
        raise UsageError(f"The number of new tokens is {max_new_tokens}.", "Ask for at least 1.")
    if target.context_limit is not None and len(prompt) > target.context_limit:
        raise UsageError(
            f"The prompt has {len(prompt)} tokens, the target's context holds {target.context_limit}.",
            "Shorten the prompt.",
        )


def _rows_behind(logits: torch.Tensor, draft: Draft, verdict: Verdict) -> torch.Tensor:
    """The logits before every token of a verdict, [at least as many, vocab]."""
    if verdict.sibling is None:
        return logits
    return logits[[*range(verdict.accepted + 1), len(draft.tokens) + 1 + verdict.sibling]]


def _record(
    index: int,
    position: int,
    draft: Draft,
    siblings: Sequence[Sibling],
    verdict: Verdict,
    kept: int,
    finished: FinishReason | None,
    policy: LengthPolicy,
    times: StepTimes,
    traced_logits: torch.Tensor | None,
) -> Step:
    """The record of a step; made after the clock was read, for α costs a pass over the vocabulary per position."""
    cut = kept <= verdict.accepted
    tested = kept if cut else verdict.tested
    return Step(
        index=index,
        position=position,
        drafted=tuple(draft.tokens),
        accepted=min(verdict.accepted, kept),
        tested=tested,
        tokens=tuple(verdict.tokens[:kept]),
        closing=None if cut else verdict.closing,
        expected_acceptance=expected_acceptance(draft, verdict, tested),
        times=times,
        finish_reason=finished,
        policy=dict(policy.notes()),
        verdicts=None if traced_logits is None else _verdicts(draft, verdict, tested, traced_logits),
        closing_probability=None
        if traced_logits is None or cut
        else _closing_probability(verdict, traced_logits),
        siblings=tuple(siblings),
        passes=draft.passes,
    )


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


def _closing_probability(verdict: Verdict, logits: torch.Tensor) -> float:
    """Probability of the closing token under what it was drawn from (greedy: the untempered softmax)."""
    token = verdict.tokens[verdict.accepted]
    if verdict.closing_distribution is None:
        return float(logits[verdict.accepted].float().softmax(dim=-1)[token])
    return float(verdict.closing_distribution[token] / verdict.closing_distribution.sum())
