"""Draft trees: siblings, growing, and the positions and masks of forward passes over trees.

Siblings are alternatives to a chain's tokens, from the same distributions of the drafter. If the token that the target
chooses in place of the first rejected one is a sibling, the logits after it are known already, and the step emits one
more token (Miao et al. 2024). The drafter runs no forward pass for that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, GrowingTree

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.protocols import DraftPolicy, Drawing
    from specbench.decoding.sampling import Randomness

_BESIDE_ONE = 4
"""Alternatives considered per draft token."""

_ROUNDING = 1e-3
"""The tolerance of log-probabilities."""


class Siblings:
    """Adds the likeliest alternatives to a chain's tokens, as leaves.

    Args:
        most: The maximum number of siblings in a step, 0 or more.
        price: Returns, for a number of rows, the smallest acceptance probability at which verifying one more row pays.

    Raises:
        UsageError: ``most`` is negative.
    """

    def __init__(self, most: int, price: Callable[[int], float]) -> None:
        if most < 0:
            raise UsageError(f"The maximum number of siblings is {most}.", "Give 0 or more.")
        self.max_count, self._price = most, price

    def widen(self, draft: Draft) -> Draft:
        """Return the draft with siblings at its end; the draft itself if there are none."""
        if not self.max_count:
            return draft
        gamma = len(draft.tokens)
        chosen = choose_siblings(draft, self.max_count, self._price(gamma + 1))
        if not chosen:
            return draft
        tokens = [*draft.tokens, *(token for _, token in chosen)]
        parents = (*range(-1, gamma - 1), *(place - 1 for place, _ in chosen))
        return replace(draft, tokens=tokens, parents=parents, siblings=len(chosen))


NO_SIBLINGS = Siblings(0, lambda _: 1.0)
"""No siblings."""


def choose_siblings(draft: Draft, most: int, price: float) -> tuple[tuple[int, int], ...]:
    """Return the likeliest alternatives.

    The chance of token x in place of token i is Π q_j(t_j) over the tokens before it, times q_i(x), by the drafter's
    untempered softmax.

    Args:
        draft: A draft with logits.
        most: The most alternatives.
        price: The smallest chance of an alternative.

    Returns:
        Pairs of a place, from 0, and a token, the likeliest first.
    """
    if not draft.tokens or draft.logits is None or most < 1:
        return ()
    found: list[tuple[float, tuple[int, int]]] = []
    survival = 1.0
    for place, (token, logits) in enumerate(zip(draft.tokens, draft.logits, strict=True)):
        if survival < price:
            break
        least = math.log(price / survival) - _ROUNDING if price > 0 else -math.inf
        for log_chance, other in logits.likeliest(_BESIDE_ONE + 1, least):
            chance = survival * math.exp(log_chance)
            if other != token and chance >= price:
                found.append((chance, (place, other)))
        survival *= math.exp(logits.log_chance(token))
    return tuple(sibling for _, sibling in heapq.nlargest(most, found))


def grow_tree(
    tree: GrowingTree,
    policy: DraftPolicy,
    distributions: Mapping[int, TokenDistribution],
    drawing: Drawing,
    random: Randomness,
) -> bool:
    """Add candidates after nodes, as many as a policy wants; return whether any were added.

    Args:
        tree: The tree, which grows.
        policy, drawing, random: See ``Drafter.propose``.
        distributions: The drafter's distribution after each of these nodes.
    """
    before = len(tree.tokens)
    counts = policy.num_children(tree, [*distributions], [*distributions.values()])
    for (node, each), count in zip(distributions.items(), counts, strict=True):
        if count:
            tree.add(node, drawing(each, count, random), each)
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
