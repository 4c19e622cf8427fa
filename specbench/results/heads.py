"""How trained heads do in a run, beside what was measured when they were trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from specbench.results import frames
from specbench.results.frames import Steps

PLACES = 4
"""Of a draft, whose acceptance is told while a head learns."""

_SPEEDUP = ("prompts", "speedup", "speedup_low", "speedup_high", "speedup_basis", "verdict", "provisional")


def stories(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """How the heads of a run came about (``specbench.models.stories``), by the names of their drafters; those that were
    measured while they were trained."""
    return {name: story for name, story in (run.get("heads") or {}).items() if story.get("measured")}


def distinct_stories(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The same, with each training once: a head that drafts alone and in a cascade learnt once."""
    told: dict[str, Mapping[str, Any]] = {}
    for name, story in stories(run).items():
        if story not in told.values():
            told[name] = story
    return told


def training_frame(df: pd.DataFrame) -> pd.DataFrame:
    """How trained heads did while they learnt.

    Args:
        df: Rows of one run, from ``specbench.results.store.load_results``.

    Returns:
        One row per head and measure with its ``drafter``, ``tokens`` trained on, ``tokens_per_step``, ``kept_1`` to
        ``kept_4``, of the drafts tested at that place the share kept, and whether it is the ``best``, which is the head
        that was kept. NaN where nothing was tested.
    """
    told = distinct_stories(frames.run_of(df))
    out = [
        {
            "drafter": name,
            "tokens": each["tokens"],
            "tokens_per_step": each["tokens_per_step"],
            **{
                f"kept_{place + 1}": share
                for place, share in enumerate([*each["accepted"], *[math.nan] * PLACES][:PLACES])
            },
            "best": each is best_measure(story),
        }
        for name, story in told.items()
        for each in story["measured"]
    ]
    names = [
        "drafter",
        "tokens",
        "tokens_per_step",
        *(f"kept_{place + 1}" for place in range(PLACES)),
        "best",
    ]
    frame = pd.DataFrame(out, columns=names)
    frame.attrs = {"kind": "training"}
    return frame


def best_measure(story: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was measured of the head as it was kept."""
    best: Mapping[str, Any] = max(story["measured"], key=lambda each: each["tokens_per_step"])
    return best


def head_frame(df: pd.DataFrame, steps: Steps | None = None) -> pd.DataFrame:
    """Trained heads by category.

    Args:
        df: Rows of one run, from ``specbench.results.store.load_results``.
        steps: Of these rows, where they are known.

    Returns:
        One row per configuration that drafts with a trained head and category with ``config, label, drafter,
        category``; ``tokens_per_step``; ``first`` and ``second``, of the drafts tested at the first two positions the
        shares that were kept; ``trained``, the tokens per step on held-out prompts of a category of that name when the
        head was trained; the ``speedup`` over plain decoding with its interval, as of ``frames.category_frame``. NaN
        where there is nothing to go by.
    """
    run = frames.run_of(df)
    told = stories(run)
    steps = steps or frames.step_arrays(df)
    speedups = {(row["config"], row["category"]): row for row in frames.records(frames.category_frame(df))}
    kinds = df[["config", "category"]].fillna("").to_numpy().tolist()
    pairs = list(dict.fromkeys((str(config), str(category)) for config, category in kinds))
    place = {pair: number for number, pair in enumerate(pairs)}
    codes = np.array([place[str(config), str(category)] for config, category in kinds], dtype=np.intp)
    found = {pairs[code]: mine for code, mine in steps.split(codes[steps.row]).items()}
    configs = df.drop_duplicates("config").set_index("config")[["label", "drafter"]]
    out = []
    order = {config["id"]: number for number, config in enumerate(run["configs"])}
    for (config, category), mine in sorted(found.items(), key=lambda each: order[each[0][0]]):
        label, drafter = configs.loc[config]
        if drafter not in told:
            continue
        rates = mine.rates(2)
        trained = best_measure(told[drafter])["categories"].get(category, math.nan)
        row = speedups.get((config, category), {"prompts": 0, "verdict": None})
        out.append(
            {
                "config": config,
                "label": label,
                "drafter": drafter,
                "category": category,
                "tokens_per_step": float(mine["emitted"].mean()),
                "first": float(rates[0]),
                "second": float(rates[1]),
                "trained": float(trained),
                **{name: row.get(name, math.nan) for name in _SPEEDUP},
            }
        )
    names = ["config", "label", "drafter", "category", "tokens_per_step", "first", "second", "trained"]
    frame = pd.DataFrame(out, columns=[*names, *_SPEEDUP])
    frame.attrs = {"kind": "heads"}
    return frame
