"""An engine that decodes requests together as they arrive, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
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
"""Takes every record of a request, or the exception that ends it, in the engine's thread; it returns at once, and
raises nothing.
"""


class BusyError(RunError):
    """The queue is full."""


class StoppedError(RunError):
    """The engine is stopping."""


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
        self.factory = RequestFactory(target.scorer, pool_tokens)
        self.factory.open(drafter)  # runs the trials of models now, not while a request waits
        use = self.factory.use
        room = None if use is None else use.block * use.blocks - TREE_POSITIONS
        limits = [limit for limit in (target.scorer.context_limit, room) if limit is not None]
        self.max_tokens = min(limits, default=None)
        self._lock = threading.Lock()
        self._open: dict[GenerationRun, Deliver] = {}
        self._scheduled: dict[int, GenerationRun] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # what the thread has to do
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="decoding", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests being decoded."""
        return self._scheduler.active

    @property
    def waiting(self) -> int:
        """Requests waiting for their turn."""
        return max(0, len(self._open) - self.running)

    def submit(self, run: GenerationRun, deliver: Deliver) -> None:
        """Submit a generation with the engine's target and drafter.

        Raises:
            BusyError, StoppedError: The queue is full, or the engine is stopping.
        """
        with self._lock:
            if self._stopping:
                raise StoppedError("The server is stopping.", "Use another one.")
            if len(self._open) >= self.max_requests:
                raise BusyError(f"{len(self._open)} requests are running or waiting.", "Try again later.")
            self._open[run] = deliver
        self._inbox.put(partial(self._schedule, run))

    def cancel(self, run: GenerationRun) -> None:
        """Cancel a generation if it has not ended; one more record may be delivered."""
        self._inbox.put(partial(self._end, run, "cancelled"))

    def stop(self) -> None:
        """Refuse new requests, and end the others with a ``StoppedError``; returns immediately."""
        with self._lock:
            self._stopping = True
        self._inbox.put(lambda: None)  # wakes the thread

    def join(self) -> None:
        """Wait until all requests have ended; call ``stop`` first."""
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._empty_inbox():
                self._step()
        finally:  # after a failure of the engine itself too: no client may wait forever
            self.stop()
            self._end_all(StoppedError("The server stopped before the answer ended.", "Use another one."))

    def _empty_inbox(self) -> bool:
        """Do what is in the inbox, and wait for more while there is nothing to decode; false at the end."""
        while not self._stopping:
            try:
                self._inbox.get(block=not self._scheduled)()
            except queue.Empty:
                return True
        return False

    def _schedule(self, run: GenerationRun) -> None:
        if run in self._open:
            number = self._scheduler.add(partial(run.as_request, self.factory, self._load))
            self._scheduled[number] = run

    def _step(self) -> None:
        """Run a step of the scheduler, and deliver its events."""
        try:
            events = self._scheduler.step()
        except Exception as error:  # of the scheduler itself: failures of single requests are events
            self._end_all(error)
            return
        for number, event in events:
            run = self._scheduled[number]
            reason: str | None = "failed"
            if not isinstance(event, Exception):
                self.counts.add(event)
                reason = event.finish_reason
            self._open[run](event)
            if reason is not None:
                self._end(run, reason)

    def _end_all(self, error: Exception) -> None:
        self._scheduler.close()
        with self._lock:
            left = [*self._open.items()]
        for run, deliver in left:
            deliver(error)
            self._end(run, "failed")

    def _end(self, run: GenerationRun, reason: str) -> None:
        with self._lock:
            if self._open.pop(run, None) is None:
                return
        self.ended[reason] += 1
        for number in [number for number, each in self._scheduled.items() if each is run]:
            del self._scheduled[number]
            self._scheduler.cancel(number)
