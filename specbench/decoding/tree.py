"""Draft trees: growing, and the positions and masks of forward passes over trees."""

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
    for (node, each), count in zip(distributions.items(), counts, strict=True):
        if count:
            tree.add(node, plan.drawing(each, count, plan.random), each)
    return len(tree.tokens) > before


def tree_positions(past: int, parents: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the positions of a forward pass over a tree, [1, 1 + nodes]: each is one after its parent's.

    Args:
        past: Tokens in the cache. The pass begins with the next one, the context's last.
        parents: See ``Draft``.
        device: The result's device.
    """
    ancestors = _ancestors(tuple(parents))
    return torch.from_numpy(past - 1 + ancestors.sum(axis=1, dtype=np.int64))[None].to(device)


def tree_mask(past: int, parents: Sequence[int], keys: int, device: torch.device) -> torch.Tensor:
    """Return the attention mask of a forward pass over a tree: a token attends to its ancestors and itself.

    Args:
        past, parents, device: See ``tree_positions``.
        keys: The number of keys; those after the last token are masked.

    Returns:
        Bool [1, 1, 1 + nodes, keys], true where it attends.
    """
    ancestors = _ancestors(tuple(parents))
    mask = np.zeros((len(ancestors), keys), dtype=np.bool_)
    mask[:, :past] = True
    mask[:, past : past + len(ancestors)] = ancestors
    return torch.from_numpy(mask)[None, None].to(device)


@lru_cache(maxsize=64)
def _ancestors(parents: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return by token which tokens are its ancestors or itself, [1 + nodes, 1 + nodes]."""
    found = np.eye(len(parents) + 1, dtype=np.bool_)
    for row, parent in enumerate(parents, start=1):
        found[row] |= found[parent + 1]
    return found
