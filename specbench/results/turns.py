"""Conversations turn by turn: what servers found in their prompt caches, and what their answers were worth.

Two things are named: a server that does not find earlier turns in its prompt cache, and one whose answers are broken
where the baseline's are not. Both are counted by conversation and compared by a sign test, since the generations of one
conversation depend on each other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from specbench.base.record import ratio
from specbench.results.results import Results
from specbench.results.run import RunWarning
from specbench.results.summary import configs_of
from specbench.rows import Row

LOST = 0.5
"""A turn that finds less than this share of the previous prompt in the cache has lost it."""

CHANCE = 0.025
"""A difference between servers is reported if a sign test gives it less than this probability."""

_BLOCKS = 16
"""Prompt caches work in blocks of a multiple of this many tokens."""

_PHRASE = 3
_WORDS = 30
_DISTINCT = 0.3
"""A text of at least ``_WORDS`` words repeats itself if less than this share of its phrases are distinct."""


def turn_rows(results: Results) -> list[SimpleNamespace]:
    """Return a row for each server and turn, in the order of the run; none without later turns.

    Returns:
        For each ``config`` and ``turn``, from 1: the number of ``answers``; mean ``prompt_tokens`` and
        ``cached_tokens``; ``reused``, cached tokens over those of the turn before, prompt and answer; the median
        ``ttft_s``; ``tokens_per_second``, a geometric mean; ``acceptance_rate``, ``tokens_per_step``; and how many
        answers are ``broken``, see ``is_broken``. NaN stands for what is not known.
    """
    if results.answers.empty or not results.done["turn"].max() > 0:
        return []
    answers = _answers(results)
    return [
        _turn_row(config, turn, rows)
        for config in configs_of(results)
        for turn, rows in answers[answers["config"] == config.id].groupby("turn")
    ]


def _turn_row(config: Row, turn: Any, rows: pd.DataFrame) -> SimpleNamespace:
    drafted = float(rows["drafted"].sum())
    known = rows[rows["cached_tokens"].notna() & rows["known"].notna()]
    speeds = rows["tokens_per_second"].to_numpy(dtype=np.float64)
    speeds = speeds[speeds > 0]
    steps = float((rows["new_tokens"] - 1 - rows["accepted"]).sum())
    return SimpleNamespace(
        config=config,
        turn=int(turn) + 1,
        answers=len(rows),
        prompt_tokens=float(rows["prompt_tokens"].mean()),
        cached_tokens=float(rows["cached_tokens"].mean()),
        reused=ratio(float(known["cached_tokens"].sum()), float(known["known"].sum())) if turn else math.nan,
        ttft_s=float(rows["ttft_s"].median()),
        tokens_per_second=math.exp(float(np.log(speeds).mean())) if len(speeds) else math.nan,
        acceptance_rate=ratio(float(rows["accepted"].sum()), drafted),
        tokens_per_step=ratio(float((rows["new_tokens"] - 1).sum()), steps) if drafted else math.nan,
        broken=int(rows["broken"].sum()),
    )


def _answers(results: Results) -> pd.DataFrame:
    """Return all answers with what is known of them.

    ``known`` is the number of tokens of the turn before, prompt and answer; ``lost`` says whether less than half of its
    prompt was found in the cache, and two blocks or more are missing (vLLM reads the last one again for a head);
    ``broken`` see ``is_broken``.
    """
    columns = ["config", "prompt", "turn", "repeat", "prompt_tokens", "new_tokens", "ttft_s", "tokens_per_second",
               "finish_reason"]  # fmt: skip
    rows = results.done[columns].join(results.answers[["text", "cached_tokens", "drafted", "accepted"]])
    rows[["drafted", "accepted"]] = rows[["drafted", "accepted"]].astype(float).fillna(0.0)
    rows["cached_tokens"] = rows["cached_tokens"].astype(float)
    key = ["config", "prompt", "turn", "repeat"]
    before = rows[[*key, "prompt_tokens", "new_tokens"]].copy()
    before["turn"] += 1
    rows = rows.merge(before, on=key, how="left", suffixes=("", "_before"))
    rows["known"] = rows["prompt_tokens_before"] + rows["new_tokens_before"]
    blocks = rows.groupby("config")["cached_tokens"].transform(_block)
    rows["lost"] = (rows["cached_tokens"] < LOST * rows["prompt_tokens_before"]) & (
        rows["cached_tokens"] + 2 * blocks <= rows["known"]
    )
    expected = {prompt.id: prompt.expects for prompt in results.run.prompts}
    rows["broken"] = [
        isinstance(text, str) and is_broken(text, expected.get(prompt) if reason == "stop" else None)
        for text, prompt, reason in zip(rows["text"], rows["prompt"], rows["finish_reason"], strict=True)
    ]
    return rows


def _block(cached: pd.Series[float]) -> int:
    """Return the size of the blocks that a server caches, as its cached tokens show it; 1 if they show none."""
    common = math.gcd(*map(int, cached.dropna()))
    return 1 if common % _BLOCKS else common


# -- answers -------------------------------------------------------------------------------------------


def is_broken(text: str, expects: str | None = None) -> bool:
    """Return whether an answer is empty, repeats a phrase over and over, or is not what is expected.

    Args:
        text: The answer.
        expects: ``json`` or ``tool call`` (a JSON object with a name and arguments); ``None`` for any text.
    """
    words = text.split()
    if not words or text.count("\N{REPLACEMENT CHARACTER}") > len(text) / 10:
        return True
    if len(words) >= _WORDS:
        phrases = [tuple(words[at : at + _PHRASE]) for at in range(len(words) - _PHRASE + 1)]
        if len(set(phrases)) < _DISTINCT * len(phrases):
            return True
    if expects is None:
        return False
    try:
        found = json.loads(re.sub(r"^```\w*\s*\n|\n\s*```$", "", text.strip()))
    except (ValueError, RecursionError):
        return True
    if expects == "json":
        return False
    return not (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("arguments"), dict)
    )


# -- what is named -------------------------------------------------------------------------------------


def conversation_warnings(results: Results) -> Iterator[RunWarning]:
    """Yield a warning for each server that loses its prompt cache, or whose answers are broken more often than those of
    the baseline; and for those that do not tell what they found in it.
    """
    if results.run.options.get("prompt_cache") != "keep" or results.done.empty:
        return
    answers = _answers(results)
    first, later = answers[answers["turn"] == 0], answers[answers["turn"] > 0]
    for config in configs_of(results):
        rows, base = (later[later["config"] == each] for each in (config.id, config.baseline))
        if rows.empty:
            continue
        if rows["cached_tokens"].isna().all():
            message = f"{config.label}: it does not say how many prompt tokens came from its cache."
            advice = "vLLM says it with --enable-prompt-tokens-details, SGLang with --enable-cache-report."
            yield RunWarning("cache-unknown", "info", message, advice)
        else:
            yield from _lost_caches(config, rows, base)
        mine = first[first["config"] == config.id]
        found = ratio(float(mine["cached_tokens"].sum()), float(mine["prompt_tokens"].sum()))
        if found > LOST:
            message = (
                f"{config.label}: first turns found {found:.0%} of their tokens in the prompt cache, from an earlier"
                " measurement."
            )
            advice = "Give another --seed, or restart the server."
            yield RunWarning("prompt-cache", "warning", message, advice, {"share": found})
        if config.id != config.baseline and more_often(rows, base, "broken"):
            broken, others = int(rows["broken"].sum()), int(base["broken"].sum())
            message = (
                f"The answers of {config.label} decay: {broken} of {len(rows)} in later turns are empty, repeat"
                f" themselves, or are not the JSON that was asked for; of {config.baseline} {others} of {len(base)}."
            )
            advice = (
                "Compare with the prompt cache off (--prompt-cache avoid) and with speculation off, to see which one"
                " it is."
            )
            data = {"broken": broken, "baseline": others}
            yield RunWarning("answers-decay", "error", message, advice, data)


def _lost_caches(config: Row, rows: pd.DataFrame, base: pd.DataFrame) -> Iterator[RunWarning]:
    """Yield a warning if a server loses its cache, in most of its later turns or more often than the baseline."""
    known, theirs = rows[rows["cached_tokens"].notna()], base[base["cached_tokens"].notna()]
    lost, others = (int(each["lost"].sum()) for each in (known, theirs))
    differs = config.id != config.baseline and more_often(known, theirs, "lost")
    if lost < LOST * len(known) and not differs:
        return
    beside = f"; {config.baseline} in {others} of {len(theirs)}" if differs else ""
    message = (
        f"{config.label} loses its prompt cache: in {lost} of {len(known)} later turns it did not find the turn"
        f" before{beside}."
    )
    advice = "Switch prefix caching on, and check that it works together with this kind of speculation."
    data = {"lost": lost / len(known), "baseline": others / len(theirs) if len(theirs) else None}
    yield RunWarning("cache-lost", "error", message, advice, data)


def more_often(rows: pd.DataFrame, base: pd.DataFrame, what: str) -> bool:
    """Return whether more conversations have it more often than in the baseline than chance explains."""
    counts = [each.groupby("prompt")[what].mean() for each in (rows, base)]
    both = pd.concat(counts, axis=1, join="inner").to_numpy(dtype=np.float64)
    more, fewer = int((both[:, 0] > both[:, 1]).sum()), int((both[:, 0] < both[:, 1]).sum())
    by_chance = sum(math.comb(more + fewer, each) for each in range(more, more + fewer + 1))
    return more > 0 and by_chance < CHANCE * 2 ** (more + fewer)
