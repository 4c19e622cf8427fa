"""What requests saw that were decoded side by side, and how speedups fall with the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specbench.base.record import Estimate
from specbench.results.results import Results
from specbench.results.run import RIVALS, RunConfig
from specbench.results.summary import Summary, SummaryRow, acceptance_rate, configs_of, speed_of

PERCENTILES = ("p50", "p95", "p99")
"""Of latencies."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Requests of one configuration.

    Latencies are percentiles of all requests, interpolated between neighbors in rank, by the names of
    ``PERCENTILES``.

    Attributes:
        config: Which.
        requests: How many there were.
        throughput: Tokens/s of all together, geometric mean over groups.
        ttft_s: From arrival to the first emission.
        token_s: Per token after that.
        latency_s: From arrival to the end.
        queued_s: The wait for a turn.
        acceptance_rate: Accepted over drafted tokens of all.
        pool_blocks, pool_peak_blocks, pool_peak_bytes: Of the target's pool, the most there were.
    """

    config: RunConfig
    requests: int
    throughput: Estimate
    ttft_s: dict[str, float]
    token_s: dict[str, float]
    latency_s: dict[str, float]
    queued_s: dict[str, float]
    acceptance_rate: float
    pool_blocks: float
    pool_peak_blocks: float
    pool_peak_bytes: float


def request_rows(results: Results) -> list[RequestRow]:
    """A row for each configuration, in the order of the run, that decodes several requests side by side."""
    found = []
    for config in configs_of(results):
        done = results.done[(results.done["config"] == config.id) & (results.done["group"] != "")]
        if done.empty:
            continue
        groups = results.groups[results.groups["config"] == config.id]
        speed = done["tokens_per_second"]
        found.append(
            RequestRow(
                config,
                len(done),
                speed_of(results, config, done),
                _percentiles(done["ttft_s"]),
                _percentiles(1.0 / speed.where(speed > 0)),
                _percentiles(done["total_s"]),
                _percentiles(done["queued_s"]),
                acceptance_rate(results, config).value,
                *(
                    float(groups[name].max())
                    for name in ("pool_blocks", "pool_peak_blocks", "pool_peak_bytes")
                ),
            )
        )
    return found


def _percentiles(values: pd.Series[float]) -> dict[str, float]:
    known = values.dropna().to_numpy(dtype=np.float64)
    return {
        name: float(np.percentile(known, int(name[1:]))) if len(known) else math.nan for name in PERCENTILES
    }


@dataclass(frozen=True, slots=True)
class Line:
    """A drafter and a policy, or a server, over the measured batches, each in a closed loop of as many clients.

    Attributes:
        rows: Of the summary, by rising batch; at least one, each with a speedup.
    """

    rows: list[SummaryRow]

    @property
    def batches(self) -> list[int]:
        """Those measured, ascending."""
        return [batch_of(row) for row in self.rows]

    @property
    def pays(self) -> int | None:
        """The largest batch whose interval lies wholly above 1; ``None`` if none does."""
        return max((batch_of(row) for row in self.rows if row.verdict == "faster"), default=None)

    @property
    def stops(self) -> int | None:
        """The smallest batch whose interval does not lie wholly above 1; ``None`` if there is none."""
        return min((batch_of(row) for row in self.rows if row.verdict != "faster"), default=None)

    @property
    def told(self) -> tuple[list[SummaryRow], list[int]]:
        """The rows that have an interval over groups of prompts, and the batches of the others."""
        told = [row for row in self.rows if row.speedup.basis == "prompts"]
        return told, [batch_of(row) for row in self.rows if row.speedup.basis != "prompts"]

    def at(self, batch: int) -> SummaryRow:
        """The row of a batch that was measured."""
        return next(row for row in self.rows if row.config.batch == batch)

    @property
    def mean(self) -> float:
        """Geometric mean of the speedups over the batches: to rank lines by."""
        return math.exp(math.fsum(math.log(row.speedup.value) for row in self.rows) / len(self.rows))


def batch_of(row: SummaryRow) -> int:
    """Requests at a time."""
    return row.config.batch or 1


def is_closed(config: RunConfig) -> bool:
    """Whether its requests came from as many clients as it decodes at a time."""
    return config.arrivals == f"closed:{config.batch}"


def lines_of(summary: Summary) -> list[Line]:
    """Every drafter and policy, or server, at every temperature over its batches, the best first."""
    found: dict[tuple[str, str, int | None, float], list[SummaryRow]] = {}
    for row in summary.rows:
        config = row.config
        if config.kind not in RIVALS or row.is_baseline or config.batch is None or not is_closed(config):
            continue
        if row.speedup.value > 0:
            key = (config.drafter, config.draft_policy, config.gamma, config.temperature)
            found.setdefault(key, []).append(row)
    lines = [Line(sorted(rows, key=batch_of)) for rows in found.values()]
    return sorted(lines, key=lambda line: -line.mean)
