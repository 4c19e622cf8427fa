"""Where two greedy outputs differ first, and whether rounding explains it. The rule is explained in docs/check.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from specbench.backends.torch.scorer import Scorer
from specbench.decoding.sampling import Sampling

_HALF_UNITS, _FLOAT_UNITS, _INT8_UNITS = 8.0, 64.0, 64.0


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs of one prompt."""

    position: int  # index of the first differing token in the output
    tokens: tuple[int | None, int | None]  # the two tokens there; None where an output had ended
    # the target's logits of these tokens, after the repetition penalty; of its two best ones where an output had
    # ended
    logits: tuple[float, float]
    gap: float  # distance of the worse of them from the target's best logit
    gap_units: float  # the gap in units of the dtype's rounding at the size of the best logit
    # whether rounding explains the difference: the gap is within tie_units. Never where an output had ended,
    # since stopping does not depend on rounding
    numerical_tie: bool


def epsilon(dtype: torch.dtype) -> float:
    """Return the distance between 1 and the next number; for int8 1/128, since a row's largest element is 127 steps."""
    return 2.0**-7 if dtype == torch.int8 else torch.finfo(dtype).eps


def rounding_unit(value: float, dtype: torch.dtype) -> float:
    """Return the distance between neighboring numbers of ``dtype`` at the size of ``value``."""
    if value == 0 or not math.isfinite(value):
        return torch.finfo(torch.float32 if dtype == torch.int8 else dtype).tiny
    return float(2.0 ** math.floor(math.log2(abs(value))) * epsilon(dtype))


def tie_units(dtype: torch.dtype) -> float:
    """Return the largest distance from the best logit, in rounding units, at which rounding can explain that a token
    was chosen.

    Forwards of different sizes over one context sum in different orders. On real models (docs/check.md) that changes
    the distance of two logits by up to 4 units in bfloat16, where every layer rounds coarsely, by up to 24 in float32,
    and by up to 26 in int8, where a last bit decides between two bytes. Twice that or more is allowed.
    """
    if dtype == torch.int8:
        return _INT8_UNITS
    return _HALF_UNITS if torch.finfo(dtype).bits <= 16 else _FLOAT_UNITS


def units_below(value: float, best: float, dtype: torch.dtype) -> float:
    """Return how far a logit is below the best one, in rounding units at the size of the best; always finite."""
    largest = torch.finfo(torch.float32).max
    gap = best - value
    return min(gap / rounding_unit(best, dtype), largest) if math.isfinite(gap) else largest


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token that two outputs do not share; ``None`` if they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(first, second)) if a != b), None)


def difference_at(
    position: int, tokens: tuple[int | None, int | None], scores: torch.Tensor, dtype: torch.dtype
) -> Difference:
    """Judge a difference by the target's logits there, after the repetition penalty, float32 [vocab].

    Args:
        position: Index in the output.
        tokens: The two tokens; ``None`` where an output had ended.
        dtype: The dtype whose rounding is the unit, see ``Scorer.rounding``.
    """
    best = float(scores.max())
    ended = None in tokens
    if ended:
        high, low = scores.topk(min(2, len(scores))).values[[0, -1]].tolist()
    else:
        high, low = scores[list(tokens)].tolist()
    largest = torch.finfo(torch.float32).max
    logits = (max(high, -largest), max(low, -largest))  # -inf has no place in JSON
    worse = min(logits)
    units = units_below(worse, best, dtype)
    gap = min(best - worse, largest)
    tie = not ended and units <= tie_units(dtype)
    return Difference(position, tokens, logits, gap, units, tie)


def find_difference(
    target: Scorer, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], sampling: Sampling
) -> Difference | None:
    """Compare two outputs after a prompt, with the transforms of ``sampling``; ``None`` if they are equal.

    The target computes the logits after the common context again, from an empty cache.
    """
    position = first_difference(first, second)
    if position is None:
        return None
    target.begin()
    context = [*prompt, *first[:position]]
    logits = target.logits(context, rows=1, prompt=len(prompt))
    target.begin()
    at_position = (output[position] if position < len(output) else None for output in (first, second))
    tokens = next(at_position), next(at_position)
    return difference_at(position, tokens, sampling.scores(logits, context)[0], target.rounding)
