"""Figures of steps: where their time goes, and one generation step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specbench.base.textsafe import one_line
from specbench.decoding.records import PARTS
from specbench.show.plots.canvas import (
    BLACK,
    BLUE,
    COLORS,
    DASHED,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    NoDataError,
    Run,
    figure,
    finish,
    grid_lines,
    new_figure,
    row_names,
    short,
)

if TYPE_CHECKING:
    import pandas as pd

_PART_COLORS = {"draft": ORANGE, "verify": BLUE, "accept": GREEN, "rollback": PURPLE, "other": "#B0B0B0"}


@figure("time", "where the time goes", table="Acceptance and time")
def time(run: Run) -> Figure:
    rows = [row for each in run.series for row in each.rows if row.ms_per_token > 0]
    rows.sort(key=lambda row: run.drafters.index(row.config.drafter))
    if not rows:
        raise NoDataError("no speculative configuration has finished a step")
    # Rows of bars from the top down, with a gap between drafters.
    places = np.array([i + 0.6 * run.drafters.index(row.config.drafter) for i, row in enumerate(rows)])
    body = new_figure(run, 1.15 + 0.17 * (places[-1] + 1))
    axes = body.subplots()
    left = np.zeros(len(rows))
    total = np.array([row.ms_per_token for row in rows])
    read = np.array([row.share_draft_prefill for row in rows])
    for part in PARTS:
        wide = total * np.array([row.share[part] for row in rows])
        color = _PART_COLORS[part]
        axes.barh(places, wide, 0.78, left=left, color=color, label=part, edgecolor="white", linewidth=0.3)
        if part == "draft" and (total * read > 0.01 * total.max()).any():
            name = "(of it the prompt)"
            axes.barh(
                places,
                total * read,
                0.78,
                color="none",
                edgecolor="#5A3C00",
                hatch="////",
                linewidth=0,
                label=name,
            )
        left += wide
    plain = [row.ms_per_token for row in run.plain if not math.isnan(row.ms_per_token)]
    for base in plain:
        axes.axvline(base, color=BLACK, linewidth=0.9, linestyle=DASHED, label="plain")
    axes.set_yticks(places, row_names(rows, run))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 1.05 * max(total.max(), *plain))
    axes.set_xlabel("time per token (ms)")
    grid_lines(axes, "x")
    remark = "Time of all steps over all emitted tokens; time to first token apart."
    return finish(body, run, "Where the time goes", remark)


@figure("generation", "draft length, acceptance and entropy over one generation")
def generation(run: Run) -> Figure:
    one = _one_generation(run)
    drafted, accepted = one["steps_drafted"], one["steps_accepted"]
    first = int(one["new_tokens"]) - int(np.sum(one["steps_emitted"]))
    edges = first + np.concatenate(([0], np.cumsum(one["steps_emitted"])))
    notes = _drawable(_notes(one["steps_policy"], len(drafted)))
    body = new_figure(run, 3.6 if notes else 2.5)
    both = body.subplots(
        2 if notes else 1, 1, sharex=True, squeeze=False, height_ratios=[1.2, 1.0] if notes else None
    )[:, 0]
    upper = both[0]
    upper.stairs(accepted, edges, fill=True, color=SKY, alpha=0.75, label="accepted")
    upper.stairs(drafted, edges, color=BLUE, linewidth=1.2, baseline=None, label="drafted (γ)")
    upper.set_ylim(0, max(1, int(drafted.max(initial=1))) * 1.12)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    upper.set_ylabel("tokens in the step")
    upper.set_xlim(edges[0], edges[-1])
    grid_lines(upper)
    if notes:
        lower = both[1]
        for number, (name, values) in enumerate(notes.items()):
            color = COLORS[(number + 1) % len(COLORS)]
            lower.plot(
                (edges[:-1] + edges[1:]) / 2,
                values,
                color=color,
                linewidth=1.2,
                linestyle=("-", "--", ":")[number % 3],
                label=short(name, 20),
            )
        lower.set_ylabel(
            "entropy / log V" if all(name.startswith("H") for name in notes) else "noted by the policy"
        )
        lower.set_ylim(bottom=min(0.0, *(float(np.nanmin(values)) for values in notes.values())))
        grid_lines(lower)
    both[-1].set_xlabel("token of the output")
    which = f"Prompt {short(one['prompt'], 40)}, {short(one['label'], 48)}: the most usual in its tokens per step."
    remark = "A column is a step, as wide as the tokens it emitted."
    meanings = [f"{name}: {_NOTES[name]}." for name in notes if name in _NOTES]
    return finish(body, run, "One generation, step by step", which, remark, *meanings)


_NOTES = {
    "H_norm": "entropy of the drafter's prediction over log V, V the size of the vocabulary (0: certain, 1: no idea)",
    "H_ema": "its moving average, which sets γ",
    "survival": "chance that the whole draft is accepted, as the policy sees it",
    "lambda": "the least chance of acceptance to go on drafting",
    "threshold": "the least probability of a draft to go on drafting",
}
"""What the notes of policies mean."""


def _one_generation(run: Run) -> pd.Series[Any]:
    """Of one configuration the generation with the most usual number of tokens per step. The configuration is one whose
    policy notes an entropy, or else anything, or else the fastest; γ above 1 goes first."""
    df = run.results.generations
    configs, drafted, policies = (df[name].to_numpy() for name in ("config", "steps_drafted", "steps_policy"))
    chosen = ((df["status"] == "ok") & (df["kind"] == "speculative")).to_numpy()
    drafting = [int(i) for i in np.flatnonzero(chosen) if np.any(drafted[i])]
    if not drafting:
        raise NoDataError("nothing was drafted")
    noting = [i for i in drafting if _drawable(_notes(policies[i], len(drafted[i])))]
    noting.sort(key=lambda i: not any(name.startswith("H") for name in policies[i]))
    longer = {configs[i] for i in drafting if np.max(drafted[i]) > 1}
    names = [name for name in dict.fromkeys(configs[drafting]) if name in longer or not longer]
    speedups = {row.config.id: row.speedup.value for row in run.rows if row.measured}
    config = str(configs[noting[0]] if noting else max(names, key=lambda name: speedups.get(name, 0.0)))
    emitted = df["steps_emitted"].to_numpy()
    usual = run.summary.row(config).tokens_per_step.value
    mine = [i for i in noting or drafting if configs[i] == config]
    place = min(mine, key=lambda i: abs(float(np.mean(emitted[i])) - usual))
    return df.iloc[place]


def _notes(policy: Any, steps: int) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """What the policy noted in every step."""
    found = {one_line(name): np.asarray(values, dtype=float) for name, values in (policy or {}).items()}
    return {name: values for name, values in found.items() if steps and len(values) == steps}


def _drawable(
    notes: dict[str, np.ndarray[Any, np.dtype[np.float64]]],
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Notes that are shares or entropies: γ has an axis of its own, and times and rates have another scale.

    An average without a memory repeats what it is of, and is left out, as is what never changes.
    """
    others = ("gamma", "γ", "rate", "probe", "drafter_pass_s", "rest_s")
    found: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for name, values in notes.items():
        repeated = any(np.array_equal(values, known, equal_nan=True) for known in found.values())
        finite = values[np.isfinite(values)]
        if not name.lower().startswith(others) and not repeated and len(finite) and np.ptp(finite) > 0:
            found[name] = values
    return found
