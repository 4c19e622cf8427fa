"""Which drafted tokens were accepted: by position, along the answer and the context, and with shorter drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from specbench.base.record import Estimate, ratio
from specbench.results import stats
from specbench.results.metrics import Figures
from specbench.results.summary import Summary

_SHORTEST = 64
"""Tokens of the first range of an answer or a context; later ranges are twice as long as the one before."""

_FEWEST_STEPS = 30
"""With fewer steps a range is not shown."""


def positions(summary: Summary) -> list[SimpleNamespace]:
    """Return acceptance by draft position, for each configuration from the first position to the last.

    Returns:
        For each: ``config``, ``position`` from 1; ``drafted``, ``tested`` and ``accepted``, in how many steps; ``rate``
        and ``rate_of_drafted``, accepted over tested, and over drafted; ``alpha``, the mean of ``sum_x min(p, q)`` over
        tested tokens; and ``least``. Of a server whose drafts differ in length, counts after the first position are
        upper bounds and rates lower bounds: ``least``.
    """
    return [
        SimpleNamespace(
            config=row.config,
            position=place,
            drafted=drafted,
            tested=tested,
            accepted=accepted,
            rate=ratio(accepted, tested),
            rate_of_drafted=ratio(accepted, drafted),
            alpha=alpha,
            least=least and place > 1,
        )
        for row in summary.rows
        for least, counts in [(False, _of_steps(row)) if row.reports_steps else _of_server(row)]
        for place, (drafted, tested, accepted, alpha) in enumerate(counts, 1)
    ]


def _of_steps(row: Figures) -> Iterator[tuple[int, int, int, float]]:
    """Yield how many were drafted, tested and accepted at each position, and their mean α (unknown of servers)."""
    steps = row.steps
    for place in range(1, int(steps["drafted"].max()) + 1 if len(steps) else 1):
        drafted, tested, accepted = (
            int((steps[name] >= place).sum()) for name in ("drafted", "tested", "accepted")
        )
        alphas = [each[place - 1] for each in steps["expected_acceptance"] if each and len(each) >= place]
        yield drafted, tested, accepted, float(np.mean(alphas)) if alphas else math.nan


def _of_server(row: Figures) -> tuple[bool, list[tuple[int, int, int, float]]]:
    """Return the same as a server reported it, with each answer or else for groups of answers, and whether these are
    bounds: drafts differ in length.
    """
    reports = row.answers[row.answers["accepted_at"].notna()]
    if reports.empty:
        reports = row.groups[row.groups["accepted_at"].notna()]
    kept = [int(sum(counts)) for counts in zip_longest(*reports["accepted_at"], fillvalue=0)]
    drafts, drafted = int(reports["drafts"].sum()), int(reports["drafted"].sum())
    tested = [drafts, *kept]
    counts = [(drafts, *each, math.nan) for each in zip(tested, kept, strict=False)] if drafts else []
    return drafted < drafts * len(kept), counts


def along(summary: Summary) -> list[SimpleNamespace]:
    """Return acceptance along answers and contexts, in ranges that double; of steps whose place is known.

    Returns:
        For each range of a configuration that has several: ``config``; ``of``, ``answer`` or ``context``, whose length
        at the beginning of a step is meant; ``first`` and ``last``, its ends; ``steps``; ``tokens_per_step``, and
        ``rate``, accepted over drafted.
    """
    steps, found = summary.results.placed_steps, list[SimpleNamespace]()
    prompts = steps["output"].map(summary.results.generations["prompt_tokens"])
    for row in summary.rows:
        mine = steps[steps["config"] == row.config.id]
        for of, length in (("answer", mine["place"]), ("context", mine["place"] + prompts[mine.index])):
            ends = _SHORTEST * 2 ** (np.log2(length.astype(float) / _SHORTEST).clip(-1.0) // 1 + 1)
            parts = {int(end): mine[ends == end] for end in sorted(set(ends))}
            parts = {end: part for end, part in parts.items() if len(part) >= _FEWEST_STEPS}
            for end, part in parts.items() if len(parts) > 1 and mine["drafted"].any() else ():
                first, rate = (
                    end // 2 * (end > _SHORTEST),
                    ratio(part["accepted"].sum(), part["drafted"].sum()),
                )
                tokens = _per_step(part["emitted"], np.ones(len(part)), part["prompt"])
                found.append(
                    SimpleNamespace(
                        config=row.config, of=of, first=first, last=end - 1, steps=len(part),
                        tokens_per_step=tokens, rate=rate,
                    )
                )  # fmt: skip
    return found


def _per_step(tokens: ArrayLike, steps: ArrayLike, prompts: pd.Series[Any]) -> Estimate:
    return stats.pooled_rate(tokens, steps, prompts.to_numpy(), least=1.0)


def shorter(summary: Summary) -> list[SimpleNamespace]:
    """Return what each server that reports its steps would give with shorter drafts. Longer ones cannot be predicted.

    The time of a step is taken to grow evenly with γ, from plain decoding's to that at the measured γ.

    Returns:
        For each server, from γ = 1 to what was measured: ``config``, ``gamma``, ``tokens_per_step``, and ``speedup``,
        NaN unless its baseline drafts nothing.
    """
    found, plain = [], {row.config.id for row in summary.rows if not (row.answers["drafted"] > 0).any()}
    for row in summary.rows:
        if not (row.is_server and row.reports_steps and row.steps["drafted"].max() > 1):
            continue
        answers, tokens = row.answers[row.answers["reported_steps"] > 0], dict[int, Estimate]()
        gammas = range(1, int(row.steps["drafted"].max()) + 1)
        for g in gammas:
            fewer = row.steps.groupby("output").size() - _steps_with(row.steps, g)
            count = answers["reported_steps"] - fewer.reindex(answers.index).fillna(0.0)
            tokens[g] = _per_step(answers["emitted_in_steps"], count, answers["prompt"])
        over_plain = row.measured and row.config.baseline in plain
        time = tokens[gammas[-1]].value / row.speedup.value if over_plain else math.nan
        found += [
            SimpleNamespace(
                config=row.config, gamma=g, tokens_per_step=tokens[g],
                speedup=tokens[g].value / (1.0 + (time - 1.0) * g / gammas[-1]),
            )
            for g in gammas
        ]  # fmt: skip
    return found


def _steps_with(steps: pd.DataFrame, gamma: int) -> pd.Series[float]:
    """Return how many steps each output would have taken with drafts of ``gamma`` tokens.

    A step of t tokens becomes t / (γ + 1) of them, rounded up: all but its last token were accepted. Only behind a
    longest draft that was accepted whole the last token is the target's, and would be accepted or not; it is taken to
    be as often as the last token of such drafts, and then the next step goes on with the same draft.
    """
    drafted, accepted, output = steps["drafted"], steps["accepted"], steps["output"]
    whole = (drafted == drafted.max()) & (accepted == drafted)
    chance = ratio(whole.sum(), ((drafted == drafted.max()) & (accepted >= drafted - 1)).sum())
    run = (~whole.shift(fill_value=False) | (output != output.shift())).cumsum()
    ended = -(-steps["emitted"] // (gamma + 1)).groupby(output).sum()
    joined = -(-steps["emitted"].groupby([output, run]).sum() // (gamma + 1)).groupby(level=0).sum()
    return joined * chance + ended * (1.0 - chance) if whole.any() else ended.astype(float)


def schedule(rows: list[SimpleNamespace]) -> dict[str, list[list[int]]]:
    """Return the fastest γ of ``shorter`` by batch size, 0 where none is faster than plain decoding, for each server
    with several sizes: from, to, γ, as vLLM's ``num_speculative_tokens_per_batch_size``.
    """
    best: dict[str, dict[int, tuple[float, int]]] = {}
    for row in rows:
        sizes, size = best.setdefault(row.config.drafter, {}), row.config.condition.batch or 1
        if not math.isnan(row.speedup):
            sizes[size] = max(sizes.get(size, (1.0, 0)), (row.speedup, row.gamma))
    return {
        server: [[low + 1, high, sizes[high][1]] for low, high in pairwise([0, *sorted(sizes)])]
        for server, sizes in best.items()
        if len(sizes) > 1
    }
