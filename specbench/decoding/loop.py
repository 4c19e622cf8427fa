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

from specbench.decoding.clocks import Clock, Stopwatch
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.explain import record_of
from specbench.decoding.protocols import ForwardOutput, ForwardRequest, NewPrompt, StepPlan
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import Request

if TYPE_CHECKING:
    import torch

DecodingLoop: TypeAlias = Generator[ForwardRequest | Prefill | Step, ForwardOutput, None]
"""A request being decoded: it yields forward requests and, in between, records."""


def decode_steps(request: Request, clock: Clock | None = None) -> Iterator[Prefill | Step]:
    """Decode one prompt: yield a ``Prefill``, then a record for each ``Step``. The last one has a ``finish_reason``.

    Args:
        request: What decides the output.
        clock: Times the steps, without the consumer's time between two records; ``None`` for the machine's.

    Raises:
        UsageError: Target or drafter was used for another context while the consumer had a record.

    Examples:
        >>> request = Request(
        ...     [1, 2, 3], target.scorer, drafter, policy=FixedLength(4), sampling=Sampling(), random=Randomness(0),
        ...     max_new_tokens=6,
        ... )
        >>> [type(record).__name__ for record in decode_steps(request)][:2]
        ['Prefill', 'Step']
    """
    decoding = decode(request, Stopwatch(clock))
    for event in decoding:
        while isinstance(event, ForwardRequest):  # the loop ends with a record, so ``send`` returns
            event = decoding.send(event.scorer.score(event))
        yield event


def decode(request: Request, watch: Stopwatch) -> DecodingLoop:
    """Decode a request (see ``decode_steps``); ``watch`` times the steps.

    The prefill is a round of this loop with an empty draft.
    """
    target, drafter, policy, stops = request.target, request.drafter, request.policy, request.stops
    context, sampling, random = list(request.prompt), request.transforms, request.random
    verification, layers = request.verification(sampling), drafter.traits.layers
    begun = request.begin()
    finished = request.end_at(len(context))
    record: Prefill | Step | None = None
    if finished or not request.first_target:
        record = Prefill(len(context), token=None, time_s=0.0, finish_reason=finished)
        yield record
    while finished is None:
        request.check_epochs(begun)
        watch.start()
        if record is not None:
            _observe(request, record)  # here its time counts as drafting
        # A step ends with one more token, which is not drafted.
        plan = StepPlan(request.limit - len(context) - 1, policy, sampling, random, verification.drawing)
        draft = Draft() if record is None else (yield from drafter.propose(context, plan))
        watch.lap("draft")
        read = yield ForwardRequest(
            target, context, draft.tokens, draft.parents,
            layers=layers, counts_experts=record is not None, prompt=len(request.prompt),
        )  # fmt: skip
        watch.lap("verify")
        verdict = verification.judge(draft, read.logits, context, sampling, random)
        emitted, reason = stops.cut(verdict.tokens)  # how many of them are output
        watch.lap("accept")
        context += verdict.tokens[:emitted]
        finished = reason or request.end_at(len(context))
        target.rollback(len(context) - 1, verdict.path)
        watch.lap("rollback")
        states = None if read.hidden is None else _along(verdict.path[: emitted - 1], read.hidden, draft)
        drafter.update(StepOutcome(context, emitted, read.logits, draft.tokens, verdict.path, states))
        watch.lap("other")
        mask_s = 0.0 if sampling.matcher is None else sampling.matcher.take_seconds()
        times = watch.times(draft.prefill_s, mask_s)
        record = record_of(request, record, draft, verdict, read, context, emitted, finished, times)
        yield record
    if isinstance(record, Step):
        _observe(request, record)


def _observe(request: Request, record: Prefill | Step) -> None:
    """Let the draft policy begin after the prefill, or learn from a step."""
    if isinstance(record, Step):
        request.policy.observe(record)
        return
    unread, traits = request.drafter.unread(request.prompt), request.drafter.traits
    token_s = record.time_s / record.prompt_tokens
    request.policy.begin(NewPrompt(unread, token_s, traits))


def _along(path: Sequence[int], hidden: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Return the hidden states of the context tokens that were fed and of the accepted nodes.

    Args:
        path: The accepted nodes.
        hidden: The states of all tokens that were fed, [fed, layers, width]: first of the context, then of the draft.
        draft: The draft.
    """
    before = len(hidden) - len(draft.tokens)
    if [*path] == [*range(len(path))]:
        return hidden[: before + len(path)]
    return hidden[[*range(before), *(before + node for node in path)]]
