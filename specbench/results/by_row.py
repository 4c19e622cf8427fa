"""The outputs, steps and pairs of a run by row, from which figures are computed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import pandas as pd

from specbench.results import stats
from specbench.results.pairs import paired_generations, paired_groups, with_baseline
from specbench.results.results import Results
from specbench.results.run import BUSY_WARNINGS

_MOST_DISTURBED = 0.5
"""Share of disturbed generations above which pairing within a round no longer makes up for it."""

LIMITED = {"ttft": "ttft_s", "tpot": "token_s", "e2el": "total_s"}
"""What can be limited: the time to the first token, per later token, and of the whole answer."""


class ByRow:
    """The data frames of a run by row; for the attributes see ``Summary``."""

    def __init__(self, results: Results, limits: Mapping[str, float]) -> None:
        self.results, self.limits, self.run = results, limits, results.run
        self.over, self.dtype = self.run.baseline, self.run.target.dtype
        answer = None if self.run.tuning is None else self.run.tuning.answer
        self.tuned = {} if answer is None else answer.measured
        self.busy = disturbance(results)
        self.disturbance = self.busy if answer is None else ""
        self.outputs = results.generations.assign(
            category=results.generations["category"].replace(self.run.tasks)
        )

    @property
    def confidence(self) -> float:
        """The nominal coverage of a speedup's interval; larger if the run could stop at several looks."""
        return stats.CONFIDENCE if self.run.stopping is None else self.run.stopping.confidence

    # -- frames by configuration -------------------------------------------------------------------

    @cached_property
    def outputs_by_row(self) -> dict[str, pd.DataFrame]:
        return _by_row(self.outputs)

    @cached_property
    def steps_by_row(self) -> dict[str, pd.DataFrame]:
        steps = self.results.steps
        return {
            str(config): mine for config, mine in steps.groupby(steps["output"].map(self.outputs["config"]))
        }

    @cached_property
    def pairs(self) -> pd.DataFrame:
        pairs = paired_generations(self.results)
        return pairs.assign(category=pairs["category"].replace(self.run.tasks))

    @cached_property
    def pairs_by_row(self) -> dict[str, pd.DataFrame]:
        return _by_row(self.pairs)

    @cached_property
    def group_pairs_by_row(self) -> dict[str, pd.DataFrame]:
        return _by_row(paired_groups(self.results))

    @cached_property
    def _units(self) -> pd.DataFrame:
        """The requests, those within the limits, and the seconds of each group, or of each prompt decoded alone.

        Seconds are those in which the tokens come at the group's throughput, so that rates of closed loops leave out
        the time in which a group ends.
        """
        done = self.results.done.assign(token_s=1.0 / self.results.done["tokens_per_second"])
        met = pd.Series(True, index=done.index)
        for name, limit_s in self.limits.items():
            met &= ~(
                done[LIMITED[name]].astype(float) > limit_s
            )  # an answer of one token has no time per token
        done = done.assign(
            unit=done["group"].where(done["group"] != "", done["prompt"]), met=met.astype(float)
        )
        keys = ["config", "baseline", "unit", "repeat"]
        units = done.groupby(keys, sort=False, as_index=False).agg(
            requests=("met", "size"),
            met=("met", "sum"),
            tokens=("new_tokens", "sum"),
            seconds=("total_s", "sum"),
        )
        groups = self.results.groups.rename(columns={"group": "unit"})[
            ["config", "unit", "repeat", "throughput"]
        ]
        units = units.merge(groups, on=["config", "unit", "repeat"], how="left")
        shared = units["tokens"] / units["throughput"].astype(float)
        return units.assign(seconds=shared.where(units["throughput"].notna(), units["seconds"]))

    @cached_property
    def units_by_row(self) -> dict[str, pd.DataFrame]:
        return _by_row(self._units)

    @cached_property
    def unit_pairs_by_row(self) -> dict[str, pd.DataFrame]:
        return _by_row(with_baseline(self._units, ["met", "seconds"], ["unit", "repeat"]))

    @cached_property
    def unit_sizes(self) -> pd.Series[int]:
        return self._units.groupby("unit")["requests"].max()


def _by_row(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {str(config): mine for config, mine in frame.groupby("config", sort=False)}


def disturbance(results: Results) -> str:
    """Return why verdicts are provisional, if other programs used the machine most of the time; otherwise empty."""
    warnings = results.generations["warnings"]
    busy = sum(not BUSY_WARNINGS.isdisjoint(names) for names in warnings)
    if busy <= _MOST_DISTURBED * len(warnings):
        return ""
    return f"Verdicts are provisional: other programs used the processor during {busy} of {len(warnings)} generations."
