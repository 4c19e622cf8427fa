"""Figures of trees: what each tree and way to verify keeps, at what width, and which ranks are right at which depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specbench.results import frames
from specbench.show.plots.acceptance import panels, two_lines
from specbench.show.plots.canvas import NoDataError, Run, grid_lines, inscribe, letter_size, new_figure, short

if TYPE_CHECKING:
    from typing import Any

    from matplotlib.axes import Axes

__all__ = ["rank_rates", "trees"]

_LEAST_TESTED = 10
"""Nodes below which a rate is not drawn."""

_MOST_RANKS = 4
"""Of a node; those behind are seldom right."""


def trees(run: Run) -> Figure:
    """Tokens per step by configuration, and decode speed against the rows of a pass."""
    drafting = run.summary[run.summary["mean_nodes"].notna()]
    if frames.rank_frame(run.df).empty:
        raise NoDataError("no tree was drafted")
    rows = frames.records(drafting.sort_values("tokens_per_step"))
    height = 0.9 + 0.26 * len(rows)
    figure = new_figure(run, height * 2 if run.narrow else max(3.2, height))
    kept, fast = figure.subplots(2, 1) if run.narrow else figure.subplots(1, 2, width_ratios=(1.2, 1))
    _intervals(kept, rows)
    for number, row in enumerate(rows):
        x, y = 1.0 + row["mean_nodes"], row["tokens_per_second"]
        fast.plot(x, y, "o", color=_color(number, rows))
        fast.annotate(
            short(row["label"], 20), (x, y), (4, 3), textcoords="offset points", fontsize=letter_size(0.7)
        )
    fast.margins(x=0.25, y=0.15)
    fast.set_xlabel("rows of a target pass, on average")
    fast.set_ylabel("decode speed (tokens/s)")
    grid_lines(fast)
    inscribe(
        figure,
        run,
        "Trees and ways to verify",
        "Tokens per step with the one behind the drafts.",
        run.intervals,
    )
    return figure


def _intervals(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A line per configuration: tokens per step with its interval."""
    for number, row in enumerate(rows):
        value = row["tokens_per_step"]
        bounds = [[value - row["tokens_per_step_low"]], [row["tokens_per_step_high"] - value]]
        error = None if np.isnan(bounds).any() else np.maximum(bounds, 0.0)
        axes.errorbar(value, number, xerr=error, fmt="o", color=_color(number, rows), markersize=4)
    axes.set_yticks(range(len(rows)), [short(row["label"], 34) for row in rows], fontsize=letter_size(0.8))
    axes.set_xlabel("tokens per step")
    axes.margins(y=0.5 / max(1, len(rows)))
    grid_lines(axes, "x")


def _color(number: int, rows: list[dict[str, Any]]) -> str:
    """Trees stand out from chains."""
    row = rows[number]
    return "#D55E00" if row["mean_nodes"] > row["mean_gamma"] + 1e-9 else "#0072B2"


def rank_rates(run: Run) -> Figure:
    """Of every tree: how often the candidate of each rank is the one that is kept, by depth."""
    frame = frames.rank_frame(run.df)
    frame = frame[(frame["tested"] >= _LEAST_TESTED) & (frame["rank"] < _MOST_RANKS)]
    if frame.empty:
        raise NoDataError(f"of no tree {_LEAST_TESTED} nodes were tested")
    groups = list(frame.groupby("config", sort=False))
    figure, grid = panels(run, len(groups), 2.1, sharey=True)
    for axes, (_, mine) in zip(grid, groups, strict=True):
        for rank, line in mine.groupby("rank"):
            axes.plot(
                line["depth"], line["rate"], marker="o", markersize=3.5, label=f"rank {int(str(rank)) + 1}"
            )
        axes.set_title(two_lines(str(mine["label"].iloc[0])), fontsize=letter_size(0.94))
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
