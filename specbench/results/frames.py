"""The data frames of a run, from which figures are computed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import pandas as pd

from specbench.results import stats
from specbench.results.pairs import output_speed, paired_generations, paired_groups, with_baseline
from specbench.results.results import Results

LIMITED = {"ttft": "ttft_s", "tpot": "token_s", "e2el": "total_s"}
"""What can be limited: the time to the first token, per later token, and of the whole answer."""


class Frames:
    """A run with limits of latency.

    Attributes:
        disturbance: Why verdicts are provisional, see ``Results``; empty for `specbench tune`, whose verdicts are not.
        tuned: What `specbench tune` found out, by configuration id; empty for other runs.
    """

    def __init__(self, results: Results, limits: Mapping[str, float]) -> None:
        self.results, self.limits, self.run = results, limits, results.run
        answer = None if self.run.tuning is None else self.run.tuning.answer
        self.tuned = {} if answer is None else answer.measured
        self.disturbance = results.disturbance if answer is None else ""
        self._parts: dict[str, tuple[dict[str, pd.DataFrame], pd.DataFrame]] = {}

    @property
    def confidence(self) -> float:
        """The nominal coverage of a speedup's interval; larger if the run could stop at several looks."""
        return stats.CONFIDENCE if self.run.stopping is None else self.run.stopping.confidence

    # -- frames ------------------------------------------------------------------------------------

    def part(self, name: str, config: str) -> pd.DataFrame:
        """Return the rows of a configuration in a frame: an attribute of this object or of ``Results``."""
        if name not in self._parts:
            whole = getattr(self if hasattr(type(self), name) else self.results, name)
            by_config = whole.groupby("config", sort=False)
            self._parts[name] = {str(each): mine for each, mine in by_config}, whole[:0]
        found, empty = self._parts[name]
        return found.get(config, empty)

    @cached_property
    def speeds(self) -> pd.DataFrame:
        """The finished outputs with ``speed``, see ``output_speed``."""
        return self.results.done.assign(speed=output_speed(self.results.done))

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """See ``paired_generations``."""
        return paired_generations(self.results)

    @cached_property
    def group_pairs(self) -> pd.DataFrame:
        """See ``paired_groups``."""
        return paired_groups(self.results)

    @cached_property
    def within(self) -> pd.DataFrame:
        """The groups with ``met``, how many of their requests were within the limits, and ``seconds``.

        Seconds are those in which the tokens come at the group's throughput, so that rates of closed loops leave out
        the time in which a group ends.
        """
        done = self.results.done.assign(token_s=1.0 / self.results.done["tokens_per_second"], met=1.0)
        for name, limit_s in self.limits.items():  # an answer of one token has no time per token
            done["met"] *= ~(done[LIMITED[name]].astype(float) > limit_s)
        keys = ["config", "group", "repeat"]
        groups = self.results.groups.merge(done.groupby(keys, as_index=False)["met"].sum(), on=keys)
        return groups.assign(seconds=groups["new_tokens"] / groups["throughput"].astype(float))

    @cached_property
    def within_pairs(self) -> pd.DataFrame:
        """The same, each with the group of its baseline."""
        return with_baseline(self.within, ["met", "seconds"], ["group", "repeat"])
