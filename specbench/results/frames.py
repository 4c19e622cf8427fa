"""The data frames of a run that figures are computed from: outputs and groups, each paired with its baseline's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from specbench.results import stats
from specbench.results.results import Results
from specbench.results.run import OTHER_ANSWERS

LIMITED = {"ttft": "ttft_s", "tpot": "token_s", "e2el": "total_s"}
"""What can be limited: the time to the first token, per later token, and of the whole answer."""

_KEY = ["group", "prompt", "turn", "repeat"]


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


def paired_generations(results: Results) -> pd.DataFrame:
    """Pair each finished generation with its baseline's for the same prompt, turn and repeat.

    Returns:
        One row per pair, without baselines: ``config, category, group, prompt, turn, repeat``; ``ratio`` (of decode
        speeds) and ``ratio_total`` (of total times per token), above 1 if the configuration is faster; ``tokens``
        and ``seconds`` after the first emission, and the baseline's as ``base_tokens`` and ``base_seconds``;
        ``identical``, whether the tokens (for servers, the texts) are equal, or ``None`` if they need not be: with
        sampling, beam search, or different prompts. For requests of a batch, times are from arrival to end.
    """
    same_prompts = results.run.options.get("salt") != "each"
    columns = [
        *_KEY, "config", "kind", "category", "baseline", "temperature", "tokens_per_second", "decode_s", "total_s",
        "new_tokens", "token_ids", "text",
    ]  # fmt: skip
    rows = results.done[columns].copy()
    alone = rows["group"] == ""
    rows["tokens"] = (rows["tokens_per_second"] * rows["decode_s"]).where(alone, rows["new_tokens"])
    rows["seconds"] = rows["decode_s"].where(alone, rows["total_s"])
    rows["tokens_per_second"] = output_speed(rows)
    rows["total"] = rows["total_s"] / rows["new_tokens"].where(rows["new_tokens"] > 0)
    figures = ["tokens_per_second", "tokens", "seconds", "total", "token_ids", "text"]
    pairs = with_baseline(rows, figures, _KEY)
    pairs["ratio"] = pairs["tokens_per_second"] / pairs["base_tokens_per_second"]
    pairs["ratio_total"] = pairs["base_total"] / pairs["total"]
    meant = (pairs["temperature"] == 0) & ~pairs["kind"].isin(OTHER_ANSWERS) & same_prompts
    outputs = (pairs[name] for name in ("token_ids", "text", "base_token_ids", "base_text"))
    same = (same_output(*output) if one else None for one, *output in zip(meant, *outputs, strict=True))
    pairs["identical"] = pd.Series(list(same), dtype=object, index=pairs.index)
    figures = ["ratio", "ratio_total", "tokens", "seconds", "base_tokens", "base_seconds", "identical"]
    return pairs[["config", "category", *_KEY, *figures]]


def paired_groups(results: Results) -> pd.DataFrame:
    """Pair each group with its baseline's for the same prompts and repeat, in columns of ``paired_generations``.

    ``ratio`` compares throughputs, and ``prompt`` is the name of the group, which is the unit of replication.
    """
    keys = ["group", "repeat"]
    groups = results.groups[["config", "baseline", *keys, "new_tokens", "throughput"]]
    groups = groups.rename(columns={"new_tokens": "tokens"})
    groups["seconds"] = groups["tokens"] / groups["throughput"]
    pairs = with_baseline(groups, ["tokens", "seconds", "throughput"], keys)
    pairs["ratio"] = pairs["throughput"] / pairs["base_throughput"]
    return pairs.rename(columns={"group": "prompt"})


def same_output(tokens: Any, text: str | None, other_tokens: Any, other_text: str | None) -> bool:
    """Return whether two outputs are the same in their tokens and, of servers, their texts."""
    return text == other_text and bool(np.array_equal(tokens, other_tokens))


def output_speed(rows: pd.DataFrame) -> pd.Series[float]:
    """Return decode tokens/s; for requests of a batch, tokens/s from arrival to end. NaN if no time has passed."""
    whole = rows["new_tokens"] / rows["total_s"].where(rows["total_s"] > 0)
    return rows["tokens_per_second"].where(rows["group"] == "", whole)


def with_baseline(rows: pd.DataFrame, figures: list[str], keys: list[str]) -> pd.DataFrame:
    """Return the rows that are not baselines, with the values of their baselines in columns ``base_<figure>``."""
    renamed = {"config": "baseline", **{name: f"base_{name}" for name in figures}}
    base = rows[["config", *keys, *figures]].rename(columns=renamed)
    return rows[rows["config"] != rows["baseline"]].merge(base, on=["baseline", *keys], how="inner")
