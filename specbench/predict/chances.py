"""What a loaded drafter would have done along an answer, by one pass of its model over the text or by a replay.

A small model reads prompt and answer once; row i of its logits gives q of token i, after the transforms that the answer
was sampled with. Drafters without a model are asked after every token what they would draft, as the loop asks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbench.base.errors import UsageError
from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import StepPlan, run_to_end
from specbench.decoding.sampling import Randomness
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import FreeDrafter
from specbench.drafters.model import ModelDrafter
from specbench.policies import FixedLength
from specbench.predict.answers import Answer, ReadAnswer
from specbench.predict.law import Chances

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter

_ROWS = 64
"""Rows of logits that are computed at a time: those of a whole answer may not fit into memory."""


def model_of(drafter: Drafter) -> Drafter:
    """Return the part of a drafter that is a model; the drafter itself unless it is a cascade."""
    return drafter.model if isinstance(drafter, CascadeDrafter) else drafter


def chances_of(drafter: Drafter, answer: Answer, longest: int, read: ReadAnswer | None = None) -> Chances:
    """Return what a drafter would do along an answer, with drafts of up to ``longest`` tokens.

    Args:
        drafter, answer: The drafter and the answer.
        longest: The longest draft.
        read: What its model has read (``read_answer``); ``None`` to read it now.

    Raises:
        UsageError: It needs the target, or the answer was sampled and its probabilities are not known.
    """
    if isinstance(drafter, FreeDrafter):
        return _of_free(drafter, answer, longest)
    read = read or read_answer(model_of(drafter), answer)
    if isinstance(drafter, CascadeDrafter):
        return _of_cascade(drafter, answer, longest, read)
    drafts = np.clip(read.readable - np.arange(len(answer.tokens)), 0, longest)
    return Chances.by_position(read.chances, drafts, longest)


# -- models ----------------------------------------------------------------------------------------


def read_answer(drafter: Drafter, answer: Answer, *, keep: bool = False) -> ReadAnswer:
    """Return the chances of a small model's drafts along an answer. Its cache holds the answer afterwards.

    Args:
        drafter, answer: The drafter and the answer.
        keep: Whether to keep the logits, for a replay.

    Raises:
        UsageError: See ``chances_of``.
    """
    if type(drafter) is not ModelDrafter:
        raise UsageError(
            f"{drafter.traits.name} is no model that drafts one token after the other with the target's tokens.",
            "Run it where the target is: specbench sweep, or specbench tune.",
        )
    sampling = answer.sampling.at(len(answer.prompt), None, ())
    if not sampling.greedy and answer.probabilities is None:
        raise UsageError(
            "The answer was sampled, and its tokens' probabilities are not known.", "Log it with logprobs."
        )
    scorer, prompt, n = drafter.scorer, len(answer.prompt), len(answer.tokens)
    text = [*answer.prompt, *answer.tokens]
    limit = drafter.context_limit
    readable = n if limit is None else max(0, min(n, limit - prompt + 1))
    chances, kept = np.zeros(n), list[torch.Tensor]()
    drafter.begin(answer.prompt)
    for first in range(0, readable, _ROWS):
        last = min(first + _ROWS, readable)
        logits = scorer.logits(text[: prompt + last - 1], rows=last - first, prompt=prompt)
        before, after = text[: prompt + first], text[prompt + first : prompt + last]
        if sampling.greedy:
            choices = sampling.choose(logits, before, after[:-1])
            chances[first:last] = np.equal(choices, after)
        else:
            assert answer.probabilities is not None
            q = sampling.probabilities(logits, before, after[:-1])
            places = torch.tensor(after, device=q.device)[:, None]
            of_tokens = q.gather(-1, places)[:, 0].double().cpu().numpy()
            chances[first:last] = np.minimum(1.0, of_tokens / answer.probabilities[first:last])
        if keep:
            kept.append(logits)
    return ReadAnswer(chances, readable, torch.cat(kept) if kept else None)


# -- drafters without a model ----------------------------------------------------------------------


def _contexts(drafter: FreeDrafter, answer: Answer) -> Iterator[tuple[int, list[int]]]:
    """Yield the places after which a step can begin, with the context, which the drafter has learned from."""
    nothing = torch.zeros(1, 1)  # in place of the target's logits
    context = list(answer.prompt)
    drafter.begin(context)
    for i, token in enumerate(answer.tokens[:-1], 1):
        context.append(token)
        drafter.update(StepOutcome(context, 1, nothing))
        yield i, context


def _of_free(drafter: FreeDrafter, answer: Answer, longest: int) -> Chances:
    n = len(answer.tokens)
    accept, drafts = np.zeros((n, longest)), np.zeros(n, np.int64)
    for i, context in _contexts(drafter, answer):
        plan = StepPlan(longest, FixedLength(longest), answer.sampling, Randomness(0))
        draft = run_to_end(drafter.propose(context, plan))
        if draft.q is not None:
            raise _random(drafter)
        drafts[i] = len(draft.tokens)
        accept[i, : draft_matches(draft.tokens, answer, i)] = 1.0
    return Chances(accept, drafts)


def draft_matches(draft: Sequence[int], answer: Answer, i: int) -> int:
    """Return how many tokens of a draft after the first i tokens are the answer's."""
    pairs = enumerate(zip(draft, answer.tokens[i:], strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(draft), len(answer.tokens) - i))


def _random(drafter: Drafter) -> UsageError:
    return UsageError(
        f"{drafter.traits.name} draws its tokens at random, so a replay does not tell what it drafts.",
        "Leave it out.",
    )


# -- cascades --------------------------------------------------------------------------------------


def _of_cascade(drafter: CascadeDrafter, answer: Answer, longest: int, read: ReadAnswer) -> Chances:
    """Return the chances where copied tokens and a model's alternate, by the guesses after the answer's own tokens."""
    n, free = len(answer.tokens), drafter.free
    accept, drafts = np.zeros((n, longest)), np.full(n, longest)
    most = longest if drafter.max_passes is None else drafter.max_passes
    for i, context in _contexts(free, answer):
        passes = 0
        free.read(context)
        following = answer.tokens[i : i + longest]
        for j, token in enumerate(following):
            guess = free.allowed_guess(context, following[:j], answer.sampling)
            if guess is not None:
                if guess.q is not None:
                    raise _random(free)
                accept[i, j] = int(guess.token) == token
            elif passes == most or i + j >= read.readable:
                drafts[i] = j
                break
            else:
                passes += 1
                accept[i, j] = read.chances[i + j]
    return Chances(accept, drafts)
