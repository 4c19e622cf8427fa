"""Calibrate the static tree of a drafter: count accepted candidates by rank on a few prompts, and choose a tree.

The target decodes with trees that have several children at each node of their first branch, with the verification
method that will be used. From how often the child of each rank is accepted, Sequoia's dynamic program gives the best
tree for every number of nodes and depth (Chen et al. 2024, arXiv 2402.12374); measured times of forward passes show
which one is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.bench.passes import TREE_NODES, pass_costs, time_passes
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.metrics import count_ranks
from specbench.decoding.records import Step
from specbench.decoding.request import DraftPlan
from specbench.decoding.theory import (
    PassCosts,
    expected_tokens_of_tree,
    predicted_speedup,
    read_by_depth,
)
from specbench.generate import GenerationRun
from specbench.models.calibrations import TreeChoice, TreeKey
from specbench.policies.trees import StaticTree, best_shapes, falling

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target
    from specbench.specs.verification import VerificationName

_RANKS = 6  # children of a node
_LEVELS = 4  # nodes of the first branch
_MAX_NODES, _MAX_DEPTH = 32, 10  # of the trees to choose from
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33)
_TIMED = 7  # passes of each kind; the median counts
_NAME = "drafter"


@dataclass(frozen=True)
class PlannedTree:
    """The best tree for some acceptance counts."""

    nodes: int
    depth: int
    tokens: float
    speedup: float


@dataclass(frozen=True)
class TreeCalibration:
    """The result of a calibration.

    Attributes:
        counts: By (depth from 1, rank from 0): how often a candidate was tested, and how often it was accepted.
        shares: By rank, the share of nodes at which that candidate was accepted.
        tree: The chosen tree with its prediction.
        chain: The best chain according to the same counts and times.
        complete: Whether all prompts were decoded in time.
    """

    counts: Mapping[tuple[int, int], Sequence[int]]
    shares: Sequence[float]
    choice: TreeChoice
    tree: PlannedTree
    chain: PlannedTree
    complete: bool


def calibrate_tree(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    key: TreeKey,
    *,
    sampling: Sampling,
    tokens: int = 64,
    seconds: float = 600.0,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> TreeCalibration:
    """Count accepted candidates by rank, time passes, and choose a tree. Nothing is stored.

    Args:
        key: The circumstances that the tree is calibrated for.
        clock: A function that returns the time; ``None`` for the clock of the target's device.

    Raises:
        UsageError: The drafter drafts no trees, the verification takes none, or nothing could be counted.
    """
    clock = clock or clock_for(str(target.scorer.device))
    limit = target.scorer.context_limit
    fitting = [prompt for prompt in prompts if limit is None or len(prompt) < limit]
    method: VerificationName | None = key.verification or None  # type: ignore[assignment]
    steps: list[Step] = []
    end, complete = clock.now() + seconds, True
    for done, prompt in enumerate(fitting):
        if progress is not None:
            progress.update("answering the prompts", done, len(fitting))
        run = GenerationRun(
            prompt,
            target,
            drafter,
            policy=DraftPlan(_comb(), verification=method),
            sampling=sampling,
            max_new_tokens=tokens,
            seed=done,
        )
        for record in run:
            if isinstance(record, Step):
                steps.append(record)
            complete = clock.now() < end
            if not complete:
                break
        if not complete:
            break
    counts = count_ranks((step.widths, step.ranks) for step in steps)
    if not counts:
        raise UsageError(
            "Nothing was drafted: the prompts do not fit the context, answers end immediately, or the time was up.",
            "Choose other prompts, or allow more minutes.",
        )
    times = time_passes(
        target.scorer,
        {_NAME: drafter},
        fitting[0],
        _WIDTHS,
        clock,
        _TIMED,
        Random(0),
        progress,
        tree_nodes=TREE_NODES,
    )
    nodes = sum(tested for (_, rank), (tested, _) in counts.items() if rank == 0)
    shares = [0.0] * (1 + max(rank for _, rank in counts))
    for (_, rank), (_, kept) in counts.items():
        shares[rank] += kept / nodes
    ranks, costs = _percentages(shares), pass_costs(times)
    tree, chain = best_tree(ranks, costs), best_tree(ranks[:1], costs)
    choice = TreeChoice(
        target=target.name,
        drafter=drafter.name,
        temperature=sampling.temperature,
        verification=key.verification,
        ranks=ranks,
        tested=nodes,
        nodes=tree.nodes,
        depth=tree.depth,
        speedup=tree.speedup,
    )
    return TreeCalibration(counts, shares, choice, tree, chain, complete)


def _comb() -> StaticTree:
    """Return a tree with several children at each node of the first branch, and none elsewhere."""
    return StaticTree.shaped(
        [_RANKS * level - _RANKS if level else -1 for level in range(_LEVELS) for _ in range(_RANKS)]
    )


def _percentages(rates: Sequence[float]) -> tuple[int, ...]:
    """Return shares of a whole as rounded percentages: at most 100 in sum, without trailing zeros."""
    rounded = [round(100 * rate) for rate in rates]
    while len(rounded) > 1 and not rounded[-1]:
        rounded.pop()
    return (min(rounded[0], 100 - sum(rounded[1:])), *rounded[1:])


def best_tree(ranks: Sequence[int], costs: PassCosts) -> PlannedTree:
    """Return the tree with the highest predicted speedup, ``E / (Σ c(r) + v(n))``; if several, the smallest.

    Args:
        ranks: Acceptance in percent, by rank; a single one gives chains.
        costs: Of passes.
    """
    rates = falling(ranks)
    shape = best_shapes(rates)
    best: PlannedTree | None = None
    for nodes in range(1, _MAX_NODES + 1):
        for depth in range(1, min(nodes, _MAX_DEPTH) + 1):
            parents = shape(nodes, depth)
            if len(parents) < nodes and best is not None:
                continue  # more nodes gain nothing
            tokens = expected_tokens_of_tree(parents, rates)
            if len(ranks) > 1:
                read = read_by_depth(parents)
                passes = sum(costs.c(_NAME, nodes) for nodes in (0, *read))
            else:
                passes = costs.drafting(_NAME, 1, len(parents))
            speedup = predicted_speedup(tokens, 1, passes, costs.v(len(parents) + 1))
            if best is None or speedup > best.speedup:
                best = PlannedTree(nodes, depth, tokens, speedup)
    assert best is not None
    return best
