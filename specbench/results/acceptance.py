"""Which drafted tokens were accepted: by position, by rank in draft trees, and how many in a step."""

from __future__ import annotations

import math
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np

from specbench.base.record import ratio
from specbench.results.results import Results
from specbench.results.steps import at_least, rank_counts
from specbench.results.summary import by_config, configs_of, reported
from specbench.rows import Row


def positions(results: Results) -> list[SimpleNamespace]:
    """Return acceptance by draft position, for each configuration from the first position to the last.

    Returns:
        For each: ``config``, ``position`` from 1; ``drafted``, ``tested`` and ``accepted``, in how many steps; ``rate``
        and ``rate_of_drafted``, accepted over tested, and over drafted; ``alpha``, the mean of ``sum_x min(p, q)`` over
        tested tokens; and ``least``. Of a server whose drafts differ in length, counts after the first position are
        upper bounds and rates lower bounds: ``least``.
    """
    steps, found = by_config(results), []
    for config in configs_of(results):
        if config.kind == "server":
            found += _positions_of_server(results, config)
            continue
        mine = steps.get(config.id)
        if mine is None or not (longest := int(mine["drafted"].max(initial=0))):
            continue
        counts = [at_least(mine[name], longest).tolist() for name in ("drafted", "tested", "accepted")]
        columns = zip(*counts, mine.alpha_by_position(longest).tolist(), strict=True)
        found += [_position(config, place, *each) for place, each in enumerate(columns, 1)]
    return found


def _position(
    config: Row, position: int, drafted: int, tested: int, accepted: int, alpha: float, *, least: bool = False
) -> SimpleNamespace:
    rate, of_drafted = ratio(accepted, tested), ratio(accepted, drafted)
    return SimpleNamespace(
        config=config,
        position=position,
        drafted=drafted,
        tested=tested,
        accepted=accepted,
        rate=rate,
        rate_of_drafted=of_drafted,
        alpha=alpha,
        least=least,
    )


def _positions_of_server(results: Results, config: Row) -> list[SimpleNamespace]:
    """Return acceptance by position as a server reported it: with each answer, or else for groups of answers."""
    reports = reported(results, results.done[results.done["config"] == config.id])
    reports = reports[reports["accepted_at"].notna()]
    if reports.empty:
        groups = results.groups
        reports = groups[(groups["config"] == config.id) & groups["accepted_at"].notna()]
    kept = [int(sum(counts)) for counts in zip_longest(*reports["accepted_at"], fillvalue=0)]
    drafts, drafted = int(reports["drafts"].sum()), int(reports["drafted"].sum())
    if not drafts:
        return []
    differ = drafted < drafts * len(kept)
    return [
        _position(config, place, drafts, tested, accepted, math.nan, least=place > 1 and differ)
        for place, (accepted, tested) in enumerate(zip(kept, [drafts, *kept], strict=False), 1)
    ]


def ranks(results: Results) -> list[SimpleNamespace]:
    """Return acceptance in draft trees, for configurations with trees.

    Returns:
        For each ``depth``, from 1, and ``rank``, the number of children of the same parent that are tested before:
        ``config``, ``tested`` and ``accepted`` nodes, and their ``rate``.
    """
    counts = {str(config): rank_counts(mine) for config, mine in results.done.groupby("config", sort=False)}
    return [
        SimpleNamespace(
            config=config,
            depth=depth,
            rank=rank,
            tested=tested,
            accepted=accepted,
            rate=ratio(accepted, tested),
        )
        for config in configs_of(results)
        for (depth, rank), (tested, accepted) in sorted(counts.get(config.id, {}).items())
    ]


def accepted_lengths(results: Results) -> list[SimpleNamespace]:
    """Return how often each accepted length occurred.

    Returns:
        For each ``config`` and length ``accepted``: the number of ``steps``; their ``share`` of those that drafted;
        ``share_iid``, this share if every test passed independently with probability α; and ``undrafted``, the share of
        all steps that drafted nothing.
    """
    steps, found = by_config(results), []
    for config in configs_of(results):
        mine = steps.get(config.id)
        if mine is None or not mine["drafted"].any():
            continue
        drafting = mine["drafted"] > 0
        gammas = mine["drafted"][drafting]
        longest = int(gammas.max())
        counts = np.bincount(mine["accepted"][drafting], minlength=longest + 1)
        alpha = ratio(mine.alpha_sum.sum(), mine["tested"].sum())
        # At least n pass if n were drafted; steps differ in their draft length.
        reach = [float((gammas >= n).mean() * alpha**n) for n in range(longest + 1)] + [0.0]
        undrafted = float(1.0 - drafting.mean())
        found += [
            SimpleNamespace(
                config=config,
                accepted=n,
                steps=int(count),
                share=float(count / counts.sum()),
                share_iid=reach[n] - reach[n + 1],
                undrafted=undrafted,
            )
            for n, count in enumerate(counts)
        ]
    return found
