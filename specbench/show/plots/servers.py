"""The figure of servers that were measured one request at a time: how fast each is, and how it stands to the first."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    DASHED,
    GRAY,
    NoDataError,
    Run,
    estimates,
    figure,
    finish,
    grid_lines,
    panels,
    row_names,
)


@figure("servers", "speed of servers, and how each stands to the first", table="Speed", of_servers=True)
def servers(run: Run) -> Figure:
    """Speed and speedup of every server, each with its interval."""
    alone = [row for row in run.servers if row.config.batch is None]
    rows = [row for row in alone if not math.isnan(row.tokens_per_second.value)]
    if not rows:
        raise NoDataError("no servers were measured one request at a time")
    names = row_names(rows, run)
    over = run.summary.over
    places = np.arange(len(rows))
    colors = [BLACK if row.is_baseline else COLORS[number % len(COLORS)] for number, row in enumerate(rows)]
    body, both = panels(run, 2, 0.55 + 0.24 * len(rows), sharey=True)
    for axes, figure_name, title in zip(
        both,
        ("tokens_per_second", "speedup"),
        ("decode speed (tokens/s)", f"speedup over {over} (×)"),
        strict=True,
    ):
        value, low, high = estimates(rows, figure_name)
        axes.hlines(places, low, high, color=colors, linewidth=1.2)
        axes.scatter(value, places, color=colors, zorder=3, s=20)
        axes.set_xlabel(title)
        axes.set_yticks(places, names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        grid_lines(axes, "x")
    both[0].set_xlim(left=0)
    both[1].axvline(1.0, color=GRAY, linewidth=0.9, linestyle=DASHED, zorder=1.5)
    return finish(body, run, "Servers", run.intervals)
