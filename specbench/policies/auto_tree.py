"""``auto-tree``: adds nodes that are likely to pay for their verification, and depths that pay for a forward pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.policies.acceptance import OnlineLogistic, log_odds
from specbench.policies.auto import AutoLength
from specbench.policies.base import TreePolicy, policy_name
from specbench.policies.trees import MOST_NODES

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import Draft, GrowingTree
    from specbench.decoding.records import Step
    from specbench.policies.costs import CostSource

_BESIDE_ONE = 4
"""Most candidates of a node."""

_ABREAST = 8
"""Most nodes in one pass of the drafter."""


class AutoTree(TreePolicy, AutoLength):
    """Grows a tree best-first, with the rate, costs and pauses of ``auto`` (``AutoLength``).

    A candidate is added iff its chance of acceptance is worth the time to verify it: P·c > R·(v(n+1) - v(n)). The
    drafter reads the next depth iff its nodes promise more than the pass costs, and each node but the first iff it pays
    for prolonging the pass. The chance of a node's b-th candidate is learned from the drafter's b-th highest
    probability there, before anything is drawn: no node depends on its own token, so any verification may be used.

    Args:
        nodes: The most nodes.
        costs: See ``AutoLength``.

    Raises:
        UsageError: ``nodes`` is below 1 or above ``MOST_NODES``.
    """

    def __init__(self, nodes: int = 16, costs: CostSource | None = None) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise UsageError(f"The tree has {nodes} nodes.", f"Give 1 to {MOST_NODES}.")
        # By rank, the first and all others: before a candidate is drawn, and when its token is known.
        self._slots = (OnlineLogistic((1.0, 1.0), (1.0, 0.3)), OnlineLogistic((0.0, 1.0), (1.0, 0.3)))
        self._known = (OnlineLogistic((1.0, 1.0), (1.0, 0.3)), OnlineLogistic((0.0, 1.0), (1.0, 0.3)))
        super().__init__(nodes, costs)
        self.name = policy_name("auto-tree", nodes=nodes)

    def reset(self) -> None:
        for curve in (*self._slots, *self._known):
            curve.reset()
        super().reset()

    def begin(self, budget: int) -> int:
        super().begin(budget)
        self._exactly = None
        self._limit = int(min(self.gamma_max, self._costs.reach))
        self._room = budget
        self._before: dict[int, list[float]] = {}  # by node: log-odds of its candidates' ranks
        self._odds: list[float] = []  # by node: of the token it became
        self._reached: list[float] = []  # by node: the chance that it is kept
        self._asked = budget > 0 and self._limit > 0 and not self._paused
        self._rows_read = 1
        return budget if self._asked else 0

    def num_children(
        self, draft: Draft, nodes: Sequence[int], distributions: Sequence[TokenDistribution]
    ) -> Sequence[int]:
        counts = [0] * len(nodes)
        forced = self._probing or self._costs.timings == 0
        slots: list[tuple[float, int]] = []
        chances: list[list[float]] = []
        for place, (node, each) in enumerate(zip(nodes, distributions, strict=True)):
            odds = [log_odds(chance) for chance in each.chances(_BESIDE_ONE)]
            reached = self._reached[node] if node >= 0 else 1.0
            self._before[node] = odds
            chances.append([reached * self._slots[rank > 0].chance(x) for rank, x in enumerate(odds)])
            slots.append((-chances[place][0], place))
        if forced:
            return [1, *[0] * (len(nodes) - 1)]
        heapq.heapify(slots)
        taken = len(draft.tokens)
        while slots and taken < self._limit:
            chance, place = heapq.heappop(slots)
            if -chance < self.min_accept_prob(taken + 1):
                break
            taken += 1
            counts[place] += 1
            if counts[place] < len(chances[place]):
                following = min(-chance, chances[place][counts[place]])
                heapq.heappush(slots, (-following, place))
        return counts

    def next_frontier(self, tree: GrowingTree, fresh: Sequence[int]) -> Sequence[int]:
        for node in fresh:
            parent, odds = tree.parents[node], log_odds(tree.chance(node))
            before = self._reached[parent] if parent >= 0 else 1.0
            self._odds.append(odds)
            self._reached.append(before * self._known[tree.ranks[node] > 0].chance(odds))
        nodes = len(tree.tokens)
        if not fresh or self._probing or nodes >= self._limit or tree.depths[fresh[0]] >= self._room:
            return []
        if self._costs.timings == 0:
            self._rows_read += 1
            return fresh[:1]
        price = self.min_accept_prob(nodes + 1)
        promised = {node: self._reached[node] * self._upcoming.chance(self._odds[node]) for node in fresh}
        likeliest = heapq.nlargest(_ABREAST, fresh, promised.__getitem__)
        pass_s = [self._costs.next_draft_s(tree.depths[fresh[0]], rows) for rows in range(len(likeliest) + 1)]
        chosen = [
            node
            for rows, node in enumerate(likeliest, 1)
            if promised[node] > price + (rows > 1) * self._rate * (pass_s[rows] - pass_s[rows - 1])
        ]
        if not chosen:
            return []
        self._survival = sum(self._reached[node] for node in chosen)
        chance = sum(promised[node] for node in chosen) / self._survival
        times = self._after(tree.depths[fresh[0]])
        wider = pass_s[len(chosen)] - times[1]
        if self._promise(nodes, chance, chance, [0.0, *(each + wider for each in times[1:])]) <= 0.0:
            return []
        self._rows_read += len(chosen)
        return sorted(chosen)

    def _learn(self, step: Step) -> None:
        if step.parents is None:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(step.parents):
            children.setdefault(parent, []).append(node)
        for level, node in enumerate((-1, *step.path)[: step.tested]):
            kept = step.path[level] if level < len(step.path) else None
            self._upcoming.learn(self._odds[node] if node >= 0 else self._last, kept is not None)
            for rank, candidate in enumerate(children[node]):
                self._slots[rank > 0].learn(self._before[node][rank], candidate == kept)
                self._known[rank > 0].learn(self._odds[candidate], candidate == kept)
            if node < 0 or level == step.tested - 1:
                last = self._odds[children[node][0]]
        if step.tested:
            self._last = last
