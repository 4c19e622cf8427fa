"""Counts of the tokens that a target writes in its greedy answers to a few prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.drafters.lookup import LookupDrafter
from specbench.generate import GenerationRun
from specbench.models.calibrations import TokenCounts
from specbench.policies import FixedLength
from specbench.specs.drafters import Lookup

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.models.target import Target

_HELD_OUT = 3
"""Every third answer is held out to show what the counts cover."""


def greedy_answer(target: Target, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Decode a prompt greedily, with lookup for speed, and return the answer's token ids."""
    run = GenerationRun(
        prompt, target, LookupDrafter(Lookup(None)), policy=FixedLength(4), max_new_tokens=tokens
    )
    for _ in run:
        pass
    return run.result().token_ids


def count_tokens(
    target: Target, prompts: Sequence[Sequence[int]], tokens: int, *, progress: Progress | None = None
) -> TokenCounts:
    """Count the tokens of a target's answers. Nothing is stored.

    Args:
        prompts: Token ids, at least 2 prompts.

    Raises:
        UsageError: Fewer than 2 prompts fit the target's context.
    """
    limit = target.scorer.context_limit
    fitting = [prompt for prompt in prompts if limit is None or len(prompt) < limit]
    if len(fitting) < 2:
        raise UsageError("Counting needs at least 2 prompts that fit the context.", "Name more prompts.")
    answers = []
    for done, prompt in enumerate(fitting):
        if progress is not None:
            progress.update("answering the prompts", done, len(fitting))
        answers.append(greedy_answer(target, prompt, tokens))
    held_out = range(min(_HELD_OUT, len(answers)) - 1, len(answers), _HELD_OUT)
    counted = [i for i in range(len(answers)) if i not in held_out]
    written = [token for i in counted for token in answers[i]]
    return TokenCounts(
        target.name,
        ranked_tokens(written, target.end_ids, (token for i in counted for token in fitting[i])),
        len(written),
        tuple(token for i in held_out for token in answers[i]),
    )


def ranked_tokens(written: Sequence[int], end_ids: Sequence[int], read: Iterable[int]) -> tuple[int, ...]:
    """Return end tokens, then written tokens by frequency, then tokens of the prompts by frequency."""
    ranked = [token for counts in (Counter(written), Counter(read)) for token, _ in counts.most_common()]
    return tuple(dict.fromkeys([*end_ids, *ranked]))
