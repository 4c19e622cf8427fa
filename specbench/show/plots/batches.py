"""Figures of requests side by side: speedup against batch, and throughput against what each request sees."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench.results import frames
from specbench.results.batches import Line, lines_of
from specbench.results.rows import PLAIN
from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    GREY,
    MARKERS,
    End,
    NoDataError,
    Run,
    Series,
    draw_series,
    grid_lines,
    inscribe,
    label_ends,
    legend_below,
    letter_size,
    new_figure,
    short,
    two,
)
from specbench.show.plots.speed import fit_y, level, mark_cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

_ALONE = "requests were decoded one after the other"
_NAME = 30  # characters of a drafter's name
_CORNERS: tuple[tuple[int, int, Literal["left", "right"]], ...] = (
    (-4, 4, "right"), (4, -8, "left"), (4, 4, "left"), (-4, -8, "right"),
)  # fmt: skip
"""Where the numbers of one line stand, and of the next: points from the marker, and their alignment."""


def speedup_by_batch(run: Run) -> Figure:
    """A line for each drafter and rule over the batches."""
    series = _series(run)
    if not series:
        raise NoDataError(_ALONE if run.summary["batch"].isna().all() else "no closed loop was measured")
    figure = new_figure(run, 3.0 if run.narrow else 3.6)
    axes = figure.subplots()
    _batch_axis(axes, sorted({x for each in series for x in each.x}))
    ends = draw_series(axes, series, "speedup")
    fit_y(axes, [each.rows for each in series], "speedup", 1.0)
    mark_cut(axes, series, "speedup")
    over = frames.baseline_name(run.df)
    ends.append(level(axes, 1.0, "plain = 1" if over == PLAIN else f"{short(over, 20)} = 1"))
    axes.set_ylabel("speedup (×)" if run.narrow else f"throughput over {over}\nat the same batch (×)")
    grid_lines(axes)
    inscribe(figure, run, "Speedup against batch", run.intervals, _chosen(run))
    label_ends(axes, ends, run)
    return figure


def latency(run: Run) -> Figure:
    """Throughput against the time per token and per answer, a line over the batches with each drafter and without."""
    requests = frames.request_frame(run.df)
    if requests.empty:
        raise NoDataError(_ALONE)
    figure, panels = two(run, 3.3, sharey=True)
    shown = list(_served(run, requests))
    ends: list[End] = []
    for axes, name, scale, title in zip(
        panels,
        ("token_s_p50", "latency_s_p50"),
        (1000.0, 1.0),
        ("time per token (ms, median)", "time per answer (s, median)"),
        strict=True,
    ):
        ends = []
        for number, (label, mine, color, marker) in enumerate(shown):
            right, up, alignment = _CORNERS[number % len(_CORNERS)]
            x, y = scale * mine[name].to_numpy(dtype=float), mine["throughput"].to_numpy(dtype=float)
            there = np.isfinite(x) & np.isfinite(y)
            if not there.any():
                continue
            axes.plot(x[there], y[there], color=color, marker=marker, zorder=3)
            for at, height, batch in zip(x[there], y[there], mine["batch"].to_numpy()[there], strict=True):
                axes.annotate(
                    f"{batch:g}",
                    (at, height),
                    xytext=(right, up),
                    textcoords="offset points",
                    ha=alignment,
                    fontsize=letter_size(0.75),
                    color=color,
                )
            ends.append(End(float(x[there][-1]), float(y[there][-1]), label, color, marker, color))
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        if axes is panels[0] or run.narrow:
            axes.set_ylabel("tokens/s of all requests")
        grid_lines(axes, "both")
    if not ends:
        raise NoDataError("no request emitted two tokens or more")
    remark = "Numbers: requests at a time. Up and to the left is better. An answer's time has its wait in it."
    inscribe(figure, run, "Throughput against latency", remark, _chosen(run))
    legend_below(panels[-1], ends, run)
    return figure


def _served(run: Run, requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, str, str]]:
    """Name, rows by rising batch, colour and marker of plain decoding, and of every drafter and rule beside it.

    Of several γ that with the highest throughput; lines are apart by temperature and by how requests come.
    """
    keys = ["kind", "drafter", "policy", "temperature", "how"]
    rows = requests.assign(how=[_how(row) for row in frames.records(requests)]).sort_values("batch")
    several = {name: rows[name].nunique() > 1 for name in ("temperature", "how")}
    ranks = [
        (line.rows[0]["drafter"], line.rows[0]["policy"], line.rows[0]["temperature"]) for line in _best(run)
    ]
    for number, (key, mine) in enumerate(rows.groupby(keys, sort=False)):
        kind, drafter, policy, temperature, how = map(str, key)
        by_gamma = [part for _, part in mine.groupby("gamma", dropna=False)]
        best = max(by_gamma, key=lambda part: float(np.log(part["throughput"]).mean()))
        rule = policy if math.isnan(best["gamma"].iloc[0]) else f"γ = {best['gamma'].iloc[0]:g}"
        parts = ["plain"] if kind == "plain" else [short(drafter, _NAME), short(rule, 20)]
        if kind == "server":
            parts = parts[:1]
        elif kind != "plain" and len(run.drafters) == 1:
            parts = parts[1:]
        parts += [f"T = {float(temperature):g}"] * several["temperature"] + [how or "closed"] * several["how"]
        place = key[1:4]
        color = COLORS[ranks.index(place) % len(COLORS)] if place in ranks else GREY
        first = best["config"].iloc[0] == best["baseline"].iloc[0]
        yield ", ".join(parts), best, BLACK if first else color, MARKERS[number % len(MARKERS)]


def _how(row: dict[str, Any]) -> str:
    """How requests come, empty for as many clients as the batch."""
    return "" if row["arrivals"] == f"closed:{row['batch']:g}" else str(row["arrivals"])


def _best(run: Run) -> list[Line]:
    """Of each drafter, rule and temperature the line of the best γ."""
    found: dict[tuple[str, str, float], Line] = {}
    for line in lines_of(run.summary):  # the best first
        row = line.rows[0]
        found.setdefault((row["drafter"], row["policy"], row["temperature"]), line)
    return list(found.values())


def _chosen(run: Run) -> str:
    several = len(_best(run)) < len(lines_of(run.summary))
    return "Of several γ the one that is best over the batches." if several else ""


def _series(run: Run) -> list[Series]:
    """Lines over the batches; x is the logarithm of the batch."""
    lines = _best(run)
    first = [line.rows[0] for line in lines]
    temperatures = {row["temperature"] for row in first}
    out = []
    for number, (line, row) in enumerate(zip(lines, first, strict=True)):
        rule = f"γ = {row['gamma']:g}" if not math.isnan(row["gamma"]) else short(row["policy"], 20)
        temperature = f"T = {row['temperature']:g}" if len(temperatures) > 1 else ""
        if row["kind"] == "server":
            rule = ""
        named = row["kind"] == "server" or len(run.drafters) > 1
        drafter = short(row["drafter"], _NAME) if named else ""
        parts = (drafter, rule, temperature, "")
        name = ", ".join(filter(None, parts))
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        x = np.log2(np.array(line.batches, dtype=float))
        out.append(Series(name, parts, row["drafter"], pd.DataFrame(line.rows), x, False, color, marker))
    return out


def _batch_axis(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlabel("requests at a time")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:.0f}"))
    margin = max(0.2, 0.05 * (places[-1] - places[0]))
    axes.set_xlim(places[0] - margin, places[-1] + margin)
