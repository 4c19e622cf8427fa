"""Figures of acceptance: against γ, by position in the draft, and how many drafts a step accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from specbench.results import frames
from specbench.show.plots.canvas import (
    BLACK,
    COLORS,
    MARKERS,
    WIDTH,
    End,
    NoDataError,
    Run,
    draw_series,
    gamma_axis,
    grid_lines,
    hollow,
    inscribe,
    label_ends,
    letter_size,
    new_figure,
    row_names,
    two,
    with_gamma,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_PANELS = 4  # in a row
_FEW, _TOO_FEW = 30, 10  # drafts at a position below which its rate is marked as uncertain, and not drawn


def two_lines(name: str) -> str:
    """A long name over two lines, for the title of a narrow panel."""
    if len(name) <= 22:
        return name
    breaks = [i + 1 for i, letter in enumerate(name) if letter in "-_/,: " and 0 < i < len(name) - 1]
    at = min(breaks or [len(name) // 2], key=lambda i: abs(i - len(name) / 2))
    return f"{name[:at].rstrip()}\n{name[at:].lstrip()}"


def panels(run: Run, count: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Panels in rows, of the same size whatever their number; those left over are taken away."""
    most = 2 if run.narrow else _PANELS
    columns = min(count, most) if run.narrow or count not in (5, 6) else 3
    lines = math.ceil(count / columns)
    figure = new_figure(run, height * lines + 0.75, min(WIDTH, 1.0 + 2.3 * columns))
    grid = figure.subplots(lines, columns, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.remove()
    for i, axes in enumerate(grid.flat[:count]):
        if i + columns >= count:  # nothing below
            axes.tick_params(labelbottom=True)
    return figure, list(grid.flat[:count])


def acceptance(run: Run) -> Figure:
    series = with_gamma(run, "acceptance_rate")
    figure, (left, right) = two(run, 3.2, sharey=True)
    halves = ((left, "acceptance_rate", "accepted / drafted"), (right, "alpha", "α of tested drafts"))
    for axes, name, title in halves:
        gamma_axis(axes, [x for each in series for x in each.x])
        ends = draw_series(axes, series, name)
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(title)
        grid_lines(axes)
        axes.set_ylabel("share of tokens" if axes is left or run.narrow else "")
    remarks = (
        "Accepted / drafted falls with γ also where α, the acceptance to be expected of a draft that is tested, stays:"
        " what stands behind a rejection is drafted in vain.",
        "Bars: 95% intervals over prompts." if run.summary["alpha_low"].notna().any() else "",
        hollow(series),
    )
    inscribe(figure, run, "Acceptance against draft length", *remarks)
    label_ends(right, ends, run)
    return figure


@dataclass(frozen=True, slots=True)
class _Places:
    """A line of the figure of positions.

    Attributes:
        name: What it is called.
        rows: Of the frame of positions.
        adapts: Whether a rule decides how much is drafted.
    """

    name: str
    rows: pd.DataFrame
    color: str
    marker: str
    adapts: bool = False


def _lines_of_positions(run: Run, frame: pd.DataFrame) -> list[_Places]:
    """A line for each drafter and rule at the largest of its γ, or for each server."""
    by_config = dict(list(frame.groupby("config", sort=False)))
    ends = [(each, each.rows.iloc[-1]) for each in run.series]
    servers = frames.records(run.servers)
    return [
        _Places(
            each.name_at(row["gamma"]),
            by_config[row["config"]],
            each.color,
            each.marker,
            each.adapts,
        )
        for each, row in ends
        if row["config"] in by_config
    ] + [
        _Places(name, by_config[row["config"]], COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)])
        for number, (name, row) in enumerate(zip(row_names(servers, run), servers, strict=True))
        if row["config"] in by_config
    ]


def positions(run: Run) -> Figure:
    frame = frames.position_frame(run.df, run.steps)
    if frame.empty:
        untold = "no server tells what was kept at each position"
        raise NoDataError("nothing was drafted" if run.servers.empty else untold)
    if not (frame["tested"] >= _TOO_FEW).any():
        raise NoDataError(f"at no position {_TOO_FEW} drafts were tested")
    lines = _lines_of_positions(run, frame)
    figure, (left, right) = two(run, 3.2, sharey=True)
    halves = ((left, "rate", "of those tested"), (right, "rate_of_drafted", "of those drafted"))
    few = False
    for axes, name, title in halves:
        ends = []
        for each in lines:
            mine = each.rows[each.rows["tested" if name == "rate" else "drafted"] >= _TOO_FEW]
            if mine.empty:
                continue
            counted = mine["tested" if name == "rate" else "drafted"].to_numpy()
            x, y = mine["position"].to_numpy(dtype=float), mine[name].to_numpy(dtype=float)
            sure = counted >= _FEW
            few |= not sure.all()
            axes.plot(x, y, color=each.color, linestyle="--" if each.adapts else "-", zorder=2.5)
            axes.plot(x[sure], y[sure], linestyle="none", marker=each.marker, color=each.color, zorder=3)
            axes.plot(
                x[~sure],
                y[~sure],
                linestyle="none",
                marker=each.marker,
                color=each.color,
                markerfacecolor="white",
                zorder=3,
            )
            ends.append(End(float(x[-1]), float(y[-1]), each.name, each.color, each.marker, each.color))
        gamma_axis(axes, frame.loc[frame["drafted"] >= _TOO_FEW, "position"].tolist())
        axes.set_xlabel("position in the draft")
        axes.set_ylim(0.0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_title(f"accepted, {title}")
        grid_lines(axes)
        axes.set_ylabel("share of tokens" if axes is left or run.narrow else "")
    remarks = (
        "Tested: all drafts before it were accepted.",
        "Of fixed γ the largest; dashed: a rule sets γ." if run.series else "",
        "Where a server's drafts have several lengths, at least so much." if frame["least"].any() else "",
        f"Hollow: fewer than {_FEW} drafts; fewer than {_TOO_FEW} are not shown." if few else "",
    )
    inscribe(figure, run, "Acceptance by position", *remarks)
    label_ends(right, ends, run)
    return figure


_RARE = 0.01  # share of steps, below which the last numbers of accepted drafts are not drawn


def accepted_length(run: Run) -> Figure:
    frame = frames.accepted_frame(run.df, run.steps)
    by_config = dict(list(frame.groupby("config", sort=False)))
    chosen = []
    for each in run.series:
        rows = each.rows[each.rows["config"].isin(list(by_config))]
        # With one draft there is no length to speak of: a step accepts it or not.
        rows = rows[[by_config[config]["accepted"].max() > 1 for config in rows["config"]]]
        if len(rows):
            ranked = rows["speedup"].fillna(0.0) if rows["speedup"].notna().any() else rows["tokens_per_step"]
            chosen.append((each, rows.iloc[int(ranked.to_numpy().argmax())]))
    if not chosen:
        raise NoDataError("no step drafted more than one token" if by_config else "nothing was drafted")
    figure, grid = panels(run, len(chosen), 2.0, sharey=True)
    cut = False
    for axes, (each, row) in zip(grid, chosen, strict=True):
        mine = by_config[row["config"]]
        mean = float((mine["accepted"] * mine["share"]).sum())
        undrafted = float(mine["undrafted"].iloc[0])
        seen = mine["accepted"][(mine[["share", "share_iid"]] >= _RARE).any(axis=1)].max()
        cut |= bool(mine["accepted"].max() > seen)
        mine = mine[mine["accepted"] <= seen]
        x = mine["accepted"].to_numpy()
        axes.bar(x, mine["share"], 0.8, color=each.color)
        axes.plot(
            x,
            mine["share_iid"],
            linestyle="none",
            marker="o",
            markersize=3.5,
            color=BLACK,
            markerfacecolor="white",
            zorder=3,
        )
        below = f"mean {mean:.2f}" + (f"; {undrafted:.0%} empty" if undrafted >= 0.005 else "")
        name = two_lines(each.name_at(row["gamma"]))
        axes.set_title(name, fontsize=letter_size(0.94), pad=letter_size(1.75))
        axes.text(0.0, 1.03, below, transform=axes.transAxes, fontsize=letter_size(0.79), color="#505050")
        axes.xaxis.set_major_locator(FixedLocator(x[:: max(1, math.ceil(len(x) / 7))].tolist()))
        axes.set_xlim(-0.6, max(x.max(), 4) + 0.6)
        axes.set_xlabel("accepted drafts")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid_lines(axes)
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel("share of steps")
    top = max(float(by_config[row["config"]][["share", "share_iid"]].max().max()) for _, row in chosen)
    grid[0].set_ylim(0, 1.08 * top)
    remarks = (
        "Steps that drafted something; of fixed γ above 1 the fastest.",
        "Circles: what α would give if tests passed independently.",
        f"Numbers with shares below {_RARE:.0%} at the end are not shown." if cut else "",
        "Empty: share of all steps that drafted nothing." if (frame["undrafted"] >= 0.005).any() else "",
    )
    inscribe(figure, run, "Accepted drafts per step", *remarks)
    return figure
