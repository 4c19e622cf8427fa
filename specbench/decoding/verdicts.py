"""Verdicts on several drafts at once, each with the way its drafts have to be drawn. Pure functions on distributions.

At a node of a tree stand candidates for the next token. A *rule* decides between them, given p, the target's
distribution there: it names the candidate that is kept, or draws another token. Walked from the context on, the output
has the target's distribution, whichever tokens were drafted, provided that

- candidates were drawn as the method says, and q is what they were drawn from, and
- whether a candidate exists depends on what was drawn before it alone, and never on its own token (a drawn one that is
  dropped for its low q makes the output wrong; a *certain* one, which nothing was tossed for, may depend on anything).

Greedy decoding needs none of this: there every method keeps the child that is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from specbench.decoding.distributions import TokenDistribution
from specbench.decoding.drafts import Draft, Draws
from specbench.decoding.protocols import Drawing
from specbench.decoding.sampling import Randomness

_SMALLEST = torch.finfo(torch.float32).tiny

TargetRows: TypeAlias = Callable[[int], torch.Tensor]
"""p behind a node (-1: behind the context), float32 [vocab]."""


class Walked(NamedTuple):
    """What became of a draft.

    Attributes:
        path: The nodes kept, root to leaf.
        token: The one behind them.
        distribution: What that was drawn from, [vocab], not normalized.
    """

    path: list[int]
    token: int
    distribution: torch.Tensor


Walk: TypeAlias = Callable[[Draft, TargetRows, Randomness], Walked]


class _Ruling(NamedTuple):
    """The next token: a candidate that is kept, or another one and what it was drawn from."""

    token: int
    distribution: torch.Tensor | None = None


_Rule: TypeAlias = Callable[[torch.Tensor, Sequence[Draws], Randomness], _Ruling]


# -- drawing candidates ----------------------------------------------------------------------------


def without_replacement(prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """One after the other from what is left of q: Gumbel-top-k sampling (Kool et al. 2019), in its order."""
    q = left = prospects.q
    tokens: list[int] = []
    for place in range(count):
        tokens.append(random.draw(left))
        if place + 1 < count:
            left = left.clone() if left is q else left
            left[tokens[-1]] = 0.0
            if float(left.sum()) <= _SMALLEST:
                break
    return [Draws(tokens, q)]


def with_replacement(prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """Independently of each other; the same token may come several times."""
    return [Draws([random.draw(prospects.q)], prospects.q) for _ in range(count)]


def top(prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:  # noqa: ARG001
    """The most probable tokens; nothing is tossed for."""
    return [Draws(prospects.best(count))]


def draw_and_top(prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """One drawn from q, and beside it the most probable others."""
    token = random.draw(prospects.q)
    others = [other for other in prospects.best(count) if other != token]
    return [Draws([token], prospects.q), Draws(others[: count - 1])]


def top_and_tail(prospects: TokenDistribution, count: int, random: Randomness) -> list[Draws]:
    """All but one the most probable tokens, and one drawn from q outside them (Hu et al. 2025)."""
    best = prospects.best(count - 1)
    tail = prospects.q.clone()
    tail[best] = 0.0
    total = float(tail.sum())
    drawn = [] if total <= _SMALLEST else [Draws([random.draw(tail)], tail / total)]
    return [*drawn, Draws(best)]


# -- deciding at a node ----------------------------------------------------------------------------


def naive(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """A token is drawn from p, and kept if it is among the candidates, whatever chose them (Miao et al. 2024).

    Keeps with the chance p(candidates). What EAGLE-2, Token Recycling and suffix decoding need. Costs a draw.
    """
    return match(p, [Draws(tokens) for tokens, _ in candidates], random)


def match(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """At most one drawn candidate, tested; then a token is drawn, and kept if it is among the certain ones.

    With one drawn from q and others beside it, *residual*: rejection sampling (Leviathan et al. 2023) whose corrected
    token may be a candidate too. With one drawn from the tail, *greedy draft* (Hu et al. 2025). Costs a draw,
    and a pass over the vocabulary after a rejection.
    """
    for token, q in _in_turn(each for each in candidates if each.q is not None):
        if _passes(_ratio(p, q, token), random):
            return _Ruling(token)
        p = remainder(p, q)
    token = random.draw(p)
    certain = any(token in tokens for tokens, q in candidates if q is None)
    return _Ruling(token, None if certain else p)


def recursive(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Recursive rejection sampling of candidates without replacement (Jeon et al. 2024; Chen et al. 2024, Sequoia).

    In the order drawn: kept with min(1, p/q); otherwise p becomes norm((p - q)₊), and q loses the token. Costs a few
    passes over the vocabulary per rejection.
    """
    for token, q in _in_turn(candidates):
        if _passes(_ratio(p, q, token), random):
            return _Ruling(token)
        p = remainder(p, q, token)
    return _Ruling(random.draw(p), p)


def specinfer(p: torch.Tensor, candidates: Sequence[Draws], random: Randomness) -> _Ruling:
    """Multi-step speculative sampling of independent draws (Miao et al. 2024, SpecInfer, Algorithm 2).

    A remaining draw at random is kept with min(1, p/q); otherwise p becomes norm((p - q)₊), and that draw goes. Equal
    draws stand there as often as they were drawn, each with the q of the drafter it came from. Certain candidates come
    after all draws, since they may have been chosen by what was drawn: tested before it, they would make the output
    wrong.
    """
    draws = [(token, q) for tokens, q in candidates if q is not None for token in tokens]
    certain = [(token, q) for tokens, q in candidates if q is None for token in tokens]
    while draws or certain:
        place = random.draw(torch.ones(len(draws))) if len(draws) > 1 else 0
        token, q = (draws or certain).pop(place)
        if _passes(_ratio(p, q, token), random):
            return _Ruling(token)
        p = remainder(p, q, token)
    return _Ruling(random.draw(p), p)


def _walked(rule: _Rule) -> Walk:
    """From the context to a leaf, or to where no candidate is kept."""

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

    From the leaves up: a path is kept with the chance that all of it has together, so a token that p would rather not
    have may be made up for by those behind it. No early end: every node gets a toss of its own. On one path nothing
    keeps more. Costs about two passes over the vocabulary per node that fails. Different branches need draws that are
    independent of each other.
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
    """Every candidate in the order drawn, with what it was drawn from; ``None`` for a certain one."""
    for tokens, q in candidates:
        left = q
        for i, token in enumerate(tokens):
            if i and left is not None:
                left = _without(left, tokens[i - 1])
            yield token, left


def _passes(chance: torch.Tensor, random: Randomness) -> bool:
    """A test that has this chance, or more than 1."""
    return random.test(chance.clamp(0.0, 1.0).reshape(1))[0] == 1


def _ratio(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """p/q of a token, whose q can underflow to 0 although it was drawn; a certain one has q = 1."""
    return p[token] if q is None else p[token] / q[token].clamp_min(_SMALLEST)


def remainder(p: torch.Tensor, q: torch.Tensor | None, token: int = -1) -> torch.Tensor:
    """norm((p - q)₊), float32 [vocab]; without q all of it was at ``token``. p itself where nothing is left."""
    rest = _less(p, q, token)
    total = float(rest.sum())
    return rest.div_(total) if total > _SMALLEST else p


def _less(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """(p - q)₊, [vocab]."""
    if q is not None:
        return (p - q).clamp_min_(0.0)
    rest = p.clone()
    rest[token] = 0.0
    return rest


def _without(q: torch.Tensor, token: int) -> torch.Tensor:
    """q when the token can no longer be drawn; all zeros when it was the last."""
    rest = q.clone()
    rest[token] = 0.0
    total = float(rest.sum())
    return rest.div_(total) if total > _SMALLEST else rest


# -- all of them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to verify, and what it asks of drafts.

    Attributes:
        walk: Decides.
        drawing: How the candidates of a node are drawn.
        chains_only: Whether a node has one candidate at most.
        several: Whether the draws of several drafters may stand at a node.
    """

    walk: Walk
    drawing: Drawing
    chains_only: bool = False
    several: bool = False


METHODS: Mapping[str, Method] = {
    "rejection": Method(_walked(match), without_replacement, chains_only=True),
    "block": Method(traverse, without_replacement, chains_only=True),
    "traversal": Method(traverse, without_replacement),
    "naive": Method(_walked(naive), top, several=True),
    "residual": Method(_walked(match), draw_and_top),
    "greedy-draft": Method(_walked(match), top_and_tail),
    "recursive": Method(_walked(recursive), without_replacement, several=True),
    "specinfer": Method(_walked(specinfer), with_replacement, several=True),
}
"""By the words of ``specbench.specs.verification``."""
