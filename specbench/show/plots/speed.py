"""Figures of speed: speedup and tokens/s against γ, predictions against measurements, and categories."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.results.stats import WIDENED, decimals
from specbench.results.summary import CategoryRow, SummaryRow, categorize
from specbench.show.plots.canvas import (
    GRAY,
    WHY_NOT,
    NoDataError,
    Run,
    all_rows,
    draw_levels,
    draw_series,
    estimates,
    figure,
    finish,
    fit_y,
    gamma_axis,
    grid_lines,
    hollow,
    letter_size,
    mark_cut,
    new_figure,
    panels,
    row_names,
    short,
    span,
    with_gamma,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@figure("speedup", "speedup against γ, one line per drafter", table="Speed")
def speedup(run: Run) -> Figure:
    series = with_gamma(run, "speedup")
    body = new_figure(run, 3.6)
    axes = body.subplots()
    gamma_axis(axes, [x for each in series for x in each.x])
    draw_series(axes, series, "speedup")
    levels = [row for row in run.levels if row.measured]
    fit_y(axes, all_rows(series), "speedup", 1.0, *(row.speedup.value for row in levels))
    mark_cut(axes, series, "speedup")
    draw_levels(axes, {"plain = 1": 1.0, **{_ratio_name(row): row.speedup.value for row in levels}})
    axes.set_ylabel("speedup over plain (×)")
    grid_lines(axes)
    return finish(body, run, "Speedup against draft length", run.intervals, hollow(series))


def _ratio_name(row: SummaryRow) -> str:
    ratio = row.speedup
    ends = (
        "" if ratio.low is None or ratio.high is None else f" [{decimals(ratio.low)}, {decimals(ratio.high)}]"
    )
    return f"{short(row.config.label, 22)} {decimals(ratio.value)}{ends}"


@figure("tokens-per-second", "decode speed against γ", table="Speed")
def tokens_per_second(run: Run) -> Figure:
    series = with_gamma(run, "tokens_per_second")
    body = new_figure(run, 3.6)
    axes = body.subplots()
    gamma_axis(axes, [x for each in series for x in each.x])
    draw_series(axes, series, "tokens_per_second")
    levels = {
        short(row.config.label, 22): row.tokens_per_second.value
        for row in (*run.plain, *run.levels)
        if not math.isnan(row.tokens_per_second.value)
    }
    fit_y(axes, all_rows(series), "tokens_per_second", *levels.values())
    mark_cut(axes, series, "tokens_per_second")
    draw_levels(axes, {f"{name} {decimals(speed)}": speed for name, speed in levels.items()})
    axes.set_ylabel("decode speed (tokens/s)")
    grid_lines(axes)
    remark = "Geometric means over prompts; time to first token apart."
    return finish(body, run, "Decode speed against draft length", remark, run.intervals, hollow(series))


@figure("prediction", "predicted against measured speedup", table="Speed")
def prediction(run: Run) -> Figure:
    series = with_gamma(run, "predicted_speedup")
    body, both = panels(run, 2, 3.0, "measured speedup (×)", sharex=True, sharey=True)
    names = (
        ("predicted_speedup", "from acceptance by position"),
        ("predicted_speedup_iid", "from α alone (i.i.d. tests)"),
    )
    rows = all_rows(series)
    spans = [span(rows, name) for name in ("speedup", "predicted_speedup", "predicted_speedup_iid")]
    low, high = min(1.0, *(span[0] for span in spans)) / 1.04, max(1.0, *(span[1] for span in spans)) * 1.04
    for axes, (name, title) in zip(both, names, strict=True):
        axes.plot((low, high), (low, high), color=GRAY, linewidth=0.9, zorder=1)
        axes.axhline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
        axes.axvline(1.0, color="#BBBBBB", linewidth=0.7, zorder=0.9)
        for each in series:
            x, x_low, x_high = estimates(each.rows, name)
            y, y_low, y_high = estimates(each.rows, "speedup")
            axes.vlines(x, y_low, y_high, color=each.color, linewidth=0.7, alpha=0.5)
            axes.hlines(y, x_low, x_high, color=each.color, linewidth=0.7, alpha=0.5)
            axes.plot(
                x,
                y,
                linestyle="none",
                marker=each.marker,
                color=each.color,
                markerfacecolor=each.face,
                zorder=3,
                label=each.name,
            )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal", adjustable="box")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel("predicted speedup (×)")
        axes.set_title(title)
        grid_lines(axes, "both")
    remarks = (
        "One mark per γ. Predicted from the times of single passes: c of the drafter, v(γ+1) of the target.",
        "On the line they agree; below it something else takes time.",
        run.intervals,
    )
    return finish(body, run, "Predicted against measured speedup", *remarks)


@figure("categories", "speedup by category and configuration", table="By category", of_servers=True)
def by_category(run: Run) -> Figure:
    cells = [row for row in categorize(run.results).rows if not math.isnan(row.speedup.value)]
    if not cells:
        raise NoDataError(WHY_NOT["speedup"])
    rows = [run.summary.row(config) for config in dict.fromkeys(cell.config.id for cell in cells)]
    row_of = {row.config.id: i for i, row in enumerate(rows)}
    names = row_names(rows, run)
    categories = list(dict.fromkeys(cell.category for cell in cells))
    without = [cell for cell in cells if cell.speedup.low is None]
    plain_cells = len(without) == len(cells)  # ratios alone take less room
    line = 0.17 if plain_cells else 0.27  # inches of a row
    heads = {name: short(name, 18).replace("-", "-\n", 1) for name in categories}
    longest = max(len(part) for head in heads.values() for part in head.split("\n"))
    wide = max(0.046 if plain_cells else 0.07, 0.0068 * longest) * letter_size(1.0)  # inches of a cell
    beside = 0.35 + 0.0068 * letter_size(1.0) * max(map(len, names))
    width = run.look.width or max(4.2, min(9.5, beside + 1.1 * wide * len(categories)))
    lines = math.ceil(len(categories) / max(1, int((width - beside) / wide)))
    each = math.ceil(len(categories) / lines)  # categories beside each other
    body = new_figure(run, 0.85 + lines * (0.45 + line * len(rows)), width)
    grids = body.subplots(lines, 1, squeeze=False)[:, 0]
    widest = max(math.log(1.25), *(abs(math.log(cell.speedup.value)) for cell in cells))
    for number, axes in enumerate(grids):
        mine = categories[number * each : (number + 1) * each]
        column_of = {category: i for i, category in enumerate(mine)}
        here = [cell for cell in cells if cell.category in column_of]
        grid = np.full((len(rows), len(mine)), np.nan)
        for cell in here:
            grid[row_of[cell.config.id], column_of[cell.category]] = math.log(cell.speedup.value)
        axes.imshow(grid, cmap=_SLOWER_FASTER, norm=TwoSlopeNorm(0.0, -widest, widest), aspect="auto")
        for cell in here:
            ink = "white" if abs(math.log(cell.speedup.value)) > 0.72 * widest else "black"
            _write_cell(axes, column_of[cell.category], row_of[cell.config.id], cell, ink)
        axes.set_xticks(range(len(mine)), [heads[name] for name in mine])
        axes.set_xlim(-0.5, each - 0.5)
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(length=0, labelsize=letter_size(0.85))
        axes.spines[:].set_visible(False)
        for i in range(1, len(rows)):
            if rows[i].config.drafter != rows[i - 1].config.drafter:
                axes.axhline(i - 0.5, color="white", linewidth=2.5)
    counts = [cell.prompts for cell in cells]
    fewest, most = min(counts), max(counts)
    prompts = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    means = f"Geometric means over prompts ({prompts} per category)"
    bold = (
        f"one {WIDENED:g} times as wide (busy machine)" if any(cell.provisional for cell in cells) else "it"
    )
    remarks = (
        "Blue: faster, orange: slower.",
        f"{means}." if plain_cells else f"{means}, below them the 95% intervals. Bold: 1 is not in {bold}.",
        "*: one prompt; over its repeats." if any(cell.speedup.basis == "repeats" for cell in cells) else "",
        f"No interval: {'one run of one prompt' if all(cell.prompts == 1 for cell in without) else 'too few prompts'}."
        if without
        else "",
    )
    return finish(body, run, "Speedup by category", *remarks)


_SLOWER_FASTER = LinearSegmentedColormap.from_list(
    "slower-faster", ["#B34A00", "#F3B58A", "#F7F7F7", "#8DBEE0", "#00568A"]
)


def _write_cell(axes: Axes, x: int, y: int, cell: CategoryRow, ink: str) -> None:
    """A ratio, above its interval if it has one."""
    low, high = cell.speedup.low, cell.speedup.high
    weight = "normal" if cell.verdict == "cannot tell" else "bold"
    middle: Any = {"ha": "center", "va": "center", "color": ink}
    ratio, size = decimals(cell.speedup.value), letter_size(0.83)
    alone = low is None or high is None
    axes.text(x, y if alone else y - 0.17, ratio, fontsize=size, weight=weight, **middle)
    if low is not None and high is not None:
        star = "*" if cell.speedup.basis == "repeats" else ""
        axes.text(x, y + 0.24, f"{_end(low)}–{_end(high)}{star}", fontsize=letter_size(0.63), **middle)


def _end(value: float) -> str:
    """An end of an interval in a cell; what two prompts leave open is not worth its digits."""
    return "0" if value < 0.005 else ">99" if value > 99 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
