"""The progress of a running sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.cli.console import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.bench.runner import SweepProgress
    from specbench.cli.progress import StageProgress


class SweepDisplay:
    """A bar on a terminal, elsewhere a line now and then. It draws only between measurements.

    Args:
        cells: What a sweep measures, in the plural.
        progress: The bar.
        say: Prints a line.
        lines: Whether to print lines of progress.
    """

    def __init__(
        self, cells: str, progress: StageProgress, say: Callable[[str], None], *, lines: bool
    ) -> None:
        self._cells, self._progress, self._say, self._lines = cells, progress, say, lines
        self._said = -1

    def show(self, at: SweepProgress) -> None:
        """Show how far the sweep is."""
        if at.problem:
            self._say(f"Single forward passes could not be timed: {at.problem}")
        failed = f", {at.failed} failed" if at.failed else ""
        left = "time left unknown" if at.seconds_left is None else f"{duration(at.seconds_left)} left"
        text = f"{at.done} of {at.total} {self._cells}{failed}, {left}"
        self._progress.update(f"{text}: {at.now}" if at.now else text, at.done, at.total)
        tenth = 10 * at.done // at.total
        if self._lines and at.seconds_left is not None and tenth > self._said:
            self._said = tenth
            self._say(text)
