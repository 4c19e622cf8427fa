"""The progress of slow stages on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
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
                    task.fields["time"] = "" if self._stage is None else self._stage.time
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
        self._stage: _Stage | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> StageProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(
        self, stage: str, done: int, total: int | None, note: str = "", left_s: float | None = None
    ) -> None:
        """Show that ``done`` of ``total`` units of a stage are done; ``None``: an unknown number.

        ``note`` stands behind the stage's name; ``left_s`` is the time left, if it is known better than from ``done``.
        """
        name = one_line(stage)
        if self._stage is None or self._stage.name != name:
            self._stage = _Stage(name, time.monotonic(), done)
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total)
        at = self._stage
        at.note, at.done, at.total = one_line(note), done, total
        at.look(left_s)
        assert self._task is not None
        shown = excerpt(at.title, max(20, self.console.width - _BESIDE))
        self._bar.update(self._task, description=shown, completed=done, total=total)
        now = time.monotonic()
        if not self._animated and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bar.refresh()
        if self._prints and name != _STARTING and at.is_due():
            self.console.print(at.line(), markup=False, soft_wrap=True)


@dataclass
class _Stage:
    """A stage: its name, when it began, and how far it is."""

    name: str
    began: float
    first: int
    note: str = ""
    done: int = 0
    total: int | None = None
    ends: float | None = None
    due_s: float = field(default_factory=lambda: PATIENCE_S)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.note}" if self.note else self.name

    @property
    def time(self) -> str:
        """Return the seconds that it has taken, and the time left if that is known."""
        now = time.monotonic()
        left = "" if self.ends is None else f", {duration(max(0.0, self.ends - now))} left"
        return duration(now - self.began) + left

    def look(self, left_s: float | None) -> None:
        """Note when it ends: by the time left, or at the speed so far."""
        now = time.monotonic()
        if left_s is None and self.total and self.done > self.first and now - self.began >= 1.0:
            left_s = (now - self.began) * (self.total - self.done) / (self.done - self.first)
        if left_s is not None:
            self.ends = now + left_s

    def is_due(self) -> bool:
        """Whether its next line is due; then that one is not."""
        spent = time.monotonic() - self.began
        if spent < self.due_s:
            return False
        self.due_s = _LATER * spent
        return True

    def line(self) -> str:
        done = f"{100 * self.done / self.total:.0f}%, " if self.total and self.done else ""
        return f"{self.title} ... {done}{self.time}"
