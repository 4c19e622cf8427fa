"""Compare the logits of a generation with those of one clean forward pass over the whole text, row by row.

A row's *deviation* is the root mean square of the differences between its logits and the clean ones, divided by the
standard deviation of the clean row. The mean difference is subtracted first, since a shift of all logits changes no
probability. Rounding causes some 2% in bfloat16 and some 2e-6 in float32; one wrong token in a cache causes tens of
percent (docs/check.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specbench.backends.torch.parity import epsilon, tie_units
from specbench.backends.torch.scorer import Scorer

_MAX_COLUMNS = 4096
_MAX_BYTES = 256 << 20

_LARGEST_FACTOR = 4.0
"""Limit of a row's deviation, as a multiple of plain decoding's largest."""

_MEDIAN_FACTOR = 1.5
"""Limit of the median deviation, as a multiple of plain decoding's: it shows small errors everywhere."""

_PLAIN_FACTOR = 8.0
"""Limit of plain decoding's own deviation, as a multiple of what is usual in its dtype."""


def sample_columns(row: torch.Tensor) -> torch.Tensor:
    """Return a copy of at most 4096 logits of a row, evenly spread over the vocabulary: float32 [columns]."""
    return row[:: max(1, -(-len(row) // _MAX_COLUMNS))].float().clone()


def clean_rows(scorer: Scorer, prompt: Sequence[int], output: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield the logits before every token of an output, [vocab] each, from an empty cache and without rollback.

    It runs one forward over prompt and output, or several if the logits would need more than 256 MB.
    """
    context = [*prompt, *output]
    limit = max(1, _MAX_BYTES // (4 * (scorer.vocab_size or scorer.embeddings)))
    scorer.begin()
    for at in range(0, len(output), limit):
        rows = min(limit, len(output) - at)
        length = len(prompt) + at + rows - 1
        yield from scorer.logits(context[:length], rows=rows, prompt=len(prompt))
        scorer.rollback(length)  # removes nothing, but caches that evict need it between forwards
    scorer.begin()


def deviation(row: torch.Tensor, clean: torch.Tensor) -> float:
    """Return the deviation of a row from the clean one, float32 [columns] each; infinite if only one is finite."""
    finite = row.isfinite() & clean.isfinite()
    if bool((finite != (row.isfinite() | clean.isfinite())).any()) or not bool(finite.any()):
        return float("inf")
    row, clean = row[finite], clean[finite]
    off = row - clean
    rms = float((off - off.mean()).pow(2).mean().sqrt())
    return rms / float(clean.std(correction=0)) if rms > 0 else 0.0


@dataclass(frozen=True)
class DeviationResult:
    """The deviations of all rows, and their limits.

    Attributes:
        limit, median_limit, plain_limit: The largest allowed ``largest``, ``median`` and ``plain_largest``.
    """

    rows: int
    median: float
    largest: float
    plain_median: float
    plain_largest: float
    limit: float
    median_limit: float
    plain_limit: float

    @property
    def sound(self) -> bool:
        return (
            self.largest <= self.limit
            and self.median <= self.median_limit
            and self.plain_largest <= self.plain_limit
        )


def judge_deviations(
    speculative: Sequence[float], plain: Sequence[float], dtype: torch.dtype
) -> DeviationResult | None:
    """Compare the deviations of speculative and plain decoding; ``None`` if there are none.

    Args:
        dtype: Dtype of the logits. Limits are at least half of its ``tie_units`` times its epsilon, because plain
            decoding can happen to be exact.
    """
    if not speculative or not plain:
        return None
    usual = tie_units(dtype) / 2 * epsilon(dtype)
    largest, median = max(plain), statistics.median(plain)
    return DeviationResult(
        rows=len(speculative),
        median=statistics.median(speculative),
        largest=max(speculative),
        plain_median=median,
        plain_largest=largest,
        limit=max(_LARGEST_FACTOR * largest, usual),
        median_limit=max(_MEDIAN_FACTOR * median, usual),
        plain_limit=_PLAIN_FACTOR * usual,
    )
