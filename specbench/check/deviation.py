"""Do the passes of a run compute what one pass over the whole text computes? The answer up to rounding, row by row.

A row's *deviation* is the root mean square of the differences of its logits from those of the clean pass, less their
mean (a shift of all logits changes no probability), over the standard deviation of the clean row. Rounding leaves some
2% in bfloat16 and some 2e-6 in float32; a cache that holds one wrong token, tens of per cent (docs/check.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specbench.backends.torch.parity import epsilon, tie_units
from specbench.backends.torch.scorer import Scorer

_MOST_COLUMNS = 4096
_MOST_BYTES = 256 << 20

_LARGER = 4.0
"""A row may deviate as much as the worst row of plain decoding, times this."""

_TYPICALLY_LARGER = 1.5
"""The median of all rows may be that of plain decoding, times this: what is a little wrong everywhere shows here."""

_PLAIN_MOST = 8.0
"""Plain decoding itself may deviate by what its dtype makes usual, times this."""


@dataclass(frozen=True)
class Columns:
    """Which tokens' logits are compared: at most 4096, evenly spread over the vocabulary."""

    step: int

    @classmethod
    def of(cls, vocab_size: int) -> Columns:
        return cls(max(1, -(-vocab_size // _MOST_COLUMNS)))

    def take(self, row: torch.Tensor) -> torch.Tensor:
        """Of one row [vocab]: float32 [columns], not a view."""
        return row[:: self.step].float().clone()


def clean_rows(scorer: Scorer, prompt: Sequence[int], output: Sequence[int]) -> Iterator[torch.Tensor]:
    """Logits before every token of an output, [vocab] each, from an empty cache and with nothing rolled back.

    One pass over prompt and output; an output whose rows would take more than 256 MB goes on in further passes on top.
    """
    context = [*prompt, *output]
    most = max(1, _MOST_BYTES // (4 * (scorer.vocab_size or scorer.embeddings)))
    scorer.begin()
    for at in range(0, len(output), most):
        rows = min(most, len(output) - at)
        read = len(prompt) + at + rows - 1
        yield from scorer.logits(context[:read], rows=rows)
        scorer.rollback(read)  # of nothing: caches that forget want it between passes
    scorer.begin()


def deviation(row: torch.Tensor, clean: torch.Tensor) -> float:
    """How far a row is from the clean one; both float32 [columns]. Infinite where only one of them is finite."""
    finite = row.isfinite() & clean.isfinite()
    if bool((finite != (row.isfinite() | clean.isfinite())).any()) or not bool(finite.any()):
        return float("inf")
    row, clean = row[finite], clean[finite]
    off = row - clean
    rms = float((off - off.mean()).pow(2).mean().sqrt())
    return rms / float(clean.std(correction=0)) if rms > 0 else 0.0


@dataclass(frozen=True)
class DeviationResult:
    """What came of it.

    Attributes:
        rows: Rows of speculative decoding that were compared.
        median, largest: Of their deviations.
        plain_median, plain_largest: The same of plain decoding.
        limit: What a row may deviate.
        median_limit: What the median may be.
        plain_limit: What a row of plain decoding may deviate.
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
    """Hold the deviations of speculative passes against those of plain ones; ``None`` if there are none.

    Args:
        speculative, plain: Of all rows of all runs.
        dtype: Of the logits. Where plain decoding happens to be exact, half of ``tie_units`` times its epsilon counts
            as usual.
    """
    if not speculative or not plain:
        return None
    usual = tie_units(dtype) / 2 * epsilon(dtype)
    worst, median = max(plain), statistics.median(plain)
    return DeviationResult(
        rows=len(speculative),
        median=statistics.median(speculative),
        largest=max(speculative),
        plain_median=median,
        plain_largest=worst,
        limit=max(_LARGER * worst, usual),
        median_limit=max(_TYPICALLY_LARGER * median, usual),
        plain_limit=_PLAIN_MOST * usual,
    )
