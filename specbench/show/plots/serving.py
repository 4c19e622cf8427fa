"""Figures of servers and of batches: speed and speedup, also by batch size, and latency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench.results.requests import BatchCurve, RequestRow, batch_curves, is_closed, request_rows
from specbench.results.run import RunConfig
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, Series, figure, short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

_ALONE = "requests were decoded one after the other"
_CORNERS = ((-4, 4, "right"), (4, -8, "left"), (4, 4, "left"), (-4, -8, "right"))
"""Where the numbers of one line stand, and of the next: points from the marker, and their alignment."""


@figure("servers", "speed of servers, and speedup over the first", table="Speed", of_servers=True)
def servers(run: PlotData) -> Figure:
    alone = [row for row in run.servers if row.config.batch is None]
    rows = [row for row in alone if not math.isnan(row.tokens_per_second.value)]
    if not rows:
        raise NoDataError("no servers were measured one request at a time")
    names = canvas.row_names(rows, run)
    places = np.arange(len(rows))
    palette = canvas.COLORS * (1 + len(rows) // len(canvas.COLORS))
    colors = [canvas.BLACK if row.is_baseline else color for row, color in zip(rows, palette, strict=False)]
    body, both = canvas.panels(run, 2, 0.55 + 0.24 * len(rows), sharey=True)
    titles = ("decode speed (tokens/s)", f"speedup over {run.summary.over} (×)")
    for axes, name, title in zip(both, ("tokens_per_second", "speedup"), titles, strict=True):
        value, low, high = canvas.estimates(rows, name)
        axes.hlines(places, low, high, color=colors, linewidth=1.2)
        axes.scatter(value, places, color=colors, zorder=3, s=20)
        axes.set_xlabel(title)
        axes.set_yticks(places, names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        canvas.grid_lines(axes, "x")
    both[0].set_xlim(left=0)
    both[1].axvline(1.0, color=canvas.GRAY, linewidth=0.9, linestyle=canvas.DASHED, zorder=1.5)
    return canvas.finish(body, run, "Servers", run.intervals)


@figure(
    "batches",
    "speedup against batch size, one line per drafter and draft policy",
    table="Speed",
    of_servers=True,
)
def speedup_by_batch(run: PlotData) -> Figure:
    series = _series(run)
    if not series:
        raise NoDataError("no closed loop was measured" if run.summary.side_by_side else _ALONE)
    body = canvas.new_figure(run, 3.6)
    axes = body.subplots()
    _batch_axis(axes, sorted({x for each in series for x in each.x}))
    canvas.draw_series(axes, series, "speedup", include=[1.0])
    over = short(run.summary.over, 20)
    canvas.draw_levels(axes, {f"{over} = 1": 1.0})
    axes.set_ylabel(f"speedup over {over} (×)")
    canvas.grid_lines(axes)
    remark = "Ratio of throughputs at the same batch size."
    return canvas.finish(body, run, "Speedup against batch size", remark, run.intervals, _chosen(run))


@figure(
    "latency",
    "throughput against latency, with and without speculation",
    table="Batches of requests",
    of_servers=True,
)
def latency(run: PlotData) -> Figure:
    requests = request_rows(run.results)
    if not requests:
        raise NoDataError(_ALONE)
    body, both = canvas.panels(run, 2, 2.55, "tokens/s of all requests", sharey=True)
    lines = list(_lines(run, requests))
    for axes, title in zip(both, ("time per token (ms, median)", "time per answer (s, median)"), strict=True):
        for number, (label, mine, color, marker) in enumerate(lines):
            right, up, alignment = _CORNERS[number % len(_CORNERS)]
            numbers: Any = {
                "xytext": (right, up),
                "textcoords": "offset points",
                "ha": alignment,
                "color": color,
            }
            points = [
                (
                    1000.0 * row.token_s["p50"] if axes is both[0] else row.latency_s["p50"],
                    row.throughput.value,
                    row,
                )
                for row in mine
            ]
            points = [point for point in points if np.isfinite(point[:2]).all()]
            if points:
                x, y, _ = zip(*points, strict=True)
                axes.plot(x, y, color=color, marker=marker, zorder=3, label=label)
                for at, height, row in points:
                    text = f"{row.config.batch}"
                    axes.annotate(text, (at, height), fontsize=canvas.font_size(0.75), **numbers)
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        canvas.grid_lines(axes, "both")
    if not any(axes.lines for axes in both):
        raise NoDataError("no request emitted two tokens or more")
    remark = (
        "Numbers: requests at a time. Up and to the left is better. The time per answer includes waiting."
    )
    return canvas.finish(body, run, "Throughput against latency", remark, _chosen(run))


def _lines(run: PlotData, requests: Sequence[RequestRow]) -> Iterator[tuple[str, list[RequestRow], str, str]]:
    """Yield a name, rows by rising batch size, color and marker for plain decoding and for each drafter with a policy.

    Of several γ, the one with the highest throughput is taken. Each temperature and arrival process has its own lines.
    """
    alike: dict[tuple[str, _Key, str], dict[int | None, list[RequestRow]]] = {}
    for row in sorted(requests, key=lambda row: row.config.batch or 1):
        arrivals = "closed" if is_closed(row.config) else str(row.config.arrivals)
        kind = (row.config.kind, _Key.of(row.config), arrivals)
        alike.setdefault(kind, {}).setdefault(row.config.gamma, []).append(row)
    temperatures = {key.temperature for _, key, _ in alike}
    several = len({arrivals for _, _, arrivals in alike}) > 1
    ranks = [_Key.of(curve.rows[0].config) for curve in _best(run)]
    for number, ((what, key, arrivals), by_gamma) in enumerate(alike.items()):
        best = max(by_gamma.values(), key=_mean_throughput)
        config = best[0].config
        parts = ["plain"] if what == "plain" else [short(key.drafter, canvas.NAME)]
        if what not in ("plain", "server"):
            parts = [*parts, _policy(config)] if len(run.drafters) > 1 else [_policy(config)]
        parts += [f"T = {key.temperature:g}"] * (len(temperatures) > 1) + [arrivals] * several
        color = canvas.COLORS[ranks.index(key) % len(canvas.COLORS)] if key in ranks else canvas.GRAY
        if config.id == config.baseline:
            color = canvas.BLACK
        yield ", ".join(parts), best, color, canvas.MARKERS[number % len(canvas.MARKERS)]


def _mean_throughput(rows: Sequence[RequestRow]) -> float:
    return float(np.mean(np.log([row.throughput.value for row in rows])))


def _policy(config: RunConfig) -> str:
    return short(config.draft_policy, 20) if config.gamma is None else f"γ = {config.gamma}"


class _Key(NamedTuple):
    """The settings that all configurations of a line share, which differ in batch size only."""

    drafter: str
    policy: str
    temperature: float

    @classmethod
    def of(cls, config: RunConfig) -> _Key:
        return cls(config.drafter, config.draft_policy, config.temperature)


def _best(run: PlotData) -> list[BatchCurve]:
    found: dict[_Key, BatchCurve] = {}
    for curve in batch_curves(run.summary):  # the best first
        found.setdefault(_Key.of(curve.rows[0].config), curve)
    return list(found.values())


def _chosen(run: PlotData) -> str:
    several = len(_best(run)) < len(batch_curves(run.summary))
    return "The best of several γ over all batch sizes." if several else ""


def _series(run: PlotData) -> list[Series]:
    """Return lines over the batch sizes; x is the logarithm of the batch size."""
    curves = _best(run)
    several = len({curve.rows[0].config.temperature for curve in curves}) > 1
    out = []
    for number, curve in enumerate(curves):
        config = curve.rows[0].config
        server = config.kind == "server"
        parts = (
            short(config.drafter, canvas.NAME) if server or len(run.drafters) > 1 else "",
            "" if server else _policy(config),
            f"T = {config.temperature:g}" if several else "",
            "",
        )
        color, marker = (each[number % len(each)] for each in (canvas.COLORS, canvas.MARKERS))
        x = np.log2(np.array(curve.batches, dtype=float))
        out.append(Series(parts, config.drafter, curve.rows, x, False, color, marker))
    return out


def _batch_axis(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlabel("requests at a time")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:.0f}"))
    margin = max(0.2, 0.05 * (places[-1] - places[0]))
    axes.set_xlim(places[0] - margin, places[-1] + margin)
