"""The decoding loop. There is one, for every drafter, cache, draft policy and sampling setting.

A step drafts tokens, verifies them in one forward pass of the target, accepts some, and rolls the caches back:

    draft -> verify -> accept -> roll back -> record

Plain decoding is this loop with a drafter that proposes nothing, so a baseline differs in nothing else. The loop knows
token ids only, prints nothing and keeps no statistics. It runs no forward pass itself: it yields a ``ForwardRequest``
and is sent the ``ForwardOutput``, so that its caller can run the passes of several requests together (``schedule.py``).
docs/design.md has the step in ten lines.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from specbench.base.errors import UsageError
from specbench.decoding.clocks import Clock, Stopwatch
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.explain import closing_probability, step_of
from specbench.decoding.logits import NoTokenError
from specbench.decoding.protocols import (
    Drafter,
    DraftPolicy,
    ForwardOutput,
    ForwardRequest,
    NewPrompt,
    Scorer,
    StepPlan,
)
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules

if TYPE_CHECKING:
    import torch

DecodingLoop: TypeAlias = Generator[ForwardRequest | Prefill | Step, ForwardOutput, None]
"""A request being decoded: it yields forward requests and, in between, records."""


def decode_steps(
    prompt: Sequence[int],
    target: Scorer,
    drafter: Drafter,
    *,
    policy: DraftPolicy,
    sampling: Sampling,
    random: Randomness,
    max_new_tokens: int,
    stops: StopRules | None = None,
    first_target: bool = True,
    clock: Clock | None = None,
    trace: bool = False,
    cached_tokens: int = 0,
) -> Iterator[Prefill | Step]:
    """Decode one prompt: yield a ``Prefill``, then a record for each ``Step``. The last one has a ``finish_reason``.

    Args:
        prompt: Token ids, at least one.
        target: The model whose output distribution is kept.
        drafter: Proposes tokens.
        policy: Decides how many tokens are drafted, and in which shape.
        sampling: The transforms of both models' logits.
        random: The source of every random draw.
        max_new_tokens: The longest output, at least 1.
        stops: What ends the output earlier; ``None`` for nothing.
        first_target: Whether the target reads the prompt and emits the first token before anything is drafted. If not,
            the ``Prefill`` is empty, and the target reads the prompt in the first step, together with its draft.
        clock: Times the steps; the consumer's time between two records is not counted.
        trace: Record q, p, r and the verdict of every drafted token.
        cached_tokens: How many tokens at the start of the prompt are in the caches of target and drafter already, from
            their previous context; fewer than all.

    Raises:
        UsageError: The prompt is empty or longer than the target's context, ``max_new_tokens`` is below 1, or target or
            drafter was used for another context while the consumer had a record.

    Examples:
        >>> records = decode_steps(
        ...     [1, 2, 3], target.scorer, drafter, policy=FixedLength(4), sampling=Sampling(), random=Randomness(0),
        ...     max_new_tokens=6,
        ... )
        >>> [type(record).__name__ for record in records][:2]
        ['Prefill', 'Step']
    """
    request = Request(
        prompt, target, drafter, policy, sampling, random, max_new_tokens, stops or StopRules(),
        first_target, trace, cached_tokens,
    )  # fmt: skip
    decoding = decode(request, Stopwatch(clock))
    for each in decoding:
        while isinstance(each, ForwardRequest):  # the loop ends with a record, so ``send`` returns
            each = decoding.send(each.scorer.score(each))
        yield each


def decode(request: Request, watch: Stopwatch) -> DecodingLoop:
    """Decode a request (see ``decode_steps``); ``watch`` times the steps."""
    target, drafter, random, stops = request.target, request.drafter, request.random, request.stops
    sampling = request.sampling.at(len(request.prompt), request.requested_length, stops.end_ids)
    policy, verification = request.policy, request.verification(sampling)
    context, limit, layers = list(request.prompt), request.limit, drafter.traits.layers
    if request.cached_tokens:
        target.resume(request.cached_tokens)
    else:
        target.begin()
    drafter.begin(request.prompt, request.cached_tokens)
    begun = target.epoch, drafter.epoch
    policy.begin(NewPrompt(len(context), drafter.unread(request.prompt), drafter.traits.prior))
    if request.end_at(len(context)):
        yield Prefill(len(context), token=None, time_s=0.0, finish_reason="context-limit")
        return
    # Of the step; -1 is the prefill: this loop's body with an empty draft.
    index = -1 if request.first_target else 0
    if index == 0:  # the first step reads the prompt
        yield Prefill(len(context), token=None, time_s=0.0)
    step: Step | None = None
    finished = None
    while finished is None:
        if (target.epoch, drafter.epoch) != begun:
            raise UsageError(
                "This generation was interrupted by another one on its target or its drafter.",
                "Let one finish before the next begins, or give each a target and a drafter of its own.",
            )
        watch.start()
        if step is not None:
            policy.observe(step.unforced)  # of the last round; here its time counts as drafting
        position = len(context)
        if index < 0:
            draft = Draft()
        else:
            # A step ends with one more token, which is not drafted.
            budget = limit - position - 1
            plan = StepPlan(budget, policy, sampling, random, verification.drawing)
            draft = yield from drafter.propose(context, plan)
        watch.lap("draft")
        counts = index >= 0
        logits, hidden, experts = yield ForwardRequest(
            target,
            context,
            draft.tokens,
            draft.parents,
            layers=layers,
            counts_experts=counts,
            prompt=len(request.prompt),
        )
        watch.lap("verify")
        try:
            verdict = verification.judge(draft, logits, context, sampling, random)
        except NoTokenError as error:
            raise sampling.why_no_token(logits) from error
        emitted, reason = stops.cut(verdict.tokens)  # how many of them are output
        watch.lap("accept")
        context += verdict.tokens[:emitted]
        finished = reason or request.end_at(len(context))
        target.rollback(len(context) - 1, verdict.path)
        watch.lap("rollback")
        states = None if hidden is None else _along(verdict.path[: emitted - 1], hidden, len(draft.tokens))
        drafter.update(StepOutcome(context, emitted, logits, draft.tokens, verdict.path, states))
        watch.lap("other")
        mask_s = 0.0 if sampling.matcher is None else sampling.matcher.take_seconds()
        times, traced = watch.times(draft.prefill_s, mask_s), logits if request.trace else None
        if index < 0:
            policy.time_prefill(times.total_s / (position - request.cached_tokens))
            probability = None if traced is None else closing_probability(verdict, traced)
            yield Prefill(position, context[-1], times.total_s, finished, probability)
        else:
            notes = policy.notes()
            step = step_of(index, position, draft, verdict, emitted, finished, times, notes, traced, experts)
            yield step
        index += 1
    if step is not None:
        policy.observe(step.unforced)


def _along(path: Sequence[int], hidden: torch.Tensor, drafted: int) -> torch.Tensor:
    """Return the hidden states of the context tokens that were fed and of the accepted path.

    Args:
        path: The accepted nodes.
        hidden: The states of all tokens that were fed, [fed, layers, width]: first of the context, then of the draft.
        drafted: How many tokens the draft has.
    """
    before = len(hidden) - drafted
    if [*path] == [*range(len(path))]:
        return hidden[: before + len(path)]
    return hidden[[*range(before), *(before + node for node in path)]]
