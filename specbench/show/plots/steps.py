"""Figures of steps: the time of each part, and one generation step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.base.textsafe import one_line
from specbench.decoding.records import PARTS
from specbench.results.stats import Floats
from specbench.show.notes import meanings
from specbench.show.plots import canvas
from specbench.show.plots.canvas import NoDataError, PlotData, figure, short

if TYPE_CHECKING:
    import pandas as pd

_PART_COLORS = dict(zip(PARTS, ("#EEDD88", "#77AADD", "#44BB99", "#FFAABB", "#CCCCCC"), strict=True))
"""Light ones (Paul Tol's), for the strong ones are those of drafters."""


@figure("time", "where the time goes", table="Acceptance and time")
def time(run: PlotData) -> Figure:
    rows = [row for each in run.series for row in each.rows if row.tokens_per_second.value > 0]
    rows.sort(key=lambda row: run.drafters.index(row.config.drafter))
    if not rows:
        raise NoDataError("no speculative configuration has finished a step")
    # Rows of bars from the top down, with a gap between drafters.
    places = np.array([i + 0.6 * run.drafters.index(row.config.drafter) for i, row in enumerate(rows)])
    body = canvas.new_figure(run, 1.15 + 0.17 * (places[-1] + 1))
    axes = body.subplots()
    left = np.zeros(len(rows))
    total = np.array([1000.0 / row.tokens_per_second.value for row in rows])
    prefill = total * np.array([row.share_draft_prefill for row in rows])
    for part in PARTS:
        wide = total * np.array([row.share[part] for row in rows])
        style: Any = {"color": _PART_COLORS[part], "edgecolor": "white", "linewidth": 0.3}
        axes.barh(places, wide, 0.78, left=left, label=part, **style)
        if part == "draft" and (prefill > 0.01 * total.max()).any():
            hatched: Any = {"color": "none", "edgecolor": "#5A3C00", "hatch": "////", "linewidth": 0}
            axes.barh(places, prefill, 0.78, label="reading the prompt", **hatched)
        left += wide
    plain = {
        row.config.label: 1000.0 / speed for row in run.plain if (speed := row.tokens_per_second.value) > 0
    }
    canvas.draw_levels(axes.axvline, plain)
    axes.set_yticks(places, canvas.row_names(rows, run))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 1.05 * max(total.max(), *plain.values()))
    axes.set_xlabel("time per token (ms)")
    canvas.grid_lines(axes, "x")
    remark = "Time per token: 1 over the table's tokens/s, without the time to first token; parts: shares of all steps."
    return canvas.finish(body, run, "Where the time goes", remark)


@figure(
    "generation",
    "one generation step by step: tokens drafted and accepted, and what the draft policy went by",
)
def generation(run: PlotData) -> Figure:
    one = _one_generation(run)
    drafted, accepted = one["steps_drafted"], one["steps_accepted"]
    first = int(one["new_tokens"]) - int(np.sum(one["steps_emitted"]))
    edges = first + np.concatenate(([0], np.cumsum(one["steps_emitted"])))
    notes = _drawable(one["steps_policy"], len(drafted))
    body = canvas.new_figure(run, 3.6 if notes else 2.5)
    ratios = [1.2, 1.0][: 1 + bool(notes)]
    both = body.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    upper = both[0]
    color, _ = run.mark(run.summary.row(one["config"]).config)
    upper.stairs(accepted, edges, fill=True, color=color, alpha=0.5, label="accepted")
    upper.stairs(drafted, edges, color=color, linewidth=1.2, baseline=None, label="drafted (γ)")
    upper.set_ylim(0, max(1, int(drafted.max(initial=1))) * 1.12)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    upper.set_ylabel("tokens in the step")
    upper.set_xlim(edges[0], edges[-1])
    canvas.grid_lines(upper)
    if notes:
        lower = both[1]
        middles = (edges[:-1] + edges[1:]) / 2
        for number, (name, values) in enumerate(notes.items()):
            shade, line = ("black", canvas.GRAY)[number % 2], ("-", "--", ":")[number % 3]
            lower.plot(middles, values, line, color=shade, linewidth=1.2, label=short(name, 20))
        entropies = all(name.startswith("H") for name in notes)
        lower.set_ylabel("entropy / log V" if entropies else "what the policy went by")
        lower.set_ylim(bottom=min(0.0, *(float(np.nanmin(values)) for values in notes.values())))
        canvas.grid_lines(lower)
    both[-1].set_xlabel("token of the output")
    which = (
        f"Prompt {short(one['prompt'], 40)}, {short(one['label'], 48)}: the most typical in tokens per step."
    )
    remark = "A column is a step, as wide as the tokens it emitted."
    return canvas.finish(body, run, "One generation, step by step", which, remark, *meanings(notes))


def _one_generation(run: PlotData) -> pd.Series[Any]:
    """Return the generation of one configuration whose tokens per step are the most typical.

    The configuration is one whose policy records an entropy; if there is none, one whose policy records anything; or
    else the fastest. γ above 1 is preferred.
    """
    df = run.results.generations
    configs, drafted, policies = (df[name].to_numpy() for name in ("config", "steps_drafted", "steps_policy"))
    chosen = ((df["status"] == "ok") & (df["kind"] == "speculative")).to_numpy()
    drafting = [int(i) for i in np.flatnonzero(chosen) if np.any(drafted[i])]
    if not drafting:
        raise NoDataError("nothing was drafted")
    noting = [i for i in drafting if _drawable(policies[i], len(drafted[i]))]
    noting.sort(key=lambda i: not any(name.startswith("H") for name in policies[i]))
    longer = {configs[i] for i in drafting if np.max(drafted[i]) > 1}
    names = [name for name in dict.fromkeys(configs[drafting]) if name in longer or not longer]
    speedups = {row.config.id: row.speedup.value for row in run.rows if row.measured}
    config = str(configs[noting[0]] if noting else max(names, key=lambda name: speedups.get(name, 0.0)))
    emitted = df["steps_emitted"].to_numpy()
    typical = run.summary.row(config).tokens_per_step.value
    mine = [i for i in noting or drafting if configs[i] == config]
    return df.iloc[min(mine, key=lambda i: abs(float(np.mean(emitted[i])) - typical))]


def _drawable(policy: Mapping[str, Any] | None, steps: int) -> dict[str, Floats]:
    """Return the values recorded by a draft policy that are shares or entropies; others have another scale.

    Values that never change are left out, and so are values that repeat others.
    """
    others = ("gamma", "γ", "rate", "probe", "drafter_pass_s", "rest_s")
    found: dict[str, Floats] = {}
    for name, noted in (policy or {}).items():
        values = np.asarray(noted, dtype=float)
        repeated = any(np.array_equal(values, known, equal_nan=True) for known in found.values())
        finite = values[np.isfinite(values)]
        if not steps or len(values) != steps or one_line(name).lower().startswith(others) or repeated:
            continue
        if len(finite) and np.ptp(finite) > 0:
            found[one_line(name)] = values
    return found
