"""Requests as they come to a server: when each is sent, and what it and all of them got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from specbench.decoding.clocks import Clock
from specbench.decoding.records import Prefill, Step

if TYPE_CHECKING:
    from specbench.generate import GenerationRun
    from specbench.generate_many import GenerationRuns

Encoded = TypeVar("Encoded")
"""A prompt as its engine takes it: models as token ids."""


@dataclass(frozen=True, slots=True)
class BenchRequest(Generic[Encoded]):
    """A request: its prompt, and the seed of its sampling."""

    prompt: Encoded
    seed: int


@dataclass(frozen=True, slots=True)
class Workload(Generic[Encoded]):
    """Requests, and when they are sent.

    Attributes:
        requests: Those that are measured, in the order in which they come.
        clients: Of a closed loop: how many are under way at any time. ``None`` where ``times`` says when they come.
        beside: What clients go on with while one of the requests has not ended, from the beginning again when all have
            come; not measured.
        times: Of an open loop: seconds at which each of the requests comes, ascending.
    """

    requests: Sequence[BenchRequest[Encoded]]
    clients: int | None
    background: Sequence[BenchRequest[Encoded]] = ()
    times: Sequence[float] = ()

    def asked(self, number: int) -> BenchRequest[Encoded]:
        """The request that is sent as the ``number``-th, from 0."""
        own = len(self.requests)
        return (
            self.requests[number] if number < own else self.background[(number - own) % len(self.background)]
        )

    @property
    def different(self) -> Sequence[BenchRequest[Encoded]]:
        """All that may be sent, each once."""
        return [*self.requests, *self.background]


@dataclass(slots=True)
class BenchResult:
    """What one request got. Seconds are counted from when the first could be sent.

    Attributes:
        run: Its records.
        arrived_s: When it was sent.
        queued_s: How long it then waited for its turn.
        prefill_s: From there to when its prompt was read.
        first_s, last_s: When its first and its last tokens came.
        first_tokens, tokens: How many the first emission held, and all.
        ended: Whether it has come to its end.
    """

    run: GenerationRun
    arrived_s: float
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    ended: bool = False

    def take(self, record: Prefill | Step, now: float) -> int:
        """Take in a record that came at that time; returns how many tokens it brought."""
        if isinstance(record, Prefill):
            self.queued_s, self.prefill_s = record.queued_s, record.time_s
            emitted = 0 if record.token is None else 1
        else:
            emitted = len(record.tokens)
        if emitted and not self.tokens:
            self.first_s, self.first_tokens = now, emitted
        if emitted:
            self.last_s = now
        self.tokens += emitted
        self.ended = record.finish_reason is not None
        return emitted


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """What came of a load.

    Attributes:
        requests: Those measured, in their order.
        seconds: From the first that could be sent to the end of the last of them.
        tokens: That all requests got in this time, those beside them too.
    """

    requests: Sequence[BenchResult]
    seconds: float
    tokens: int


class SkippingClock:
    """A clock that can be put forward: nobody needs to wait while nothing is asked for.

    Args:
        clock: Tells the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._skipped = 0.0

    def now(self) -> float:
        return self._now() + self._skipped

    def skip_to(self, time: float) -> None:
        """Put it forward to a time; one that is past leaves it as it is."""
        self._skipped += max(0.0, time - self.now())


def run_workload(
    load: Workload[Sequence[int]],
    runs: GenerationRuns,
    start: Callable[[BenchRequest[Sequence[int]]], GenerationRun],
    clock: SkippingClock,
) -> WorkloadResult:
    """Send requests, and decode until the last measured one has ended. Whatever one of them raises goes through.

    Args:
        load: The requests.
        runs: Decode them; empty, and over at the end.
        start: Makes a run of a request.
        clock: That of ``runs``.
    """
    return _Service(load, runs, start, clock).served()


@dataclass(slots=True)
class _Service:
    """A load on its way."""

    load: Workload[Sequence[int]]
    runs: GenerationRuns
    start: Callable[[BenchRequest[Sequence[int]]], GenerationRun]
    clock: SkippingClock
    sent: list[BenchResult] = field(default_factory=list)
    began: float = 0.0
    tokens: int = 0

    def served(self) -> WorkloadResult:
        own = len(self.load.requests)
        self.began = self.clock.now()
        now, left = 0.0, own
        try:
            for _ in range(self.load.clients or 0):
                self._send(0.0)
            while left:
                self._send_due()
                if not len(self.runs):
                    self.clock.skip_to(self.began + self.load.times[len(self.sent)])
                    continue
                events = self.runs.step()
                now = self.clock.now() - self.began
                for number, event in events:
                    if isinstance(event, Exception):
                        raise event
                    answered = self.sent[number]
                    self.tokens += answered.take(event, now)
                    if answered.ended:
                        left -= number < own
                        if self.load.clients is not None and left:
                            self._send(now)
        finally:
            self.runs.close()
        return WorkloadResult(self.sent[:own], now, self.tokens)

    def _send_due(self) -> None:
        """Those whose time has come, though nobody may have looked for a while."""
        if self.load.clients is None:
            now = self.clock.now() - self.began
            while len(self.sent) < len(self.load.times) and self.load.times[len(self.sent)] <= now:
                self._send(self.load.times[len(self.sent)])

    def _send(self, at: float) -> None:
        run = self.start(self.load.asked(len(self.sent)))
        self.sent.append(BenchResult(run, at))
        self.runs.add(run, self.began + at)
