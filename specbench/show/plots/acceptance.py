"""A figure of acceptance by position in the draft."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specbench.results.acceptance import positions as acceptance_by_position
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData

_FEW, _TOO_FEW = 30, 10
"""Drafts at a position below which its rate is marked as uncertain, and not drawn."""


def positions(run: PlotData) -> Figure:
    known: dict[str, list[Any]] = {}
    for row in acceptance_by_position(run.summary):
        known.setdefault(row.config.id, []).append(row)
    if not known:
        unknown = "no server reports acceptance by position"
        raise NoDataError(unknown if run.servers else "nothing was drafted")
    # A line for each drafter with a draft policy, of fixed γ the largest, and for each server.
    lines = [(each.name_at(each.rows[-1]), each.rows[-1].config.id, each.style) for each in run.series]
    for server, name in zip(run.servers, canvas.row_names(run.servers, run), strict=True):
        lines.append((name, server.config.id, run.make_series([server], [0.0]).style))
    shown = [(name, known[config], style) for name, config, style in lines if config in known]
    if all(row.tested < _TOO_FEW for _, rows, _ in shown for row in rows):
        raise NoDataError(f"fewer than {_TOO_FEW} drafts were tested at every position")
    body, both = canvas.two_panels(2.45, "share of tokens")
    few = False
    for axes, of_tested in zip(both, (True, False), strict=True):
        for name, rows, style in shown:
            points = [
                (row.position, row.rate if of_tested else row.rate_of_drafted, count)
                for row in rows
                if (count := row.tested if of_tested else row.drafted) >= _TOO_FEW
            ]
            if not points:
                continue
            x, y, counts = np.array(points, float).T
            sure = counts >= _FEW
            few |= not sure.all()
            axes.plot(x, y, markevery=sure, label=name, **style)
            axes.plot(x[~sure], y[~sure], linestyle="none", alpha=0.35, **style)
        canvas.gamma_axis(
            axes, [row.position for _, rows, _ in shown for row in rows if row.drafted >= _TOO_FEW]
        )
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(f"accepted, of those {'tested' if of_tested else 'drafted'}")
        canvas.grid_lines(axes)
    remarks = (
        "Tested: all drafts before it were accepted.",
        "Fixed γ: the largest." if any(not each.adapts for each in run.series) else "",
        "Hollow: an adaptive draft policy." if any(each.adapts for each in run.series) else "",
        "Lower bounds for a server whose drafts differ in length."
        if any(row.least for _, rows, _ in shown for row in rows)
        else "",
        f"Faint: fewer than {_FEW} drafts; fewer than {_TOO_FEW} are not shown." if few else "",
    )
    return canvas.finish(body, run, "Acceptance by position", *remarks)
