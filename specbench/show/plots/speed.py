"""Figures of speedups: against γ or of each server, against the size of a batch, and against the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench.results.metrics import Figures
from specbench.results.stats import Floats, ratio_text
from specbench.results.summary import size_of
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, Series, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from specbench.results.summary import Curve

_DODGE = 0.08  # of the distance between two γ, so that intervals do not hide each other
_SHOWN = 1.6  # factor from a value up to which its interval is shown


def speedup(run: PlotData) -> Figure:
    rows = [row for row in run.rows if not math.isnan(row.tokens_per_second.value)]
    alone = [row for row in rows if row.is_server and row.config.condition.batch is None]
    series = [] if alone else [each for each in run.series if np.isfinite(_estimates(each.rows)[0]).any()]
    if not (alone or series):
        raise NoDataError("no speculative configuration has a generation whose baseline finished too")
    if all(len(each.rows) == 1 for each in series):  # nothing to see over γ
        return _of_rows(run, alone or rows)
    levels = {"plain = 1": 1.0}
    levels |= {
        f"{short(row.config.label, 22)} {ratio_text(row.speedup)}": row.speedup.value
        for row in run.levels
        if row.measured
    }
    labels = ("", "speedup over plain (×)")
    return _against(run, series, labels, levels, "Speedup against draft length", _fastest(series))


def _fastest(series: Sequence[Series]) -> str:
    """Return a sentence that names the highest speedup, and that of fixed γ: which is fastest, verdicts say."""
    rows = [(each, row) for each in series for row in each.rows if math.isfinite(row.speedup.value)]
    fixed = [pair for pair in rows if not pair[0].adapts]
    names = [
        f"{each.name if each.adapts else each.name_at(row)}, {ratio_text(row.speedup)}"
        for each, row in (max(some, key=lambda pair: pair[1].speedup.value) for some in (rows, fixed) if some)
    ]
    return f"Highest: {'; of fixed γ: '.join(dict.fromkeys(names))}."


def speedup_by_batch(run: PlotData) -> Figure:
    alone = "requests were decoded one after the other"
    missing = "no closed loop was measured" if run.summary.side_by_side else alone
    remark = "Ratio of throughputs at the same batch size."
    return _by_load(run, "batch", "requests at a time", "batch size", missing, remark)


def speedup_by_context(run: PlotData) -> Figure:
    missing = "no lengths of context were measured (--context)"
    return _by_load(run, "context", "tokens of context", "context", missing)


def _by_load(
    run: PlotData, load: Literal["batch", "context"], label: str, word: str, missing: str, *remarks: str
) -> Figure:
    """Return the figure over a load, with the best curve of each drafter with a draft policy, of several γ."""
    curves = run.summary.curves(load)
    if not curves:
        raise NoDataError(missing)
    best: dict[tuple[str, str, float], Curve] = {}
    for curve in curves:
        config = curve[0].config
        best.setdefault((config.drafter, config.draft_policy, config.condition.temperature), curve)
    series = [
        run.make_series(curve, np.log2([size_of(row) for row in curve]), loads=True)
        for curve in best.values()
    ]
    over = short(run.summary.run.baseline, 20)
    chosen = "The best of several γ over all of them." if len(best) < len(curves) else ""
    labels, levels = (label, f"speedup over {over} (×)"), {f"{over} = 1": 1.0}
    return _against(run, series, labels, levels, f"Speedup against {word}", *remarks, chosen)


# --- Drawing --------------------------------------------------------------------------------------


def _estimates(rows: Sequence[Figures], name: str = "speedup") -> tuple[Floats, Floats, Floats]:
    """Return a metric of rows with the ends of its intervals; NaN if a row has none."""
    ends = [(row[name].value, row[name].low, row[name].high) for row in rows]
    value, low, high = np.array(ends, dtype=np.float64).reshape(-1, 3).T
    return value, low, high


def _of_rows(run: PlotData, rows: Sequence[Figures]) -> Figure:
    """Return a figure with a line for each row: its decode speed, and its speedup."""
    places = np.arange(len(rows))
    body, both = canvas.two_panels(0.55 + 0.24 * len(rows))
    titles = ("decode speed (tokens/s)", f"speedup over {run.summary.run.baseline} (×)")
    for axes, name, label in zip(both, ("tokens_per_second", "speedup"), titles, strict=True):
        for place, row, value, low, high in zip(places, rows, *_estimates(rows, name), strict=True):
            color, marker = run.mark(row.config)
            axes.hlines(place, low, high, color=color, linewidth=1.2)
            axes.plot(value, place, color=color, marker=marker, zorder=3)
        axes.set_xlabel(label)
        axes.set_yticks(places, canvas.row_names(rows, run))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        canvas.grid_lines(axes, "x")
    both[0].set_xlim(left=0)
    canvas.draw_levels(both[1].axvline, {f"{short(run.summary.run.baseline, 20)} = 1": 1.0})
    return canvas.finish(body, run, "Speed", run.intervals)


def _against(
    run: PlotData, series: Sequence[Series], labels: tuple[str, str], levels: Mapping[str, float], title: str,
    *remarks: str,
) -> Figure:  # fmt: skip
    """Return a figure of speedups with their intervals, against γ, or against the load that a first label names."""
    body = canvas.new_figure(3.6)
    axes = body.subplots()
    (_load_axis if labels[0] else canvas.gamma_axis)(axes, [x for each in series for x in each.x])
    said = _draw_series(axes, series)
    y, low, high = _estimates([row for each in series for row in each.rows])
    lowest = min(float(np.nanmin(np.fmin(np.fmax(low, y / _SHOWN), y))), *levels.values())
    highest = max(float(np.nanmax(np.fmax(np.fmin(high, y * _SHOWN), y))), *levels.values())
    margin = 0.06 * (highest - lowest) or 0.1 * highest
    axes.set_ylim(max(0.0, lowest - margin), highest + margin)
    canvas.draw_levels(axes.axhline, levels)
    axes.set(ylabel=labels[1], xlabel=labels[0] or axes.get_xlabel())
    canvas.grid_lines(axes)
    return canvas.finish(body, run, title, *remarks, run.intervals, said)


def _load_axis(axes: Axes, places: Sequence[float]) -> None:
    """Make x an axis of batch sizes or contexts, of which the logarithms are drawn."""
    axes.xaxis.set_major_locator(FixedLocator(sorted({*places})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:,.0f}"))
    margin = max(0.2, 0.05 * (max(places) - min(places)))
    axes.set_xlim(min(places) - margin, max(places) + margin)


def _dodged(series: Sequence[Series]) -> list[Floats]:
    """Return the x of each series, moved a little where there are several, so that no interval hides another."""
    every = np.unique(np.concatenate([each.x for each in series]))
    step = 1.0
    if len(every) > 1:
        step = min(1.0, max(float(np.diff(every).min()), (every[-1] - every[0]) / 20))
    apart = _DODGE * step * min(1.0, 8 / len(series))
    return [each.x + (number - (len(series) - 1) / 2) * apart for number, each in enumerate(series)]


def _draw_series(axes: Axes, series: Sequence[Series]) -> str:
    """Draw the speedups of all series with their intervals, in axes whose x limits are set.

    The single value of an adaptive draft policy has a dotted line across the figure for comparison.

    Returns:
        A sentence for the caption on the marks that were drawn.
    """
    faint = min(1.0, 6 / len(series))
    for each, x in zip(series, _dodged(series), strict=True):
        y, low, high = _estimates(each.rows)
        known = np.isfinite(y)
        if not known.any():
            continue
        if each.adapts and len(each.x) == 1:
            dotted: Any = {"linewidth": 0.7, "linestyle": (0, (1, 2)), "zorder": 1.6}
            axes.axhline(y[known][-1], color=each.color, alpha=faint, **dotted)
        axes.plot(x[known], y[known], markeredgewidth=1.0, label=each.name, **each.style)
        ends = known & ~np.isnan(low) & ~np.isnan(high)
        thin: Any = {"linewidth": 0.9, "alpha": 0.75 * faint, "zorder": 2.5}
        axes.vlines(x[ends], low[ends], high[ends], color=each.color, **thin)
    if any(each.adapts and len(each.x) == 1 for each in series):
        return "Hollow, on a dotted line: an adaptive draft policy, at its mean draft length."
    return "Hollow: an adaptive draft policy." if any(each.adapts for each in series) else ""
