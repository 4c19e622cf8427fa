"""Siblings: likely alternatives to drafted tokens, which the target verifies beside the draft in the same pass.

A draft is a chain, and behind its first wrong token everything is lost. Where a pass over a few more tokens costs next
to nothing, the runners-up of the drafter's own distributions can be verified along with it, each in the place of one
drafted token: if the target's choice in the place of the wrong token is among them, its logits behind that choice are
there already, and the step emits one token more. That is the flattest token tree there is (Miao et al. 2024), and the
drafter makes no pass for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from specbench.decoding.protocols import Draft, Sibling

__all__ = ["choose_siblings", "tree_mask", "tree_positions"]

_BESIDE_ONE = 4
"""Alternatives of one drafted token that are looked at."""


def choose_siblings(draft: Draft, most: int, price: float) -> tuple[Sibling, ...]:
    """The alternatives that are likeliest to give a token.

    Beside draft i the chance is that of all drafts before it, Π q_j(t_j), times q_i(x), by the drafter's untempered
    softmax.

    Args:
        draft: With the drafter's logits; tokens that are certain to a cascade have no alternatives.
        most: No more than so many.
        price: The chance from which on a token to verify is worth its time.

    Returns:
        By falling chance.
    """
    if not draft.tokens or draft.logits is None or most < 1:
        return ()
    found: list[tuple[float, Sibling]] = []
    survival = 1.0
    for place, (token, logits) in enumerate(zip(draft.tokens, draft.logits, strict=True)):
        if survival < price:
            break
        row = logits.float()
        best = row.topk(min(_BESIDE_ONE + 1, len(row)))
        total = float(row.logsumexp(dim=-1))
        chances = [math.exp(value - total) for value in best.values.tolist()]
        own = 0.0
        for chance, other in zip(chances, best.indices.tolist(), strict=True):
            if other == token:
                own = chance
            elif survival * chance >= price:
                found.append((survival * chance, Sibling(place, other)))
        survival *= own
    return tuple(sibling for _, sibling in heapq.nlargest(most, found))


def tree_positions(
    past: int, fresh: int, drafted: int, siblings: Sequence[Sibling], device: torch.device
) -> torch.Tensor:
    """Positions of the tokens of a pass, [1, fresh + drafted + siblings]: a sibling has that of the draft beside it.

    Args:
        past: Tokens in the cache.
        fresh: Tokens of the context that are not.
        drafted: Length of the draft.
        siblings: Behind the draft, in this order.
        device: Where to.
    """
    chain = [past + i for i in range(fresh + drafted)]
    return torch.tensor([chain + [past + fresh + each.place for each in siblings]], device=device)


def tree_mask(
    past: int, fresh: int, drafted: int, siblings: Sequence[Sibling], keys: int, device: torch.device
) -> torch.Tensor:
    """What each token of such a pass attends to: what comes before it in its own branch, and itself.

    Args:
        keys: Positions that attention is handed; what lies behind the last token is seen by none.

    Returns:
        Bool [1, 1, tokens, keys], true where it attends.
    """
    chain = fresh + drafted
    tokens = chain + len(siblings)
    mask = torch.zeros((tokens, keys), dtype=torch.bool, device=device)
    rows = torch.arange(chain, device=device)[:, None]
    mask[:chain] = torch.arange(keys, device=device) <= past + rows
    for row, each in enumerate(siblings, start=chain):
        mask[row, : past + fresh + each.place] = True
        mask[row, past + row] = True
    return mask[None, None]
