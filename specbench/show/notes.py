"""What the values mean that draft policies note in each step."""

from __future__ import annotations

from collections.abc import Iterable

POLICY_NOTES = {
    "rate": "tokens per second that a further draft token must reach to be worth its time",
    "survival": "estimated probability that the whole draft is accepted",
    "probe": "1 if the step drafts only to learn",
    "blind": "1 if the drafter has not read the whole context",
    "gamma": "the draft length that is aimed at",
    "H_norm": "entropy of the drafter's prediction over log V, V the size of the vocabulary (0: certain, 1: no idea)",
    "H_ema": "its moving average, which sets γ",
    "lambda": "minimum acceptance probability to continue drafting",
    "threshold": "minimum probability of a draft to continue drafting",
}


def meanings(names: Iterable[str]) -> list[str]:
    """Return a sentence on each name that has a meaning here."""
    return [f"{name}: {POLICY_NOTES[name]}." for name in names if name in POLICY_NOTES]
