"""The progress of slow stages on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from specbench.base.textsafe import excerpt, one_line
from specbench.cli.console import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import TaskID

PATIENCE_S = 2.0
"""Seconds after which a stage gets its first line where no terminal draws a bar."""

_LATER = 3
"""Each further line of a stage comes when it has taken this many times as long as at the line before."""

_STARTING = "starting"
_REDRAW_S = 0.1
_BAR_CELLS, _BESIDE = 16, 46  # of the bar, and of it with percentage and times


@contextmanager
def starting(quiet: bool = False) -> Iterator[StageProgress]:
    """Show the stages of a start, from imports to loaded models, with the garbage collector off."""
    with without_collector(), StageProgress(quiet) as progress:
        progress.update(_STARTING, 0, None)
        yield progress


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch the garbage collector off: among the millions of objects of a start it would take a quarter longer."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class StageProgress(AbstractContextManager["StageProgress"]):
    """Draws the current stage with its time left on one line of a terminal, which is gone at the end.

    Without a terminal, a stage that takes two seconds is printed when it reports, and again whenever it has taken three
    times as long.

    Args:
        quiet: Draw and print nothing.
        animated: Draw the bar from a thread. Not while something is measured: then only ``update`` draws.

    Attributes:
        console: The console to print on while the bar is drawn.
    """

    def __init__(self, quiet: bool = False, *, animated: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self.console = Console(stderr=True, highlight=False)

        class Bar(Progress):
            def get_renderables(bar) -> Iterable[RenderableType]:  # noqa: N805
                for task in bar.tasks:
                    task.fields["time"] = self._time()
                yield from super().get_renderables()

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_CELLS, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
            TaskProgressColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[time]}", style="dim"),
            console=self.console,
            transient=True,
            auto_refresh=animated,
            disable=quiet or not self.console.is_terminal,
        )
        self._animated = animated
        self._prints = not quiet and not self.console.is_terminal
        self._drawn = float("-inf")
        self._task: TaskID | None = None
        self._stage, self._began, self._first, self._due_s = "", 0.0, 0, PATIENCE_S
        self._ends: float | None = None

    def __enter__(self) -> StageProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int | None, note: str = "") -> None:
        """Show that ``done`` of ``total`` units of a stage are done; ``None``: an unknown number.

        ``note`` stands behind the stage's name.
        """
        name, now = one_line(stage), time.monotonic()
        if name != self._stage or self._task is None:
            self._stage, self._began, self._first, self._due_s, self._ends = name, now, done, PATIENCE_S, None
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total)
        spent = now - self._began
        if total and done > self._first and spent >= 1.0:
            self._ends = now + spent * (total - done) / (done - self._first)
        title = f"{name}: {one_line(note)}" if note else name
        shown = excerpt(title, max(20, self.console.width - _BESIDE))
        self._bar.update(self._task, description=shown, completed=done, total=total)
        if not self._animated and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bar.refresh()
        if self._prints and name != _STARTING and spent >= self._due_s:
            self._due_s = _LATER * spent
            share = f"{100 * done / total:.0f}%, " if total and done else ""
            self.console.print(f"{title} ... {share}{self._time()}", markup=False, soft_wrap=True)

    def _time(self) -> str:
        """Return how long the stage has taken, and the time left if that is known."""
        now = time.monotonic()
        left = "" if self._ends is None else f", {duration(max(0.0, self._ends - now))} left"
        return duration(now - self._began) + left
