"""The figure of speedups by length of context."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench.results.contexts import ContextCurve, context_curves
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, Series, figure, short

_MOST = 6


@figure(
    "contexts",
    "speedup against length of context, one line per drafter and draft policy",
    table="Speed",
    of_servers=True,
)
def speedup_by_context(run: PlotData) -> Figure:
    curves = context_curves(run.summary)
    if not curves:
        raise NoDataError("no lengths of context were measured (--context)")
    body = canvas.new_figure(run, 3.6)
    axes = body.subplots()
    series = [_series(run, curve, number) for number, curve in enumerate(curves[:_MOST])]
    places = sorted({x for each in series for x in each.x})
    axes.set_xlabel("tokens of context")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:,.0f}"))
    margin = max(0.2, 0.05 * (places[-1] - places[0]))
    axes.set_xlim(places[0] - margin, places[-1] + margin)
    canvas.draw_series(axes, series, "speedup", include=[1.0])
    over = short(run.summary.over, 20)
    canvas.draw_levels(axes, {f"{over} = 1": 1.0})
    axes.set_ylabel(f"speedup over {over} (×)")
    canvas.grid_lines(axes)
    more = f"The best {_MOST} of {len(curves)}." if len(curves) > _MOST else ""
    return canvas.finish(body, run, "Speedup against context", run.intervals, more)


def _series(run: PlotData, curve: ContextCurve, number: int) -> Series:
    """Return a line over the lengths of context; x is the logarithm of the length."""
    config = curve.rows[0].config
    several = len({row.config.temperature for row in run.rows}) > 1
    server = config.kind == "server"
    policy = short(config.draft_policy, 20) if config.gamma is None else f"γ = {config.gamma}"
    parts = (
        short(config.drafter, canvas.NAME) if server or len(run.drafters) > 1 else "",
        "" if server else policy,
        f"T = {config.temperature:g}" if several else "",
        "",
    )
    color, marker = (each[number % len(each)] for each in (canvas.COLORS, canvas.MARKERS))
    x = np.log2(np.array(curve.contexts, dtype=float))
    return Series(parts, config.drafter, curve.rows, x, config.gamma is None, color, marker)
