"""The scheduler: decodes many requests in shared forward passes.

Requests join and leave between any two passes. *Requests that draft go first, then the one that has waited longest*,
and a pass includes all requests that wait for the same model. So all have drafted when the target reads, whose pass is
the most expensive one; no request takes two steps while another takes none; and the n-th tokens of all drafts share a
pass. A request that still reads a long context does not count as drafting, so none waits for more than a part of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeAlias

import torch

from specbench.base.errors import UsageError
from specbench.decoding.clocks import Clock, ShiftedClock, Stopwatch
from specbench.decoding.loop import DecodingLoop, decode
from specbench.decoding.protocols import ForwardOutput, ForwardRequest, Scorer
from specbench.decoding.records import Prefill, SharedPass, Step
from specbench.decoding.request import Request

_POLL_S = 0.001
"""Seconds between two checks while no request has arrived."""

Event: TypeAlias = Prefill | Step | Exception
"""A record of a request, or the exception that ended it."""


@dataclass(eq=False, slots=True)
class _Job:
    """A request with its state."""

    number: int  # its place in the order of arrival
    start: Callable[[], Request]  # makes the request when its turn has come
    arrived: float  # by the scheduler's clock
    request: Request = field(init=False)  # from its turn on
    decoding: DecodingLoop = field(init=False)
    pending: ForwardRequest | None = None  # the forward request it waits for; ``None`` until its turn
    since: int = 0  # number of the scheduler's pass after which it began to wait
    queued_s: float = 0.0  # waited for its turn
    reading: bool = False  # whether its last pass read only a part of its context
    passed_over: bool = False  # whether the last pass of its model was too full for it
    states: list[torch.Tensor] = field(default_factory=list)  # the hidden states of these parts
    context: Sequence[int] = ()  # the target's, which grows with the output
    verified: int = 0  # tokens of it in the target's cache when the present draft began
    scorers: set[Scorer] = field(default_factory=set)  # all it has used

    def wait_for(self, request: ForwardRequest, now: int) -> None:
        """Wait for this forward pass."""
        target = self.request.target
        if request.scorer is target:
            self.context = request.context
        elif self.pending is None or self.pending.scorer is target:
            self.verified = target.cached_len
        self.pending, self.since, self.reading = request, now, False
        self.scorers.add(request.scorer)

    def with_states(self, output: ForwardOutput) -> ForwardOutput:
        """Return the output with the hidden states of the parts read before."""
        if output.hidden is None or not self.states:
            return output
        states, self.states = [*self.states, output.hidden], []
        return output._replace(hidden=torch.cat(states))

    @property
    def due(self) -> ForwardRequest:
        """The forward pass to run next: the pending one, once the target has read again what the draft is based on."""
        assert self.pending is not None
        target = self.request.target
        if self.pending.scorer is not target and target.cached_len < self.verified:
            prompt = len(self.request.prompt)
            return ForwardRequest(target, self.context[: self.verified], rows=1, prompt=prompt)
        return self.pending

    @property
    def drafts(self) -> bool:
        """Whether it waits for a drafter that does not read a long context."""
        return not self.reading and self.due.scorer is not self.request.target


class Scheduler:
    """Decodes a batch of requests.

    A request's output is the same as alone, but for rounding, and an exception ends only the request that caused it: a
    shared pass that fails is repeated for each. Every request needs its own scorers and draft policy, which may share
    memory.

    A pass runs when ``Scorer.reserve`` has found memory for it. Where there is none, the latest request is preempted:
    it frees its KV cache, and reads its context again after another one has ended. The first one is never preempted.

    Times in records are those that passed for the request; shared passes, and passes of others while it waited, count
    in full.

    Args:
        max_batch: Most active requests, at least 1.
        max_tokens_per_pass: Most tokens in a pass, at least 1; longer contexts are read in parts.
        clock: Tells the time; ``None`` for the machine's.
        watch: Called with every pass right after it.

    Raises:
        UsageError: A limit is below 1.
    """

    def __init__(
        self,
        *,
        max_batch: int = 8,
        max_tokens_per_pass: int = 512,
        clock: Clock | None = None,
        watch: Callable[[SharedPass], None] | None = None,
    ) -> None:
        if max_batch < 1:
            raise UsageError(f"The batch size is {max_batch}.", "Give at least 1.")
        if max_tokens_per_pass < 1:
            raise UsageError(
                f"The limit of tokens per forward pass is {max_tokens_per_pass}.", "Give at least 1."
            )
        self.max_batch, self.max_tokens_per_pass = max_batch, max_tokens_per_pass
        self._clock = ShiftedClock(clock)
        self._watch = watch
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []  # by arrival
        self._coming: deque[tuple[int, Event]] = deque()  # events not yet yielded
        self._added = self._passes = 0
        self._full = False  # a request was preempted, and none has ended since

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._waiting) + len(self._active)

    @property
    def active(self) -> int:
        """Active requests."""
        return len(self._active)

    def now(self) -> float:
        """Return the time by its clock, which stops while the consumer has a record."""
        return self._clock()

    def add(self, start: Callable[[], Request], arrived: float | None = None) -> int:
        """Add a request to the end of the queue.

        Args:
            start: Makes the request when its turn has come; an exception ends it.
            arrived: Its arrival by ``now()``, perhaps in the future, not before that of earlier ones; ``None`` for now.

        Returns:
            Its number, from 0.
        """
        self._waiting.append(_Job(self._added, start, self.now() if arrived is None else arrived))
        self._added += 1
        return self._added - 1

    def cancel(self, number: int) -> None:
        """End a request and free its memory; it yields no more events."""
        for job in [*self._active, *self._waiting]:
            if job.number == number:
                self._end(job)
        self._coming = deque(event for event in self._coming if event[0] != number)

    def close(self) -> None:
        """End all requests."""
        self._coming.clear()
        for job in [*self._active, *self._waiting]:
            self._end(job)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """Yield events with the numbers of their requests until all have ended; leaving the loop ends them.

        The consumer's time is not counted.
        """
        try:
            while len(self):
                self._coming.extend(self.step())
                while self._coming:
                    with self._clock.paused():
                        yield self._coming.popleft()
        finally:
            self.close()

    def step(self) -> list[tuple[int, Event]]:
        """Admit requests, run one forward pass and return its events; wait for the next arrival if idle."""
        while self._waiting and not self._active and self._waiting[0].arrived > self.now():
            time.sleep(_POLL_S)
        self._admit()
        if parts := self._chosen():
            self._passes += 1
            self._make(parts)
        events = [*self._coming]
        self._coming.clear()
        return events

    def _make(self, parts: Sequence[tuple[_Job, ForwardRequest]]) -> None:
        """Run one forward pass and continue its requests."""
        requests = [part for _, part in parts]
        fed, scorer = tuple(map(_new_tokens, requests)), requests[0].scorer
        began = 0.0 if self._watch is None else self._clock()
        try:
            outputs = [scorer.score(*requests)] if scorer.batch is None else scorer.batch.score(requests)
        except Exception as error:
            if len(parts) == 1:
                self._fail(parts[0][0], error)
                return
            for alone in parts:  # one by one, so that only those that cause it fail
                self._make([alone])
            return
        self._report(parts, fed, began)
        for (job, part), rows in zip(parts, outputs, strict=True):
            job.passed_over = False
            try:
                if part is job.pending:
                    rows = job.with_states(rows)
                else:
                    part.scorer.rollback(len(part.context))
            except Exception as error:
                self._fail(job, error)
                continue
            if part is job.pending:
                self._continue(job, rows)
                continue
            if rows.hidden is not None:
                job.states.append(rows.hidden)
            job.since, job.reading = self._passes, True

    def _report(
        self, parts: Sequence[tuple[_Job, ForwardRequest]], fed: tuple[int, ...], began: float
    ) -> None:
        if self._watch is None:
            return
        job, part = parts[0]
        self._watch(
            SharedPass(
                model=loaded_of(part.scorer),
                target=part.scorer is job.request.target,
                requests=tuple(job.number for job, _ in parts),
                fed=fed,
                drafted=tuple(len(part.tokens) for _, part in parts),
                seconds=self._clock() - began,
            )
        )

    # -- choosing the next pass ------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.max_batch and not (self._full and self._active):
            job = self._waiting[0]
            if job.arrived > self.now():
                return
            if job.pending is None and not self._begin(job):
                continue
            try:
                reserved = job.due.scorer.reserve(job.due)
            except Exception as error:
                self._fail(job, error)
                continue
            if not reserved and self._active:
                return
            self._waiting.popleft()
            job.since = self._passes
            self._active.append(job)
            self._active.sort(key=attrgetter("number"))

    def _begin(self, job: _Job) -> bool:
        """Start a request; return whether it reached a forward pass."""
        try:
            job.request = job.start()
        except Exception as error:
            self._fail(job, error)
            return False
        job.queued_s = self._clock() - job.arrived
        job.decoding = decode(job.request, Stopwatch(self._clock))
        self._continue(job, None)
        return job.pending is not None

    def _chosen(self) -> list[tuple[_Job, ForwardRequest]]:
        """Return the jobs in the next pass with what each reads in it."""
        while self._active:
            candidates = self._active
            if len(candidates) > 1:
                candidates = [job for job in self._active if job.drafts] or candidates
            longest = min(candidates, key=lambda job: (job.since, job.number))
            model = _runner_of(longest.due.scorer)
            self._reserve(self._waiting_for(model))
            if group := self._waiting_for(model):
                return self._shares(group)
        return []

    def _waiting_for(self, model: object) -> list[_Job]:
        return [job for job in self._active if _runner_of(job.due.scorer) is model]

    def _reserve(self, group: Sequence[_Job]) -> None:
        """Reserve memory for a pass of these jobs; preempt the latest ones if there is not enough."""
        for job in group:
            try:
                while job in self._active and not job.due.scorer.reserve(job.due):
                    if self._active == [job]:
                        raise UsageError(
                            "The KV cache is too small for this request, although no other request is active.",
                            "Give the KV cache more memory.",
                        )
                    self._preempt(self._active[-1])
            except Exception as error:
                self._fail(job, error)

    def _preempt(self, job: _Job) -> None:
        try:
            for scorer in job.scorers:
                scorer.rollback(0)
        except Exception as error:
            self._fail(job, error)
            return
        job.states = []
        self._active.remove(job)
        place = next((i for i, other in enumerate(self._waiting) if other.number > job.number), None)
        self._waiting.insert(len(self._waiting) if place is None else place, job)
        self._full = True

    def _shares(self, group: Sequence[_Job]) -> list[tuple[_Job, ForwardRequest]]:
        """Return what each job reads in this pass: first those with few tokens, then parts of longer contexts."""
        left = self.max_tokens_per_pass
        parts: list[tuple[_Job, ForwardRequest]] = []
        for job in sorted(group, key=_turn):
            part = job.due
            new = _new_tokens(part)
            if new > left and part.scorer.reads_in_parts:
                part = _beginning(part, left)
                new = _new_tokens(part)
            job.passed_over = new > left and bool(parts)
            if not job.passed_over:
                parts.append((job, part))
                left = max(0, left - new)
        return parts

    # -- continuing after it ---------------------------------------------------------------------------

    def _continue(self, job: _Job, rows: ForwardOutput | None) -> None:
        """Continue a request to its next forward pass or its end."""
        try:
            event = next(job.decoding) if rows is None else job.decoding.send(rows)
            while not isinstance(event, ForwardRequest):
                if isinstance(event, Prefill):
                    event = replace(event, queued_s=job.queued_s)
                self._coming.append((job.number, event))
                event = next(job.decoding)
        except StopIteration:
            self._end(job)
        except Exception as error:
            self._fail(job, error)
        else:
            job.wait_for(event, self._passes)

    def _fail(self, job: _Job, error: Exception) -> None:
        self._coming.append((job.number, error))
        self._end(job)

    def _end(self, job: _Job) -> None:
        if job.pending is not None:
            with suppress(Exception):
                job.decoding.close()
        for scorer in job.scorers:
            with suppress(Exception):
                scorer.rollback(0)
        if job in self._active:
            self._active.remove(job)
            self._full = False
        else:
            self._waiting.remove(job)


def _runner_of(scorer: Scorer) -> object:
    """Return what runs its passes: the same object for scorers that can share one."""
    return scorer if scorer.batch is None else scorer.batch


def loaded_of(scorer: Scorer) -> object:
    """Return the loaded model, by which costs are known in later batches too."""
    return scorer if scorer.batch is None else scorer.batch.loaded


def _new_tokens(request: ForwardRequest) -> int:
    """Return how many tokens a pass feeds."""
    return len(request.context) + len(request.tokens) - request.scorer.cached_len


def _turn(job: _Job) -> tuple[bool, int, int, int]:
    return not job.passed_over, _new_tokens(job.due), job.since, job.number


def _beginning(asked: ForwardRequest, most: int) -> ForwardRequest:
    """Return a request over the next ``most`` tokens only; the rows with logits must come from one pass."""
    held = asked.scorer.cached_len
    rows = len(asked.tokens) + 1 if asked.rows is None else asked.rows
    end = min(held + most, len(asked.context), len(asked.context) + len(asked.tokens) - rows)
    return (
        asked._replace(context=asked.context[:end], tokens=(), parents=None, rows=1) if end > held else asked
    )
