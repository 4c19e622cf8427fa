"""Whether a position's logits come out bitwise the same in every pass, so that greedy outputs cannot part at ties.

Rounding depends on the order of sums, and kernels choose that by the shape of a pass. Where it is the same for every
width, plain decoding (one token in a pass) and verification (γ + 1) see the same logits in any dtype. What it takes:
``kernels.attention`` and ``kernels.linear``; this module tries it out on the loaded model.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from specbench.backends.torch.caches import PreallocatedKVCache
from specbench.backends.torch.kernels.attention import KEY_BLOCK
from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.backends.torch.scorer import Scorer

__all__ = ["require_bit_exact", "why_not_bit_exact"]

_READ = 40
"""Tokens that are really read: in front of the edge they are repeated, which takes no time."""

_BEFORE, _BEHIND = 3, 6
"""How far from the edge of a block of keys single tokens begin and end."""

_WIDTHS = (2, 3, 5, 9, 17, 32)


def why_not_bit_exact(scorer: Scorer) -> str | None:
    """Why passes of different widths may give different logits here, in a sentence; ``None`` if they do not.

    Reads random tokens with passes of one token and of several over the edge of a block of keys (as far as the model's
    context goes), and compares the logits bit by bit. The scorer's cache is empty afterwards. Takes about 15 passes.
    """
    if scorer.device.type != "cpu":
        return f"Kernels on {scorer.device.type} choose the order of their sums by the shape of a pass."
    cache = scorer.cache
    if not isinstance(cache, PreallocatedKVCache) or cache.widest_pass is None:
        return "It takes the preallocated cache, and a model with scaled dot-product attention and no sliding window."
    widest, start = max(_WIDTHS), KEY_BLOCK - _BEFORE
    if scorer.context_limit is not None:
        start = min(start, scorer.context_limit - widest)
    if start < 1:
        return f"The context of {scorer.context_limit} tokens is too short to try it out."
    choice = random.Random(0)
    tokens = [choice.randrange(scorer.embeddings) for _ in range(start + widest)]

    def read(length: int, width: int) -> torch.Tensor:
        scorer.rollback(length)
        return scorer.logits(tokens[: length + width], rows=width)

    scorer.begin()
    scorer.logits(tokens[: min(_READ, start)], rows=1)
    cache.repeat(start)
    alone = [read(start + i, 1)[0] for i in range(min(widest, KEY_BLOCK + _BEHIND - start))]
    try:
        for width in _WIDTHS:
            together = read(start, width)
            if any(not torch.equal(one, many) for one, many in zip(alone, together, strict=False)):
                return f"On this processor, a pass of {width} tokens gives other logits than passes of one."
    finally:
        scorer.begin()
    return None


def require_bit_exact(scorer: Scorer) -> None:
    """Refuse a model whose logits depend on the width of the pass.

    Raises:
        UsageError: They do, or nothing is known.
    """
    reason = why_not_bit_exact(scorer)
    if reason is not None:
        raise UsageError(f"Bit-exact passes cannot be had here. {reason}", "Leave --bit-exact out.")
