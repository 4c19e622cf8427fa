"""Verification methods: how the candidates of a draft are drawn, and how they are tested. Pure functions.

A node of a draft tree has candidates for the next token. A *rule* decides between them, given p, the target's
distribution after the node: it accepts one candidate, or draws another token. The rule is applied from the context on,
from node to node. The output then has the target's distribution, whatever was drafted, under two conditions:

- The candidates were drawn as the method says, and q is the distribution they were drawn from.
- Whether a drawn candidate exists depends only on what was drawn before it, and not on its own token: removing one for
  its low q would make the output wrong. A *certain* candidate, one that was not drawn, may depend on anything.

Greedy decoding needs none of this: there every method keeps the child that is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from specbench.decoding.distributions import TokenDistribution
from specbench.decoding.drafts import Draft, Draws
from specbench.decoding.protocols import Drawing, top
from specbench.decoding.sampling import Randomness

_SMALLEST = torch.finfo(torch.float32).tiny

TargetRows: TypeAlias = Callable[[int], torch.Tensor]
"""Returns p after a node (-1: the context), float32 [vocab]."""


class Walked(NamedTuple):
    """The outcome of testing a draft from the context on.

    Attributes:
        path: The accepted nodes, root to leaf.
        token: The token after them.
        distribution: Its distribution, [vocab], not normalized.
    """

    path: list[int]
    token: int
    distribution: torch.Tensor


Walk: TypeAlias = Callable[[Draft, TargetRows, Randomness], Walked]


_Ruling: TypeAlias = tuple[int, torch.Tensor | None]
"""The next token: an accepted candidate, or another one with its distribution."""

_Rule: TypeAlias = Callable[[torch.Tensor, Sequence[Draws], Randomness], _Ruling]


# -- drawing candidates ----------------------------------------------------------------------------


def without_replacement(distribution: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """Draw one after the other, each from what is left of q, as Gumbel-top-k sampling does (Kool et al. 2019)."""
    q = left = distribution.q
    tokens: list[int] = []
    for place in range(count):
        tokens.append(random.draw(left))
        if place + 1 < count:
            left = left.clone() if left is q else left
            left[tokens[-1]] = 0.0
            if float(left.sum()) <= _SMALLEST:
                break
    return [Draws(tokens, q)]


def with_replacement(distribution: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """Draw independently; a token can be drawn several times."""
    return [Draws([random.draw(distribution.q)], distribution.q) for _ in range(count)]


# -- deciding at a node ----------------------------------------------------------------------------


def naive(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Draw from p, and accept the token if it is a candidate, however these were chosen (Miao et al. 2024).

    A candidate is accepted with probability p(all candidates). EAGLE-2, Token Recycling and suffix decoding need this
    method. It costs one draw.
    """
    return rejection(p, [Draws(tokens) for tokens, _ in candidates], random)


def rejection(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Test a drawn candidate, if any; then draw a token, and accept it if it is a certain candidate.

    With one candidate this is rejection sampling (Leviathan et al. 2023). It costs one draw, and after a rejection work
    over the vocabulary.
    """
    for token, q in _in_turn(draws for draws in candidates if draws.q is not None):
        if _passes(_ratio(p, q, token), random):
            return token, None
        p = remainder(p, q)
    token = random.draw(p)
    certain = any(token in tokens for tokens, q in candidates if q is None)
    return token, None if certain else p


def recursive(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Test candidates without replacement in turn (Jeon et al. 2024; Chen et al. 2024, Sequoia).

    In the order drawn, a candidate is accepted with probability min(1, p/q); otherwise p becomes norm((p - q)₊), and
    the token is removed from q. A rejection costs work over the vocabulary.
    """
    for token, q in _in_turn(candidates):
        if _passes(_ratio(p, q, token), random):
            return token, None
        p = remainder(p, q, token)
    return random.draw(p), p


def specinfer(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Test independent draws in random order (Miao et al. 2024, SpecInfer, Algorithm 2).

    One of the remaining draws, chosen at random, is accepted with probability min(1, p/q); otherwise p becomes
    norm((p - q)₊), and the draw is removed. A token that was drawn twice counts as two draws, each with the q of its
    drafter. Certain candidates are tested after all draws, because they may have been chosen depending on what was
    drawn; tested earlier, they would make the output wrong.
    """
    draws = [(token, q) for tokens, q in candidates if q is not None for token in tokens]
    certain = [(token, q) for tokens, q in candidates if q is None for token in tokens]
    while draws or certain:
        place = random.draw(torch.ones(len(draws))) if len(draws) > 1 else 0
        token, q = (draws or certain).pop(place)
        if _passes(_ratio(p, q, token), random):
            return token, None
        p = remainder(p, q, token)
    return random.draw(p), p


def _walked(rule: _Rule) -> Walk:
    """Return a function that applies a rule from the context to a leaf, or to a node without an accepted candidate."""

    def walk(draft: Draft, p: TargetRows, random: Randomness) -> Walked:
        path: list[int] = []
        node = -1
        while candidates := draft.draws(node):
            token, distribution = rule(p(node), candidates, random)
            if distribution is not None:
                return Walked(path, token, distribution)
            kept = draft.child(node, token)
            assert kept is not None
            node = kept
            path.append(node)
        last = p(node)
        return Walked(path, random.draw(last), last)

    return walk


# -- deciding over paths ---------------------------------------------------------------------------


def traverse(draft: Draft, p: TargetRows, random: Randomness) -> Walked:
    """Traversal verification of candidates without replacement (Weng et al. 2025); on a chain, block verification
    (Sun et al. 2024).

    Nodes are tested one after the other, each leaf before its ancestors, until one passes; then the path to it is
    accepted. The probability of passing is a joint one of the whole path, so tokens with p > q can make up for an
    earlier one with p < q. No method keeps more tokens of a chain. A node that fails costs about two passes over the
    vocabulary. Draws in different branches have to be independent of each other.
    """

    def visit(node: int, chance: float) -> Walked | None:
        candidates = draft.draws(node)
        here = p(node) if candidates else None
        for token, q in _in_turn(candidates):
            child = draft.child(node, token)
            assert here is not None
            assert child is not None
            found = visit(child, min(1.0, chance * float(_ratio(here, q, token))))
            if found is not None:
                found.path.insert(0, child)
                return found
            rest = _less(chance * here, q, token)
            total = float(rest.sum())
            if total > _SMALLEST:
                here = rest / total
            chance = total / (total + 1.0 - chance) if chance < 1.0 else 1.0
        if not _passes(torch.tensor(chance), random):
            return None
        last = p(node) if here is None else here
        return Walked([], random.draw(last), last)

    found = visit(-1, 1.0)
    assert found is not None, "the context is always kept"
    return found


# -- parts of them ---------------------------------------------------------------------------------


def _in_turn(candidates: Iterable[Draws]) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield candidates in the order drawn with their distributions, ``None`` for certain ones."""
    for tokens, q in candidates:
        left = q
        for i, token in enumerate(tokens):
            if i and left is not None:
                left = _without(left, tokens[i - 1])
            yield token, left


def _passes(chance: torch.Tensor, random: Randomness) -> bool:
    """Return whether a test with this probability, clipped to 1, is passed."""
    return random.test(chance.clamp(0.0, 1.0).reshape(1))[0] == 1


def _ratio(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return p/q of a token, whose q may underflow to 0; a certain one has q = 1."""
    return p[token] if q is None else p[token] / q[token].clamp_min(_SMALLEST)


def remainder(p: torch.Tensor, q: torch.Tensor | None, token: int = -1) -> torch.Tensor:
    """Return norm((p - q)₊), float32 [vocab], or p if nothing is left; without q, q is one-hot at ``token``."""
    rest = _less(p, q, token)
    total = float(rest.sum())
    return rest.div_(total) if total > _SMALLEST else p


def _less(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return (p - q)₊, [vocab]."""
    if q is not None:
        return (p - q).clamp_min_(0.0)
    rest = p.clone()
    rest[token] = 0.0
    return rest


def _without(q: torch.Tensor, token: int) -> torch.Tensor:
    """Return q without the token, normalized; all zeros if nothing is left."""
    rest = q.clone()
    rest[token] = 0.0
    total = float(rest.sum())
    return rest.div_(total) if total > _SMALLEST else rest


# -- all of them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A verification method, with what it requires of drafts.

    Attributes:
        walk: Tests a draft from the context on.
        drawing: How a node's candidates are drawn.
        chains_only: Whether it verifies chains only.
        several_drafters: Whether a node may have draws of several drafters.
    """

    walk: Walk
    drawing: Drawing
    chains_only: bool = False
    several_drafters: bool = False


METHODS: Mapping[str, Method] = {
    "rejection": Method(_walked(rejection), without_replacement, chains_only=True),
    "block": Method(traverse, without_replacement, chains_only=True),
    "traversal": Method(traverse, without_replacement),
    "naive": Method(_walked(naive), top, several_drafters=True),
    "recursive": Method(_walked(recursive), without_replacement, several_drafters=True),
    "specinfer": Method(_walked(specinfer), with_replacement, several_drafters=True),
}
"""Verification methods, by their names in ``specbench.specs.policies``."""
