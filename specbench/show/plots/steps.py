"""Figures of steps: the time of each part of them, and those inside the thinking and in the answer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specbench.decoding.records import PARTS
from specbench.results.thinking import part_rows
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure

_PART_COLORS = dict(zip(PARTS, ("#EEDD88", "#77AADD", "#225544", "#FFAABB", "#CCCCCC"), strict=True))
"""Light colors (Paul Tol's), as strong ones stand for drafters, and a dark one, which differs from them in gray."""


@figure("time", "where the time goes", table="Speed")
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
    prefill = total * np.array([row.share_draft_prefill for row in rows])
    for part in PARTS:
        wide = total * np.array([row.share[part] for row in rows])
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


@figure("thinking", "tokens per step inside the thinking and in the answer", table="Thinking and answer")
def by_part(run: PlotData) -> Figure:
    rows = [row for row in part_rows(run.results) if not math.isnan(row.tokens_per_step.value)]
    rows = [row for row in rows if row.config.kind == "speculative"]
    if not rows:
        raise NoDataError("no configuration that drafts has thought")
    configs = list(dict.fromkeys(row.config.id for row in rows))
    body = canvas.new_figure(0.9 + 0.42 * len(configs))
    axes = body.subplots()
    for shift, part in ((-0.17, "thinking"), (0.17, "answer")):
        mine = [row for row in rows if row.part == part]
        places = np.array([configs.index(row.config.id) for row in mine]) + shift
        axes.barh(places, [row.tokens_per_step.value for row in mine], height=0.32, label=part)
    names = canvas.row_names([run.summary.row(config) for config in configs], run)
    axes.set_yticks(range(len(configs)), names)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per step")
    canvas.grid_lines(axes, "x")
    return canvas.finish(
        body, run, "Thinking and answer", "Steps that begin inside the thinking, and after it."
    )
