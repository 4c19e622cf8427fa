"""Drafts: trees of tokens; a chain is a tree of width 1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

    from specbench.decoding.distributions import TokenDistribution
    from specbench.decoding.logits import Logits


@dataclass(frozen=True, slots=True)
class Guess:
    """A guess at the next token, made without a forward pass.

    Attributes:
        token: The token, if it is certain.
        match_confidence: A number from 0 to 1 that rises with the chance that the guess is accepted. Its scale is free:
            ``auto`` learns what it means, and outputs do not depend on it.
        q: The distribution to draw it from, float32 [vocab]; ``None`` if it is certain.

    Examples:
        >>> Guess(17, match_confidence=0.8).q is None
        True
    """

    token: int
    match_confidence: float
    q: torch.Tensor | None = None


Source: TypeAlias = "Logits | Guess | Literal['forced']"
"""Where a token of a chain is from: a model's untransformed logits, a guess, or the format, which allows no other."""


class Draws(NamedTuple):
    """Candidates for one place, drawn in turn without replacement.

    Attributes:
        tokens: In the order drawn. Independent draws are separate ``Draws``.
        q: The distribution that the first one was drawn from, float32 [vocab]; ``None`` if the tokens are certain, that
            is, chosen without a random draw.
    """

    tokens: Sequence[int]
    q: torch.Tensor | None = None


@dataclass(slots=True)
class Draft:
    """The proposal of one step: a tree of tokens after the context.

    Attributes:
        tokens: The drafted token ids, γ of them in a chain; empty for no proposal.
        q: The distributions they were drawn from, float32 [γ, vocab], after the sampling transforms; ``None`` if all
            were certain (q would be one-hot). Valid until the drafter's next proposal, which may reuse the memory.
        sources: Where the tokens of a chain are from; empty from a drafter that does not say.
        guess: A guess at the next token that is not drafted, or not yet. The target's token in its place shows whether
            it was right.
        prefill_s: Seconds in which the drafter first read the prompt, or caught up with more than a few tokens.
        passes: Forward passes of the draft so far; a guess took none. ``None`` where they are not counted: one per
            token.
        next_is_read: Whether the model has read all of the draft, as guesses: its next token takes no pass.
        parents: By token the index of its parent, -1 for the context; parents come first. ``None`` for a chain.
        candidates: By node (-1: the context) what was drawn after it, in that order; valid as long as ``q``. ``None``
            for a chain: ``q`` has its distributions.
    """

    tokens: list[int] = field(default_factory=list)
    q: torch.Tensor | None = None
    sources: list[Source] = field(default_factory=list)
    guess: Guess | None = None
    prefill_s: float = 0.0
    passes: int | None = None
    next_is_read: bool = False
    parents: Sequence[int] | None = None
    candidates: Mapping[int, Sequence[Draws]] | None = None

    def source(self, i: int) -> Source | None:
        """Return where token ``i`` is from, or what is known of the next one; ``None`` if the drafter does not say."""
        return self.sources[i] if i < len(self.sources) else self.guess

    def chance(self, node: int) -> float:
        """Return the probability of a token by the drafter's distribution; 1 if unknown."""
        return 1.0

    def draws(self, node: int) -> Sequence[Draws]:
        """Return what was drawn after a node, -1 for the context."""
        if self.candidates is not None:
            return self.candidates.get(node, ())
        place = node + 1
        if place == len(self.tokens):
            return ()
        return (Draws((self.tokens[place],), None if self.q is None else self.q[place]),)

    def branch(self, node: int) -> list[int]:
        """Return the tokens from the context to a node, inclusive; none for -1."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = node - 1 if self.parents is None else self.parents[node]
        return tokens[::-1]

    @property
    def chain(self) -> int:
        """The length of the chain, or of a tree's first branch."""
        if self.parents is None:
            return len(self.tokens)
        return next((i for i, parent in enumerate(self.parents) if parent != i - 1), len(self.parents))

    def child(self, node: int, token: int) -> int | None:
        """Return the index of a token after a node (-1: the context); ``None`` if it was not drafted there."""
        if self.parents is None:
            follows = node + 1 < len(self.tokens) and self.tokens[node + 1] == token
            return node + 1 if follows else None
        nodes = zip(self.parents, self.tokens, strict=True)
        return next((i for i, place in enumerate(nodes) if place == (node, token)), None)


@dataclass(slots=True)  # frozen ones take longer to make
class StepOutcome:
    """The outcome of a step, or of the prefill, whose draft is empty.

    Attributes:
        context: All tokens, including the new ones.
        emitted: The number of new tokens; 0 for a draft that was never verified.
        logits: The target's.
        tokens: The verified draft tokens; all nodes of a tree.
        path: The accepted nodes, root to leaf; a stop may have cut the output earlier.
        states: The target's hidden states at the drafter's ``layers``, [positions, layers, width], up to the last token
            but one, and without a gap to those of the previous step. ``None`` if the drafter needs none.
        rows: By draft token its row of the logits, row 0 being the context's; ``None`` for the usual order.
    """

    context: Sequence[int]
    emitted: int
    logits: torch.Tensor
    tokens: Sequence[int] = ()
    path: Sequence[int] = ()
    states: torch.Tensor | None = None
    rows: Sequence[int] | None = None

    def deciding(self) -> torch.Tensor:
        """Return the logits that decided each new token, [emitted, vocab]."""
        path = self.path[: self.emitted - 1]
        if self.rows is None and all(node == i for i, node in enumerate(path)):
            return self.logits[: self.emitted]
        return self.logits[[0, *self.after(path)]]

    def after(self, nodes: Iterable[int]) -> list[int]:
        """Return the rows of the logits after these draft tokens."""
        return [node + 1 if self.rows is None else self.rows[node] for node in nodes]


@dataclass(slots=True)
class GrowingTree(Draft):
    """A draft tree that grows node by node; nodes are numbered in the order added, -1 is the context.

    Attributes:
        depths: By node its depth, 1 right after the context.
        ranks: By node its place among its siblings, from 0.
        distributions: By node the drafter's distribution after it; ``None`` if not needed.
    """

    parents: list[int] = field(default_factory=list)
    candidates: dict[int, list[Draws]] = field(default_factory=dict)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    distributions: dict[int, TokenDistribution | None] = field(default_factory=dict)

    def add(self, parent: int, draws: Sequence[Draws], distribution: TokenDistribution | None = None) -> None:
        """Add candidates after a node; equal ones share a node.

        Args:
            parent: The node.
            draws: The candidates, in the order drawn.
            distribution: The drafter's distribution there; ``None`` if not needed.
        """
        self.distributions[parent] = distribution
        if not draws:
            return
        before = self.candidates.setdefault(parent, [])
        known = {token for drawn in before for token in drawn.tokens}
        for token in (token for drawn in draws for token in drawn.tokens):
            if token in known:
                continue
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
            self.ranks.append(len(known))
            known.add(token)
        before += draws

    def chance(self, node: int) -> float:
        distribution = self.distributions[self.parents[node]]
        return 1.0 if distribution is None else distribution.chance(self.tokens[node])

    def graft(self, chain: Draft) -> list[int]:
        """Add a chain and return its nodes; equal tokens at a node share one."""
        nodes: list[int] = []
        node = -1
        for i, token in enumerate(chain.tokens):
            source = None if chain.q is None else chain.q[i].clone()  # the next proposal may write over it
            self.add(node, [Draws((token,), source)])
            node = next(i for i, child in enumerate(self.tokens) if (self.parents[i], child) == (node, token))
            nodes.append(node)
        return nodes

    def pruned(self, kept: Sequence[int]) -> GrowingTree:
        """Return the tree of these nodes alone, ascending and with all ancestors; all must be certain."""
        tree = GrowingTree(prefill_s=self.prefill_s, passes=self.passes)
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        for node in kept:
            parent = place[self.parents[node]]
            tree.add(parent, [Draws((self.tokens[node],))], self.distributions[self.parents[node]])
        return tree
