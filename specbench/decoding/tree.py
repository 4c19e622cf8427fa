"""Draft trees: how they grow, and the positions and masks of forward passes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.decoding.drafts import GrowingTree

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.protocols import StepPlan


def grow_tree(tree: GrowingTree, plan: StepPlan, distributions: Mapping[int, TokenDistribution]) -> bool:
    """Add candidates after nodes, as many as the plan's policy wants; return whether any were added.

    Args:
        tree: The tree, which grows.
        plan: See ``Drafter.propose``.
        distributions: The drafter's distribution after each of these nodes.
    """
    before = len(tree.tokens)
    counts = plan.policy.num_children(tree, [*distributions], [*distributions.values()])
    for (node, distribution), count in zip(distributions.items(), counts, strict=True):
        if count:
            tree.add(node, plan.drawing(distribution, count, plan.random), distribution)
    return len(tree.tokens) > before


def tree_rows(
    past: int, parents: Sequence[int], keys: int, device: torch.device, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and mask of a forward pass over a tree, whose rows are the context's last token and the nodes.

    Args:
        past: Tokens in the cache.
        parents: See ``Draft``.
        keys: The number of keys; those after the last token are masked.
        device: The results' device.
        first: The first row of the pass; those before it are in the cache too.

    Returns:
        The positions, [1, rows]: a token is one after its parent. The mask, bool [1, 1, rows, keys], true where a token
            attends: to the context, its ancestors and itself.
    """
    ancestors = _ancestors(tuple(parents))
    rows = ancestors[first:]
    positions = torch.from_numpy(past - 1 + rows.sum(axis=1, dtype=np.int64))
    mask = np.zeros((len(rows), keys), dtype=np.bool_)
    mask[:, :past] = True
    mask[:, past : past + len(ancestors)] = rows
    return positions[None].to(device), torch.from_numpy(mask)[None, None].to(device)


@lru_cache(maxsize=64)
def _ancestors(parents: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return by token which tokens are its ancestors or itself, [1 + nodes, 1 + nodes]."""
    ancestors = np.eye(len(parents) + 1, dtype=np.bool_)
    for row, parent in enumerate(parents, start=1):
        ancestors[row] |= ancestors[parent + 1]
    return ancestors
