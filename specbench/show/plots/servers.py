"""The figure of servers measured one request at a time: speed, and speedup over the first."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure


@figure("servers", "speed of servers, and speedup over the first", table="Speed", of_servers=True)
def servers(run: PlotData) -> Figure:
    alone = [row for row in run.servers if row.config.batch is None]
    rows = [row for row in alone if not math.isnan(row.tokens_per_second.value)]
    if not rows:
        raise NoDataError("no servers were measured one request at a time")
    names = canvas.row_names(rows, run)
    places = np.arange(len(rows))
    palette = canvas.COLORS * (1 + len(rows) // len(canvas.COLORS))
    colors = [canvas.BLACK if row.is_baseline else color for row, color in zip(rows, palette, strict=False)]
    body, both = canvas.panels(run, 2, 0.55 + 0.24 * len(rows), sharey=True)
    titles = ("decode speed (tokens/s)", f"speedup over {run.summary.over} (×)")
    for axes, name, title in zip(both, ("tokens_per_second", "speedup"), titles, strict=True):
        value, low, high = canvas.estimates(rows, name)
        axes.hlines(places, low, high, color=colors, linewidth=1.2)
        axes.scatter(value, places, color=colors, zorder=3, s=20)
        axes.set_xlabel(title)
        axes.set_yticks(places, names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        canvas.grid_lines(axes, "x")
    both[0].set_xlim(left=0)
    both[1].axvline(1.0, color=canvas.GRAY, linewidth=0.9, linestyle=canvas.DASHED, zorder=1.5)
    return canvas.finish(body, run, "Servers", run.intervals)
