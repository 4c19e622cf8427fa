"""Several drafters whose chains are merged into one tree (Miao et al. 2024, SpecInfer)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, GrowingTree, StepOutcome
from specbench.decoding.protocols import Drafter, DrafterTraits

if TYPE_CHECKING:
    from specbench.decoding.protocols import Decoding, ScorerLike, StepPlan


class SeveralDrafters(Drafter):
    """Drafts a chain with each of at least two drafters; equal prefixes share nodes.

    A token that several drew counts once for each of them, with that drafter's q.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        name = "|".join(drafter.traits.name for drafter in drafters)
        layers = sorted({layer for drafter in drafters for layer in drafter.traits.layers})
        super().__init__(DrafterTraits(name, several=True, layers=layers))
        self.drafters = tuple(drafters)
        self._chains: list[list[int]] = []  # by drafter its nodes of the last tree

    @property
    def epoch(self) -> tuple[object, ...]:
        return tuple(drafter.epoch for drafter in self.drafters)

    def fork(self, scorer_like: ScorerLike) -> SeveralDrafters:
        return SeveralDrafters([drafter.fork(scorer_like) for drafter in self.drafters])

    def begin(self, prompt: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.begin(prompt)
        self._chains = []

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        """Draft chain after chain; raise ``UsageError`` for a policy that depends on the draft."""
        if not plan.policy.unconditional:
            raise UsageError(
                f"Several drafters draft chains of one fixed length, but {plan.policy.name} decides the length while"
                f" drafting.",
                "Give --gamma N.",
            )
        tree = GrowingTree()
        self._chains = []
        prefill_s, passes = 0.0, 0
        for drafter in self.drafters:
            draft = yield from drafter.propose(context, plan)
            self._chains.append(tree.graft(draft))
            prefill_s += draft.prefill_s
            passes += draft.passes or 0
        tree.prefill_s, tree.passes = prefill_s, passes
        return tree

    def update(self, outcome: StepOutcome) -> None:
        layers = {layer: i for i, layer in enumerate(self.traits.layers)}
        for drafter, chain in zip(self.drafters, self._chains or [[]] * len(self.drafters), strict=True):
            # Each gets its own chain, followed by what the others drafted, which it has not read.
            nodes = [*chain, *(node for node in range(len(outcome.tokens)) if node not in chain)]
            states = outcome.states
            drafter.update(
                replace(
                    outcome,
                    tokens=[outcome.tokens[node] for node in nodes],
                    path=[nodes.index(node) for node in outcome.path],
                    states=None
                    if states is None
                    else states[:, [layers[layer] for layer in drafter.traits.layers]],
                    rows=outcome.after(nodes),
                )
            )
