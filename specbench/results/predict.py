"""Speedups predicted from the measured steps and the measured costs of forward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specbench.base.record import NO_FIGURE, Estimate, ratio
from specbench.decoding.theory import PassCosts, read_by_depth, reading_seconds
from specbench.results import stats

if TYPE_CHECKING:
    import pandas as pd


def predict(steps: pd.DataFrame, drafter: str, timed: PassCosts, prompt_tokens: pd.Series[int]) -> Estimate:
    """Predict the speedup from each prompt's steps and the run's costs, as a geometric mean over prompts.

    Args:
        steps: The steps of a configuration, see ``step_frame``.
        drafter: Its drafter.
        timed: Times of forward passes in this run.
        prompt_tokens: The length of the prompt of each output.
    """
    if not timed.target_s.get(1) or not steps["drafted"].any():
        return NO_FIGURE
    if drafter in timed.drafter_s:
        c, later = timed.c(drafter), timed.drafting(drafter, 0, 1)
    elif steps["passes"].any():  # not timed separately: what a drafted token took in these steps
        c = (steps["draft_s"] - steps["draft_prefill_s"]).sum() / steps["passes"].sum() / timed.target_s[1]
        later = c
    else:
        return NO_FIGURE
    v = np.array([timed.v(n) for n in range(int(steps["nodes"].max()) + 2)])
    wider: dict[tuple[int, ...], float] = {(): 0.0}  # extra cost by tree, in which nodes count from 1

    def extra(parents: list[int] | None) -> float:
        tree = tuple(parents or ()) if drafter in timed.rows_s else ()
        if tree not in wider:
            depths = read_by_depth([parent - 1 for parent in tree])
            wider[tree] = sum(timed.c(drafter, nodes) - later for nodes in depths)
        return wider[tree]

    reading = timed.reading_s.get(drafter, {})
    found, prompts = [], []
    for prompt, mine in steps.groupby("prompt"):
        trees = np.array([extra(parents) for parents in mine["parents"]])
        verify = v[mine["nodes"] + 1].sum() + trees.sum()
        # Its pass that reads the prompt drafts as well.
        readers = np.unique(mine["output"][mine["draft_prefill_s"] > 0]).tolist() if reading else []
        reading_s = sum(reading_seconds(reading, float(prompt_tokens[output])) for output in readers)
        drafts = (mine["passes"] > 0).sum()
        drafting = (drafts - len(readers)) * c + (mine["passes"].sum() - drafts) * later
        found.append(ratio(mine["emitted"].sum(), drafting + verify + reading_s / timed.target_s[1]))
        prompts.append(prompt)
    return stats.geometric_mean(found, prompts)
