"""A progress bar on stderr for slow stages: fetching, converting, loading, decoding without output."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from specbench.base.textsafe import terminal_safe

if TYPE_CHECKING:
    from rich.console import RenderableType

_PRINTED_ONCE = ("fetching", "converting", "waiting", "trying drafters", "decoding plainly")
_KEPT = "(the result is kept)"
"""The end of the names of stages that take long only the first time; they are printed as well."""

_STARTING = "starting"
_REDRAW_S = 0.1


@contextmanager
def starting(quiet: bool = False, *, every: bool = False) -> Iterator[StageProgress]:
    """Show the stages of a start, from imports to loaded models, with the garbage collector off.

    For ``every`` see ``StageProgress``. A start makes millions of objects that stay; collecting among them would take
    a quarter longer.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with StageProgress(quiet, every=every) as progress:
            progress.update(_STARTING, 0, None)
            yield progress
    finally:
        if collecting:
            gc.enable()


class StageProgress(AbstractContextManager["StageProgress"]):
    """Draws the current stage on one line of a terminal, which is gone at the end.

    Without a terminal, stages that take minutes are printed once.

    Args:
        quiet: Draw and print nothing.
        animated: Draw from a thread. Not while something is measured: then only ``update`` draws.
        every: Whether all stages are printed without a terminal.

    Attributes:
        console: The console to print on while the bar is drawn.
        prefix: Stands in front of the names of stages.
        above: Returns what is drawn above the line; ``None`` for nothing.
    """

    def __init__(self, quiet: bool = False, *, animated: bool = True, every: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

        self.console = Console(stderr=True, highlight=False)
        self._quiet, self._every = quiet, every
        self.above: Callable[[], RenderableType] | None = None

        class Bar(Progress):
            def get_renderables(bar) -> Iterable[RenderableType]:  # noqa: N805
                if self.above is not None:
                    yield self.above()
                yield from super().get_renderables()

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(24, complete_style="cyan", finished_style="cyan", pulse_style="cyan"),
            TaskProgressColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.elapsed:.0f} s", style="dim"),
            console=self.console,
            transient=True,
            auto_refresh=animated,
            disable=quiet or not self.console.is_terminal,
        )
        self.prefix = ""
        self._animated = animated
        self._drawn = float("-inf")
        self._stage: tuple[str, TaskID] | None = None

    def __enter__(self) -> StageProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` units of a stage are done; ``None``: an unknown number."""
        stage = self.prefix + stage
        if self._stage is None or self._stage[0] != stage:
            self._begin(stage, total)
        assert self._stage is not None
        self._bar.update(self._stage[1], completed=done, total=total)
        now = time.monotonic()
        if not self._animated and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._bar.refresh()

    def _begin(self, stage: str, total: int | None) -> None:
        if self._stage is not None:
            self._bar.remove_task(self._stage[1])
        shown = " ".join(terminal_safe(stage).split())
        self._stage = stage, self._bar.add_task(shown, total=total)
        is_long = stage.startswith(_PRINTED_ONCE) or stage.endswith(_KEPT)
        if (
            not self.console.is_terminal
            and not self._quiet
            and (is_long or (self._every and stage != _STARTING))
        ):
            self.console.print(f"{shown} ...", markup=False, soft_wrap=True)
