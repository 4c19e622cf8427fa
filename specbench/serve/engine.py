"""An engine that decodes requests together as they arrive, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from specbench.backends.torch.batch import RequestFactory
from specbench.base.errors import RunError
from specbench.decoding.clocks import clock_for
from specbench.decoding.schedule import Event, Scheduler
from specbench.generate_many import TREE_POSITIONS
from specbench.policies.batch_costs import BatchCosts
from specbench.serve.protocol import Usage

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.generate import GenerationRun
    from specbench.models.target import Target

Deliver: TypeAlias = Callable[[Event], None]


class BusyError(RunError):
    """The queue is full."""


class StoppedError(RunError):
    """The engine is stopping."""


@dataclass(eq=False)
class Job:
    """A submitted request.

    ``deliver`` is called in the engine's thread with every record, or with the exception that ends the request.
    """

    run: GenerationRun
    deliver: Deliver
    number: int | None = None


class Engine:
    """Engine that takes requests from any thread, and decodes several at a time.

    Args:
        target, drafter: Target and drafter of all requests; each request gets a scorer and a drafter of its own.
        max_batch: Requests decoded at a time.
        max_waiting: Maximum number of requests that wait in addition.
        pool_tokens: Tokens of the KV cache pool; ``None`` for caches that grow.

    Attributes:
        counts: Of all requests since the start; only its thread writes them.
        ended: Ended requests, by finish reason, ``cancelled`` or ``failed``.
        max_tokens: Limit on the tokens of prompt and output together; ``None`` for none.
        max_requests: Limit on running and waiting requests.
    """

    def __init__(
        self, target: Target, drafter: Drafter, *, max_batch: int, max_waiting: int, pool_tokens: int | None
    ) -> None:
        self.target, self.drafter = target, drafter
        self.counts, self.ended = Usage(), Counter[str]()
        self.max_requests = max_batch + max_waiting
        self._load = BatchCosts()
        self._scheduler = Scheduler(
            max_batch=max_batch, clock=clock_for(str(target.scorer.device)), watch=self._load.observe
        )
        self.factory = RequestFactory(target.scorer, pool_tokens, max_batch)
        self.factory.open(drafter)  # runs the trials of models now, not while a request waits
        use = self.factory.use
        limits = [
            target.scorer.context_limit,
            None if use is None else use.block * use.blocks - TREE_POSITIONS,
        ]
        self.max_tokens = min((limit for limit in limits if limit is not None), default=None)
        self._changed = threading.Condition()
        self._jobs: set[Job] = set()
        self._numbered: dict[int, Job] = {}
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[Job] = deque()
        self._deadline: float | None = None  # when the requests that are left end; None: not stopping
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests being decoded."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Requests waiting for their turn."""
        return max(0, len(self._jobs) - self.running)

    def submit(self, run: GenerationRun, deliver: Deliver) -> Job:
        """Submit a generation with the engine's target and drafter; ``deliver`` (see ``Job``) must return immediately.

        Raises:
            BusyError, StoppedError: The queue is full, or the engine is stopping.
        """
        job = Job(run, deliver)
        with self._changed:
            if self._deadline is not None:
                raise StoppedError("The server is stopping.", "Use another one.")
            if len(self._jobs) >= self.max_requests:
                raise BusyError(f"{len(self._jobs)} requests are running or waiting.", "Try again later.")
            self._jobs.add(job)
            self._submitted.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request if it has not ended; one more record may be delivered."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def stop(self, grace_s: float) -> None:
        """Refuse new requests, and end those left after ``grace_s`` seconds; returns immediately."""
        with self._changed:
            deadline = time.monotonic() + grace_s
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            self._changed.notify()

    def join(self) -> None:
        """Wait until all requests have ended; call ``stop`` first."""
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._has_work():
                self._update_jobs()
                self._step()
        finally:  # after a failure of the engine itself too: no client may wait forever
            self.stop(0.0)
            self._end_all(StoppedError("The server stopped before the answer ended.", "Use another one."))

    def _has_work(self) -> bool:
        """Wait until there is work and return true; return false once everything has to end."""
        with self._changed:
            while not (self._jobs or self._cancelled or self._deadline is not None):
                self._changed.wait()
            return self._deadline is None or (bool(self._jobs) and time.monotonic() < self._deadline)

    def _update_jobs(self) -> None:
        """Schedule submitted requests, and end cancelled ones."""
        with self._changed:
            submitted = [job for job in self._submitted if job in self._jobs]
            cancelled = [*self._cancelled]
            self._submitted.clear()
            self._cancelled.clear()
        for job in submitted:
            job.number = self._scheduler.add(partial(job.run.as_request, self.factory, self._load))
            self._numbered[job.number] = job
        for job in cancelled:
            self._end(job, "cancelled")

    def _step(self) -> None:
        """Run a step of the scheduler, and deliver its events."""
        try:
            events = self._scheduler.step()
        except Exception as error:  # of the scheduler itself: failures of single requests are events
            self._end_all(error)
            return
        for number, event in events:
            job = self._numbered.get(number)
            if job is None:
                continue
            if not isinstance(event, Exception):
                self.counts.add(event)
            try:
                job.deliver(event)
            except Exception:  # its consumer is gone; the others continue
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
        self.ended[reason] += 1
        if job.number is not None:
            self._numbered.pop(job.number, None)
            self._scheduler.cancel(job.number)
