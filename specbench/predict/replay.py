"""The steps of a drafter and a draft policy along an answer, taken one after the other by their own code.

A model's passes are answered from its one pass over the answer. Where tests are random, whether a draft is accepted is
drawn with its chance. Behind a rejected token the logits at the places of the answer's next tokens stand for those that
only the drafter could give: what is drafted there counts as drafted, and is never accepted. Which tokens are accepted
does not depend on it, except with policies that learn from it (``confidence:adapt``, ``entropy-bound``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specbench.decoding.drafts import StepOutcome
from specbench.decoding.protocols import ForwardOutput, ForwardRequest, NewPrompt, StepPlan, run_to_end
from specbench.decoding.records import Closing, Step, StepTimes
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.parts import models_of, without_guesses
from specbench.predict.answers import Answer, Counts, ReadAnswer
from specbench.predict.chances import draft_matches

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, DraftPolicy


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


def replay(
    drafter: Drafter,
    answer: Answer,
    read: ReadAnswer | None,
    policy: DraftPolicy,
    longest: int,
    seed: int = 0,
) -> tuple[Counts, list[StepStart]]:
    """Return the counts of steps along an answer, and how each began.

    Args:
        drafter: A drafter without a model, or with a small one that has read the answer.
        answer: The answer.
        read: What the model has read, with its logits; ``None`` without a model.
        policy: The draft policy, for chains.
        longest: The longest draft that is counted by place.
        seed: Seed of the tests.
    """
    n, prompt, room = len(answer.tokens), len(answer.prompt), answer.room()
    tested, accepted = np.zeros(longest), np.zeros(longest)
    starts: list[StepStart] = []
    drafted = passes = 0
    nothing, random = torch.zeros(1, 1), Randomness(seed)
    with _known_passes(drafter, answer, read) as sampling:
        drafter.begin(answer.prompt)
        policy.begin(NewPrompt(prompt, prompt, drafter.traits.prior))
        drafter.update(StepOutcome([*answer.prompt, answer.tokens[0]], 1, nothing))
        i = 1
        while i < n:
            before, context = copy.deepcopy(policy), [*answer.prompt, *answer.tokens[:i]]
            draft = run_to_end(drafter.propose(context, StepPlan(int(room[i]), policy, sampling, random)))
            count, right = len(draft.tokens), draft_matches(draft.tokens, answer, i)
            closing: Closing | None = "corrected" if right < count else "bonus" if count else "target"
            closing = None if i + right == n else closing
            known = right + (closing == "corrected")
            tested[:known] += 1
            accepted[:right] += 1
            drafted, passes = drafted + count, passes + (draft.passes or 0)
            starts.append(StepStart(i, before, count))
            tokens = tuple(answer.tokens[i : i + right + 1])
            drafter.update(StepOutcome([*context, *tokens], len(tokens), nothing, draft.tokens, range(right)))
            policy.observe(
                Step(len(starts) - 1, prompt + i, tuple(draft.tokens), right, known, tokens, closing, (),
                     StepTimes(), passes=draft.passes)
            )  # fmt: skip
            i += len(tokens)
    return Counts(len(starts), drafted, passes, tested, accepted), starts


def draft_on(drafter: Drafter, answer: Answer, starts: Sequence[StepStart]) -> int:
    """Let a model that has just read an answer draft again where steps began, the last one first, by real passes.

    Returns:
        How many tokens it drafted.
    """
    room, random, drafted = answer.room(), Randomness(0), 0
    sampling = answer.sampling.at(len(answer.prompt), None, ())
    with without_guesses([drafter]):  # they would have seen the whole answer
        for start in sorted(starts, key=lambda each: -each.place):
            context = [*answer.prompt, *answer.tokens[: start.place]]
            nothing = StepOutcome(context, 0, torch.zeros(1, 1))
            drafter.update(nothing)
            plan = StepPlan(int(room[start.place]), start.policy, sampling, random)
            drafted += len(run_to_end(drafter.propose(context, plan)).tokens)
            drafter.update(nothing)
    return drafted


@contextmanager
def _known_passes(drafter: Drafter, answer: Answer, read: ReadAnswer | None) -> Iterator[Sampling]:
    """Within the block, answer the passes of a drafter's model from what it has read; yield the transforms to use."""
    models: list[Any] = models_of(drafter) if read is not None else []
    scorers = [model.scorer for model in models]
    sampling = answer.sampling.at(len(answer.prompt), None, ())
    if read is not None and not sampling.greedy:
        sampling = _KnownTests(sampling, answer, read)  # type: ignore[assignment]
    try:
        for model in models:
            model.scorer = _KnownPasses(model.scorer, len(answer.prompt), read)
        yield sampling
    finally:
        for model, scorer in zip(models, scorers, strict=True):
            model.scorer = scorer


class _KnownPasses:
    """A scorer that gives logits that are known, whatever it is fed."""

    def __init__(self, scorer: Any, prompt: int, read: Any) -> None:
        self._scorer, self._prompt, self._logits = scorer, prompt, read.logits
        self.cached_len = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def begin(self) -> None:
        self.cached_len = 0

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.cached_len = min(self.cached_len, length)

    def score(self, request: ForwardRequest) -> ForwardOutput:
        self.cached_len = len(request.context) + len(request.tokens)
        last = self.cached_len - self._prompt
        places = range(last + 1 - (request.rows or 1), last + 1)
        return ForwardOutput(self._logits[[min(place, len(self._logits) - 1) for place in places]])


class _KnownTests:
    """Transforms by which a model draws the answer's token as often as that is accepted, and else another one."""

    def __init__(self, sampling: Sampling, answer: Answer, read: ReadAnswer) -> None:
        self._sampling, self._answer, self._read = sampling, answer, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampling, name)

    def probabilities(
        self,
        logits: torch.Tensor,
        context: Sequence[int],
        drafted: Sequence[int] = (),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the distribution to draw from, [1, vocab]; for the arguments see ``Sampling``."""
        answer, n = self._answer, len(self._answer.tokens)
        first = len(context) - len(answer.prompt)
        place = first + len(drafted)
        q = torch.zeros(logits.shape) if out is None else out.zero_()
        token = int(answer.tokens[place]) if place < n else -1
        chance = 0.0
        if token >= 0 and list(drafted) == list(answer.tokens[first:place]):
            chance = float(self._read.chances[place])
        other = next(each for each in logits[0].topk(2).indices.tolist() if each != token)
        q[0, other] = 1.0 - chance
        if chance:
            q[0, token] = chance
        return q
