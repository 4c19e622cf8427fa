"""How a speedup falls as more requests are decoded side by side: lines over batches, and where they reach 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.results.frames import records
from specbench.results.rows import RIVALS

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Line:
    """A drafter and a rule, or a server, over the batches that were measured, each in a closed loop of as many clients.

    Attributes:
        rows: Of the summary, by rising batch; at least one, each with a speedup.
    """

    rows: list[dict[str, Any]]

    @property
    def batches(self) -> list[int]:
        """Those measured, ascending."""
        return [int(row["batch"]) for row in self.rows]

    @property
    def pays(self) -> int | None:
        """The largest batch whose interval lies wholly above 1; ``None`` if none does."""
        return max((int(row["batch"]) for row in self.rows if row["verdict"] == "faster"), default=None)

    @property
    def stops(self) -> int | None:
        """The smallest batch whose interval does not lie wholly above 1; ``None`` if there is none."""
        return min((int(row["batch"]) for row in self.rows if row["verdict"] != "faster"), default=None)

    @property
    def told(self) -> tuple[list[dict[str, Any]], list[int]]:
        """The rows that have an interval over groups of prompts, and the batches of the others."""
        told = [row for row in self.rows if row["speedup_basis"] == "prompts"]
        return told, [int(row["batch"]) for row in self.rows if row["speedup_basis"] != "prompts"]

    def at(self, batch: int) -> dict[str, Any]:
        """The row of a batch that was measured."""
        return next(row for row in self.rows if row["batch"] == batch)

    @property
    def mean(self) -> float:
        """Geometric mean of the speedups over the batches: to rank lines by."""
        return math.exp(math.fsum(math.log(row["speedup"]) for row in self.rows) / len(self.rows))


def lines_of(summary: pd.DataFrame) -> list[Line]:
    """Every drafter and rule, or server, at every temperature over its batches, the best first; none without batches.

    Args:
        summary: A ``specbench.results.frames.summary_frame``.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records(summary):
        if row["kind"] not in RIVALS or row["config"] == row["baseline"]:
            continue
        if math.isnan(row["batch"]) or not row["speedup"] > 0:
            continue
        if row["arrivals"] != f"closed:{row['batch']:.0f}":
            continue
        gamma = None if math.isnan(row["gamma"]) else row["gamma"]
        found.setdefault((row["drafter"], row["policy"], gamma, row["temperature"]), []).append(row)
    lines = [Line(sorted(rows, key=lambda row: float(row["batch"]))) for rows in found.values()]
    return sorted(lines, key=lambda line: -line.mean)
