"""The display of a running sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specbench.base.textsafe import terminal_safe
from specbench.bench.grid import Sweep, SweepConfig
from specbench.bench.runner import CellDone, CellStarted, Event, SweepStarted
from specbench.cli.console import duration

if TYPE_CHECKING:
    from specbench.results.lines import Measurement


class SweepDisplay:
    """Progress of a sweep, and the table so far on a terminal; elsewhere a line now and then.

    It draws only on events, never during a measurement.

    Args:
        sweep: What runs.
        console: Where to.
        quiet: Show nothing.
    """

    def __init__(self, sweep: Sweep, console: Console, *, quiet: bool = False) -> None:
        self._turns = {prompt.id: len(prompt.turns) for prompt in sweep.prompts}
        self._options = sweep.options
        self._console, self._quiet = console, quiet
        self._speeds = _Speeds(sweep.configs)
        self._now = "starting"
        self._done, self._total = 0, 1
        self._left: float | None = None
        self._failed = 0
        self._said = -1
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> SweepDisplay:
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.stop()

    @property
    def _on_terminal(self) -> bool:
        return self._console.is_terminal and not self._quiet

    def handle(self, event: Event) -> None:
        """Take an event, and show it."""
        if isinstance(event, CellStarted):
            self._now = self._describe(event)
        elif isinstance(event, CellDone):
            self._done, self._total, self._left = event.done, event.total, event.seconds_left
            if not event.cell.warmup:
                self._take(event.measurement)
        elif isinstance(event, SweepStarted):
            self._done, self._total = len(event.measurements), event.total
            for each in event.measurements:
                self._take(each)
        else:
            self._now = "timed single forward passes"
            if event.costs is None:
                problem = f"Single forward passes could not be timed: {event.error}"
                self._console.print(Text(self._safe(problem)), soft_wrap=not self._console.is_terminal)
        if self._quiet:
            return
        if self._on_terminal:
            self._live.update(self._picture(), refresh=True)
        elif isinstance(event, CellDone) and not event.cell.warmup:
            self._say_progress()

    def _describe(self, event: CellStarted) -> str:
        cell, config = event.cell, event.config
        if cell.warmup:
            return f"warming up: {config.label}"
        turn = f" turn {cell.turn + 1}" if self._turns.get(cell.prompt, 1) > 1 else ""
        return f"{config.label} · {cell.prompt}{turn} · repeat {cell.repeat + 1} of {self._options.repeats}"

    def _take(self, measurement: Measurement) -> None:
        if measurement.result is not None:
            self._speeds.add(measurement)
        else:
            self._failed += 1

    def _say_progress(self) -> None:
        tenth = 10 * self._done // self._total
        if tenth > self._said:
            self._said = tenth
            failed = f", {self._failed} failed" if self._failed else ""
            cells = "batches" if self._options.batches else "generations"
            self._console.print(
                f"{self._done} of {self._total} {cells}{failed}, {self._time_left()}",
                markup=False,
                soft_wrap=True,
            )

    def _time_left(self) -> str:
        return "time left unknown" if self._left is None else f"{duration(self._left)} left"

    def _picture(self) -> RenderableType:
        progress = Table.grid(padding=(0, 1))
        failed = f"{self._failed} failed" if self._failed else ""
        bar = ProgressBar(self._total, self._done, width=24)
        progress.add_row(bar, f"{self._done}/{self._total}", self._time_left(), failed)
        now = Text(self._safe(self._now), style="dim", no_wrap=True, overflow="ellipsis")
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
        table.add_column("so far", no_wrap=True, overflow="ellipsis")
        over = "× first" if self._options.servers else "× plain"
        for heading in ("tokens/s", over, "runs"):
            table.add_column(heading, justify="right")
        rows = self._speeds.rows()
        shown = rows[: max(3, self._console.height - 6)]
        for config, speed, ratio, count in shown:
            table.add_row(
                Text(self._safe(config.label)),
                f"{speed:.1f}",
                "–" if ratio is None else f"{ratio:.2f}",
                str(count),
            )
        more = len(rows) - len(shown)
        return Group(progress, now, table, Text(f"and {more} more" if more else "", style="dim"))

    def _safe(self, text: str) -> str:
        return terminal_safe(text)


class _Speeds:
    """Speeds of generations or batches so far."""

    def __init__(self, configs: Sequence[SweepConfig]) -> None:
        self._configs = {config.id: config for config in configs}
        self._speeds: dict[str, dict[tuple[str, int, int], float]] = {name: {} for name in self._configs}

    def add(self, measurement: Measurement) -> None:
        """Take a finished generation or batch; one of a single token has no speed."""
        line, speed = measurement.line, measurement.speed
        if not math.isnan(speed):
            self._speeds[line.config][line.prompt, line.turn, line.repeat] = speed

    def rows(self) -> list[tuple[SweepConfig, float, float | None, int]]:
        """Return geometric means: configuration, tokens/s, ratio to plain decoding (``None`` without a pair), runs."""
        found = []
        for config in self._configs.values():
            if speeds := self._speeds.get(config.id):
                plain = self._speeds.get(config.baseline, {})
                ratios = [speed / plain[place] for place, speed in speeds.items() if place in plain]
                ratio = geometric_mean(ratios) if ratios else None
                found.append((config, geometric_mean(speeds.values()), ratio, len(speeds)))
        return found
