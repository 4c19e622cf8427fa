"""Figures of acceptance: by γ, by position, by accepted length, and by rank and depth in draft trees."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from specbench.results.acceptance import accepted_lengths, ranks
from specbench.results.acceptance import positions as acceptance_by_position
from specbench.results.summary import SummaryRow
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure

_FEW, _TOO_FEW = 30, 10
"""Drafts at a position below which its rate is marked as uncertain, and not drawn."""

_LEAST_TESTED = 10  # nodes below which a rate is not drawn
_LONGEST_NAME = 36
_BY_RANK = ("-", "--", "-.", ":")  # of a node; ranks after these are seldom right
_RARE = 0.01  # share of steps below which the longest accepted lengths are not drawn


@figure("acceptance", "acceptance rate and α against γ", table="Speed")
def acceptance(run: PlotData) -> Figure:
    series = canvas.with_gamma(run, "acceptance_rate")
    body, (left, right) = canvas.panels(2, 2.45, "share of tokens", sharey=True)
    halves = ((left, "acceptance_rate", "accepted / drafted"), (right, "alpha", "α of tested drafts"))
    for axes, name, title in halves:
        canvas.gamma_axis(axes, [x for each in series for x in each.x])
        said = canvas.draw_series(axes, series, name)
        canvas.share_axis(axes)
        axes.set_title(title)
        canvas.grid_lines(axes)
    remarks = (
        "Accepted / drafted falls with γ even where α, the expected acceptance of a tested draft, does not: whatever"
        " follows a rejection was drafted in vain.",
        "Bars: 95% intervals over prompts." if any(row.alpha.low is not None for row in run.rows) else "",
        said,
    )
    return canvas.finish(body, run, "Acceptance against draft length", *remarks)


@figure("positions", "acceptance by position in the draft", table="Acceptance by position")
def positions(run: PlotData) -> Figure:
    known: dict[str, list[Any]] = {}
    for row in acceptance_by_position(run.results):
        known.setdefault(row.config.id, []).append(row)
    if not known:
        unknown = "no server reports acceptance by position"
        raise NoDataError(unknown if run.servers else "nothing was drafted")
    # A line for each drafter with a draft policy, of fixed γ the largest, and for each server.
    lines = [(each.name_at(each.rows[-1]), each.rows[-1].config.id, each.style) for each in run.series]
    for server, name in zip(run.servers, canvas.row_names(run.servers, run), strict=True):
        lines.append((name, server.config.id, run.make_series([server], [0.0]).style))
    shown = [(name, known[config], style) for name, config, style in lines if config in known]
    if all(row.tested < _TOO_FEW for _, rows, _ in shown for row in rows):
        raise NoDataError(f"fewer than {_TOO_FEW} drafts were tested at every position")
    body, both = canvas.panels(2, 2.45, "share of tokens", sharey=True)
    few = False
    for axes, of_tested in zip(both, (True, False), strict=True):
        for name, rows, style in shown:
            points = [
                (row.position, row.rate if of_tested else row.rate_of_drafted, count)
                for row in rows
                if (count := row.tested if of_tested else row.drafted) >= _TOO_FEW
            ]
            if not points:
                continue
            x, y, counts = np.array(points, float).T
            sure = counts >= _FEW
            few |= not sure.all()
            axes.plot(x, y, markevery=sure, label=name, **style)
            axes.plot(x[~sure], y[~sure], linestyle="none", alpha=0.35, **style)
        canvas.gamma_axis(
            axes, [row.position for _, rows, _ in shown for row in rows if row.drafted >= _TOO_FEW]
        )
        axes.set_xlabel("position in the draft")
        canvas.share_axis(axes)
        axes.set_title(f"accepted, of those {'tested' if of_tested else 'drafted'}")
        canvas.grid_lines(axes)
    remarks = (
        "Tested: all drafts before it were accepted.",
        "Fixed γ: the largest." if any(not each.adapts for each in run.series) else "",
        "Hollow: an adaptive draft policy." if any(each.adapts for each in run.series) else "",
        "Lower bounds for a server whose drafts differ in length."
        if any(row.least for _, rows, _ in shown for row in rows)
        else "",
        f"Faint: fewer than {_FEW} drafts; fewer than {_TOO_FEW} are not shown." if few else "",
    )
    return canvas.finish(body, run, "Acceptance by position", *remarks)


@figure("accepted-length", "accepted length of each step")
def accepted_length(run: PlotData) -> Figure:
    known: dict[str, list[Any]] = {}
    for each in accepted_lengths(run.results):
        known.setdefault(each.config.id, []).append(each)
    chosen = []
    for series in run.series:
        # With one draft there is no length to speak of: a step accepts it or not.
        rows = [row for row in series.rows if len(known.get(row.config.id, ())) > 2]
        if rows:
            fast = any(not math.isnan(row.speedup.value) for row in rows)
            figures = [(row.speedup if fast else row.tokens_per_step).value for row in rows]
            chosen.append((series, rows[int(np.argmax(np.nan_to_num(figures)))]))
    if not chosen:
        raise NoDataError("no step drafted more than one token" if known else "nothing was drafted")
    body, grid = canvas.panels(len(chosen), 2.0, "share of steps", narrowest=13, sharey=True)
    cut = False
    dashes: Any = {"linestyle": "none", "marker": "_", "markersize": 7, "markeredgewidth": 1.5}
    for axes, (series, row) in zip(grid, chosen, strict=True):
        mine = known[row.config.id]
        mean = sum(each.accepted * each.share for each in mine)
        undrafted = mine[0].undrafted
        seen = max(each.accepted for each in mine if max(each.share, each.share_iid) >= _RARE)
        cut |= mine[-1].accepted > seen
        mine = mine[: seen + 1]
        x = [each.accepted for each in mine]
        axes.bar(x, [each.share for each in mine], 0.8, color=series.color)
        axes.plot(x, [each.share_iid for each in mine], color=canvas.BLACK, zorder=3, **dashes)
        title, pad = canvas.two_lines(series.name_at(row)), 1.75 * canvas.FONT_SIZE
        axes.set_title(title, fontsize=0.94 * canvas.FONT_SIZE, pad=pad)
        below = f"mean {mean:.2f}" + (f"; {undrafted:.0%} empty" if undrafted >= 0.005 else "")
        note: Any = {"transform": axes.transAxes, "fontsize": 0.79 * canvas.FONT_SIZE, "color": "#505050"}
        axes.text(0.0, 1.03, below, **note)
        axes.xaxis.set_major_locator(FixedLocator(x[:: max(1, math.ceil(len(x) / 7))]))
        axes.set_xlim(-0.6, max(*x, 4) + 0.6)
        axes.set_xlabel("accepted length")
        canvas.grid_lines(axes)
    shown = [each for _, row in chosen for each in known[row.config.id]]
    canvas.share_axis(grid[0], 1.08 * max(max(each.share, each.share_iid) for each in shown))
    remarks = (
        "Steps that drafted something; of fixed γ above 1 the fastest.",
        "Dashes: what α would give if tests passed independently.",
        f"The longest lengths are not shown where their shares are below {_RARE:.0%}." if cut else "",
        "Empty: share of all steps that drafted nothing."
        if any(each[0].undrafted >= 0.005 for each in known.values())
        else "",
    )
    return canvas.finish(body, run, "Accepted length", *remarks)


def _name(row: SummaryRow, run: PlotData) -> str:
    """Return a name that says which draft tree it is, shortened at the end;
    a drafter named in the title is left out.
    """
    label, policy = row.config.label, row.config.policy
    if len(run.drafters) == 1 and policy is not None:
        label = policy.label + row.config.condition.words
    return label if len(label) <= _LONGEST_NAME else f"{label[: _LONGEST_NAME - 1]}…"


@figure("ranks", "acceptance in trees by rank and depth")
def rank_rates(run: PlotData) -> Figure:
    lines: dict[str, dict[int, list[Any]]] = {}
    for row in ranks(run.results):
        if row.tested >= _LEAST_TESTED and row.rank < len(_BY_RANK):
            lines.setdefault(row.config.id, {}).setdefault(row.rank, []).append(row)
    if not lines:
        raise NoDataError(f"fewer than {_LEAST_TESTED} nodes were tested of every tree")
    body, grid = canvas.panels(len(lines), 2.1, "accepted, of those tested", narrowest=13, sharey=True)
    for axes, (config, by_rank) in zip(grid, lines.items(), strict=True):
        for rank, line in sorted(by_rank.items()):
            depths, rates = [row.depth for row in line], [row.rate for row in line]
            color, _ = run.mark(run.summary.row(config).config)
            style: Any = {"color": color, "marker": ".", "linestyle": _BY_RANK[rank]}
            axes.plot(depths, rates, label=f"rank {rank + 1}", **style)
        name = canvas.two_lines(_name(run.summary.row(config), run))
        axes.set_title(name, fontsize=0.94 * canvas.FONT_SIZE)
        axes.set_xlabel("depth")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.share_axis(axes)
        canvas.grid_lines(axes)
    remark = (
        "Rank 1: the first candidate of its node. Tested: all before it on its branch were accepted. Points of fewer"
        f" than {_LEAST_TESTED} nodes are not drawn."
    )
    return canvas.finish(body, run, "Acceptance by rank and depth", remark)
