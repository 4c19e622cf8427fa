"""Where two greedy outputs part, and whether arithmetic alone explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from specbench.sampling import Sampling
from specbench.scorer import Scorer

__all__ = ["Difference", "find_difference", "rounding_unit"]

_TIE_UNITS = 4.0
"""Gap of the two best logits, in rounding units, up to which different summation orders can change the argmax."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs of one prompt.

    Attributes:
        position: Index of the first differing token in the output.
        tokens: The two tokens there; ``None`` where an output had ended.
        logits: The target's two best logits there, after the repetition penalty.
        gap: Their distance.
        gap_units: The distance in units of the dtype's rounding at that size.
        numerical_tie: Whether rounding explains the difference.
    """

    position: int
    tokens: tuple[int | None, int | None]
    logits: tuple[float, float]
    gap: float
    gap_units: float
    numerical_tie: bool


def rounding_unit(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of ``dtype`` at the size of ``value``."""
    if value == 0 or not math.isfinite(value):
        return torch.finfo(dtype).tiny
    return float(2.0 ** math.floor(math.log2(abs(value))) * torch.finfo(dtype).eps)


def find_difference(
    target: Scorer, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], sampling: Sampling
) -> Difference | None:
    """Compare two outputs; ``None`` if they are the same. Uses the target's cache for one pass.

    Args:
        target: Scores the common context once more.
        prompt: Token ids before both outputs.
        first, second: Token ids.
        sampling: Its repetition penalty applies.
    """
    position = next((i for i, (a, b) in enumerate(zip_longest(first, second)) if a != b), None)
    if position is None:
        return None
    target.begin()
    context = [*prompt, *first[:position]]
    logits = target.logits(context, rows=1)
    best = sampling.scores(logits, context)[0].topk(min(2, logits.shape[-1])).values.tolist()
    target.begin()
    high, low = best[0], best[-1]
    units = (high - low) / rounding_unit(high, logits.dtype)
    return Difference(
        position=position,
        tokens=(_at(first, position), _at(second, position)),
        logits=(high, low),
        gap=high - low,
        gap_units=units,
        numerical_tie=units <= _TIE_UNITS,
    )


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None
