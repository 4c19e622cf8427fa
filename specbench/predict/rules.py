"""Draft policies that decide while they draft, run along an answer.

The policy's own code sees the drafter's distributions along the answer, step after step; a drafter without a model
really drafts. Where tests are random, several walks are averaged. What a model drafts after the first wrong token is
not in the answer: the distributions at the places of the answer's next tokens stand for those, and from a sample of
steps the drafter really drafts on, which corrects the number of drafted tokens. Accepted tokens do not depend on that,
except with policies that learn from it (``confidence:adapt``, ``entropy-bound``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import NewPrompt, StepPlan, run_to_end
from specbench.decoding.records import Closing, Step, StepTimes
from specbench.decoding.sampling import Randomness
from specbench.drafters.parts import without_guesses
from specbench.predict.law import Floats, room_before

if TYPE_CHECKING:
    from specbench.decoding.protocols import DraftPolicy
    from specbench.drafters.free import FreeDrafter
    from specbench.drafters.model import ModelDrafter
    from specbench.predict.answers import Answer, ReadAnswer

_WALKS = 16
"""Walks along a sampled answer."""

Proposal: TypeAlias = tuple[Draft, int]
"""A draft, and how many of its tokens are accepted."""


@dataclass(eq=False)
class Walked:
    """Counts of the steps of walks, or their means; see ``law.ExpectedSteps``.

    Attributes:
        samples: Places after which steps began, with the policy as it was then, and how much was drafted.
    """

    tested: Floats
    accepted: Floats
    steps: float = 0.0
    drafted: float = 0.0
    samples: list[tuple[int, DraftPolicy, int]] = field(default_factory=list)


def walk(
    answer: Answer, policy: DraftPolicy, longest: int, propose: Callable[[int, int], Proposal]
) -> Walked:
    """Walk along an answer, step after step, as the decoding loop does.

    Args:
        answer: The answer.
        policy: Told of every step.
        longest: The longest draft that is counted by place.
        propose: Returns the draft after the first i tokens, for which there is so much room.
    """
    n, prompt = len(answer.tokens), len(answer.prompt)
    room, found = room_before(n, answer.limit), Walked(np.zeros(longest), np.zeros(longest))
    policy.begin(NewPrompt(prompt, prompt))
    i = 1
    while i < n:
        before = copy.deepcopy(policy)
        draft, accepted = propose(i, int(room[i]))
        drafted = len(draft.tokens)
        found.samples.append((i, before, drafted))
        closing: Closing | None = "corrected" if accepted < drafted else "bonus" if drafted else "target"
        if i + accepted == n:
            closing = None
        tested = accepted + (closing == "corrected")
        found.drafted += drafted
        found.tested[:tested] += 1
        found.accepted[:accepted] += 1
        tokens = tuple(answer.tokens[i : i + accepted + 1])
        policy.observe(
            Step(int(found.steps), prompt + i, tuple(draft.tokens), accepted, tested, tokens, closing, (),
                 StepTimes(), passes=draft.passes)
        )  # fmt: skip
        found.steps += 1
        i += len(tokens)
    return found


def replay(drafter: FreeDrafter, answer: Answer, policy: DraftPolicy, longest: int) -> Walked:
    """Walk along an answer with a drafter without a model, which really drafts; its tokens must be certain."""
    nothing, random, known = torch.zeros(1, 1), Randomness(0), 0

    def propose(i: int, room: int) -> Proposal:
        nonlocal known
        context = [*answer.prompt, *answer.tokens[:i]]
        drafter.update(StepOutcome(context, i - known, nothing))
        known = i
        draft = run_to_end(drafter.propose(context, StepPlan(room, policy, answer.sampling, random)))
        following = answer.tokens[i : i + len(draft.tokens)]
        pairs = enumerate(zip(draft.tokens, following, strict=False))
        return draft, next((place for place, (a, b) in pairs if a != b), len(following))

    drafter.begin(answer.prompt)
    return walk(answer, policy, longest, propose)


def walk_model(
    drafter: ModelDrafter, answer: Answer, read: ReadAnswer, policy: DraftPolicy, longest: int, samples: int
) -> tuple[Walked, int, int]:
    """Walk along an answer that a model has just read.

    Args:
        drafter, answer, read: The model, the answer, and what the model would draft.
        policy, longest: See ``walk``.
        samples: From how many steps the model drafts on.

    Returns:
        The mean counts of several walks, how many tokens it really drafted in these steps, and how many the walk had.
    """
    random = Random(0)

    def propose(i: int, room: int) -> Proposal:
        limit = policy.begin_step(min(room, max(0, read.readable - i)))
        return _draft(answer, read, policy, i, limit, random)

    walks = [walk(answer, policy, longest, propose) for _ in range(1 if answer.sampling.greedy else _WALKS)]
    steps = walks[0].samples
    with without_guesses([drafter]):  # they would have seen the whole answer
        really, walked = _draft_on(drafter, answer, random.sample(steps, min(samples, len(steps))))
    mean = Walked(
        np.mean([each.tested for each in walks], axis=0),
        np.mean([each.accepted for each in walks], axis=0),
        float(np.mean([each.steps for each in walks])),
        float(np.mean([each.drafted for each in walks])),
    )
    return mean, really, walked


def _draft(
    answer: Answer, read: ReadAnswer, policy: DraftPolicy, i: int, limit: int, random: Random
) -> Proposal:
    """Draft after the first i tokens as ``ModelDrafter`` does."""
    draft, accepted, n = Draft(logits=[], passes=0), 0, len(answer.tokens)
    assert draft.logits is not None
    while len(draft.tokens) < limit and policy.expand(draft):
        place = i + len(draft.tokens)
        logits = read.known[min(place, n - 1)]
        if not policy.num_children(draft, (len(draft.tokens) - 1,), (logits,))[0]:
            break
        right = accepted == len(draft.tokens) and place < n and random.random() < read.chances[place]
        accepted += right
        draft.logits.append(logits)
        draft.tokens.append(answer.tokens[place] if right else logits.choice)
        draft.passes = len(draft.tokens)
    return draft, accepted


def _draft_on(
    drafter: ModelDrafter, answer: Answer, samples: Sequence[tuple[int, DraftPolicy, int]]
) -> tuple[int, int]:
    """Let a model really draft from steps of a walk, the last one first: its cache holds the whole answer."""
    room = room_before(len(answer.tokens), answer.limit)
    sampling, random = answer.sampling.at(len(answer.prompt), None, ()), Randomness(0)
    really = walked = 0
    for i, policy, count in sorted(samples, key=lambda each: -each[0]):
        context = [*answer.prompt, *answer.tokens[:i]]
        nothing = StepOutcome(context, 0, torch.empty(1, 1))
        drafter.update(nothing)
        draft = run_to_end(drafter.propose(context, StepPlan(int(room[i]), policy, sampling, random)))
        drafter.update(nothing)
        really += len(draft.tokens)
        walked += count
    return really, walked
