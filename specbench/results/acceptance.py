"""Which drafted tokens were accepted: by position, by rank in draft trees, and how many in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from specbench.base.record import ratio
from specbench.results.results import Results
from specbench.results.steps import at_least, rank_counts
from specbench.results.summary import by_config, configs_of, reported
from specbench.rows import Row


@dataclass(frozen=True, slots=True)
class PositionRow:
    """Acceptance at one position in the drafts of a configuration.

    Attributes:
        position: Counted from 1.
        drafted, tested, accepted: Numbers of steps. Of a server whose drafts differ in length, ``drafted`` and
            ``tested`` are upper bounds after the first position, and the rates lower bounds (``least``).
        rate, rate_of_drafted: Accepted over tested, and over drafted.
        alpha: Mean of ``sum_x min(p, q)`` over tested tokens.
    """

    config: Row
    position: int
    drafted: int
    tested: int
    accepted: int
    rate: float
    rate_of_drafted: float
    alpha: float
    least: bool


@dataclass(frozen=True, slots=True)
class RankRow:
    """Nodes of one depth and rank in the draft trees of a configuration.

    Attributes:
        depth: Counted from 1.
        rank: Number of children of the same parent that are tested before it.
        rate: Accepted over tested nodes.
    """

    config: Row
    depth: int
    rank: int
    tested: int
    accepted: int
    rate: float


@dataclass(frozen=True, slots=True)
class AcceptedRow:
    """The steps of a configuration that had one accepted length.

    Attributes:
        share: Their share of the steps that drafted something.
        share_iid: This share, if every test passed independently with probability α.
        undrafted: Share of all steps that drafted nothing.
    """

    config: Row
    accepted: int
    steps: int
    share: float
    share_iid: float
    undrafted: float


def positions(results: Results) -> list[PositionRow]:
    """Return acceptance by draft position, for each configuration from the first position to the last."""
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
        for position, (drafted, tested, accepted, alpha) in enumerate(columns, 1):
            rates = ratio(accepted, tested), ratio(accepted, drafted)
            found.append(PositionRow(config, position, drafted, tested, accepted, *rates, alpha, least=False))
    return found


def _positions_of_server(results: Results, config: Row) -> list[PositionRow]:
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
    found = []
    for position, (accepted, tested) in enumerate(zip(kept, [drafts, *kept], strict=False), 1):
        rates = ratio(accepted, tested), ratio(accepted, drafts)
        least = position > 1 and drafted < drafts * len(kept)
        found.append(PositionRow(config, position, drafts, tested, accepted, *rates, math.nan, least))
    return found


def ranks(results: Results) -> list[RankRow]:
    """Return acceptance in draft trees by depth and rank, for configurations with trees."""
    counts = {str(config): rank_counts(mine) for config, mine in results.done.groupby("config", sort=False)}
    return [
        RankRow(config, depth, rank, tested, accepted, ratio(accepted, tested))
        for config in configs_of(results)
        for (depth, rank), (tested, accepted) in sorted(counts.get(config.id, {}).items())
    ]


def accepted_lengths(results: Results) -> list[AcceptedRow]:
    """Return how often each accepted length occurred."""
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
        shares = counts / counts.sum()
        found += [
            AcceptedRow(config, n, int(counts[n]), float(shares[n]), reach[n] - reach[n + 1], undrafted)
            for n in range(longest + 1)
        ]
    return found
