"""Figures of requests side by side: speedup against batch, and throughput against what each request sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from specbench.results.requests import Line, RequestRow, is_closed, lines_of, request_rows
from specbench.results.run import RunConfig
from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    GRAY,
    MARKERS,
    NoDataError,
    Run,
    Series,
    all_rows,
    draw_levels,
    draw_series,
    figure,
    finish,
    fit_y,
    grid_lines,
    letter_size,
    mark_cut,
    new_figure,
    panels,
    short,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

_ALONE = "requests were decoded one after the other"
_NAME = 30  # characters of a drafter's name
_CORNERS: tuple[tuple[int, int, Literal["left", "right"]], ...] = (
    (-4, 4, "right"), (4, -8, "left"), (4, 4, "left"), (-4, -8, "right"),
)  # fmt: skip
"""Where the numbers of one line stand, and of the next: points from the marker, and their alignment."""


@figure("batches", "speedup against batch, one line per drafter and policy", table="Speed", of_servers=True)
def speedup_by_batch(run: Run) -> Figure:
    """A line for each drafter and policy over the batches."""
    series = _series(run)
    if not series:
        raise NoDataError("no closed loop was measured" if run.summary.side_by_side else _ALONE)
    body = new_figure(run, 3.6)
    axes = body.subplots()
    _batch_axis(axes, sorted({x for each in series for x in each.x}))
    draw_series(axes, series, "speedup")
    fit_y(axes, all_rows(series), "speedup", 1.0)
    mark_cut(axes, series, "speedup")
    over = short(run.summary.over, 20)
    draw_levels(axes, {f"{over} = 1": 1.0})
    axes.set_ylabel(f"speedup over {over} (×)")
    grid_lines(axes)
    remark = "Of the throughput, at the same batch."
    return finish(body, run, "Speedup against batch", remark, run.intervals, _chosen(run))


@figure(
    "latency",
    "throughput against latency, with and without speculation",
    table="Requests side by side",
    of_servers=True,
)
def latency(run: Run) -> Figure:
    """Throughput against the time per token and per answer, a line over the batches with each drafter and without."""
    requests = request_rows(run.results)
    if not requests:
        raise NoDataError(_ALONE)
    body, both = panels(run, 2, 2.55, "tokens/s of all requests", sharey=True)
    shown = list(_served(run, requests))
    for axes, title in zip(both, ("time per token (ms, median)", "time per answer (s, median)"), strict=True):
        for number, (label, mine, color, marker) in enumerate(shown):
            right, up, alignment = _CORNERS[number % len(_CORNERS)]
            x = np.array(
                [1000.0 * row.token_s["p50"] if axes is both[0] else row.latency_s["p50"] for row in mine]
            )
            y = np.array([row.throughput.value for row in mine])
            batches = np.array([row.config.batch for row in mine])
            there = np.isfinite(x) & np.isfinite(y)
            if not there.any():
                continue
            axes.plot(x[there], y[there], color=color, marker=marker, zorder=3, label=label)
            for at, height, batch in zip(x[there], y[there], batches[there], strict=True):
                axes.annotate(
                    f"{batch:g}",
                    (at, height),
                    xytext=(right, up),
                    textcoords="offset points",
                    ha=alignment,
                    fontsize=letter_size(0.75),
                    color=color,
                )
        axes.set_xlabel(title)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        grid_lines(axes, "both")
    if not any(axes.lines for axes in both):
        raise NoDataError("no request emitted two tokens or more")
    remark = "Numbers: requests at a time. Up and to the left is better. An answer's time has its wait in it."
    return finish(body, run, "Throughput against latency", remark, _chosen(run))


def _served(run: Run, requests: Sequence[RequestRow]) -> Iterator[tuple[str, list[RequestRow], str, str]]:
    """Name, rows by rising batch, color and marker of plain decoding, and of every drafter and policy beside it.

    Of several γ that with the highest throughput; lines are apart by temperature and by how requests come.
    """
    alike: dict[tuple[str, _Place, str], dict[int | None, list[RequestRow]]] = {}
    for row in sorted(requests, key=lambda row: row.config.batch or 1):
        key = (row.config.kind, _place(row.config), _how(row.config))
        alike.setdefault(key, {}).setdefault(row.config.gamma, []).append(row)
    temperatures = {place.temperature for _, place, _ in alike}
    hows = {how for _, _, how in alike}
    ranks = [_place(line.rows[0].config) for line in _best(run)]
    for number, ((kind, place, how), by_gamma) in enumerate(alike.items()):
        best = max(by_gamma.values(), key=_mean_throughput)
        gamma = best[0].config.gamma
        policy = place.policy if gamma is None else f"γ = {gamma}"
        parts = ["plain"] if kind == "plain" else [short(place.drafter, _NAME), short(policy, 20)]
        if kind == "server":
            parts = parts[:1]
        elif kind != "plain" and len(run.drafters) == 1:
            parts = parts[1:]
        parts += [f"T = {place.temperature:g}"] * (len(temperatures) > 1) + [how or "closed"] * (
            len(hows) > 1
        )
        color = COLORS[ranks.index(place) % len(COLORS)] if place in ranks else GRAY
        first = best[0].config.id == best[0].config.baseline
        yield ", ".join(parts), best, BLACK if first else color, MARKERS[number % len(MARKERS)]


def _mean_throughput(rows: Sequence[RequestRow]) -> float:
    return float(np.mean(np.log([row.throughput.value for row in rows])))


def _how(config: RunConfig) -> str:
    """How requests come, empty for as many clients as the batch."""
    return "" if is_closed(config) else str(config.arrivals)


class _Place(NamedTuple):
    """What a line over the batches is of."""

    drafter: str
    policy: str
    temperature: float


def _place(config: RunConfig) -> _Place:
    return _Place(config.drafter, config.draft_policy, config.temperature)


def _best(run: Run) -> list[Line]:
    """Of each drafter, policy and temperature the line of the best γ."""
    found: dict[_Place, Line] = {}
    for line in lines_of(run.summary):  # the best first
        found.setdefault(_place(line.rows[0].config), line)
    return list(found.values())


def _chosen(run: Run) -> str:
    several = len(_best(run)) < len(lines_of(run.summary))
    return "Of several γ the one that is best over the batches." if several else ""


def _series(run: Run) -> list[Series]:
    """Lines over the batches; x is the logarithm of the batch."""
    lines = _best(run)
    several = len({line.rows[0].config.temperature for line in lines}) > 1
    out = []
    for number, line in enumerate(lines):
        config = line.rows[0].config
        server = config.kind == "server"
        policy = short(config.draft_policy, 20) if config.gamma is None else f"γ = {config.gamma}"
        parts = (
            short(config.drafter, _NAME) if server or len(run.drafters) > 1 else "",
            "" if server else policy,
            f"T = {config.temperature:g}" if several else "",
            "",
        )
        name = ", ".join(filter(None, parts))
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        x = np.log2(np.array(line.batches, dtype=float))
        out.append(Series(name, parts, config.drafter, line.rows, x, False, color, marker))
    return out


def _batch_axis(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xlabel("requests at a time")
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{2**value:.0f}"))
    margin = max(0.2, 0.05 * (places[-1] - places[0]))
    axes.set_xlim(places[0] - margin, places[-1] + margin)
