"""What a loaded drafter would have done along an answer: it is asked after every token what it would draft.

It drafts by its own code, as the loop asks it. A small model reads the answer once, and its passes are answered from
that. Other models run theirs, with the target's states along the answer, as long as their draft is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import ForwardOutput, ForwardRequest, StepPlan, run_to_end
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import FreeDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.parts import models_of
from specbench.policies import FixedLength
from specbench.predict.law import Answer, Chances, Floats

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, Scorer

_ROWS = 64
"""Rows of logits that are computed at a time."""

_DRAFTED = 8
"""Tokens that a drafter on the target's cache reads at a time, before the target does."""

_RARE = 1e-3
"""A chance that a draft is accepted so far below which it counts as rejected."""


def model_of(drafter: Drafter) -> Drafter:
    """Return the part of a drafter that is a model; the drafter itself unless it is a cascade."""
    return drafter.model if isinstance(drafter, CascadeDrafter) else drafter


def reads_alone(drafter: Drafter) -> bool:
    """Return whether one pass over an answer tells what a drafter's model would draft."""
    return type(model_of(drafter)) in (ModelDrafter, SelfDrafter)


def chances_of(
    drafter: Drafter,
    answer: Answer,
    longest: int,
    logits: torch.Tensor | None = None,
    states: TargetStates | None = None,
) -> Chances:
    """Return what a drafter would do along an answer, with drafts of up to ``longest`` tokens.

    Args:
        drafter, answer: The drafter and the answer.
        longest: The longest draft.
        logits: Those of its model along the answer (``read_answer``); ``None`` if it does not read alone.
        states: The target's hidden states, if it is not known that the drafter needs none.
    """
    free = drafter.free if isinstance(drafter, CascadeDrafter) else drafter
    along = _AlongAnswer(answer, longest, certain=isinstance(drafter, FreeDrafter), known=logits is not None)
    sampling = answer.transforms
    if isinstance(free, FreeDrafter) and free.forces:  # forced tokens are left out of predictions
        sampling = replace(sampling, format=None)
    nothing = torch.zeros(1, 1)  # in place of the target's logits
    context = list(answer.prompt)
    with _known_passes(drafter, answer, logits):
        drafter.begin(context)
        for i, token in enumerate(answer.tokens[:-1], 1):
            fed = None if states is None else states.of(0 if i == 1 else len(context) - 1, len(context))
            context.append(token)
            drafter.update(StepOutcome(context, 1, nothing, states=fed))
            plan = StepPlan(longest, along, sampling, along)  # type: ignore[arg-type]
            along.first = i
            along.note(run_to_end(drafter.propose(context, plan)))
    return along.chances()


class _AlongAnswer(FixedLength):
    """The policy of drafts that end at their first token that is not the answer's, and the source of their draws.

    What a drafter draws is the answer's token; what the test of it would be is noted.

    Args:
        answer: The answer.
        longest: The longest draft.
        certain: Whether nothing is gained by ending a draft, so that its length is known too.
        known: Whether passes are known, so that a draft also goes on behind a wrong token, and tells its passes there.

    Attributes:
        first: After how many tokens the draft begins.
    """

    unconditional = False
    first = 0

    def __init__(self, answer: Answer, longest: int, *, certain: bool, known: bool) -> None:
        super().__init__(longest)
        n = len(answer.tokens)
        self._answer, self._certain, self._known = answer, certain, known
        self._accept, self._drafts = np.zeros((n, longest)), np.zeros(n, np.int64)
        self._passes = np.full((n, longest), np.nan)

    def begin_step(self, budget: int) -> int:
        self._ended, self._survival = False, 1.0
        self._before: list[int] = []  # passes before each token
        self._drawn: dict[int, float] = {}
        return super().begin_step(budget)

    def should_continue(self, draft: Draft) -> bool:
        place, tokens = len(draft.tokens), self._answer.tokens
        self._before.append(draft.passes or 0)
        if not self._certain:
            at = self.first + place
            off = at >= len(tokens) or (place > 0 and draft.tokens[-1] != tokens[at - 1])
            self._ended = self._survival < _RARE or (off and not self._known)
        return not self._ended

    def draw(self, q: torch.Tensor) -> int:
        """Return the answer's token, where ``Randomness`` draws one from q."""
        place = len(self._before) - 1
        at = self.first + place
        if self._answer.probabilities is None:
            raise UsageError(
                "A drafter draws at random, and the probabilities of the answer's tokens are not known.",
                "Leave it out.",
            )
        if at >= len(self._answer.tokens):
            return int(q.argmax())
        token = int(self._answer.tokens[at])
        self._drawn[place] = chance = min(1.0, float(q[token]) / self._answer.probabilities[at])
        self._survival *= chance
        return token

    def note(self, draft: Draft) -> None:
        """Note a finished draft."""
        count, i = len(draft.tokens), self.first
        pairs = zip(draft.tokens, self._answer.tokens[i:], strict=False)
        most = min(count, len(self._answer.tokens) - i)
        right = next((j for j, (drafted, token) in enumerate(pairs) if drafted != token), most)
        self._accept[i, :right] = [self._drawn.get(j, 1.0) for j in range(right)]
        self._drafts[i] = self._limit if self._ended else count  # behind a wrong token it would have gone on
        self._passes[i, :count] = np.diff([*self._before[:count], draft.passes or 0])

    def chances(self) -> Chances:
        """Return what was noted; behind wrong tokens a pass is as likely as at this place of other drafts."""
        known = ~np.isnan(self._passes)
        seen = known.sum(axis=0)
        means = np.where(known, self._passes, 0.0).sum(axis=0) / np.maximum(seen, 1)
        means[seen == 0] = means[seen > 0][-1] if seen.any() else 0.0
        return Chances(self._accept, self._drafts, np.where(known, self._passes, means))


# -- models ----------------------------------------------------------------------------------------


def read_answer(drafter: Drafter, answer: Answer, target: Scorer | None = None) -> torch.Tensor:
    """Return the logits that a small model drafts each token of an answer by, [tokens that it can draft, vocab].

    Args:
        drafter, answer: A drafter that ``reads_alone``, or the model of a cascade, and the answer.
        target: Reads every few tokens of the answer again after a drafter that drafts on its cache, as in decoding;
            ``None`` where it is not there.
    """
    assert isinstance(drafter, ModelDrafter)
    scorer, prompt, text = drafter.scorer, len(answer.prompt), [*answer.prompt, *answer.tokens]
    limit = drafter.context_limit
    readable = len(text) if limit is None else min(len(text), limit + 1)
    logits = list[torch.Tensor]()
    drafter.begin(answer.prompt)
    scorer.begin()  # also where it shares the target's cache
    shared = target if isinstance(drafter, SelfDrafter) else None
    chunk = _ROWS if shared is None else _DRAFTED
    for first in range(prompt, readable, chunk):
        last = min(first + chunk, readable)
        if shared is not None and first > 1:
            shared.rollback(first - 1 - chunk)  # to before what the drafter has read
            shared.score(ForwardRequest(shared, text[: first - 1], rows=1, prompt=prompt))
        logits.append(scorer.logits(text[: last - 1], rows=last - first, prompt=prompt))
    return torch.cat(logits) if logits else torch.zeros(0, 1)


def target_probabilities(target: Scorer, answer: Answer) -> Floats:
    """Return the target's probability of each token of a sampled answer, by its own pass."""
    prompt, text, probabilities = len(answer.prompt), [*answer.prompt, *answer.tokens], list[Floats]()
    target.begin()
    for first in range(prompt, len(text), _ROWS):
        last = min(first + _ROWS, len(text))
        request = ForwardRequest(target, text[: last - 1], rows=last - first, prompt=prompt)
        after = text[first:last]
        p = answer.transforms.probabilities(target.score(request).logits, text[:first], after[:-1])
        probabilities.append(
            p.gather(-1, torch.tensor(after, device=p.device)[:, None])[:, 0].double().cpu().numpy()
        )
    return np.concatenate(probabilities)


class TargetStates:
    """The target's hidden states along an answer, for drafters that need them.

    They are those of one pass over the answer; but where a drafter also reads the target's cache, the target reads the
    answer bit by bit, as in decoding.

    Args:
        target: The target.
        drafter: What needs the states.
        answer: The answer.
    """

    def __init__(self, target: Scorer, drafter: Drafter, answer: Answer) -> None:
        self._target, self._layers = target, drafter.traits.layers
        self._prompt, self._text = len(answer.prompt), [*answer.prompt, *answer.tokens]
        self._bit_by_bit = any(hasattr(model.scorer, "target_cache") for model in models_of(drafter))
        self._whole: torch.Tensor | None = None
        if self._layers or self._bit_by_bit:
            target.begin()
        if self._layers and not self._bit_by_bit:
            self._whole = self._read(len(self._text))

    def of(self, first: int, last: int) -> torch.Tensor | None:
        """Return the states of the tokens from ``first`` up to ``last``, which follow those asked for before."""
        if self._bit_by_bit:
            return self._read(last)
        return None if self._whole is None else self._whole[first:last]

    def _read(self, length: int) -> torch.Tensor | None:
        request = ForwardRequest(
            self._target, self._text[:length], rows=1, layers=self._layers, prompt=self._prompt
        )
        return self._target.score(request).hidden


@contextmanager
def _known_passes(drafter: Drafter, answer: Answer, logits: torch.Tensor | None) -> Iterator[None]:
    """Within the block, answer the passes of a drafter's model from known logits; without these, let it run."""
    models: list[Any] = models_of(drafter) if logits is not None else []
    scorers = [model.scorer for model in models]
    try:
        for model in models:
            model.scorer = _KnownPasses(model.scorer, len(answer.prompt), logits)
        yield
    finally:
        for model, scorer in zip(models, scorers, strict=True):
            model.scorer = scorer


class _KnownPasses:
    """A scorer that gives the logits of one pass over an answer, whatever it is fed.

    Behind a wrong token, the logits at the places of the answer's next tokens stand for those that only the drafter
    could give.
    """

    def __init__(self, scorer: Any, prompt: int, logits: Any) -> None:
        self._scorer, self._prompt, self._logits = scorer, prompt, logits
        self.cached_len = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def begin(self) -> None:
        self.cached_len = 0

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.cached_len = min(self.cached_len, length)

    def score(self, request: ForwardRequest) -> ForwardOutput:
        self.cached_len = len(request.context) + len(request.tokens)
        end = self.cached_len - self._prompt + 1
        last = len(self._logits) - 1
        return ForwardOutput(self._logits[[min(row, last) for row in range(end - (request.rows or 1), end)]])
