"""Speedups predicted from the measured steps and the measured costs of forward passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from specbench.base.record import NO_FIGURE, Estimate, ratio
from specbench.decoding.metrics import kept_by_rank
from specbench.decoding.theory import (
    PassCosts,
    SharedCosts,
    expected_tokens,
    expected_tokens_of_tree,
    predicted_speedup,
    predicted_throughput_ratio,
    prompt_readings,
    read_by_depth,
    reading_seconds,
)
from specbench.results import stats
from specbench.results.experts import experts_by_rows
from specbench.results.results import Results
from specbench.results.run import RunConfig
from specbench.results.steps import Steps, rank_counts


@dataclass(frozen=True, slots=True)
class Prediction:
    """The speedup that theory predicts for a configuration.

    Attributes:
        speedup: Predicted from the tokens per step.
        speedup_iid: Predicted from α.
        c: Time of a drafter's forward pass over the target's with one token; NaN for batches.
    """

    speedup: Estimate = NO_FIGURE
    speedup_iid: Estimate = NO_FIGURE
    c: float = math.nan


NO_PREDICTION = Prediction()


def predict(steps: Steps, config: RunConfig, timed: PassCosts, results: Results) -> Prediction:
    """Predict the speedup from each prompt's steps and the run's costs, as a geometric mean over prompts.

    Args:
        steps, config: A configuration and its steps.
        timed: Times of forward passes in this run.
        results: The run.
    """
    drafter = config.drafter
    if not timed.target_s.get(1) or not steps["drafted"].any():
        return NO_PREDICTION
    if timed.experts:  # the text's own tokens share other experts than those of the timed passes
        read = experts_by_rows(results.generations.iloc[np.unique(steps.row)])
        timed = timed.reading({rows: ratio for rows, (_, ratio) in read.items()})
    if drafter in timed.drafter_s:
        c, later = timed.c(drafter), timed.drafting(drafter, 0, 1)
    elif steps["passes"].any():  # not timed separately: what a drafted token took in these steps
        c = (steps["draft_s"] - steps["draft_prefill_s"]).sum() / steps["passes"].sum() / timed.target_s[1]
        later = c
    else:
        return NO_PREDICTION
    widest = int(steps["nodes"].max()) + 1
    v = np.array([timed.v(n) for n in range(widest + 1)])
    wider = np.zeros(len(steps.trees) + 1)  # extra cost by tree; the last item is that of chains
    if drafter in timed.rows_s:
        for tree in np.unique(steps.tree[steps.tree >= 0]):
            wider[tree] = sum(timed.c(drafter, nodes) - later for nodes in read_by_depth(steps.trees[tree]))
    reading = timed.reading_s.get(drafter, {})
    lengths = results.generations["prompt_tokens"].to_numpy() if reading else ()
    found, iid, prompts = [], [], []
    for prompt, mine in steps.split(steps.prompt).items():
        longest = int(mine["drafted"].max())
        alpha = ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        by_length = [1.0, *(expected_tokens(alpha, gamma) for gamma in range(1, longest + 1))]
        tokens_iid = np.array(by_length)[mine["drafted"]]
        if grown := np.unique(mine.tree[mine.tree >= 0]).tolist():
            rates = kept_by_rank(rank_counts(results.generations.iloc[np.unique(mine.row)]))
            for tree in grown:
                tokens_iid[mine.tree == tree] = expected_tokens_of_tree(steps.trees[tree], rates)
        verify = v[mine["nodes"] + 1].sum() + wider[mine.tree].sum()
        # Its pass that reads the prompt drafts as well.
        readers = np.unique(mine.row[mine["draft_prefill_s"] > 0]).tolist() if reading else []
        reading_s = sum(reading_seconds(reading, float(lengths[row])) for row in readers)
        drafts = (mine["passes"] > 0).sum()
        drafting = (drafts - len(readers)) * c + (mine["passes"].sum() - drafts) * later
        cost = (1, drafting, verify + reading_s / timed.target_s[1])
        found.append(predicted_speedup(mine["emitted"].sum(), *cost))
        iid.append(predicted_speedup(tokens_iid.sum(), *cost))
        prompts.append(prompt)
    return Prediction(stats.geometric_mean(found, prompts), stats.geometric_mean(iid, prompts), c)


def predict_batch(steps: Steps, config: RunConfig, timed: SharedCosts, results: Results) -> Prediction:
    """Predict the speedup from each group's steps and the costs of shared forwards, as a geometric mean over groups.

    The batch must be a closed loop of as many clients as the batch size. Prefill is taken to last as long as in
    plain decoding. For the arguments see ``predict``.
    """
    batch, df = config.batch or 1, results.generations
    drafter = timed.drafter_s.get(config.drafter, {})
    if 1 not in timed.target_s.get(batch, {}) or batch not in drafter or not steps["drafted"].any():
        return NO_PREDICTION
    if config.arrivals != f"closed:{batch}":
        return NO_PREDICTION
    plain = df[(df["config"] == config.baseline) & (df["status"] == "ok")]
    read = plain.groupby(["group", "repeat"])[
        "ttft_s"
    ].max()  # in a batch, every request waits for all prompts
    first = read.groupby("group").mean().to_dict()
    repeats = df["repeat"].to_numpy(dtype=np.intp)
    groups, names = pd.factorize(df["group"])
    ratios: list[float] = []
    iid: list[float] = []
    units = []
    for code, mine in steps.split(groups[steps.row]).items():
        name = str(names[code])
        if name not in first:
            continue
        requests = len(np.unique(mine.row))
        verified = float(mine["nodes"].mean()) + 1.0
        alpha = ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        readings, more_s = _prompts_read(mine, repeats, batch)
        by_alpha = np.mean([expected_tokens(alpha, gamma) for gamma in mine["drafted"]])
        step_s = timed.draft_s(config.drafter, batch, mine["passes"].tolist())
        for found, tokens in ((ratios, mine["emitted"].mean()), (iid, by_alpha)):
            found.append(
                predicted_throughput_ratio(
                    tokens=float(tokens),
                    plain_s=timed.target_pass_s(batch, 1),
                    step_s=step_s + max(timed.target_pass_s(batch, verified), timed.target_pass_s(batch, 1)),
                    first_s=float(first[name]),
                    later_tokens=float(mine["emitted"].sum()) / requests,
                    more_s=more_s,
                    readings=readings,
                )
            )
        units.append(name)
    return Prediction(stats.geometric_mean(ratios, units), stats.geometric_mean(iid, units))


def _prompts_read(steps: Steps, repeats: NDArray[np.intp], batch: int) -> tuple[tuple[float, float], float]:
    """Return ``prompt_readings`` of a group in plain decoding and with its drafts, and the drafter's prefill seconds.

    Args:
        steps: Steps of all repeats of the group.
        repeats: The repeat of each row of the data frame.
        batch: Number of requests decoded together.
    """
    found = []
    for each in steps.split(repeats[steps.row]).values():
        _, places, counts = np.unique(each.row, return_inverse=True, return_counts=True)
        tokens, draft_s = (np.bincount(places, each[name]) for name in ("emitted", "draft_prefill_s"))
        plain, drafted = (prompt_readings(lengths.tolist(), batch) for lengths in (tokens, counts))
        found.append((plain, drafted, draft_s.max()))
    plain, drafted, more_s = np.mean(found, axis=0).tolist()
    return (plain, drafted), more_s
