"""Figures of speed: speedup and tokens/s against γ, predictions against measurements, and categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.results.stats import WIDENED, decimals
from specbench.results.summary import CategoryRow, SummaryRow, categorize
from specbench.show.plots.canvas import (
    DASHED,
    GREY,
    WHY_NOT,
    End,
    NoDataError,
    Run,
    Series,
    dodged,
    draw_series,
    estimates,
    gamma_axis,
    grid_lines,
    hollow,
    inscribe,
    key_line,
    label_ends,
    legend_below,
    letter_size,
    new_figure,
    row_names,
    short,
    two,
    with_gamma,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def fit_y(axes: Axes, rows: Sequence[SummaryRow], name: str, *include: float) -> None:
    """Limits that show every value, and of wide intervals at least a part; those that are cut get an arrowhead."""
    bottom, top = _span(rows, name)
    bottom, top = min(bottom, *include), max(top, *include)
    margin = 0.06 * (top - bottom) or 0.1 * top
    axes.set_ylim(max(0.0, bottom - margin), top + margin)


def _span(rows: Sequence[SummaryRow], name: str) -> tuple[float, float]:
    """Lowest and highest value with their intervals, of each as much as lies within a factor of 1.6."""
    y, low, high = estimates(rows, name)
    low, high = np.fmax(low, y / 1.6), np.fmin(high, y * 1.6)
    low, high = np.fmin(low, y), np.fmax(high, y)
    return float(np.nanmin(low)), float(np.nanmax(high))


def mark_cut(axes: Axes, series: Sequence[Series], name: str) -> None:
    """Arrowheads where intervals go on beyond the axes."""
    bottom, top = axes.get_ylim()
    for each, x in zip(series, dodged(series), strict=True):
        _, low, high = estimates(each.rows, name)
        for cut, at, marker in ((high > top, top, "^"), (low < bottom, bottom, "v")):
            if cut.any():
                axes.plot(
                    x[cut], np.full(cut.sum(), at), marker, color=each.color, markersize=3, clip_on=False
                )


def level(axes: Axes, y: float, name: str) -> End:
    """A horizontal line to compare with; returns its end as ``draw_series`` does."""
    axes.axhline(y, color=GREY, linewidth=0.9, linestyle=DASHED, zorder=1.5)
    return End(axes.get_xlim()[1], y, name, GREY)


def speedup(run: Run) -> Figure:
    series = with_gamma(run, "speedup")
    figure = new_figure(run, 3.0 if run.narrow else 3.6)
    axes = figure.subplots()
    gamma_axis(axes, [x for each in series for x in each.x])
    ends = draw_series(axes, series, "speedup")
    levels = [row for row in run.levels if row.measured]
    fit_y(axes, all_rows(series), "speedup", 1.0, *(row.speedup.value for row in levels))
    mark_cut(axes, series, "speedup")
    ends.append(level(axes, 1.0, "plain = 1"))
    ends += [level(axes, row.speedup.value, _ratio_name(row)) for row in levels]
    axes.set_ylabel("speedup (×)" if run.narrow else "speedup over plain decoding (×)")
    grid_lines(axes)
    inscribe(figure, run, "Speedup against draft length", run.intervals, hollow(series))
    label_ends(axes, ends, run)
    return figure


def all_rows(series: Sequence[Series]) -> list[SummaryRow]:
    """The rows of several series."""
    return [row for each in series for row in each.rows]


def _ratio_name(row: SummaryRow) -> str:
    ratio = row.speedup
    ends = (
        "" if ratio.low is None or ratio.high is None else f" [{decimals(ratio.low)}, {decimals(ratio.high)}]"
    )
    return f"{short(row.config.label, 22)} {decimals(ratio.value)}{ends}"


def tokens_per_second(run: Run) -> Figure:
    series = with_gamma(run, "tokens_per_second")
    figure = new_figure(run, 3.0 if run.narrow else 3.6)
    axes = figure.subplots()
    gamma_axis(axes, [x for each in series for x in each.x])
    ends = draw_series(axes, series, "tokens_per_second")
    levels = {
        short(row.config.label, 22): row.tokens_per_second.value
        for row in (*run.plain, *run.levels)
        if not math.isnan(row.tokens_per_second.value)
    }
    fit_y(axes, all_rows(series), "tokens_per_second", *levels.values())
    mark_cut(axes, series, "tokens_per_second")
    ends += [level(axes, speed, f"{name} {decimals(speed)}") for name, speed in levels.items()]
    axes.set_ylabel("decode speed (tokens/s)")
    grid_lines(axes)
    remark = "Geometric means over prompts; time to first token apart."
    inscribe(figure, run, "Decode speed against draft length", remark, run.intervals, hollow(series))
    label_ends(axes, ends, run)
    return figure


def prediction(run: Run) -> Figure:
    series = with_gamma(run, "predicted_speedup")
    figure, panels = two(run, 3.3, sharex=True, sharey=True)
    names = (
        ("predicted_speedup", "from acceptance by position"),
        ("predicted_speedup_iid", "from α alone (i.i.d. tests)"),
    )
    rows = all_rows(series)
    spans = [_span(rows, name) for name in ("speedup", "predicted_speedup", "predicted_speedup_iid")]
    low, high = min(1.0, *(span[0] for span in spans)) / 1.04, max(1.0, *(span[1] for span in spans)) * 1.04
    for axes, (name, title) in zip(panels, names, strict=True):
        axes.plot((low, high), (low, high), color=GREY, linewidth=0.9, zorder=1)
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
            )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal", adjustable="box")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel("predicted speedup (×)")
        axes.set_ylabel("measured speedup (×)" if axes is panels[0] or run.narrow else "")
        axes.set_title(title)
        grid_lines(axes, "both")
    remarks = (
        "One mark per γ. Predicted from the times of single passes: c of the drafter, v(γ+1) of the target.",
        "On the line they agree; below it something else takes time.",
        run.intervals,
    )
    inscribe(figure, run, "Predicted against measured speedup", *remarks)
    named = [End(high, 0.0, each.name, each.color, each.marker, each.face) for each in series]
    if run.narrow:
        legend_below(panels[-1], named, run)
    else:
        keys = [key_line(end, [0], [0]) for end in named]
        for key in keys:
            key.set_linestyle("none")
        figure.legend(
            keys, [end.name for end in named], loc="outside right center", frameon=False, handletextpad=0.2
        )
    return figure


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
    beside = 0.25 + 0.0068 * letter_size(1.0) * max(map(len, names)) + (0.0 if run.narrow else 0.6)
    width = run.look.width or max(4.2, min(9.5, beside + 1.1 * wide * len(categories)))
    lines = math.ceil(len(categories) / max(1, int((width - beside) / wide)))
    each = math.ceil(len(categories) / lines)  # categories beside each other
    figure = new_figure(run, 0.85 + lines * (0.45 + line * len(rows)), width)
    panels = figure.subplots(lines, 1, squeeze=False)[:, 0]
    widest = max(math.log(1.25), *(abs(math.log(cell.speedup.value)) for cell in cells))
    for number, axes in enumerate(panels):
        mine = categories[number * each : (number + 1) * each]
        column_of = {category: i for i, category in enumerate(mine)}
        here = [cell for cell in cells if cell.category in column_of]
        grid = np.full((len(rows), len(mine)), np.nan)
        for cell in here:
            grid[row_of[cell.config.id], column_of[cell.category]] = math.log(cell.speedup.value)
        image = axes.imshow(grid, cmap=_SLOWER_FASTER, norm=TwoSlopeNorm(0.0, -widest, widest), aspect="auto")
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
    if not run.narrow:
        _speedup_bar(figure, panels, image, widest, lines * line * len(rows))
    counts = [cell.prompts for cell in cells]
    fewest, most = min(counts), max(counts)
    prompts = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    means = f"Geometric means over prompts ({prompts} per category)"
    bold = (
        f"one {WIDENED:g} times as wide (busy machine)" if any(cell.provisional for cell in cells) else "it"
    )
    remarks = (
        f"{means}." if plain_cells else f"{means}, below them the 95% intervals. Bold: 1 is not in {bold}.",
        "*: one prompt; over its repeats." if any(cell.speedup.basis == "repeats" for cell in cells) else "",
        f"No interval: {'one run of one prompt' if all(cell.prompts == 1 for cell in without) else 'too few prompts'}."
        if without
        else "",
    )
    inscribe(figure, run, "Speedup by category", *remarks)
    return figure


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


def _speedup_bar(figure: Figure, panels: Any, image: Any, widest: float, height: float) -> None:
    """The scale of the colours, in speedups; ``height`` is that of the cells in inches."""
    ratios = (0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0)
    ticks = [ratio for ratio in ratios if abs(math.log(ratio)) <= widest]
    if height < 0.17 * len(ticks):  # no room for all
        ticks = [ticks[0], 1.0, ticks[-1]]
    bar = figure.colorbar(
        image,
        ax=list(panels),
        ticks=[math.log(tick) for tick in ticks],
        fraction=0.025,
        pad=0.01,
        aspect=max(12, height / 0.27),
    )
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.ax.tick_params(labelsize=letter_size(0.81), length=2)
    bar.ax.spines[:].set_visible(False)
    bar.set_label("speedup (×)", fontsize=letter_size(0.88))


def _end(value: float) -> str:
    """An end of an interval in a cell; what two prompts leave open is not worth its digits."""
    return "0" if value < 0.005 else ">99" if value > 99 else f"{value:.2f}" if value < 10 else f"{value:.0f}"
