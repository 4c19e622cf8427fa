"""Thinking and answers apart: what each configuration gains inside the thinking, and after it.

A step belongs to the thinking if its first token does. Of a server, the parts are the tokens before and after the last
piece of thinking arrived, and its drafts are not known by part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from specbench.base.record import Estimate, ratio
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.summary import configs_of
from specbench.rows import Row

PartName = Literal["thinking", "answer"]
_FIGURES = ("tokens", "seconds", "steps", "drafted", "accepted")


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part of the outputs of one configuration, after the first emission. NaN stands for what is not known.

    Attributes:
        tokens: Number of tokens, over all generations.
        share: Of the tokens of both parts.
        time_share: Of the seconds of both parts.
        tokens_per_second: Geometric mean over prompts.
        speedup: Over the same part of the baseline, geometric mean over prompts; 1 for a baseline.
        tokens_per_step, acceptance_rate: Pooled over all steps.
    """

    config: Row
    part: PartName
    tokens: int
    share: float
    time_share: float
    tokens_per_second: Estimate
    speedup: Estimate
    tokens_per_step: Estimate
    acceptance_rate: Estimate

    @property
    def is_baseline(self) -> bool:
        return self.config.id == self.config.baseline


def part_rows(results: Results) -> list[PartRow]:
    """Return both parts of each configuration that thought, in the order of the run."""
    thought = results.done[results.done["thinking_tokens"] > 0]
    if thought.empty:
        return []
    parts = pd.DataFrame([each for _, row in thought.iterrows() for each in _parts(row)])
    parts["speed"] = parts["tokens"] / parts["seconds"].where(parts["seconds"] > 0)
    keys = ["prompt", "turn", "repeat", "part"]
    base = parts[["config", *keys, "speed"]].rename(columns={"config": "baseline", "speed": "base"})
    parts = parts.merge(base, on=["baseline", *keys], how="left")
    parts["ratio"] = parts["speed"] / parts["base"]
    return [
        _row(config, part, mine, mine[mine["part"] == part])
        for config in configs_of(results)
        for mine in [parts[parts["config"] == config.id]]
        for part in ("thinking", "answer")
        if len(mine)
    ]


def _parts(row: pd.Series[Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures of both parts of a generation."""
    key = {name: row[name] for name in ("config", "baseline", "prompt", "turn", "repeat")}
    whole = {"tokens": max(0, row["new_tokens"] - row["first_tokens"]), "seconds": row["decode_s"]}
    emitted = np.array(row["steps"].emitted, dtype=np.int64)
    if len(emitted):
        starts = row["first_tokens"] + np.concatenate(([0], np.cumsum(emitted)[:-1]))
        inside = starts < row["thinking_tokens"]
        counts = {"tokens": emitted, "steps": np.ones_like(emitted)}
        counts |= {name: np.array(getattr(row["steps"], name)) for name in ("drafted", "accepted")}
        whole |= {name: float(values.sum()) for name, values in counts.items()}
        thinking = {name: float(values[inside].sum()) for name, values in counts.items()}
    else:
        known = min(row["thinking_tokens"], row["new_tokens"]) - row["first_tokens"]
        thinking = {"tokens": max(0.0, known)}
    thinking["seconds"] = row["thinking_s"]
    yield {**key, "part": "thinking", **{name: thinking.get(name, math.nan) for name in _FIGURES}}
    rest = {name: whole.get(name, math.nan) - thinking.get(name, math.nan) for name in _FIGURES}
    yield {**key, "part": "answer", **rest}


def _row(config: Row, part: PartName, both: pd.DataFrame, rows: pd.DataFrame) -> PartRow:
    prompts, repeats = rows["prompt"].to_numpy(), rows["repeat"].to_numpy()
    is_baseline = config.id == config.baseline
    return PartRow(
        config=config,
        part=part,
        tokens=int(rows["tokens"].sum()),
        share=ratio(float(rows["tokens"].sum()), float(both["tokens"].sum())),
        time_share=ratio(float(rows["seconds"].sum()), float(both["seconds"].sum())),
        tokens_per_second=stats.geometric_mean(rows["speed"], prompts, repeats),
        speedup=Estimate(1.0, None, None, len(set(prompts)))
        if is_baseline
        else stats.geometric_mean(rows["ratio"], prompts, repeats),
        tokens_per_step=stats.pooled_rate(rows["tokens"], rows["steps"], prompts, least=1.0),
        acceptance_rate=stats.pooled_rate(rows["accepted"], rows["drafted"], prompts, most=1.0),
    )
