"""What a generation is said to have come to: each case as it is printed, in one file of snapshots."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbench.base.record import Estimate
from specbench.cli.summary import show_summary
from specbench.results.stats import verdict

TIMES = {f"{part}_s": share for part, share in zip(("draft", "verify", "accept", "rollback", "other"),
                                                   (0.2, 0.7, 0.05, 0.05, 0.0), strict=True)}  # fmt: skip
FIGURES: dict[str, Any] = {
    "target": "tiny", "dtype": "float32", "drafter": "self:layers=1", "text": "the", "new_tokens": 20,
    "finish_reason": "length", "steps": 9, "drafted": 27, "accepted": 10, "nodes": 27,
    "acceptance_rate": 10 / 27, "tokens_per_step": 19 / 9, "gammas": [3] * 9, "tokens_per_second": 19.0,
    "time": {"ttft_s": 0.25, "decode_s": 1.0, "mask_s": 0.0, **TIMES}, "draftable_share": None,
    "options": {"gamma": 3, "draft_policy": "fixed:gamma=3", "verification": None, "temperature": 0.0},
    "explained": {"tokens": 2.0, "step": 1.25, "drafting": 0.25, "usual": 1.5, "plain_s": 0.1, "plain_steps": 9},
}  # fmt: skip
RATES = [(10.0, 10.0), (40.0, 10.0), (20.0, 40.0), (None, 1000.0)]  # the first pair alone says something else
COMPARED: dict[str, Any] = {
    "speedup": 2.0 ** (1 / 3), "speedup_interval": [1.1, 1.44], "identical": True, "differing_repeats": 0,
    "warnings": [],
    "repeats": [
        {"speculative": {"tokens_per_second": fast}, "plain": {"tokens_per_second": slow},
         "speedup": fast and fast / slow}
        for fast, slow in RATES
    ],
}  # fmt: skip
DIFFERENCE = {"texts": ["a", None], "numerical_tie": False, "gap_units": 12.0, "rounding": "float32", "position": 3,
              "gap": 0.5}  # fmt: skip
SLOW = {"tokens": 2.0, "step": 4.0, "drafting": 2.5, "usual": 0.5}
RARE = {"tokens": 1.05, "step": 1.2, "drafting": 0.01, "usual": 0.88}
BUSY = {"severity": "warning", "text": "Busy.", "remedy": "Wait."}
SAMPLED = {
    "identical": None,
    "options": {"gamma": None, "draft_policy": "auto", "verification": "traversal", "temperature": 0.8},
}

ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a gain": ({}, {}),
    "a gain, verbose": ({"draftable_share": 0.98}, {"verbose": True, "notes": ["It was measured."]}),
    "slower, for drafting": ({"explained": SLOW}, {}),
    "hardly faster": ({"explained": {**SLOW, "step": 2.0, "drafting": 0.4, "usual": 1.0}}, {}),
    "slower, little accepted": (
        {"explained": RARE, "gammas": [5, 0, 0, 15], "steps": 4, "drafted": 20, "acceptance_rate": 0.05},
        {},
    ),
    "slower, for experts": (
        {"explained": {**RARE, "experts": 2.4}, "drafted": 20, "acceptance_rate": 0.05},
        {"verbose": True},
    ),
    "nothing drafted": ({"drafted": 0, "explained": {**SLOW, "usual": 1.0}}, {}),
    "nothing drafted, as none would pay": (
        {
            "drafted": 0,
            "explained": {**SLOW, "usual": 1.0},
            "options": {**FIGURES["options"], "draft_policy": "auto"},
        },
        {},
    ),
    "little drafted, as more would not pay": (
        {
            "gammas": [3, 0, 0, 0, 0, 0, 2, 0, 0],
            "drafted": 5,
            "explained": {**RARE, "usual": 0.94},
            "options": {**FIGURES["options"], "draft_policy": "auto"},
        },
        {},
    ),
    "too slow a drafter": ({"too_slow": True, "drafted": 2, "explained": SLOW}, {}),
    "nothing to predict from": ({"explained": None}, {}),
    "plain decoding": ({"drafter": "none", "drafted": 0, "explained": None}, {}),
    "a single token": ({"tokens_per_second": None, "explained": None, "steps": 0, "new_tokens": 1}, {}),
    "interrupted": ({"finish_reason": None, "explained": None}, {}),
    "a tree": ({"nodes": 90, "options": SAMPLED["options"]}, {}),
    "an empty reply": ({"finish_reason": "eos", "text": " \n", "explained": None}, {}),
}
PAIRED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "faster": ({"transformers_tokens_per_second": 5.25}, {}),
    "faster, verbose": ({}, {"verbose": True}),
    "slower": ({"speedup": 0.5, "speedup_interval": [0.4, 0.6], "explained": SLOW}, {}),
    "not shown": ({"speedup_interval": [0.9, 1.6], "warnings": [BUSY]}, {}),
    "too few repeats": ({"speedup": 0.9, "speedup_interval": None, "explained": SLOW}, {}),
    "nothing drafted": ({"speedup": 0.5, "speedup_interval": [0.4, 0.6], "drafted": 0}, {}),
    "too slow a drafter": (
        {"speedup": 0.5, "speedup_interval": [0.4, 0.6], "too_slow": True, "explained": SLOW},
        {},
    ),
    "too short": ({"speedup": None, "speedup_interval": None}, {}),
    "sampled": (SAMPLED, {}),
    "different tokens": ({"identical": False, "difference": DIFFERENCE, "differing_repeats": 1}, {}),
    "plain decoding twice": ({"drafter": "none", "drafted": 0}, {}),
}


@pytest.mark.parametrize(("base", "cases"), [({}, ALONE), (COMPARED, PAIRED)], ids=["alone", "compared"])
def test_what_it_came_to(capsys, snapshot, base, cases):
    shown = []
    for name, (changes, options) in cases.items():
        figures = FIGURES | base | changes
        if "speedup" in figures:
            low, high = figures["speedup_interval"] or (None, None)
            figures["verdict"] = verdict(
                Estimate(figures["speedup"] or math.nan, low, high, 1, "repeats"), "repeats"
            )
        show_summary(figures, spaced=False, **options)
        shown.append(f"-- {name}\n{capsys.readouterr().err}")
    snapshot("\n".join(shown))
