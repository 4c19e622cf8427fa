"""A figure of steps: the time of each part of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specbench.decoding.records import PARTS
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData

_PART_COLORS = dict(zip(PARTS, ("#EEDD88", "#77AADD", "#225544", "#FFAABB", "#CCCCCC"), strict=True))
"""Light colors (Paul Tol's), as strong ones stand for drafters, and a dark one, which differs from them in gray."""


def time(run: PlotData) -> Figure:
    rows = [row for each in run.series for row in each.rows if row.tokens_per_second.value > 0]
    rows.sort(key=lambda row: run.drafters.index(row.config.drafter))
    if not rows:
        raise NoDataError("no speculative configuration has finished a step")
    # Rows of bars from the top down, with a gap between drafters.
    places = np.array([i + 0.6 * run.drafters.index(row.config.drafter) for i, row in enumerate(rows)])
    body = canvas.new_figure(1.15 + 0.17 * (places[-1] + 1))
    axes = body.subplots()
    left = np.zeros(len(rows))
    total = np.array([1000.0 / row.tokens_per_second.value for row in rows])
    prefill = total * np.array([row.share_draft_prefill.value for row in rows])
    for part in PARTS:
        wide = total * np.array([row[f"share_{part}"].value for row in rows])
        if not (wide > 0.003 * total.max()).any():
            continue  # narrower than its edge
        style: Any = {"color": _PART_COLORS[part], "edgecolor": "white", "linewidth": 0.3}
        axes.barh(places, wide, 0.78, left=left, label=part, **style)
        if part == "draft" and (prefill > 0.01 * total.max()).any():
            hatched: Any = {"color": "none", "edgecolor": "#5A3C00", "hatch": "////", "linewidth": 0}
            axes.barh(places, prefill, 0.78, label="reading the prompt", **hatched)
        left += wide
    plain = {
        row.config.label: 1000.0 / speed for row in run.plain if (speed := row.tokens_per_second.value) > 0
    }
    canvas.draw_levels(axes.axvline, plain)
    axes.set_yticks(places, canvas.row_names(rows, run))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 1.05 * max([total.max(), *plain.values()]))
    axes.set_xlabel("time per token (ms)")
    canvas.grid_lines(axes, "x")
    remark = "Time per token: 1 over the table's tokens/s, without the time to first token; parts: shares of all steps."
    return canvas.finish(body, run, "Where the time goes", remark)
