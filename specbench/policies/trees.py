"""Policies that draft trees of a fixed shape, or by the drafter's probabilities."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from specbench.decoding.drafts import GrowingTree
from specbench.decoding.protocols import DraftPolicy
from specbench.specs.policies import DynamicTree, StaticTree

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft


class TreePolicy(DraftPolicy):
    """Drafts trees; subclasses override ``num_children`` and ``next_frontier``."""

    branches = True

    def __init__(self, spec: StaticTree | DynamicTree) -> None:
        self.spec, self.name, self.verification = spec, str(spec), spec.verification
        self._room = 0
        self._grown = 0  # nodes of the draft seen so far

    def begin_step(self, budget: int) -> int:
        self._room = budget
        return budget

    def expand(self, draft: Draft) -> Sequence[int]:
        if not draft.tokens:
            self._grown = 0
            return (-1,)
        assert isinstance(draft, GrowingTree)
        fresh, self._grown = range(self._grown, len(draft.tokens)), len(draft.tokens)
        return self.next_frontier(draft, fresh)

    def next_frontier(self, tree: GrowingTree, fresh: Sequence[int]) -> Sequence[int]:
        """Return which of the new nodes, ascending, the drafter reads in its next forward pass; none to stop."""
        raise NotImplementedError


class StaticTreePolicy(TreePolicy):
    """Drafts one shape in every step: the ``best_shape`` for ``ranks``, which are in percent."""

    def __init__(self, spec: StaticTree) -> None:
        super().__init__(spec)
        falling = [min(spec.ranks[: rank + 1]) / 100 for rank in range(len(spec.ranks))]
        self._lay_out(best_shape(falling, spec.nodes, spec.depth))

    @classmethod
    def shaped(cls, parents: Sequence[int]) -> StaticTreePolicy:
        """Return a tree of another shape, given by the nodes' parents, -1 for the context; ranks in this order."""
        tree = cls(StaticTree(len(parents)))
        tree._lay_out(parents)
        return tree

    def _lay_out(self, parents: Sequence[int]) -> None:
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self._shape: dict[int, int] = {}

    def begin_step(self, budget: int) -> int:
        self._shape = {-1: -1}
        return super().begin_step(budget)

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        return [len(self._children.get(self._shape[node], ())) for node in nodes]

    def next_frontier(self, tree: GrowingTree, fresh: Sequence[int]) -> Sequence[int]:
        for node in fresh:
            self._shape[node] = self._children[self._shape[tree.parents[node]]][tree.ranks[node]]
        return [
            node for node in fresh if tree.depths[node] < self._room and self._shape[node] in self._children
        ]


class DynamicTreePolicy(TreePolicy):
    """Drafts the likeliest tokens (Li et al. 2024, EAGLE-2): continues the best nodes of each depth, and verifies the
    best of all. Nodes are chosen by their own tokens, so none may be drawn.
    """

    spec: DynamicTree
    certain_only = True
    _scores: list[float]  # by node the log of its chance

    def begin_step(self, budget: int) -> int:
        self._scores = []
        return super().begin_step(budget)

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        return [self.spec.top_k] * len(nodes)

    def next_frontier(self, tree: GrowingTree, fresh: Sequence[int]) -> Sequence[int]:
        for node in fresh:
            parent = tree.parents[node]
            before = self._scores[parent] if parent >= 0 else 0.0
            self._scores.append(before + math.log(max(tree.chance(node), 1e-30)))
        if not fresh or tree.depths[fresh[0]] >= min(self.spec.depth, self._room):
            return []
        return sorted(heapq.nlargest(self.spec.top_k, fresh, key=self._scores.__getitem__))

    def prune(self, draft: Draft) -> Sequence[int] | None:
        if len(draft.tokens) <= self.spec.nodes:
            return None
        # Of equal scores the first: so no node comes without its parent.
        best = sorted(range(len(draft.tokens)), key=lambda node: (-self._scores[node], node))
        return sorted(best[: self.spec.nodes])


def best_shape(acceptance: Sequence[float], nodes: int, depth: int) -> tuple[int, ...]:
    """Return the tree with most expected tokens (Chen et al. 2024, Sequoia, section 4.1).

    With T[m][l][b] the most tokens expected of m nodes, root included, l deep and with up to b candidates at the root:
    T[1] = 1, and a tree has either fewer candidates at its root, or a b-th one that is the root of a tree of y nodes:
    T[m][l][b] = max(T[m][l][b-1], max over y of T[m-y][l][b-1] + P[b]·T[y][l-1][any]).

    Args:
        acceptance: P: the chance that the candidate of rank b, from 0, is the one that is kept; not rising.
        nodes: The most nodes, without the context.
        depth: The greatest depth.

    Returns:
        The nodes' parents, -1 for the context, in the order of depth.
    """
    most = len(acceptance)

    @cache
    def best(m: int, left: int, b: int) -> tuple[float, int]:
        """Return the most tokens of a tree of m nodes, and the nodes of its b-th candidate, 0 for none."""
        if m == 1 or left == 0 or b == 0:
            return 1.0, 0
        most_tokens = (best(m, left, b - 1)[0], 0)
        for y in range(1, m):
            tokens = best(m - y, left, b - 1)[0] + acceptance[b - 1] * best(y, left - 1, most)[0]
            if tokens > most_tokens[0] + 1e-12:
                most_tokens = (tokens, y)
        return most_tokens

    parents: list[int] = []
    waiting = [(-1, nodes + 1, depth)]
    for parent, m, left in waiting:
        sizes: list[int] = []
        b = most if m > 1 and left else 0
        while b and m > 1:
            y = best(m, left, b)[1]
            if y:
                sizes.append(y)
                m -= y
            b -= 1
        for size in reversed(sizes):
            waiting.append((len(parents), size, left - 1))
            parents.append(parent)
    return tuple(parents)
