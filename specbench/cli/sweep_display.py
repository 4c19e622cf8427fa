"""The progress of a running sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.bench.runner import CellDone, CellStarted, Event, SweepStarted
from specbench.cli.console import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.bench.grid import Sweep
    from specbench.cli.progress import StageProgress


class SweepDisplay:
    """A bar on a terminal, elsewhere a line now and then. It draws only on events, never during a measurement.

    Args:
        sweep: What runs.
        progress: The bar.
        say: Prints a line.
        lines: Whether to print lines of progress.
    """

    def __init__(
        self, sweep: Sweep, progress: StageProgress, say: Callable[[str], None], *, lines: bool
    ) -> None:
        self._options, self._progress, self._say, self._lines = sweep.options, progress, say, lines
        self._now = "starting"
        self._done, self._total, self._failed = 0, 1, 0
        self._left_s: float | None = None
        self._said = -1

    def handle(self, event: Event) -> None:
        """Take an event, and show it."""
        if isinstance(event, CellStarted):
            self._now = ("warming up: " if event.cell.warmup else "") + event.config.label
        elif isinstance(event, CellDone):
            self._done, self._total, self._left_s = event.done, event.total, event.seconds_left
            self._failed += not event.cell.warmup and event.measurement.result is None
            if not event.cell.warmup:
                self._say_progress()
        elif isinstance(event, SweepStarted):
            self._done, self._total = len(event.measurements), event.total
            self._failed = sum(each.result is None for each in event.measurements)
        else:
            self._now = "timed single forward passes"
            if event.costs is None:
                self._say(f"Single forward passes could not be timed: {event.error}")
        self._progress.update(f"{self._text()}: {self._now}", self._done, self._total)

    def _text(self) -> str:
        cells = "batches" if self._options.batches else "generations"
        failed = f", {self._failed} failed" if self._failed else ""
        left = "time left unknown" if self._left_s is None else f"{duration(self._left_s)} left"
        return f"{self._done} of {self._total} {cells}{failed}, {left}"

    def _say_progress(self) -> None:
        tenth = 10 * self._done // self._total
        if self._lines and tenth > self._said:
            self._said = tenth
            self._say(self._text())
