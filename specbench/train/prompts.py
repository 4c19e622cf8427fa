"""Choice of the prompts that a head is trained on, and of those that it is measured on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from specbench.base.errors import UsageError
from specbench.bench.prompts import ALL_SETS, Prompt, load_prompts

_NO_WORD = re.compile(r"[\W_]+")


def training_prompts(sources: Sequence[str | Path]) -> list[Prompt]:
    """Load prompts to train on.

    Raises:
        UsageError: See ``load_prompts``; or a prompt is also in a benchmark set, whatever its case, spaces and
            punctuation.
    """
    prompts = load_prompts(sources)
    measured = {_words(turn): prompt.id for prompt in load_prompts([ALL_SETS]) for turn in prompt.turns}
    for prompt in prompts:
        for turn in prompt.turns:
            if (found := measured.get(_words(turn))) is not None:
                raise UsageError(
                    f"The training prompt {prompt.id!r} is also in a benchmark set ({found}).",
                    "Remove it from the training set.",
                )
    return prompts


def _words(text: str) -> str:
    return _NO_WORD.sub(" ", text).strip().casefold()


def held_out_prompts(prompts: Sequence[Prompt], number: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into those to train on and those to measure on, which are the last of each category, in turn.

    Args:
        number: Number of held-out prompts, at most a third.

    Raises:
        UsageError: There are fewer than 3.
    """
    if len(prompts) < 3:
        raise UsageError(
            "Training needs at least 3 prompts, because some are held out to measure on.", "Name more."
        )
    rank: dict[str, int] = {}
    order = []
    for place in reversed(range(len(prompts))):
        category = prompts[place].category
        rank[category] = rank.get(category, 0) + 1
        order.append((rank[category], place))
    held = {place for _, place in sorted(order)[: min(number, len(prompts) // 3)]}
    trained = [prompt for place, prompt in enumerate(prompts) if place not in held]
    return trained, [prompts[place] for place in sorted(held)]
