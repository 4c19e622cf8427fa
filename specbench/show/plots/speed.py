"""Figures of speed: speedup and tokens/s by γ, predictions compared with measurements, and categories."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.results.stats import decimals, ratio_text
from specbench.results.summary import SummaryRow, categorize
from specbench.show.plots import canvas
from specbench.show.plots.canvas import FONT_SIZE, NoDataError, PlotData, Series, figure, short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


@figure("speedup", "speedup against γ, one line per drafter", table="Speed")
def speedup(run: PlotData) -> Figure:
    series = canvas.with_gamma(run, "speedup")
    if all(len(each.rows) == 1 for each in series):  # nothing to see over γ
        rows = [row for row in run.rows if not math.isnan(row.tokens_per_second.value)]
        return canvas.rows_of_speed(run, rows, "Speed")
    levels = {"plain = 1": 1.0}
    levels |= {
        f"{short(row.config.label, 22)} {ratio_text(row.speedup)}": row.speedup.value
        for row in run.levels
        if row.measured
    }
    labels = ("", "speedup over plain (×)")
    title = "Speedup against draft length"
    return canvas.one_panel(run, series, "speedup", labels, levels, title, _fastest(series))


def _fastest(series: Sequence[Series]) -> str:
    """Return a sentence that names the fastest row and the fastest of fixed γ."""
    rows = [(each, row) for each in series for row in each.rows if math.isfinite(row.speedup.value)]
    fixed = [pair for pair in rows if not pair[0].adapts]
    names = [
        f"{each.name if each.adapts else each.name_at(row)}, {ratio_text(row.speedup)}"
        for each, row in (max(some, key=lambda pair: pair[1].speedup.value) for some in (rows, fixed) if some)
    ]
    return f"Fastest: {'; of fixed γ: '.join(dict.fromkeys(names))}."


@figure("prediction", "predicted against measured speedup", table="Speed")
def prediction(run: PlotData) -> Figure:
    series = canvas.with_gamma(run, "predicted_speedup")
    body, (axes,) = canvas.panels(1, 3.0, "measured speedup (×)")
    rows = canvas.all_rows(series)
    low, high = canvas.span(rows, "speedup", canvas.span(rows, "predicted_speedup", [1.0]))
    low, high = low / 1.04, 1.04 * high
    axes.plot((low, high), (low, high), color=canvas.GRAY, linewidth=0.9, zorder=1)
    axes.axhline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
    axes.axvline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
    named: list[tuple[float, float]] = []
    for each in series:
        x, x_low, x_high = canvas.estimates(each.rows, "predicted_speedup")
        y, y_low, y_high = canvas.estimates(each.rows, "speedup")
        axes.vlines(x, y_low, y_high, color=each.color, linewidth=0.7, alpha=0.5)
        axes.hlines(y, x_low, x_high, color=each.color, linewidth=0.7, alpha=0.5)
        axes.plot(x, y, linestyle="none", label=each.name, **each.style)
        for row, place in zip(each.rows, zip(x, y, strict=True), strict=True):
            near = any(math.dist(place, other) < 0.06 * (high - low) for other in named)
            if row.config.gamma is not None and all(map(math.isfinite, place)) and not near:
                named.append(place)
                style: Any = {
                    "fontsize": 0.75 * FONT_SIZE,
                    "color": each.color,
                    "textcoords": "offset points",
                }
                axes.annotate(str(row.config.gamma), place, xytext=(3, 3), **style)
    axes.set(xlim=(low, high), ylim=(low, high), xlabel="predicted speedup (×)")
    axes.set_aspect("equal", adjustable="box")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    canvas.grid_lines(axes, "both")
    remarks = (
        "One mark per γ, which stands beside it where there is room. Predicted from the times of single forward"
        " passes: c of the drafter, v(γ+1) of the target.",
        "On the line both agree; below it something else takes time.",
        run.intervals,
    )
    return canvas.finish(body, run, "Predicted against measured speedup", *remarks)


@figure("categories", "speedup by category and configuration", table="By category")
def by_category(run: PlotData) -> Figure:
    cells = [row for row in categorize(run.results) if not math.isnan(row.speedup.value)]
    if not cells:
        raise NoDataError(canvas.WHY_NOT["speedup"])
    rows = [run.summary.row(config) for config in dict.fromkeys(cell.config.id for cell in cells)]
    row_of = {row.config.id: i for i, row in enumerate(rows)}
    names = canvas.row_names(rows, run)
    categories = list(dict.fromkeys(cell.category for cell in cells))
    if len(categories) == 1:
        raise NoDataError("all prompts are of one category")
    without = [cell for cell in cells if not _has_interval(cell)]
    plain_cells = len(without) == len(cells)  # ratios alone need less space
    line = 0.17 if plain_cells else 0.27  # inches of a row
    heads = [short(name, 18).replace("-", "-\n", 1) for name in categories]
    longest = max(len(part) for head in heads for part in head.split("\n"))
    wide = max(0.046 if plain_cells else 0.07, 0.0068 * longest) * FONT_SIZE  # inches of a cell
    width = max(4.2, 0.35 + 0.0068 * FONT_SIZE * max(map(len, names)) + 1.1 * wide * len(categories))
    body = canvas.new_figure(1.3 + line * len(rows), width)
    axes = body.subplots()
    grid = np.full((len(rows), len(categories)), np.nan)
    widest = max(math.log(1.25), *(abs(math.log(cell.speedup.value)) for cell in cells))
    for cell in cells:
        x, y, log = categories.index(cell.category), row_of[cell.config.id], math.log(cell.speedup.value)
        grid[y, x] = log
        _write_cell(axes, x, y, cell, "white" if abs(log) > 0.72 * widest else "black")
    axes.imshow(grid, cmap=_SLOWER_FASTER, norm=TwoSlopeNorm(0.0, -widest, widest), aspect="auto")
    axes.set_xticks(range(len(categories)), heads)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(length=0, labelsize=0.85 * FONT_SIZE)
    axes.spines[:].set_visible(False)
    for i in range(1, len(rows)):
        if rows[i].config.drafter != rows[i - 1].config.drafter:
            axes.axhline(i - 0.5, color="white", linewidth=2.5)
    counts = [cell.prompts for cell in cells]
    prompts = " to ".join(map(str, sorted({min(counts), max(counts)})))
    means = f"Geometric means over prompts ({prompts} per category)"
    remarks = (
        "Blue: faster, orange: slower.",
        f"{means}." if plain_cells else f"{means}, below them the intervals. Bold: the interval excludes 1.",
        "No interval: too few prompts." if without else "",
    )
    return canvas.finish(body, run, "Speedup by category", *remarks)


_SLOWER_FASTER = LinearSegmentedColormap.from_list(
    "slower-faster", ["#B34A00", "#F3B58A", "#F7F7F7", "#8DBEE0", "#00568A"]
)


def _write_cell(axes: Axes, x: int, y: int, cell: SummaryRow, ink: str) -> None:
    low, high = (cell.speedup.low, cell.speedup.high) if _has_interval(cell) else (None, None)
    weight = "normal" if low is None or cell.verdict == "cannot tell" else "bold"
    middle: Any = {"ha": "center", "va": "center", "color": ink}
    ratio, alone = decimals(cell.speedup.value), low is None or high is None
    axes.text(x, y if alone else y - 0.17, ratio, fontsize=0.83 * FONT_SIZE, weight=weight, **middle)
    if low is not None and high is not None:
        axes.text(x, y + 0.24, f"{_end(low)}–{_end(high)}", fontsize=0.63 * FONT_SIZE, **middle)


def _has_interval(cell: SummaryRow) -> bool:
    """Return whether a category has an interval over prompts: one over the repeats of a prompt says nothing of it."""
    return cell.speedup.low is not None and cell.speedup.basis != "repeats"


def _end(value: float) -> str:
    """Format an end of an interval in few digits; with few prompts, more digits mean nothing."""
    return "0" if value < 0.005 else ">99" if value > 99 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
