"""Figures of acceptance: against γ, by position in the draft, and how many drafts a step accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from specbench.base.record import Estimate
from specbench.results.acceptance import AcceptedRow, PositionRow, accepted_lengths
from specbench.results.acceptance import positions as acceptance_by_position
from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    MARKERS,
    NoDataError,
    Run,
    draw_series,
    figure,
    finish,
    gamma_axis,
    grid_lines,
    hollow,
    letter_size,
    panels,
    row_names,
    with_gamma,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEW, _TOO_FEW = 30, 10  # drafts at a position below which its rate is marked as uncertain, and not drawn


def two_lines(name: str) -> str:
    """A long name over two lines, for the title of a narrow panel."""
    if len(name) <= 22:
        return name
    breaks = [i + 1 for i, letter in enumerate(name) if letter in "-_/,: " and 0 < i < len(name) - 1]
    at = min(breaks or [len(name) // 2], key=lambda i: abs(i - len(name) / 2))
    return f"{name[:at].rstrip()}\n{name[at:].lstrip()}"


@figure("acceptance", "acceptance rate and α against γ", table="Acceptance and time")
def acceptance(run: Run) -> Figure:
    series = with_gamma(run, "acceptance_rate")
    body, (left, right) = panels(run, 2, 2.45, "share of tokens", sharey=True)
    halves = ((left, "acceptance_rate", "accepted / drafted"), (right, "alpha", "α of tested drafts"))
    for axes, name, title in halves:
        gamma_axis(axes, [x for each in series for x in each.x])
        draw_series(axes, series, name)
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(title)
        grid_lines(axes)
    remarks = (
        "Accepted / drafted falls with γ also where α, the acceptance to be expected of a draft that is tested, stays:"
        " what stands behind a rejection is drafted in vain.",
        "Bars: 95% intervals over prompts." if any(row.alpha.low is not None for row in run.rows) else "",
        hollow(series),
    )
    return finish(body, run, "Acceptance against draft length", *remarks)


@dataclass(frozen=True, slots=True)
class _Places:
    """A line of the figure of positions.

    Attributes:
        name: What it is called.
        rows: Its positions, from the first on.
        adapts: Whether a policy decides how much is drafted.
    """

    name: str
    rows: Sequence[PositionRow]
    color: str
    marker: str
    adapts: bool = False


def _lines_of_positions(run: Run, rows: Sequence[PositionRow]) -> list[_Places]:
    """A line for each drafter and policy at the largest of its γ, or for each server."""
    known: dict[str, list[PositionRow]] = {}
    for row in rows:
        known.setdefault(row.config.id, []).append(row)
    ends = [(each, each.rows[-1]) for each in run.series]
    names = row_names(run.servers, run)
    return [
        _Places(each.name_at(row), known[row.config.id], each.color, each.marker, each.adapts)
        for each, row in ends
        if row.config.id in known
    ] + [
        _Places(name, known[row.config.id], COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)])
        for number, (name, row) in enumerate(zip(names, run.servers, strict=True))
        if row.config.id in known
    ]


@figure("positions", "acceptance by position in the draft", table="Acceptance by position", of_servers=True)
def positions(run: Run) -> Figure:
    rows = acceptance_by_position(run.results)
    if not rows:
        untold = "no server tells what was kept at each position"
        raise NoDataError(untold if run.servers else "nothing was drafted")
    if all(row.tested < _TOO_FEW for row in rows):
        raise NoDataError(f"at no position {_TOO_FEW} drafts were tested")
    lines = _lines_of_positions(run, rows)
    body, (left, right) = panels(run, 2, 2.45, "share of tokens", sharey=True)
    halves = ((left, "rate", "of those tested"), (right, "rate_of_drafted", "of those drafted"))
    few = False
    for axes, name, title in halves:
        for each in lines:
            of = [
                (row.position, row.rate, row.tested)
                if name == "rate"
                else (row.position, row.rate_of_drafted, row.drafted)
                for row in each.rows
            ]
            x, y, counted = np.array([place for place in of if place[2] >= _TOO_FEW], float).reshape(-1, 3).T
            if not len(x):
                continue
            sure = counted >= _FEW
            few |= not sure.all()
            shown: Any = {"color": each.color, "marker": each.marker, "markevery": sure, "label": each.name}
            axes.plot(x, y, linestyle="--" if each.adapts else "-", zorder=2.5, **shown)
            axes.plot(
                x[~sure],
                y[~sure],
                linestyle="none",
                marker=each.marker,
                color=each.color,
                markerfacecolor="white",
                zorder=3,
            )
        gamma_axis(axes, [row.position for row in rows if row.drafted >= _TOO_FEW])
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(f"accepted, {title}")
        grid_lines(axes)
    remarks = (
        "Tested: all drafts before it were accepted.",
        "Of fixed γ the largest; dashed: a policy sets γ." if run.series else "",
        "Where a server's drafts have several lengths, at least so much."
        if any(row.least for row in rows)
        else "",
        f"Hollow: fewer than {_FEW} drafts; fewer than {_TOO_FEW} are not shown." if few else "",
    )
    return finish(body, run, "Acceptance by position", *remarks)


_RARE = 0.01  # share of steps, below which the last numbers of accepted drafts are not drawn


@figure("accepted-length", "accepted drafts per step")
def accepted_length(run: Run) -> Figure:
    known: dict[str, list[AcceptedRow]] = {}
    for each in accepted_lengths(run.results):
        known.setdefault(each.config.id, []).append(each)
    chosen = []
    for series in run.series:
        # With one draft there is no length to speak of: a step accepts it or not.
        rows = [row for row in series.rows if len(known.get(row.config.id, ())) > 2]
        if rows:
            fast = any(not math.isnan(row.speedup.value) for row in rows)
            best = max(rows, key=lambda row: _rank(row.speedup if fast else row.tokens_per_step))
            chosen.append((series, best))
    if not chosen:
        raise NoDataError("no step drafted more than one token" if known else "nothing was drafted")
    body, grid = panels(run, len(chosen), 2.0, "share of steps", narrowest=13, sharey=True)
    cut = False
    for axes, (series, row) in zip(grid, chosen, strict=True):
        mine = known[row.config.id]
        mean = sum(each.accepted * each.share for each in mine)
        undrafted = mine[0].undrafted
        seen = max(each.accepted for each in mine if max(each.share, each.share_iid) >= _RARE)
        cut |= mine[-1].accepted > seen
        mine = mine[: seen + 1]
        x = [each.accepted for each in mine]
        axes.bar(x, [each.share for each in mine], 0.8, color=series.color)
        axes.plot(
            x,
            [each.share_iid for each in mine],
            linestyle="none",
            marker="o",
            markersize=3.5,
            color=BLACK,
            markerfacecolor="white",
            zorder=3,
        )
        below = f"mean {mean:.2f}" + (f"; {undrafted:.0%} empty" if undrafted >= 0.005 else "")
        axes.set_title(two_lines(series.name_at(row)), fontsize=letter_size(0.94), pad=letter_size(1.75))
        axes.text(0.0, 1.03, below, transform=axes.transAxes, fontsize=letter_size(0.79), color="#505050")
        axes.xaxis.set_major_locator(FixedLocator(x[:: max(1, math.ceil(len(x) / 7))]))
        axes.set_xlim(-0.6, max(*x, 4) + 0.6)
        axes.set_xlabel("accepted drafts")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid_lines(axes)
    shown = [each for _, row in chosen for each in known[row.config.id]]
    grid[0].set_ylim(0, 1.08 * max(max(each.share, each.share_iid) for each in shown))
    remarks = (
        "Steps that drafted something; of fixed γ above 1 the fastest.",
        "Circles: what α would give if tests passed independently.",
        f"Numbers with shares below {_RARE:.0%} at the end are not shown." if cut else "",
        "Empty: share of all steps that drafted nothing."
        if any(each[0].undrafted >= 0.005 for each in known.values())
        else "",
    )
    return finish(body, run, "Accepted drafts per step", *remarks)


def _rank(estimate: Estimate) -> float:
    return 0.0 if math.isnan(estimate.value) else estimate.value
