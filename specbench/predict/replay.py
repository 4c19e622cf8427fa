"""The steps of a drafter and a draft policy along an answer, taken one after the other by their own code.

A small model's passes are answered from its one pass over the answer (``known_passes``); others run. Where tests are
random, whether a draft is accepted is drawn with its chance. What is drafted behind a rejected token counts as drafted,
and is never accepted. Which tokens are accepted does not depend on it, except with policies that learn from it
(``confidence:adapt``, ``entropy-bound``, ``auto``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import NewPrompt, StepPlan, run_to_end
from specbench.decoding.records import Closing, Step, StepTimes
from specbench.decoding.sampling import Randomness
from specbench.drafters.parts import models_of, without_guesses
from specbench.predict.chances import KnownTests, TargetStates, known_passes, matching_path
from specbench.predict.law import Answer, Counts, ReadAnswer

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, DraftPolicy
    from specbench.decoding.sampling import Sampling


class StepStart(NamedTuple):
    """How a step of a replay began.

    Attributes:
        place: After how many tokens.
        policy: The policy as it was.
        drafted: How many tokens were drafted.
    """

    place: int
    policy: DraftPolicy
    drafted: int


class StepSeconds(NamedTuple):
    """What steps would take, for policies that decide by measured times.

    Attributes:
        draft_s: Seconds of a draft of so many passes.
        verify_s: Seconds of a target's pass over so many tokens.
        read_s: Seconds by token in which the target reads a prompt.
    """

    draft_s: Callable[[float], float]
    verify_s: Callable[[float], float]
    read_s: float = 0.0


UNTIMED = StepSeconds(lambda _: 0.0, lambda _: 0.0)


def replay(
    drafter: Drafter,
    answer: Answer,
    policy: DraftPolicy,
    longest: int,
    *,
    read: ReadAnswer | None = None,
    states: TargetStates | None = None,
    seconds: StepSeconds = UNTIMED,
    seed: int = 0,
) -> tuple[Counts, list[StepStart]]:
    """Return the counts of steps along an answer, and how each began.

    Args:
        drafter: Any drafter; the passes of one that has not read the answer alone are run.
        answer: The answer.
        policy: The draft policy.
        longest: The longest draft that is counted by place.
        read: What the model has read, with its logits; ``None`` to run its passes.
        states: The target's hidden states, if it is not known that the drafter needs none.
        seconds: What steps take.
        seed: Seed of the tests.
    """
    n, prompt, room = len(answer.tokens), len(answer.prompt), answer.room()
    tested, accepted = np.zeros(longest), np.zeros(longest)
    starts: list[StepStart] = []
    drafted = passes = 0
    nothing, random = torch.zeros(1, 1), Randomness(seed)
    sampling: Sampling = answer.transforms
    if read is not None and not sampling.greedy:
        sampling = KnownTests(sampling, answer, read)  # type: ignore[assignment]
    with known_passes(drafter, answer, read):
        if states is not None:
            states.begin()
        drafter.begin(answer.prompt)
        policy.begin(NewPrompt(drafter.unread(answer.prompt), seconds.read_s, drafter.traits.prior))
        fed = None if states is None else states.of(0, prompt)
        drafter.update(StepOutcome([*answer.prompt, answer.tokens[0]], 1, nothing, states=fed))
        i = 1
        while i < n:
            before, context = copy.deepcopy(policy), [*answer.prompt, *answer.tokens[:i]]
            draft = run_to_end(drafter.propose(context, StepPlan(int(room[i]), policy, sampling, random)))
            count, path = len(draft.tokens), matching_path(draft, answer, i)
            right, depth = len(path), draft.chain if draft.parents is None else len(path) + 1
            closing: Closing | None = "corrected" if right < depth else "bonus" if count else "target"
            closing = None if i + right == n else closing
            known = right + (closing == "corrected")
            tested[:known] += 1
            accepted[:right] += 1
            drafted, passes = drafted + count, passes + (draft.passes or 0)
            starts.append(StepStart(i, before, count))
            tokens = tuple(answer.tokens[i : i + right + 1])
            first = prompt + i - 1
            fed = None if states is None else states.of(first, first + len(tokens))
            outcome = StepOutcome([*context, *tokens], len(tokens), nothing, draft.tokens, path, fed)
            drafter.update(outcome)
            times = StepTimes(
                draft_s=seconds.draft_s(draft.passes or 0), verify_s=seconds.verify_s(1 + count)
            )
            policy.observe(
                Step(len(starts) - 1, prompt + i, tuple(draft.tokens), right, known, tokens, closing, (), times,
                     passes=draft.passes)
            )  # fmt: skip
            i += len(tokens)
    return Counts(len(starts), drafted, passes, tested, accepted), starts


def draft_on(drafter: Drafter, answer: Answer, starts: Sequence[StepStart]) -> int:
    """Let a model that has just read an answer draft again where steps began, the last one first, by real passes.

    Returns:
        How many tokens it drafted.
    """
    room, random, drafted = answer.room(), Randomness(0), 0
    with without_guesses([drafter]):  # they would have seen the whole answer
        for start in sorted(starts, key=lambda each: -each.place):
            context = [*answer.prompt, *answer.tokens[: start.place]]
            for model in models_of(drafter):
                model.scorer.rollback(len(context) - 1)
            plan = StepPlan(int(room[start.place]), start.policy, answer.transforms, random)
            drafted += len(run_to_end(drafter.propose(context, plan)).tokens)
    return drafted
