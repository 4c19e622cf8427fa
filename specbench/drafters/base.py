"""What drafters have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.drafts import GrowingTree, StepOutcome
    from specbench.decoding.protocols import DraftPolicy, Drawing, ScorerLike
    from specbench.decoding.sampling import Randomness


class BaseDrafter:
    """Drafts chains, and has nothing to read, to learn or to roll back; others override what they need.

    For what the members mean see ``Drafter``; whoever inherits it has ``propose`` besides.

    Args:
        name: How the command line names it.
    """

    several = certain = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def epoch(self) -> object:
        return 0

    @property
    def takes_trees(self) -> bool:
        return False

    @property
    def draftable(self) -> frozenset[int] | None:
        return None

    @property
    def layers(self) -> Sequence[int]:
        return ()

    def fork(self, scorer_like: ScorerLike) -> BaseDrafter:
        raise NotImplementedError

    def begin(self, prompt: Sequence[int]) -> None:
        """There is nothing to forget."""

    def resume(self, prompt: Sequence[int], kept: int) -> None:
        """Read it all again."""
        self.begin(prompt)

    def update(self, outcome: StepOutcome) -> None:
        """There is nothing to learn, nor to roll back."""


def grow(
    tree: GrowingTree,
    policy: DraftPolicy,
    prospects: Mapping[int, TokenDistribution],
    drawing: Drawing,
    random: Randomness,
) -> bool:
    """Put candidates after nodes of a tree, as many as a policy wants; whether there are any.

    Args:
        tree: It grows.
        policy, drawing, random: See ``Drafter.propose``.
        prospects: What the drafter expects, by node.
    """
    first = len(tree.tokens)
    counts = policy.num_children(tree, [*prospects], [*prospects.values()])
    for (node, each), count in zip(prospects.items(), counts, strict=True):
        if count:
            tree.add(node, drawing(each, count, random), each)
    return len(tree.tokens) > first
