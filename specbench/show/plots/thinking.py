"""The figure of thinking and answers apart."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from specbench.results.thinking import part_rows
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure


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
