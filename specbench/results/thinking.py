"""Thinking and answers apart: what each configuration gains inside the thinking, and after it.

A step belongs to the thinking if its first token does. Of a server, the parts are the tokens before and after the last
piece of thinking arrived, and its drafts are not known by part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from specbench.base.record import BASELINE, ratio
from specbench.results import stats
from specbench.results.results import Results
from specbench.results.summary import configs_of
from specbench.rows import Row

_FIGURES = ("tokens", "seconds", "steps", "drafted", "accepted")


def part_rows(results: Results) -> list[SimpleNamespace]:
    """Return both parts of each configuration that thought, in the order of the run.

    Returns:
        For each ``config`` and ``part``, ``thinking`` or ``answer``, after the first emission: ``tokens`` of all
        generations; ``share`` and ``time_share``, of the tokens and of the seconds of both parts; ``tokens_per_second``
        and ``speedup`` over the same part of the baseline, geometric means over prompts; ``tokens_per_step`` and
        ``acceptance_rate``, pooled over all steps. NaN stands for what is not known.
    """
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


def _row(config: Row, part: str, both: pd.DataFrame, rows: pd.DataFrame) -> SimpleNamespace:
    prompts, repeats = rows["prompt"].to_numpy(), rows["repeat"].to_numpy()
    return SimpleNamespace(
        config=config,
        part=part,
        tokens=int(rows["tokens"].sum()),
        share=ratio(float(rows["tokens"].sum()), float(both["tokens"].sum())),
        time_share=ratio(float(rows["seconds"].sum()), float(both["seconds"].sum())),
        tokens_per_second=stats.geometric_mean(rows["speed"], prompts, repeats),
        speedup=BASELINE
        if config.id == config.baseline
        else stats.geometric_mean(rows["ratio"], prompts, repeats),
        tokens_per_step=stats.pooled_rate(rows["tokens"], rows["steps"], prompts, least=1.0),
        acceptance_rate=stats.pooled_rate(rows["accepted"], rows["drafted"], prompts, most=1.0),
    )
