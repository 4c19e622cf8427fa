"""Figures of trees: what each tree and way to verify keeps, at what width, and which ranks are right at which depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specbench.results import frames
from specbench.show.plots.acceptance import panels, two_lines
from specbench.show.plots.canvas import NoDataError, Run, grid_lines, inscribe, letter_size, new_figure

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.axes import Axes

_LEAST_TESTED = 10
"""Nodes below which a rate is not drawn."""

_LONGEST_NAME = 36

_MOST_RANKS = 4
"""Of a node; those behind are seldom right."""


def trees(run: Run) -> Figure:
    """By configuration: tokens per step, rows of a pass, and decode speed."""
    if frames.rank_frame(run.df).empty:
        raise NoDataError("no tree was drafted")
    rows = frames.records(run.summary[run.summary["mean_nodes"].notna()].sort_values("tokens_per_step"))
    height = 1.2 + 0.3 * len(rows)
    figure = new_figure(run, 3 * height if run.narrow else height)
    grid = figure.subplots(3, 1) if run.narrow else figure.subplots(1, 3, sharey=True)
    for axes, name, label in zip(
        grid,
        ("tokens_per_step", "rows", "tokens_per_second"),
        ("tokens per step", "rows of a target pass", "decode speed (tokens/s)"),
        strict=True,
    ):
        for number, row in enumerate(rows):
            tree = row["mean_nodes"] > row["mean_gamma"] + 1e-9
            _dot(
                axes, {**row, "rows": 1.0 + row["mean_nodes"]}, name, number, "#D55E00" if tree else "#0072B2"
            )
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_yticks(range(len(rows)), [_name(row, run) for row in rows], fontsize=letter_size(0.79))
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.1)
        grid_lines(axes, "x")
    inscribe(figure, run, "Trees and ways to verify", "Means; of trees in orange.", run.intervals)
    return figure


def _name(row: dict[str, Any], run: Run) -> str:
    """A configuration's, without the drafter that stands in the title: its beginning, for that says which tree."""
    label = str(row["label"])
    if len(run.drafters) == 1:
        label = label.removeprefix(str(row["drafter"])).strip()
    return label if len(label) <= _LONGEST_NAME else f"{label[: _LONGEST_NAME - 1]}…"


def _dot(axes: Axes, row: dict[str, Any], name: str, y: int, color: str) -> None:
    """A figure with its interval, if it has one."""
    value = row[name]
    bounds = [[value - row.get(f"{name}_low", np.nan)], [row.get(f"{name}_high", np.nan) - value]]
    error = None if np.isnan(bounds).any() else np.maximum(bounds, 0.0)
    axes.errorbar(value, y, xerr=error, fmt="o", color=color, markersize=4)


def rank_rates(run: Run) -> Figure:
    """Of every tree: how often the candidate of each rank is the one that is kept, by depth."""
    frame = frames.rank_frame(run.df)
    frame = frame[(frame["tested"] >= _LEAST_TESTED) & (frame["rank"] < _MOST_RANKS)]
    if frame.empty:
        raise NoDataError(f"of no tree {_LEAST_TESTED} nodes were tested")
    groups = list(frame.groupby("config", sort=False))
    figure, grid = panels(run, len(groups), 2.1, sharey=True)
    rows = {row["config"]: row for row in frames.records(run.summary)}
    for axes, (config, mine) in zip(grid, groups, strict=True):
        for rank, line in mine.groupby("rank"):
            axes.plot(
                line["depth"], line["rate"], marker="o", markersize=3.5, label=f"rank {int(str(rank)) + 1}"
            )
        axes.set_title(two_lines(_name(rows[config], run)), fontsize=letter_size(0.94))
        axes.set_xlabel("depth")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid_lines(axes)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("kept, of those looked at")
    grid[0].legend(fontsize=letter_size(0.79), loc="upper right")
    inscribe(
        figure,
        run,
        "Acceptance by rank and depth",
        "Rank 1: the first candidate of its node. Looked at: all before it on its branch were kept.",
        f"Points of fewer than {_LEAST_TESTED} nodes are not drawn.",
    )
    return figure
