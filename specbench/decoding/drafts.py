"""Drafts: trees of tokens, of which a chain is the plainest case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.logits import Logits
    from specbench.decoding.protocols import DraftPolicy, Drawing
    from specbench.decoding.sampling import Randomness


class Draws(NamedTuple):
    """Candidates for one place, drawn together: one after the other, each from what those before it have left of q.

    Attributes:
        tokens: In the order drawn. Those that were drawn independently of each other are ``Draws`` of their own.
        q: What the first was drawn from, float32 [vocab]; ``None``: they are certain.
    """

    tokens: Sequence[int]
    q: torch.Tensor | None = None


@dataclass(slots=True)
class Draft:
    """The proposal of one step: a tree of tokens behind the context, of which a chain is the plainest case.

    Attributes:
        tokens: The drafted token ids, γ of them in a chain; empty when there is nothing to propose.
        q: The distributions they were drawn from, float32 [γ, vocab], after the sampling transforms; ``None`` when
            every token was certain to its drafter (q is then one-hot, and never written out). It holds until the
            drafter's next proposal, which may take the same memory.
        logits: The drafter's untransformed logits, γ of them; ``None`` from a drafter without any. Where a token was
            certain to a cascade they are ``Logits.certain``.
        evidence: What a drafter without logits knows instead: for each token a number from 0 to 1, the higher the more
            speaks for it, on the condition that the drafts before it are right. It may run ahead of ``tokens``.
            ``None`` from a drafter that has logits or knows nothing of the kind; NaN where a cascade took the token
            from a model.
        prefill_s: Seconds in which the drafter read a prompt for the first time, or caught up with more than a few
            tokens that it had no part in.
        passes: How many passes of a model the draft took so far. A token with evidence took none then, and the next one
            takes none if there is evidence for it. ``None`` where they are not counted: one per token.
        declined: A certain token that came without a pass, and that the policy did not want behind the others: what the
            target puts in its place tells what would have become of it. ``None`` where there is none.
        parents: By token the index of the one it stands behind, -1 for the context; parents come before their children.
            ``None`` for a chain: -1, 0, 1, ...
        candidates: Of a tree whose tokens were drawn as one: what was drawn after which node (-1: the context), in
            that order; their q hold as long as ``q``. ``None``: that tells it of the first branch, and the rest is
            certain.
        siblings: How many of the last tokens are leaves that a policy put beside a chain.
    """

    tokens: list[int] = field(default_factory=list)
    q: torch.Tensor | None = None
    logits: list[Logits] | None = None
    match_confidence: list[float] | None = None
    prefill_s: float = 0.0
    passes: int | None = None
    rejected_guess: int | None = None
    parents: Sequence[int] | None = None
    candidates: Mapping[int, Sequence[Draws]] | None = None
    siblings: int = 0

    def chance(self, node: int) -> float:  # noqa: ARG002
        """That a token is right if those before it are, by the drafter's own distribution; 1 if that is not known."""
        return 1.0

    def draws(self, node: int) -> Sequence[Draws]:
        """What was drawn for the place after a node, -1 for the context."""
        if self.candidates is not None:
            return self.candidates.get(node, ())
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        after = [i for i, parent in enumerate(parents) if parent == node]
        drawn = 0 if self.q is None else len(self.q)
        found = [Draws((self.tokens[i],), self.q[i]) for i in after if self.q is not None and i < drawn]
        certain = [self.tokens[i] for i in after if i >= drawn]
        return [*found, Draws(certain)] if certain else found

    def branch(self, node: int) -> list[int]:
        """The tokens from the context down to a node, itself among them; none for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = node - 1 if self.parents is None else self.parents[node]
        return tokens[::-1]

    @property
    def is_chain(self) -> bool:
        """Whether a chain was drafted: siblings beside it are its policy's."""
        return self.parents is None or self.siblings > 0

    @property
    def chain(self) -> int:
        """How many of the first tokens each stand behind the one before: all of them, or a tree's first branch."""
        if self.parents is None:
            return len(self.tokens)
        return next((i for i, parent in enumerate(self.parents) if parent != i - 1), len(self.parents))

    def child(self, node: int, token: int) -> int | None:
        """The token's index behind another (-1: the context); ``None`` if it was not drafted there."""
        if self.parents is None:
            follows = node + 1 < len(self.tokens) and self.tokens[node + 1] == token
            return node + 1 if follows else None
        nodes = zip(self.parents, self.tokens, strict=True)
        return next((i for i, found in enumerate(nodes) if found == (node, token)), None)


@dataclass(slots=True)  # frozen ones take longer to make
class StepOutcome:
    """What became of a step's draft; of the pass over the prompt, of an empty one.

    Attributes:
        context: All tokens, the new ones at its end among them.
        emitted: How many these are; 0 takes a draft back that nobody has verified.
        logits: The target's.
        tokens: The drafts that were verified; of a tree all nodes.
        path: Those that were kept, root to leaf; a stop may have cut the output before the last of them.
        states: The target's hidden states of the drafter's ``layers``, [positions, layers, width]. They end with those
            of the last token but one, which the target has not read, and begin no later than after those of the step
            before. ``None`` for a drafter that wants none.
        rows: By draft, which row of the logits is the one after it; row 0 is the one before all. ``None``: one after
            the other.
    """

    context: Sequence[int]
    emitted: int
    logits: torch.Tensor
    tokens: Sequence[int] = ()
    path: Sequence[int] = ()
    states: torch.Tensor | None = None
    rows: Sequence[int] | None = None

    def deciding(self) -> torch.Tensor:
        """The logits before each new token, [emitted, vocab]."""
        path = self.path[: self.emitted - 1]
        if self.rows is None and all(node == i for i, node in enumerate(path)):
            return self.logits[: self.emitted]
        return self.logits[[0, *self.after(path)]]

    def after(self, nodes: Iterable[int]) -> list[int]:
        """The rows of the logits that come after these drafts."""
        return [node + 1 if self.rows is None else self.rows[node] for node in nodes]


@dataclass(slots=True)
class GrowingTree(Draft):
    """A draft that grows node by node; they are numbered in the order in which they come, -1 is the context.

    Attributes:
        depths: By node: 1 for those right after the context.
        ranks: By node: how many others came before it after the same node.
        prospects: By node what the drafter expects after it; ``None`` if nobody asks for chances.
    """

    parents: list[int] = field(default_factory=list)
    candidates: dict[int, list[Draws]] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    prospects: dict[int, TokenDistribution | None] = field(default_factory=dict)

    def add(self, parent: int, draws: Sequence[Draws], prospects: TokenDistribution | None = None) -> None:
        """Put candidates after a node; equal ones share a node.

        Args:
            parent: The node.
            draws: The candidates, in the order drawn.
            prospects: What the drafter expects there; ``None`` if nobody asks for chances.
        """
        self.prospects[parent] = prospects
        if not draws:
            return
        before = self.candidates.setdefault(parent, [])
        known = {token for each in before for token in each.tokens}
        for token in (token for each in draws for token in each.tokens):
            if token in known:
                continue
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
            self.ranks.append(len(known))
            known.add(token)
        before += draws

    def grow(
        self,
        policy: DraftPolicy,
        expected: Mapping[int, TokenDistribution],
        drawing: Drawing,
        random: Randomness,
    ) -> bool:
        """Add as many candidates after nodes as a policy wants; return whether there are any.

        Args:
            policy, drawing, random: See ``Drafter.propose``.
            expected: What the drafter expects, by node.
        """
        before = len(self.tokens)
        counts = policy.num_children(self, [*expected], [*expected.values()])
        for (node, each), count in zip(expected.items(), counts, strict=True):
            if count:
                self.add(node, drawing(each, count, random), each)
        return len(self.tokens) > before

    def chance(self, node: int) -> float:
        prospects = self.prospects[self.parents[node]]
        return 1.0 if prospects is None else prospects.chance(self.tokens[node])

    def graft(self, chain: Draft) -> list[int]:
        """Put a chain in, and return its nodes. What it draws where others drew the same has their node."""
        nodes: list[int] = []
        node = -1
        for i, token in enumerate(chain.tokens):
            source = None if chain.q is None else chain.q[i].clone()  # the next proposal may write over it
            self.add(node, [Draws((token,), source)])
            node = next(i for i, each in enumerate(self.tokens) if (self.parents[i], each) == (node, token))
            nodes.append(node)
        return nodes

    def pruned(self, kept: Sequence[int]) -> GrowingTree:
        """What is left with these nodes, ascending, alone: each with the one before it. All must be certain."""
        tree = GrowingTree(prefill_s=self.prefill_s, passes=self.passes)
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        for node in kept:
            parent = place[self.parents[node]]
            tree.add(parent, [Draws((self.tokens[node],))], self.prospects[self.parents[node]])
        return tree
