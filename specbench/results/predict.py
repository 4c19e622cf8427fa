"""Speedups predicted from the measured steps and the measured costs of forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from specbench.base.record import ratio
from specbench.decoding.theory import PassCosts, read_by_depth, reading_seconds
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.steps import Steps
from specbench.rows import Row


def predict(steps: Steps, config: Row, timed: PassCosts, results: Results) -> dict[str, Any]:
    """Predict the speedup from each prompt's steps and the run's costs, as a geometric mean over prompts.

    Args:
        steps, config: A configuration and its steps.
        timed: Times of forward passes in this run.
        results: The run.

    Returns:
        The fields of ``SummaryRow`` on predictions, as far as there are any.
    """
    drafter = config.drafter
    if not timed.target_s.get(1) or not steps["drafted"].any():
        return {}
    if drafter in timed.drafter_s:
        c, later = timed.c(drafter), timed.drafting(drafter, 0, 1)
    elif steps["passes"].any():  # not timed separately: what a drafted token took in these steps
        c = (steps["draft_s"] - steps["draft_prefill_s"]).sum() / steps["passes"].sum() / timed.target_s[1]
        later = c
    else:
        return {}
    widest = int(steps["nodes"].max()) + 1
    v = np.array([timed.v(n) for n in range(widest + 1)])
    wider = np.zeros(len(steps.trees) + 1)  # extra cost by tree; the last item is that of chains
    if drafter in timed.rows_s:
        for tree in np.unique(steps.tree[steps.tree >= 0]):
            wider[tree] = sum(timed.c(drafter, nodes) - later for nodes in read_by_depth(steps.trees[tree]))
    reading = timed.reading_s.get(drafter, {})
    lengths = results.generations["prompt_tokens"].to_numpy() if reading else ()
    found, prompts = [], []
    for prompt, mine in steps.split(steps.prompt).items():
        verify = v[mine["nodes"] + 1].sum() + wider[mine.tree].sum()
        # Its pass that reads the prompt drafts as well.
        readers = np.unique(mine.row[mine["draft_prefill_s"] > 0]).tolist() if reading else []
        reading_s = sum(reading_seconds(reading, float(lengths[row])) for row in readers)
        drafts = (mine["passes"] > 0).sum()
        drafting = (drafts - len(readers)) * c + (mine["passes"].sum() - drafts) * later
        found.append(ratio(mine["emitted"].sum(), drafting + verify + reading_s / timed.target_s[1]))
        prompts.append(prompt)
    return {
        "predicted_speedup": stats.geometric_mean(found, prompts),
        "c": c,
    }
