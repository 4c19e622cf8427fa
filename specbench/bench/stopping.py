"""When measuring stops: the answer is sure at a look, the time is up, or there is nothing left to measure.

Looking at results again and again makes ordinary intervals miss the truth more often than promised: sooner or later
chance looks like an effect. So there are a few looks, fixed before anything is measured, whose errors add up to what is
promised. `tune` divides its error among them (``specbench.tune.race``). The intervals of a sweep's speedups are as wide
as it takes to hold at all looks together (repeated confidence intervals, Jennison and Turnbull 1989), so they hold
whatever the reason for stopping; benchmarks/interval_coverage.py measures their coverage.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from specbench.results.metrics import Figures
from specbench.results.results import load_results
from specbench.results.run import RIVALS, Stopping
from specbench.results.stats import AT_EVERY_LOOK
from specbench.results.summary import Summary, best_by_baseline

if TYPE_CHECKING:
    from specbench.bench.grid import Cell, Sweep
    from specbench.decoding.clocks import Clock
    from specbench.results.store import RunStore
    from specbench.specs.sweeps import Until

FIRST_LOOK = 6
"""Blocks before the first look: with fewer, intervals are too wide to be worth their share of the error."""

Ending = Literal["decided", "time", "blocks", "interrupted"]
"""Why measuring ended: the answer is sure, the time is up, there are no more blocks, or the user stopped it."""


def look_due(blocks: int) -> bool:
    """Return whether to look after so many blocks: after 6, 8, 12, 16, 24, 32, ..."""
    return blocks >= FIRST_LOOK and blocks // (blocks & -blocks) in (1, 3)


def looks(prompts: int, repeats: int, *, in_turn: bool = True) -> set[int]:
    """Return after how many decoded prompts a sweep looks: after each repeat of all prompts, and when ``look_due`` if
    all configurations decode a prompt ``in_turn``.
    """
    within = filter(look_due, range(prompts)) if in_turn else ()
    return {*within, *(prompts * repeat for repeat in range(1, repeats + 1))}


def until_answered(
    left: Iterable[Cell], planned: Sequence[Cell], sweep: Sweep, store: RunStore, clock: Clock
) -> Iterator[Cell]:
    """Yield the cells to measure, of those that are left, until the answer of a sweep is sure or the time is up.

    Its answer is the verdict on the fastest configuration, or a narrow interval. A configuration whose interval lies
    below that of the fastest is measured no further. The run keeps the rule and how it ended.
    """
    until, minutes = sweep.options.until, sweep.options.minutes
    assert until is not None
    rule = Stopping(until=str(until), minutes=minutes, confidence=AT_EVERY_LOOK)
    store.update(stopping=rule)
    end_s = math.inf if minutes is None else clock() + 60 * minutes
    firsts = [cell for cell in planned if cell.order == 0 and cell.turn == 0]
    decoded = {cell: number for number, cell in enumerate(firsts)}
    prompts = sum(cell.repeat == 0 for cell in firsts)
    due = looks(prompts, len(firsts) // max(1, prompts), in_turn=sweep.together is None)
    beaten: Collection[str] = ()
    ended: Literal["decided", "time", "blocks"] = "blocks"
    for cell in left:
        if cell.order == 0:
            if decoded.get(cell) in due:
                sure, beaten = _look(store, until)
                if sure:
                    ended = "decided"
                    break
            if clock() > end_s:
                ended = "time"
                break
        if cell.config not in beaten:
            yield cell
    if ended == "blocks" and _look(store, until)[0]:
        ended = "decided"
    store.update(stopping=structs.replace(rule, ended=ended))


def _look(store: RunStore, until: Until) -> tuple[bool, set[str]]:
    """Return whether the answer is sure enough, and the ids of configurations that are slower than the fastest."""
    rows = [row for row in Summary(load_results(store.path)).rows if row.measured]
    best = best_by_baseline(rows)
    fastest = {row.config.baseline: row for row in best}
    rivals = [row for row in rows if row.config.kind in RIVALS]
    beaten = {row.config.id for row in rivals if _is_slower(row, fastest[row.config.baseline])}
    return bool(best) and all(_is_known(row, until.half_width) for row in best), beaten


def _is_known(row: Figures, half_width: float | None) -> bool:
    if half_width is None:
        return row.verdict != "cannot tell"
    speedup = row.speedup
    if speedup.basis != "prompts" or speedup.low is None or speedup.high is None:
        return False
    return (speedup.high - speedup.low) / 2 <= half_width * speedup.value


def _is_slower(row: Figures, fastest: Figures) -> bool:
    high, low = row.speedup.high, fastest.speedup.low
    return row.speedup.basis == "prompts" and high is not None and low is not None and high < low
