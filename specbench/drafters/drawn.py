"""Checks that a draft consists of the tokens that were drawn for it, from the distributions that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specbench.decoding.drafts import Draft

_SAME = 1e-6
"""Total variation up to which two distributions are one."""


class DrawEvent(NamedTuple):
    """A token drawn from a distribution, [vocab], not necessarily of sum 1."""

    distribution: torch.Tensor
    token: int


def find_undrawn(draft: Draft, draws: Sequence[DrawEvent]) -> str | None:
    """Return which token of a draft was not drawn from its q, or how many draws were discarded, which changes q too.

    A token with probability 1 in q need not have been drawn.
    """
    if draft.candidates is not None:
        return _find_undrawn_node(draft, draws)
    at = 0
    for i, token in enumerate(draft.tokens):
        q = None if draft.q is None else draft.q[i]
        drawn = at < len(draws) and draws[at].token == token
        if drawn and q is not None and _equal(draws[at].distribution, q):
            at += 1
        elif q is not None and float(q[token]) != float(q.sum()):
            return f"drafted token {i} was not drawn from its q"
    return f"{len(draws) - at} drawn tokens were discarded" if at < len(draws) else None


def _find_undrawn_node(tree: Draft, draws: Sequence[DrawEvent]) -> str | None:
    """Do so for a tree, whose candidates are drawn from what is left of their q."""
    assert tree.candidates is not None
    places = tree.candidates.items()
    drawn = [(node, tokens, q) for node, groups in places for tokens, q in groups if q is not None]
    if (count := sum(len(tokens) for _, tokens, _ in drawn)) != len(draws):
        return f"{len(draws)} tokens were drawn for {count} candidates"
    unused = list(draws)
    for node, tokens, q in drawn:
        left = q.clone()
        for token in tokens:
            # Several drafters may draw candidates after one node, one after the other.
            same = (i for i, event in enumerate(unused) if event.token == token)
            at = next((i for i in same if _equal(unused[i].distribution, left)), None)
            if at is None:
                return f"node {tree.child(node, token)} was not drawn from its q"
            del unused[at]
            left[token] = 0.0
    return None


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two distributions, [vocab] each, are the same once they are normalized."""
    if torch.equal(first, second):
        return True
    if first.shape != second.shape:
        return False
    first, second = first.double(), second.to(first.device).double()
    return float((first / first.sum() - second / second.sum()).abs().sum() / 2) < _SAME
