"""When a sweep may stop: its answer is sure, or narrow enough (``--until``).

Looking at results again and again makes ordinary intervals miss the truth more often than promised: sooner or later
chance looks like an effect. So there are a few looks, fixed before anything is measured, and the speedups' intervals
are as wide as it takes to hold at all looks together (repeated confidence intervals, Jennison and Turnbull 1989). They
then hold whatever the reason for stopping. benchmarks/interval_coverage.py measures their coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from specbench.results.results import load_results
from specbench.results.run import Stopping
from specbench.results.stats import AT_EVERY_LOOK
from specbench.results.summary import SummaryRow, best_by_baseline, summarize
from specbench.specs.stopping import parse_until

if TYPE_CHECKING:
    from specbench.bench.grid import Cell
    from specbench.results.store import RunStore

FIRST_LOOK = 6
"""Prompts before the first look."""

Ending = Literal["answered", "time", "prompts"]
"""Why measuring ended: the answer is sure or narrow enough, the time is up, or every prompt was decoded."""


def looks(prompts: int, repeats: int) -> set[int]:
    """Return after how many decoded prompts to look: 6, 8, 12, 16, 24, ..., and after each repeat of all prompts."""
    found = {prompts * repeat for repeat in range(1, repeats + 1)}
    number = FIRST_LOOK
    while number < prompts:
        found |= {number, min(prompts, number * 4 // 3)}
        number *= 2
    return found


class StoppingRule:
    """Decides between two prompts whether to stop.

    Args:
        until: See ``parse_until``.
        minutes: Time limit; ``None`` for none.
        store: The run, which keeps the rule and how it ended.
        cells: The plan of the sweep, without warm-ups.
    """

    def __init__(self, until: str, minutes: float | None, store: RunStore, cells: Sequence[Cell]) -> None:
        self._half_width = parse_until(until)
        self._minutes, self._store = minutes, store
        self._decoded: dict[Cell, int] = {}
        for cell in cells:
            if cell.order == 0 and cell.turn == 0:
                self._decoded[cell] = len(self._decoded)
        prompts = sum(cell.repeat == 0 for cell in self._decoded)
        self._looks = looks(prompts, len(self._decoded) // max(1, prompts))
        self._until = until
        self._store_ending(None)

    def ending_before(self, cell: Cell, seconds: float) -> Ending | None:
        """Return why to stop before a cell, ``seconds`` after the start; ``None`` to go on."""
        decoded = self._decoded.get(cell)
        if decoded in self._looks and self._is_answered():
            return "answered"
        over = self._minutes is not None and seconds > 60 * self._minutes
        return "time" if over and cell.order == 0 else None

    def end(self, ending: Ending | None) -> None:
        """Store why measuring ended; ``None``: everything was decoded."""
        self._store_ending(ending or ("answered" if self._is_answered() else "prompts"))

    def _store_ending(self, ending: Ending | None) -> None:
        rule = Stopping(until=self._until, minutes=self._minutes, confidence=AT_EVERY_LOOK, ended=ending)
        self._store.update(stopping=rule)

    def _is_answered(self) -> bool:
        rows = summarize(load_results(self._store.path)).rows
        best = best_by_baseline(row for row in rows if row.measured)
        return bool(best) and all(self._is_known(row) for row in best)

    def _is_known(self, row: SummaryRow) -> bool:
        if self._half_width is None:
            return row.verdict != "cannot tell"
        speedup = row.speedup
        if speedup.basis != "prompts" or speedup.low is None or speedup.high is None:
            return False
        return (speedup.high - speedup.low) / 2 <= self._half_width * speedup.value
