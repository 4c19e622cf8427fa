"""Generations, and groups of them, each beside the one of its baseline."""

from __future__ import annotations

import numpy as np
import pandas as pd

from specbench.results.results import Results
from specbench.results.run import OTHER_ANSWERS

_KEY = ["group", "prompt", "turn", "repeat"]


def paired_runs(results: Results) -> pd.DataFrame:
    """Each finished generation beside the one of its baseline with the same prompt, turn and repeat.

    Returns:
        One row per pair with ``config, category, group, prompt, turn, repeat``; ``ratio`` (of decode speeds) and
        ``ratio_total`` (of whole times per token), above 1 where the configuration is faster; ``tokens`` and
        ``seconds`` after the first emission and those of the baseline as ``base_tokens`` and ``base_seconds``;
        ``identical``, whether the tokens are the same, of servers the texts (``None`` where sampling, beam search or
        prompts that differ make the question pointless).
        Of requests side by side, all of these are about the whole time from their arrival to their end, which is what
        their share of the machine shows in. Baselines themselves are left out.
    """
    same_prompts = results.run.options.get("salt") != "each"
    columns = [
        *_KEY, "config", "kind", "category", "baseline", "temperature", "tokens_per_second", "decode_s", "total_s",
        "new_tokens", "token_ids",
    ]  # fmt: skip
    rows = results.done[columns].copy()
    texts = results.answers["text"].to_dict()
    rows["text"] = [texts.get(row) for row in rows.index]
    alone = rows["group"] == ""
    rows["tokens"] = (rows["tokens_per_second"] * rows["decode_s"]).where(alone, rows["new_tokens"])
    rows["seconds"] = rows["decode_s"].where(alone, rows["total_s"])
    rows["tokens_per_second"] = rows["tokens_per_second"].where(alone, whole_speed(rows))
    rows["total"] = rows["total_s"] / rows["new_tokens"].where(rows["new_tokens"] > 0)
    figures = ["tokens_per_second", "tokens", "seconds", "total", "token_ids", "text"]
    pairs = _beside(rows, rows[["config", *_KEY, *figures]], figures, _KEY)
    pairs["ratio"] = pairs["tokens_per_second"] / pairs["base_tokens_per_second"]
    pairs["ratio_total"] = pairs["base_total"] / pairs["total"]
    meant = (pairs["temperature"] == 0) & ~pairs["kind"].isin(OTHER_ANSWERS) & same_prompts
    outputs = (zip(pairs[f"{side}token_ids"], pairs[f"{side}text"], strict=True) for side in ("", "base_"))
    same = (
        None if not one else our_text == their_text and bool(np.array_equal(ours, theirs))
        for (ours, our_text), (theirs, their_text), one in zip(*outputs, meant, strict=True)
    )
    pairs["identical"] = pd.Series(list(same), dtype=object, index=pairs.index)
    figures = ["ratio", "ratio_total", "tokens", "seconds", "base_tokens", "base_seconds", "identical"]
    return pairs[["config", "category", *_KEY, *figures]]


def paired_groups(results: Results) -> pd.DataFrame:
    """Each group beside that of its baseline with the same prompts and repeat, in columns of ``paired_runs``.

    ``ratio`` is that of throughputs. A group stands where a prompt does: it is what other groups may differ from.
    """
    keys = ["group", "repeat"]
    groups = results.groups[["config", "baseline", *keys, "new_tokens", "throughput"]]
    groups = groups.rename(columns={"new_tokens": "tokens"})
    groups["seconds"] = groups["tokens"] / groups["throughput"]
    figures = ["tokens", "seconds", "throughput"]
    pairs = _beside(groups, groups[["config", *keys, *figures]], figures, keys)
    pairs["ratio"] = pairs["throughput"] / pairs["base_throughput"]
    return pairs.rename(columns={"group": "prompt"})


def whole_speed(rows: pd.DataFrame) -> pd.Series[float]:
    """Tokens/s from arrival to end, NaN where no time has passed."""
    return rows["new_tokens"] / rows["total_s"].where(rows["total_s"] > 0)


def _beside(rows: pd.DataFrame, others: pd.DataFrame, figures: list[str], keys: list[str]) -> pd.DataFrame:
    """Rows of configurations that have another one as baseline, with its figures as ``base_<figure>``."""
    base = others.rename(columns={"config": "baseline", **{name: f"base_{name}" for name in figures}})
    mine = rows[rows["config"] != rows["baseline"]]
    return mine.merge(base, on=["baseline", *keys], how="inner")
