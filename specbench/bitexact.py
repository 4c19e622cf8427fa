"""Whether a position's logits come out bitwise the same in every pass, so that greedy outputs cannot part at ties.

Rounding depends on the order of sums, and kernels choose that by the shape of a pass. Where it is the same for every
width, plain decoding (one token in a pass) and verification (γ + 1) see the same logits in any dtype. What it takes:
``specbench.attention`` and ``specbench.packing``; this module tries it out on the loaded model.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from specbench.errors import UsageError

if TYPE_CHECKING:
    from specbench.scorer import Scorer

__all__ = ["require_bit_exact", "why_not_bit_exact"]

_CONTEXT = 61  # behind it a few single tokens reach over the edge of a block of keys
_SINGLES = 9
_WIDTHS = (2, 3, 5, 9, 17, 32)


def why_not_bit_exact(scorer: Scorer) -> str | None:
    """Why passes of different widths may give different logits here, in a sentence; ``None`` if they do not.

    Reads random tokens with passes of one token and of several, and compares the logits bit by bit. The scorer's cache
    is empty afterwards. Takes about 25 passes.
    """
    if scorer.device.type != "cpu":
        return f"Kernels on {scorer.device.type} choose the order of their sums by the shape of a pass."
    widest = scorer.cache.widest_pass
    if widest is None:
        return "It takes the preallocated cache, and a model with scaled dot-product attention and no sliding window."
    tokens = [random.Random(0).randrange(scorer.embeddings) for _ in range(_CONTEXT + max(_WIDTHS))]
    if scorer.context_limit is not None and len(tokens) > scorer.context_limit:
        return f"The context of {scorer.context_limit} tokens is too short to try it out."

    def read(length: int, width: int) -> torch.Tensor:
        scorer.rollback(length)
        return scorer.logits(tokens[: length + width], rows=width)

    scorer.begin()
    scorer.logits(tokens[:_CONTEXT], rows=1)
    alone = [read(_CONTEXT + i, 1)[0] for i in range(_SINGLES)]
    try:
        for width in _WIDTHS:
            together = read(_CONTEXT, width)
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
