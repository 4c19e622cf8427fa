"""Figures of batches and lengths of context: speed and speedup, and latency."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from specbench.results.summary import size_of
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, Series, figure, short

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specbench.results.metrics import Figures
    from specbench.results.summary import Curve
    from specbench.rows import Row

_ALONE = "requests were decoded one after the other"
_MOST = 6  # lines over contexts
_NUMBER: Any = {
    "textcoords": "offset points",
    "ha": "center",
    "va": "center",
    "fontsize": 0.75 * canvas.FONT_SIZE,
    "path_effects": [withStroke(linewidth=2, foreground="white")],
    "zorder": 2.9,
}


@figure("batches", "speedup against batch size", table="Speed")
def speedup_by_batch(run: PlotData) -> Figure:
    best = _best(run.summary.curves("batch"))
    if not best:
        raise NoDataError("no closed loop was measured" if run.summary.side_by_side else _ALONE)
    series = [_series(run, each) for each in best]
    said = ("Ratio of throughputs at the same batch size.", _chosen(run))
    return _speedups(run, series, "requests at a time", "Speedup against batch size", *said)


@figure("contexts", "speedup against length of context", table="Speed")
def speedup_by_context(run: PlotData) -> Figure:
    curves = run.summary.curves("context")
    if not curves:
        raise NoDataError("no lengths of context were measured (--context)")
    series = [_series(run, each) for each in curves[:_MOST]]
    more = f"The best {_MOST} of {len(curves)}." if len(curves) > _MOST else ""
    return _speedups(run, series, "tokens of context", "Speedup against context", more)


def _series(run: PlotData, curve: Curve) -> Series:
    return run.make_series(curve, np.log2([size_of(row) for row in curve]), loads=True)


def _speedups(run: PlotData, series: Sequence[Series], load: str, title: str, *remarks: str) -> Figure:
    over = short(run.summary.run.baseline, 20)
    labels = (load, f"speedup over {over} (×)")
    return canvas.one_panel(run, series, "speedup", labels, {f"{over} = 1": 1.0}, title, *remarks)


@figure("latency", "throughput against latency", table="Batches of requests")
def latency(run: PlotData) -> Figure:
    requests = [row for row in run.rows if row.finished_requests.value]
    if not requests:
        raise NoDataError(_ALONE)
    body, both = canvas.panels(2, 2.55, "tokens/s of all requests", sharey=True)
    lines = list(_lines(run, requests))
    for axes, title in zip(both, ("time per token (ms, median)", "time per answer (s, median)"), strict=True):
        for number, (label, mine, style) in enumerate(lines):
            side = 1 if number % 2 else -1  # of a point at which its batch size stands
            times = [
                1000 * row["request_token_s_p50"].value if axes is both[0] else row["latency_s_p50"].value
                for row in mine
            ]
            points = [
                (time, speed, row.config.condition.batch)
                for time, row in zip(times, mine, strict=True)
                if math.isfinite(time) and math.isfinite(speed := row.tokens_per_second.value)
            ]
            if points:
                x, y, _ = zip(*points, strict=True)
                axes.plot(x, y, label=label, **style)
                for time, speed, batch in points:
                    at: Any = {"xytext": (6 * side, -5 * side), "color": style["color"]}
                    axes.annotate(f"{batch}", (time, speed), **at, **_NUMBER)
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


def _lines(run: PlotData, requests: Sequence[Figures]) -> Iterator[tuple[str, list[Figures], dict[str, Any]]]:
    """Yield a name, rows by rising batch size and a style, for plain decoding and for each drafter with a policy.

    Of several γ, the fastest is taken. Each temperature and arrival process has its own lines.
    """
    alike: dict[tuple[str, _Alike, str], dict[int | None, list[Figures]]] = {}
    for row in sorted(requests, key=lambda row: row.config.condition.batch or 1):
        at = row.config.condition
        arrivals = "closed" if at.is_closed else str(at.arrivals)
        kind = (row.config.kind, _alike(row.config), arrivals)
        alike.setdefault(kind, {}).setdefault(row.config.gamma, []).append(row)
    several = len({arrivals for *_, arrivals in alike}) > 1
    for (what, _, arrivals), by_gamma in alike.items():
        best = max(by_gamma.values(), key=_mean_speed)
        line = run.make_series(best, [0] * len(best), loads=True)
        name = "plain" if what == "plain" else line.name
        yield ", ".join([name, *[arrivals] * several]), best, line.style


def _mean_speed(rows: Sequence[Figures]) -> float:
    return float(np.mean(np.log([row.tokens_per_second.value for row in rows])))


_Alike = tuple[str, str, float]


def _alike(config: Row) -> _Alike:
    """Return what configurations share that differ in γ and batch size only."""
    return config.drafter, config.draft_policy, config.condition.temperature


def _best(curves: Sequence[Curve]) -> list[Any]:
    """Return the first, best curve of each drafter with a policy."""
    found: dict[_Alike, Curve] = {}
    for curve in curves:
        found.setdefault(_alike(curve[0].config), curve)
    return list(found.values())


def _chosen(run: PlotData) -> str:
    curves = run.summary.curves("batch")
    return "The best of several γ over all batch sizes." if len(_best(curves)) < len(curves) else ""
