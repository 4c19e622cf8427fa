"""Decodes requests side by side as they come, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from specbench.backends.torch.batch import RequestFactory
from specbench.base.errors import RunError
from specbench.decoding.clocks import clock_for
from specbench.decoding.records import Prefill, Step
from specbench.decoding.schedule import Event, Scheduler
from specbench.generate_many import BESIDE
from specbench.lengths.load import Load

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.generate import GenerationRun
    from specbench.models.target import Target

Deliver: TypeAlias = Callable[[Event], None]


class BusyError(RunError):
    """As many requests wait as may wait."""


class StoppedError(RunError):
    """The server is about to end."""


@dataclass
class Counts:
    """What has been done since the start. Written by the engine's thread alone; others may read.

    Attributes:
        ended: Requests, by why: a finish reason, ``cancelled`` or ``failed``.
        prompt_tokens, tokens: Of prompts that were read, and emitted.
        steps, drafted, accepted: Steps; tokens drafted in them, of a tree its depth; how many of these were kept.
        drafts: Steps that drafted anything.
        kept_at: By place in a draft, from 0, for every place that was drafted: in how many steps it was kept.
    """

    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    kept_at: Counter[int] = field(default_factory=Counter)

    def take(self, record: Prefill | Step) -> None:
        """One more record of some request."""
        if isinstance(record, Prefill):
            self.prompt_tokens += record.prompt_tokens
            self.tokens += record.token is not None
        else:
            self.tokens += len(record.tokens)
            self.steps += 1
            self.drafts += bool(record.drafted)
            self.drafted += record.gamma
            self.accepted += record.accepted
            self.kept_at.update({place: int(place < record.accepted) for place in range(record.gamma)})


@dataclass(eq=False)
class Job:
    """A request that was taken in.

    Attributes:
        run: What is decoded; it is not told of its records.
        deliver: Is handed every record, and an exception if that is how it ends, in the engine's thread.
        number: The scheduler's; ``None`` before it has one.
    """

    run: GenerationRun
    deliver: Deliver
    number: int | None = None


class Engine:
    """Takes requests from any thread, and decodes several at a time.

    Args:
        target, drafter: Of all requests; each gets a scorer and a drafter of its own.
        max_batch: How many are decoded at a time.
        max_waiting: How many may wait besides.
        pool_tokens: Tokens whose keys and values are held at a time, in all; ``None`` for caches that grow.

    Attributes:
        room: The most tokens that a prompt and its output may have together; ``None`` for no limit.
        most: How many requests may be under way or wait.
    """

    def __init__(
        self, target: Target, drafter: Drafter, *, max_batch: int, max_waiting: int, pool_tokens: int | None
    ) -> None:
        self.target, self.drafter, self.counts = target, drafter, Counts()
        self.most = max_batch + max_waiting
        self._load = Load()
        self._scheduler = Scheduler(
            max_batch=max_batch, clock=clock_for(str(target.scorer.device)), watch=self._load.took
        )
        self.factory = RequestFactory(target.scorer, pool_tokens, max_batch)
        self.factory.open(drafter)  # models are tried out now, and not while somebody waits
        held = self.factory.use
        limits = [target.scorer.context_limit, None if held is None else held.block * held.blocks - BESIDE]
        self.room = min((limit for limit in limits if limit is not None), default=None)
        self._changed = threading.Condition()
        self._jobs: set[Job] = set()
        self._numbered: dict[int, Job] = {}
        self._coming: deque[Job] = deque()
        self._gone: deque[Job] = deque()
        self._until: float | None = (
            None  # when everything ends that has not ended by itself; None: nobody wants that
        )
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that are decoded now."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return max(0, len(self._jobs) - self.running)

    def submit(self, run: GenerationRun, deliver: Deliver) -> Job:
        """Take in a request.

        Args:
            run: What to decode; its target and drafter are the engine's.
            deliver: See ``Job``; it returns at once.

        Raises:
            BusyError, StoppedError: It is not taken in.
        """
        job = Job(run, deliver)
        with self._changed:
            if self._until is not None:
                raise StoppedError("The server is about to end.", "Ask another one.")
            if len(self._jobs) >= self.most:
                raise BusyError(f"{len(self._jobs)} requests are under way or wait.", "Try again later.")
            self._jobs.add(job)
            self._coming.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants it any more, if it has not ended; a record may still come of it."""
        with self._changed:
            self._gone.append(job)
            self._changed.notify()

    def stop(self, grace_s: float) -> None:
        """Take in nothing more, and end what is left after so many seconds; returns at once."""
        with self._changed:
            until = time.monotonic() + grace_s
            self._until = until if self._until is None else min(until, self._until)
            self._changed.notify()

    def join(self) -> None:
        """Wait until everything has ended; ``stop`` comes first."""
        self._thread.join()

    def _work(self) -> None:
        try:
            self._decode()
        finally:  # also where something has failed that is no request: nobody may wait for what never comes
            self.stop(0.0)
            self._end_all(StoppedError("The server ended before the answer did.", "Ask another one."))

    def _decode(self) -> None:
        while self._is_wanted():
            self._take_in()
            self._step()

    def _is_wanted(self) -> bool:
        """Wait until there is something to do; false once everything has to end."""
        with self._changed:
            while not (self._jobs or self._gone or self._until is not None):
                self._changed.wait()
            return self._until is None or (bool(self._jobs) and time.monotonic() < self._until)

    def _take_in(self) -> None:
        """Hand requests that have come to the scheduler, and end those that nobody wants any more."""
        with self._changed:
            coming = [job for job in self._coming if job in self._jobs]
            gone = [*self._gone]
            self._coming.clear()
            self._gone.clear()
        for job in coming:
            job.number = self._scheduler.add(partial(job.run.as_request, self.factory, self._load))
            self._numbered[job.number] = job
        for job in gone:
            self._end(job, "cancelled")

    def _step(self) -> None:
        """Let the scheduler make a pass, and hand out what comes of it."""
        try:
            events = self._scheduler.step()
        except Exception as error:  # of the scheduler itself: what is wrong with one request is an event
            self._end_all(error)
            return
        for number, event in events:
            job = self._numbered.get(number)
            if job is None:
                continue
            if not isinstance(event, Exception):
                self.counts.take(event)
            try:
                job.deliver(event)
            except Exception:  # nobody is there to be told; the others go on
                self._end(job, "failed")
                continue
            if isinstance(event, Exception):
                self._end(job, "failed")
            elif event.finish_reason is not None:
                self._end(job, event.finish_reason)

    def _end_all(self, error: Exception) -> None:
        self._scheduler.close()
        with self._changed:
            jobs = [*self._jobs]
        for job in jobs:
            with suppress(Exception):
                job.deliver(error)
            self._end(job, "failed")

    def _end(self, job: Job, reason: str) -> None:
        with self._changed:
            if job not in self._jobs:
                return
            self._jobs.discard(job)
        self.counts.ended[reason] += 1
        if job.number is not None:
            self._numbered.pop(job.number, None)
            self._scheduler.cancel(job.number)
