"""Many requests at once: their coroutines ask for passes, and a pass is made for all that can share it.

Requests join and leave between any two passes. Which pass comes next is one policy: *those who draft go first, then
whoever has waited longest*, and every pass takes along all that wait for the same model. So everybody has drafted when
the target reads, whose pass is the dearest and the one worth filling; nobody takes two steps while another takes none;
and among those who draft, the n-th tokens of all drafts share a pass. Somebody who is still reading a long context does
not count as drafting, so that nobody waits for more than a part of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from specbench.base.errors import UsageError
from specbench.decoding.clocks import Clock, PausedClock, Stopwatch
from specbench.decoding.loop import DecodingLoop, decode
from specbench.decoding.protocols import ForwardOutput, ForwardRequest, Scorer
from specbench.decoding.records import Prefill, SharedPass, Step
from specbench.decoding.request import Request

_NAP = 0.001
"""Seconds between two looks at the clock where nobody is there yet."""

Event: TypeAlias = Prefill | Step | Exception
"""What comes of a request: its records, or why it has ended without the last one."""


@dataclass(eq=False, slots=True)
class _Job:
    """A request on its way.

    Attributes:
        number: The place of its arrival.
        start: Makes the request, when its turn has come.
        arrived: When it arrives, by the scheduler's clock.
        request, decoding: ``None`` before its turn has come.
        asked: The pass it waits for.
        since: At which of the scheduler's passes it began to wait for it.
        queued_s: Seconds it waited for its turn.
        reading: Whether the last pass was a part of what it lacks.
        passed_over: Whether a pass of its model had no room for it.
        states: Hidden states that these parts gave.
        context: What its target has been asked to read, which grows as the output does.
        verified: How much of that the target held when the draft under way was begun.
        scorers: All whose passes it has asked for.
    """

    number: int
    start: Callable[[], Request]
    arrived: float
    request: Request | None = None
    decoding: DecodingLoop | None = None
    asked: ForwardRequest | None = None
    since: int = 0
    queued_s: float = 0.0
    reading: bool = False
    passed_over: bool = False
    states: list[torch.Tensor] = field(default_factory=list)
    context: Sequence[int] = ()
    verified: int = 0
    scorers: set[Scorer] = field(default_factory=set)

    def waits_for(self, asked: ForwardRequest, now: int) -> None:
        """It goes on with this pass."""
        assert self.request is not None
        target = self.request.target
        if asked.scorer is target:
            self.context = asked.context
        elif self.asked is None or self.asked.scorer is target:
            self.verified = target.cached_len
        self.asked, self.since, self.reading = asked, now, False
        self.scorers.add(asked.scorer)

    def with_states(self, rows: ForwardOutput) -> ForwardOutput:
        """The last rows that it waits for, with the states of the parts read before."""
        if rows.hidden is None or not self.states:
            return rows
        states, self.states = [*self.states, rows.hidden], []
        return rows._replace(hidden=torch.cat(states))

    @property
    def due(self) -> ForwardRequest:
        """The pass to make next: what it waits for, once its target holds again what the draft was begun on."""
        assert self.request is not None
        assert self.asked is not None
        target = self.request.target
        if self.asked.scorer is not target and target.cached_len < self.verified:
            return ForwardRequest(target, self.context[: self.verified], rows=1)
        return self.asked

    @property
    def drafts(self) -> bool:
        """Whether it waits for a drafter, and not for one that has a long context to read."""
        assert self.request is not None
        return not self.reading and self.due.scorer is not self.request.target


class Scheduler:
    """Decodes requests side by side.

    A request's output is what it would be alone, and what one raises ends that one: a pass of several that fails is
    made again for each by itself. It needs a target's and a drafter's scorers, and a draft policy,
    that no other request has; what these share (weights, a pool of memory) is up to them.

    Memory is theirs too: a pass is made when ``Scorer.reserve`` has found room for it. Where there is none, the request
    that came last is put back: it gives up all keys and values, and once somebody has left it reads its context again
    and goes on. The one that came first is never put back, so that everything comes to its end.

    Times in records are what passed for that request, by one clock for all: passes that were shared or made for others
    while it waited count for each.

    Args:
        max_batch: Requests that are under way at a time, at least 1.
        max_tokens_per_pass: Tokens that a pass may read, at least 1; a longer context is read in parts, with what the
            drafts of others leave. A single draft may be longer.
        clock: Tells the time; ``None`` for the machine's.
        watch: Is told every pass as soon as it has been made, before its requests go on.

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
            raise UsageError(f"The batch is of {max_batch} requests.", "Give at least 1.")
        if max_tokens_per_pass < 1:
            raise UsageError(f"A pass may read {max_tokens_per_pass} tokens.", "Give at least 1.")
        self.max_batch, self.max_tokens_per_pass = max_batch, max_tokens_per_pass
        self._clock = PausedClock(clock)
        self._watch = watch
        self._waiting: deque[_Job] = deque()
        self._active: list[_Job] = []  # by arrival
        self._coming: deque[tuple[int, Event]] = deque()  # what an iteration has still to hand out
        self._added = self._passes = 0
        self._full = False  # somebody was put back, and nobody has left since

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._active)

    @property
    def active(self) -> int:
        """Requests under way."""
        return len(self._active)

    def now(self) -> float:
        """The time by its clock, which stands still while the consumer of an iteration has a record."""
        return self._clock.now()

    def add(self, start: Callable[[], Request], arrived: float | None = None) -> int:
        """Take in a request, behind those that wait.

        Args:
            start: Makes it when its turn has come; what it raises is what the request ends with.
            arrived: When it arrives, by ``now()``, or has arrived: never before those added earlier, perhaps in the
                future. ``None``: now.

        Returns:
            Its number, from 0 on, in the order in which they were added.
        """
        self._waiting.append(_Job(self._added, start, self.now() if arrived is None else arrived))
        self._added += 1
        return self._added - 1

    def cancel(self, number: int) -> None:
        """End a request, if it has not ended, and give its memory back. There will be no more events of it."""
        for job in [*self._active, *self._waiting]:
            if job.number == number:
                self._end(job)
        self._coming = deque(event for event in self._coming if event[0] != number)

    def close(self) -> None:
        """End all of them."""
        self._coming.clear()
        for job in [*self._active, *self._waiting]:
            self._end(job)

    def __iter__(self) -> Iterator[tuple[int, Event]]:
        """What comes of the requests, with their numbers, until there are none; the consumer's time is not counted.

        Whoever leaves off ends them all.
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
        """Let requests in, make one pass, and hand out what comes of it; where none is there, wait for the next."""
        while self._waiting and not self._active and self._waiting[0].arrived > self.now():
            time.sleep(_NAP)
        events: list[tuple[int, Event]] = []
        self._admit(events)
        parts = self._chosen(events)
        if not parts:
            return events
        self._passes += 1
        self._make(parts, events)
        return events

    def _make(self, parts: Sequence[tuple[_Job, ForwardRequest]], events: list[tuple[int, Event]]) -> None:
        """Make one pass, and let everybody go on from it."""
        fed = tuple(_lack(part) for _, part in parts)
        began = 0.0 if self._watch is None else self._clock.now()
        try:
            answers = _answers([part for _, part in parts])
        except Exception as error:
            if len(parts) == 1:
                self._fail(parts[0][0], error, events)
                return
            for each in parts:  # one by one, only those whose fault it is fail
                self._make([each], events)
            return
        self._tell(parts, fed, began)
        for (job, part), rows in zip(parts, answers, strict=True):
            job.passed_over = False
            try:
                if part is job.asked:
                    rows = job.with_states(rows)
                else:
                    part.scorer.rollback(len(part.context))
            except Exception as error:
                self._fail(job, error, events)
                continue
            if part is job.asked:
                self._go_on(job, rows, events)
                continue
            if rows.hidden is not None:
                job.states.append(rows.hidden)
            job.since, job.reading = self._passes, True

    def _tell(self, parts: Sequence[tuple[_Job, ForwardRequest]], fed: tuple[int, ...], began: float) -> None:
        if self._watch is None:
            return
        job, part = parts[0]
        assert job.request is not None
        self._watch(
            SharedPass(
                model=loaded_of(part.scorer),
                target=part.scorer is job.request.target,
                requests=tuple(job.number for job, _ in parts),
                fed=fed,
                drafted=tuple(len(part.tokens) for _, part in parts),
                began_s=began,
                seconds=self._clock.now() - began,
                active=len(self._active),
                waiting=sum(job.arrived <= began for job in self._waiting),
            )
        )

    # -- who takes part in the next pass -----------------------------------------------------------------

    def _admit(self, events: list[tuple[int, Event]]) -> None:
        while self._waiting and len(self._active) < self.max_batch and not (self._full and self._active):
            job = self._waiting[0]
            if job.arrived > self.now():
                return
            if job.request is None and not self._begin(job, events):
                continue
            try:
                room = job.due.scorer.reserve(job.due)
            except Exception as error:
                self._fail(job, error, events)
                continue
            if not room and self._active:
                return
            self._waiting.popleft()
            job.since = self._passes
            self._active.append(job)
            self._active.sort(key=_number)

    def _begin(self, job: _Job, events: list[tuple[int, Event]]) -> bool:
        """Let a request come to its first pass; whether it does."""
        try:
            job.request = job.start()
        except Exception as error:
            self._fail(job, error, events)
            return False
        job.queued_s = self._clock.now() - job.arrived
        job.decoding = decode(job.request, Stopwatch(self._clock))
        self._go_on(job, None, events)
        return job.asked is not None

    def _chosen(self, events: list[tuple[int, Event]]) -> list[tuple[_Job, ForwardRequest]]:
        """Who takes part in the next pass, each with its share: what it waits for, or a part of what it lacks."""
        while self._active:
            candidates = self._active
            if len(candidates) > 1:
                candidates = [job for job in self._active if job.drafts] or candidates
            model = _maker_of(min(candidates, key=_waited).due.scorer)
            self._make_room(self._waiting_for(model), events)
            if group := self._waiting_for(model):
                return self._shares(group)
        return []

    def _waiting_for(self, model: object) -> list[_Job]:
        return [job for job in self._active if _maker_of(job.due.scorer) is model]

    def _make_room(self, group: Sequence[_Job], events: list[tuple[int, Event]]) -> None:
        """Reserve what a pass of these takes, for those that came first if not for all; the others are put back."""
        for job in group:
            try:
                while job in self._active and not job.due.scorer.reserve(job.due):
                    if self._active == [job]:
                        raise UsageError(
                            "There is no room for this request, although no other is active.",
                            "Give more memory.",
                        )
                    self._put_back(self._active[-1], events)
            except Exception as error:
                self._fail(job, error, events)

    def _put_back(self, job: _Job, events: list[tuple[int, Event]]) -> None:
        try:
            for scorer in job.scorers:
                scorer.rollback(0)
        except Exception as error:
            self._fail(job, error, events)
            return
        job.states = []
        self._active.remove(job)
        place = next((i for i, other in enumerate(self._waiting) if other.number > job.number), None)
        self._waiting.insert(len(self._waiting) if place is None else place, job)
        self._full = True

    def _shares(self, group: Sequence[_Job]) -> list[tuple[_Job, ForwardRequest]]:
        """What each has read in this pass: first those who lack little, then parts of what the others lack."""
        left = self.max_tokens_per_pass
        found: list[tuple[_Job, ForwardRequest]] = []
        for job in sorted(group, key=_turn):
            part = job.due
            lack = _lack(part)
            if lack > left and part.scorer.reads_in_parts:
                part = _beginning(part, left)
                lack = _lack(part)
            job.passed_over = lack > left and bool(found)
            if not job.passed_over:
                found.append((job, part))
                left = max(0, left - lack)
        return found

    # -- what comes of it --------------------------------------------------------------------------------

    def _go_on(self, job: _Job, rows: ForwardOutput | None, events: list[tuple[int, Event]]) -> None:
        """Let a request go on to its next pass, or to its end."""
        decoding = job.decoding
        assert decoding is not None
        try:
            each = next(decoding) if rows is None else decoding.send(rows)
            while not isinstance(each, ForwardRequest):
                if isinstance(each, Prefill):
                    each = replace(each, queued_s=job.queued_s)
                events.append((job.number, each))
                each = next(decoding)
        except StopIteration:
            self._end(job)
        except Exception as error:
            self._fail(job, error, events)
        else:
            job.waits_for(each, self._passes)

    def _fail(self, job: _Job, error: Exception, events: list[tuple[int, Event]]) -> None:
        events.append((job.number, error))
        self._end(job)

    def _end(self, job: _Job) -> None:
        if job.decoding is not None:
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


def _number(job: _Job) -> int:
    return job.number


def _waited(job: _Job) -> tuple[int, int]:
    return job.since, job.number


def _maker_of(scorer: Scorer) -> object:
    """Who makes its passes: the same for scorers whose passes can be one."""
    return scorer if scorer.batch is None else scorer.batch


def loaded_of(scorer: Scorer) -> object:
    """What was loaded to make its passes: what these cost is known by it in later batches too."""
    return scorer if scorer.batch is None else scorer.batch.loaded


def _lack(asked: ForwardRequest) -> int:
    """How many tokens a pass feeds."""
    return len(asked.context) + len(asked.tokens) - asked.scorer.cached_len


def _turn(job: _Job) -> tuple[bool, int, int, int]:
    return not job.passed_over, _lack(job.due), job.since, job.number


def _beginning(asked: ForwardRequest, most: int) -> ForwardRequest:
    """A pass over the next so many tokens that the scorer lacks; the rows that are wanted have to come in one."""
    held = asked.scorer.cached_len
    rows = len(asked.tokens) + 1 if asked.rows is None else asked.rows
    end = min(held + most, len(asked.context), len(asked.context) + len(asked.tokens) - rows)
    return (
        asked._replace(context=asked.context[:end], tokens=(), parents=None, rows=1) if end > held else asked
    )


def _answers(passes: Sequence[ForwardRequest]) -> Sequence[ForwardOutput]:
    """The rows of each, made in one pass where that can be."""
    batch = passes[0].scorer.batch
    if batch is None or len(passes) == 1:
        return [asked.scorer.score(asked) for asked in passes]
    return batch.score(passes)
