"""Which drafts were accepted: by position, by rank in trees, and how many in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from specbench.base.record import ratio
from specbench.results.results import Results
from specbench.results.run import RunConfig
from specbench.results.steps import at_least, rank_counts
from specbench.results.summary import by_config, configs_of, reported


@dataclass(frozen=True, slots=True)
class PositionRow:
    """A position in the drafts of a configuration.

    Attributes:
        config: Which.
        position: From 1.
        drafted, tested, accepted: Numbers of steps that did so with it. A server reports what was accepted there, and
            how many steps drafted at all: where its drafts are of several lengths, the other two are after the first
            position the most that can be.
        rate: Accepted over tested.
        rate_of_drafted: Accepted over drafted.
        alpha: Mean of ``sum_x min(p, q)`` where tested.
        least: Whether the rates are the least that can be.
    """

    config: RunConfig
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
    """Nodes of one depth and rank in the trees of a configuration.

    Attributes:
        config: Which.
        depth: From 1.
        rank: How many candidates of the same node come before it.
        tested, accepted: Nodes there at whose place something was tested, and that were accepted.
        rate: Accepted over tested.
    """

    config: RunConfig
    depth: int
    rank: int
    tested: int
    accepted: int
    rate: float


@dataclass(frozen=True, slots=True)
class AcceptedRow:
    """Steps of a configuration that accepted so many drafts, of those that drafted something.

    Attributes:
        config: Which.
        accepted: How many drafts.
        steps: Number of steps.
        share: Of all that drafted.
        share_iid: What tests that pass independently with chance α would give.
        undrafted: Share of all steps that drafted nothing.
    """

    config: RunConfig
    accepted: int
    steps: int
    share: float
    share_iid: float
    undrafted: float


def positions(results: Results) -> list[PositionRow]:
    """Acceptance by draft position, for each configuration from the first to the last."""
    steps, found = by_config(results), []
    for config in configs_of(results):
        if config.kind == "server":
            found += _positions_of_server(results, config)
            continue
        mine = steps.get(config.id)
        longest = 0 if mine is None else int(mine["drafted"].max(initial=0))
        if mine is None or not longest:
            continue
        drafted, tested, accepted = (
            at_least(mine[name], longest).tolist() for name in ("drafted", "tested", "accepted")
        )
        alpha = mine.alpha_by_position(longest).tolist()
        found += [
            PositionRow(
                config, i + 1, drafted[i], tested[i], accepted[i],
                ratio(accepted[i], tested[i]), ratio(accepted[i], drafted[i]), alpha[i], least=False,
            )
            for i in range(longest)
        ]  # fmt: skip
    return found


def _positions_of_server(results: Results, config: RunConfig) -> list[PositionRow]:
    """From what a server reported of its answers, or of groups of them."""
    told = reported(results, results.done[results.done["config"] == config.id])
    told = told[told["kept_at"].notna()]
    if told.empty:
        groups = results.groups
        told = groups[(groups["config"] == config.id) & groups["kept_at"].notna()]
    kept = [int(sum(places)) for places in zip_longest(*told["kept_at"], fillvalue=0)]
    drafts, drafted = int(told["drafts"].sum()), int(told["drafted"].sum())
    if not drafts:
        return []
    return [
        PositionRow(
            config, place + 1, drafts, tested, accepted, ratio(accepted, tested), ratio(accepted, drafts),
            math.nan, least=place > 0 and drafted < drafts * len(kept),
        )
        for place, (accepted, tested) in enumerate(zip(kept, [drafts, *kept], strict=False))
    ]  # fmt: skip


def ranks(results: Results) -> list[RankRow]:
    """Acceptance in trees by depth and rank; none of configurations without trees."""
    done = results.done[["config", "steps_widths", "steps_ranks"]]
    counts = {str(config): rank_counts(mine) for config, mine in done.groupby("config", sort=False)}
    return [
        RankRow(config, depth, rank, tested, accepted, ratio(accepted, tested))
        for config in configs_of(results)
        for (depth, rank), (tested, accepted) in sorted(counts.get(config.id, {}).items())
    ]


def accepted_lengths(results: Results) -> list[AcceptedRow]:
    """How many drafts steps accepted, from none to all."""
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
            AcceptedRow(
                config, n, int(counts[n]), float(counts[n] / counts.sum()), reach[n] - reach[n + 1], undrafted
            )
            for n in range(longest + 1)
        ]
    return found
