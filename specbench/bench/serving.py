"""Workloads: when requests are sent, and the times and tokens of each request and of all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbench.decoding.clocks import ShiftedClock

if TYPE_CHECKING:
    from specbench.decoding.records import Prefill, Step
    from specbench.generate import GenerationRun
    from specbench.generate_many import GenerationRuns


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt as its engine encodes it, the seed of its sampling, its id and its category."""

    prompt: Any
    seed: int
    name: str = ""
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and when they are sent.

    Attributes:
        requests: Measured requests, in order.
        clients: Number of requests active at any time (closed loop); ``None`` for an open loop.
        background: Requests that clients send afterwards, until the last measured request has ended. They are repeated
            as needed and not measured.
        times: Time at which each request is sent (open loop), in seconds, ascending.
    """

    requests: Sequence[BenchRequest]
    clients: int | None
    background: Sequence[BenchRequest] = ()
    times: Sequence[float] = ()

    def request(self, number: int) -> BenchRequest:
        """Return the request number ``number`` in the order of sending, counted from 0."""
        own = len(self.requests)
        if number < own:
            return self.requests[number]
        return self.background[(number - own) % len(self.background)]


@dataclass(slots=True)
class BenchResult:
    """The emissions of one request. Times count from when the first request could be sent.

    Attributes:
        arrived_s: When it was sent.
        emissions: When tokens arrived, and how many.
    """

    run: GenerationRun
    arrived_s: float
    emissions: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False

    def add(self, record: Prefill | Step, now: float) -> int:
        """Add a record that arrived at ``now``; return its number of tokens."""
        if record.tokens:
            self.emissions.append((now, len(record.tokens)))
        self.ended = record.finish_reason is not None
        return len(record.tokens)


def run_workload(
    workload: Workload,
    runs: GenerationRuns,
    start: Callable[[BenchRequest], GenerationRun],
    clock: ShiftedClock,
) -> tuple[Sequence[BenchResult], float, int]:
    """Send the requests of a workload, and decode until the last measured one has ended.

    Args:
        workload: The requests.
        runs: Decodes the requests, with the same clock; must be empty, and is closed at the end.
        start: Returns the generation of a request.

    Returns:
        The results of the measured requests, the seconds until the last one ended, and the tokens of all requests
        until then.

    Raises:
        Exception: The error of a request that fails.
    """
    began, now, tokens = clock(), 0.0, 0
    left = own = len(workload.requests)
    sent: list[BenchResult] = []

    def send(at: float) -> None:
        run = start(workload.request(len(sent)))
        sent.append(BenchResult(run, at))
        runs.add(run, began + at)

    try:
        for _ in range(workload.clients or 0):
            send(0.0)
        while left:
            if workload.clients is None:  # several may be due since the last look
                due = clock() - began
                while len(sent) < own and workload.times[len(sent)] <= due:
                    send(workload.times[len(sent)])
            if not len(runs):
                clock.skip_to(began + workload.times[len(sent)])
                continue
            events = runs.step()
            now = clock() - began
            for number, event in events:
                if isinstance(event, Exception):
                    raise event
                tokens += sent[number].add(event, now)
                if sent[number].ended:
                    left -= number < own
                    if workload.clients is not None and left:
                        send(now)
    finally:
        runs.close()
    return sent[:own], now, tokens
