"""Figures of draft trees: tokens per step by tree and verification method, and acceptance by rank and depth."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.results.acceptance import RankRow, ranks
from specbench.results.summary import SummaryRow
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure

_LEAST_TESTED = 10  # nodes below which a rate is not drawn
_LONGEST_NAME = 36
_MOST_RANKS = 4  # of a node; those after it are seldom right


@figure("trees", "tokens per step by tree and verification method, and speed against rows")
def trees(run: PlotData) -> Figure:
    if not ranks(run.results):
        raise NoDataError("no tree was drafted")
    rows = [row for row in run.rows if not math.isnan(row.mean_nodes)]
    rows.sort(key=lambda row: row.tokens_per_step.value)
    body, grid = canvas.panels(run, 3, 0.45 + 0.3 * len(rows), sharey=True)
    no_interval = np.full(len(rows), math.nan)
    shown = (
        ("tokens per step", canvas.estimates(rows, "tokens_per_step")),
        (
            "rows of a target's forward",
            (np.array([1.0 + row.mean_nodes for row in rows]), no_interval, no_interval),
        ),
        ("decode speed (tokens/s)", canvas.estimates(rows, "tokens_per_second")),
    )
    for axes, (label, figures) in zip(grid, shown, strict=True):
        for number, (row, value, low, high) in enumerate(zip(rows, *figures, strict=True)):
            tree = row.mean_nodes > row.mean_gamma + 1e-9
            error = None if math.isnan(low) else np.maximum([[value - low], [high - value]], 0.0)
            color = canvas.VERMILLION if tree else canvas.BLUE
            axes.errorbar(value, number, xerr=error, fmt="o", color=color, markersize=4)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        names = [_name(row, run) for row in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=canvas.font_size(0.79))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.1)
        canvas.grid_lines(axes, "x")
    return canvas.finish(body, run, "Draft trees", "Means; trees in orange.", run.intervals)


def _name(row: SummaryRow, run: PlotData) -> str:
    """Return the beginning of a name, which says which tree, without the drafter in the title."""
    label = row.config.label
    if len(run.drafters) == 1:
        label = label.removeprefix(row.config.drafter).strip()
    return label if len(label) <= _LONGEST_NAME else f"{label[: _LONGEST_NAME - 1]}…"


@figure("ranks", "acceptance in trees by rank and depth")
def rank_rates(run: PlotData) -> Figure:
    lines: dict[str, dict[int, list[RankRow]]] = {}
    for row in ranks(run.results):
        if row.tested >= _LEAST_TESTED and row.rank < _MOST_RANKS:
            lines.setdefault(row.config.id, {}).setdefault(row.rank, []).append(row)
    if not lines:
        raise NoDataError(f"of no tree {_LEAST_TESTED} nodes were tested")
    body, grid = canvas.panels(run, len(lines), 2.1, "accepted, of those tested", narrowest=13, sharey=True)
    for axes, (config, by_rank) in zip(grid, lines.items(), strict=True):
        for rank, line in sorted(by_rank.items()):
            depths, rates = [row.depth for row in line], [row.rate for row in line]
            axes.plot(depths, rates, marker="o", markersize=3.5, label=f"rank {rank + 1}")
        name = canvas.two_lines(_name(run.summary.row(config), run))
        axes.set_title(name, fontsize=canvas.font_size(0.94))
        axes.set_xlabel("depth")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.share_axis(axes)
        canvas.grid_lines(axes)
    remark = (
        "Rank 1: the first candidate of its node. Tested: all before it on its branch were accepted. Points of fewer"
        f" than {_LEAST_TESTED} nodes are not drawn."
    )
    return canvas.finish(body, run, "Acceptance by rank and depth", remark)
