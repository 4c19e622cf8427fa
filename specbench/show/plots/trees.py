"""Figures of trees: what each tree and way to verify keeps, at what width, and which ranks are right at which depth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specbench.base.record import Estimate
from specbench.results.acceptance import RankRow, ranks
from specbench.results.summary import SummaryRow, bare
from specbench.show.plots.acceptance import two_lines
from specbench.show.plots.canvas import (
    NoDataError,
    Run,
    figure,
    finish,
    grid_lines,
    letter_size,
    panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAST_TESTED = 10
"""Nodes below which a rate is not drawn."""

_LONGEST_NAME = 36

_MOST_RANKS = 4
"""Of a node; those behind are seldom right."""


@figure("trees", "tokens per step by tree and way to verify, and speed against rows")
def trees(run: Run) -> Figure:
    """By configuration: tokens per step, rows of a pass, and decode speed."""
    if not ranks(run.results):
        raise NoDataError("no tree was drafted")
    rows = [row for row in run.rows if not math.isnan(row.mean_nodes)]
    rows.sort(key=lambda row: row.tokens_per_step.value)
    body, grid = panels(run, 3, 0.45 + 0.3 * len(rows), sharey=True)
    shown: list[tuple[str, list[Estimate]]] = [
        ("tokens per step", [row.tokens_per_step for row in rows]),
        ("rows of a target pass", [bare(1.0 + row.mean_nodes) for row in rows]),
        ("decode speed (tokens/s)", [row.tokens_per_second for row in rows]),
    ]
    for axes, (label, figures) in zip(grid, shown, strict=True):
        for number, (row, each) in enumerate(zip(rows, figures, strict=True)):
            tree = row.mean_nodes > row.mean_gamma + 1e-9
            _dot(axes, each, number, "#D55E00" if tree else "#0072B2")
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_yticks(range(len(rows)), [_name(row, run) for row in rows], fontsize=letter_size(0.79))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.1)
        grid_lines(axes, "x")
    return finish(body, run, "Trees and ways to verify", "Means; of trees in orange.", run.intervals)


def _name(row: SummaryRow, run: Run) -> str:
    """A configuration's, without the drafter that stands in the title: its beginning, for that says which tree."""
    label = row.config.label
    if len(run.drafters) == 1:
        label = label.removeprefix(row.config.drafter).strip()
    return label if len(label) <= _LONGEST_NAME else f"{label[: _LONGEST_NAME - 1]}…"


def _dot(axes: Axes, estimate: Estimate, y: int, color: str) -> None:
    """A figure with its interval, if it has one."""
    value, error = estimate.value, None
    if estimate.low is not None and estimate.high is not None:
        error = np.maximum([[value - estimate.low], [estimate.high - value]], 0.0)
    axes.errorbar(value, y, xerr=error, fmt="o", color=color, markersize=4)


@figure("ranks", "acceptance in trees by rank and depth")
def rank_rates(run: Run) -> Figure:
    """Of every tree: how often the candidate of each rank is the one that is kept, by depth."""
    lines: dict[str, dict[int, list[RankRow]]] = {}
    for row in ranks(run.results):
        if row.tested >= _LEAST_TESTED and row.rank < _MOST_RANKS:
            lines.setdefault(row.config.id, {}).setdefault(row.rank, []).append(row)
    if not lines:
        raise NoDataError(f"of no tree {_LEAST_TESTED} nodes were tested")
    body, grid = panels(run, len(lines), 2.1, "kept, of those looked at", narrowest=13, sharey=True)
    for axes, (config, by_rank) in zip(grid, lines.items(), strict=True):
        for rank, line in sorted(by_rank.items()):
            depths, rates = [row.depth for row in line], [row.rate for row in line]
            axes.plot(depths, rates, marker="o", markersize=3.5, label=f"rank {rank + 1}")
        axes.set_title(two_lines(_name(run.summary.row(config), run)), fontsize=letter_size(0.94))
        axes.set_xlabel("depth")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid_lines(axes)
    return finish(
        body,
        run,
        "Acceptance by rank and depth",
        "Rank 1: the first candidate of its node. Looked at: all before it on its branch were kept.",
        f"Points of fewer than {_LEAST_TESTED} nodes are not drawn.",
    )
