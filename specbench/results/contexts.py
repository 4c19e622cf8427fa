"""Speedups by length of context, from runs with ``--context``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specbench.results.run import RIVALS
from specbench.results.summary import Summary, SummaryRow


@dataclass(frozen=True, slots=True)
class ContextCurve:
    """Speedups of a drafter with a draft policy, or of a server, by length of context.

    Attributes:
        rows: Rows of the summary, by rising context; at least one, each with a speedup.
    """

    rows: list[SummaryRow]

    @property
    def contexts(self) -> list[int]:
        """The measured lengths of context, ascending."""
        return [context_of(row) for row in self.rows]

    @property
    def pays(self) -> SummaryRow | None:
        """The row of the longest context whose speedup has an interval wholly above 1."""
        return next((row for row in reversed(self.rows) if row.verdict == "faster"), None)

    @property
    def most(self) -> SummaryRow:
        """The row with the highest speedup."""
        return max(self.rows, key=lambda row: row.speedup.value)

    @property
    def stops(self) -> SummaryRow | None:
        """The row of the shortest context whose speedup has an interval that is not wholly above 1."""
        return next((row for row in self.rows if row.verdict != "faster"), None)

    @property
    def mean(self) -> float:
        """Geometric mean of the speedups, to rank curves by."""
        return math.exp(math.fsum(math.log(row.speedup.value) for row in self.rows) / len(self.rows))


def context_of(row: SummaryRow) -> int:
    """Return the length of context of a configuration."""
    return row.config.context or 0


def context_curves(summary: Summary) -> list[ContextCurve]:
    """Return the curves at all temperatures: one for each drafter with a draft policy, or server; the best first."""
    found: dict[tuple[str, str, int | None, float], list[SummaryRow]] = {}
    for row in summary.rows:
        config = row.config
        if (
            config.kind in RIVALS
            and not row.is_baseline
            and config.context is not None
            and row.speedup.value > 0
        ):
            key = (config.drafter, config.draft_policy, config.gamma, config.temperature)
            found.setdefault(key, []).append(row)
    curves = [ContextCurve(sorted(rows, key=context_of)) for rows in found.values()]
    return sorted(curves, key=lambda curve: -curve.mean)
