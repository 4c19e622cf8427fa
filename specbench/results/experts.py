"""How many experts the target's passes read, by the number of their tokens (docs/metrics.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pandas as pd

_NAMED = 3
"""Numbers of tokens that the sentence names."""


def experts_by_rows(generations: pd.DataFrame) -> dict[int, tuple[int, float]]:
    """Return what passes over 1, 2, ... tokens read, by number of tokens, ascending.

    Args:
        generations: Rows of ``Results.done``.

    Returns:
        How many passes there were, and how many times the experts of one token they read; empty without experts.
    """
    passes: Counter[int] = Counter()
    read: Counter[int] = Counter()
    one: Counter[int] = Counter()
    for each in generations["steps"]:
        for nodes, count, own in zip(each.nodes, each.experts, each.experts_one, strict=False):
            passes[nodes + 1] += 1
            read[nodes + 1] += count
            one[nodes + 1] += own
    return {rows: (passes[rows], read[rows] / one[rows]) for rows in sorted(passes) if one[rows]}


def experts_sentence(found: Mapping[int, tuple[int, float]]) -> str:
    """Return a sentence on what ``experts_by_rows`` found; empty if no pass had several tokens."""
    often = sorted((rows for rows in found if rows > 1), key=lambda rows: -found[rows][0])
    if not often:
        return ""
    parts = [f"over {rows} tokens {found[rows][1]:.1f}" for rows in sorted(often[:_NAMED])]
    first, *others = [f"{part} times" for part in parts]
    more = f", {', '.join(others)}" if others else ""
    return f"A target pass {first.replace('tokens', 'tokens reads')} the experts of one{more}."
