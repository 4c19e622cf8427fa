"""Which tree is best for a drafter? What is kept of its candidates by rank is counted on a few prompts.

The target decodes with trees that have several candidates behind each node of their first branch, verified as they will
be. From how often the candidate of each rank is the one kept, Sequoia's program makes the best tree of every number
of nodes and depth (Chen et al. 2024, arXiv 2402.12374), and what passes cost here tells which of them is fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.bench.passes import TREE_NODES, time_passes
from specbench.decoding.clocks import Clock, clock_for
from specbench.decoding.metrics import count_ranks
from specbench.decoding.records import Step
from specbench.decoding.request import DraftPolicy
from specbench.decoding.theory import (
    PassCosts,
    expected_tokens_of_tree,
    predicted_speedup,
    read_by_depth,
)
from specbench.generate import GenerationRun
from specbench.lengths.trees import StaticTree, best_shapes, falling
from specbench.models.calibrations import TreeChoice, TreeKey

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target
    from specbench.specs.verification import VerificationName

_RANKS = 6  # candidates of a node
_LEVELS = 4  # of the first branch
_MOST, _DEEPEST = 32, 10  # of the trees to choose from
_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33)
_TIMED = 7  # passes of each kind; the median counts
_NAME = "drafter"


@dataclass(frozen=True)
class PlannedTree:
    """A tree that is best for what was counted.

    Attributes:
        nodes, depth: The most it may have.
        tokens: Expected of a step.
        speedup: Predicted, over plain decoding.
    """

    nodes: int
    depth: int
    tokens: float
    speedup: float


@dataclass(frozen=True)
class TreeCalibration:
    """What a calibration found.

    Attributes:
        counts: By depth, from 1, and rank, from 0: at how many nodes it was tested, and how often kept.
        shares: By rank, at how many of all nodes that candidate was the one kept; some nodes may have had none.
        choice: The tree to be stored.
        tree: The same, and what is expected of it.
        chain: The best chain by the same figures.
        complete: Whether all prompts were decoded before the time was up.
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
    seed: int = 0,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> TreeCalibration:
    """Count what is kept by rank, time passes, and choose a tree. Nothing is stored.

    Args:
        target, drafter: What decodes; the drafter drafts trees.
        prompts: Token ids of prompts like those to come.
        key: What the tree is to hold for.
        sampling: The transforms.
        tokens: Length of an answer at most.
        seconds: Decoding ends after so many, with what was counted by then.
        seed: Of sampling, for the first prompt.
        progress: Told how far the stages have come.
        clock: Times passes; ``None`` for the one right for the target's device.

    Raises:
        UsageError: The drafter drafts no trees, the way to verify takes none, or nothing could be counted.
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
            policy=DraftPolicy(_comb(), verification=method),
            sampling=sampling,
            max_new_tokens=tokens,
            seed=seed + done,
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
            "Nothing was drafted: the prompts do not fit the context, their answers end at once, or the time was up.",
            "Name other prompts, or allow more minutes.",
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
        abreast=TREE_NODES,
    )
    nodes = sum(tested for (_, rank), (tested, _) in counts.items() if rank == 0)
    shares = [0.0] * (1 + max(rank for _, rank in counts))
    for (_, rank), (_, kept) in counts.items():
        shares[rank] += kept / nodes
    ranks, costs = _percentages(shares), times.medians()
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
    """Several candidates behind each node of the first branch, and nothing behind the others."""
    return StaticTree.shaped(
        [_RANKS * level - _RANKS if level else -1 for level in range(_LEVELS) for _ in range(_RANKS)]
    )


def _percentages(rates: Sequence[float]) -> tuple[int, ...]:
    """Per cent of parts of a whole, rounded; not more than a hundred, without zeros behind the last that counts."""
    rounded = [round(100 * rate) for rate in rates]
    while len(rounded) > 1 and not rounded[-1]:
        rounded.pop()
    return (min(rounded[0], 100 - sum(rounded[1:])), *rounded[1:])


def best_tree(ranks: Sequence[int], costs: PassCosts, drafter: str = _NAME) -> PlannedTree:
    """The tree with the highest predicted speedup, ``E / (Σ c(r) + v(n))``; of equally good ones the smallest.

    Args:
        ranks: Per cent, by rank; a single one gives chains, which are not drafted as trees.
        costs: Of passes.
        drafter: Whose.
    """
    rates = falling(ranks)
    shape = best_shapes(rates)
    best: PlannedTree | None = None
    for nodes in range(1, _MOST + 1):
        for depth in range(1, min(nodes, _DEEPEST) + 1):
            parents = shape(nodes, depth)
            if len(parents) < nodes and best is not None:
                continue  # nothing is gained by more
            tokens = expected_tokens_of_tree(parents, rates)
            read = read_by_depth(parents) if len(ranks) > 1 else [0] * (len(parents) - 1)
            passes = sum(costs.c(drafter, behind) for behind in (0, *read))
            speedup = predicted_speedup(tokens, 1, passes, costs.v(len(parents) + 1))
            if best is None or speedup > best.speedup:
                best = PlannedTree(nodes, depth, tokens, speedup)
    assert best is not None
    return best
