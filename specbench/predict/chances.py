"""What a loaded drafter would have done along an answer, by one pass of its model over the text or by its own drafts.

A small model reads prompt and answer once; row i of its logits gives q of token i, after the transforms that the answer
was sampled with. Every other drafter is asked after every token what it would draft, as the loop asks it, as long as
its draft is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from specbench.predict.law import Answer, Chances, Floats, ReadAnswer

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter, Scorer
    from specbench.decoding.sampling import Sampling

_ROWS = 64
"""Rows of logits that are computed at a time: those of a whole answer may not fit into memory."""

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
    read: ReadAnswer | None = None,
    states: TargetStates | None = None,
) -> Chances:
    """Return what a drafter would do along an answer, with drafts of up to ``longest`` tokens.

    Args:
        drafter, answer: The drafter and the answer.
        longest: The longest draft.
        read: What its model has read (``read_answer``), of a cascade with logits; ``None`` if it does not read alone.
        states: The target's hidden states, if it is not known that the drafter needs none.
    """
    if read is not None and not isinstance(drafter, CascadeDrafter):
        drafts = np.clip(read.readable - np.arange(len(answer.tokens)), 0, longest)
        return Chances.by_position(read.chances, drafts, longest)
    most = drafter.max_passes if isinstance(drafter, CascadeDrafter) else None
    along = _AlongAnswer(answer, longest, certain=isinstance(drafter, FreeDrafter), most_passes=most)
    with known_passes(drafter, answer, read):
        for i, context in _contexts(drafter, answer, states):
            along.first = i
            plan = StepPlan(longest, along, answer.transforms, along)  # type: ignore[arg-type]
            along.note(run_to_end(drafter.propose(context, plan)))
    return along.chances()


# -- models ----------------------------------------------------------------------------------------


def read_answer(
    drafter: Drafter, answer: Answer, *, keep: bool = False, target: Scorer | None = None
) -> ReadAnswer:
    """Return the chances of a small model's drafts along an answer. Its cache holds the answer afterwards.

    Args:
        drafter, answer: The drafter and the answer.
        keep: Whether to keep the logits, for the drafts of a cascade or a policy.
        target: Reads every few tokens of the answer again after a drafter that drafts on its cache, as in decoding;
            ``None`` where it is not there.

    Raises:
        UsageError: It needs the target, or the answer was sampled and its probabilities are not known.
    """
    if not reads_alone(drafter) or not isinstance(drafter, ModelDrafter):
        raise UsageError(
            f"What {drafter.traits.name} drafts is not told by its own pass over an answer alone.",
            "Run it where the target is: specbench sweep, or specbench tune.",
        )
    sampling = answer.transforms
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
    scorer.begin()  # also where it shares the target's cache
    shared = target if isinstance(drafter, SelfDrafter) else None
    chunk = _ROWS if shared is None else _DRAFTED
    for first in range(0, readable, chunk):
        last, verified = min(first + chunk, readable), prompt + first - 1
        if shared is not None and verified:
            shared.rollback(verified - chunk)  # to before what the drafter has read
            shared.score(ForwardRequest(shared, text[:verified], rows=1, prompt=prompt))
        logits = scorer.logits(text[: prompt + last - 1], rows=last - first, prompt=prompt)
        before, after = text[: prompt + first], text[prompt + first : prompt + last]
        if sampling.greedy:
            choices = sampling.choose(logits, before, after[:-1])
            chances[first:last] = np.equal(choices, after)
        else:
            assert answer.probabilities is not None
            q = sampling.probabilities(logits, before, after[:-1])
            chances[first:last] = np.minimum(1.0, _of(q, after) / answer.probabilities[first:last])
        if keep:
            kept.append(logits)
    return ReadAnswer(chances, readable, torch.cat(kept) if kept else None)


def _of(rows: torch.Tensor, tokens: Sequence[int]) -> Floats:
    """Return each row's probability of its token."""
    places = torch.tensor(tokens, device=rows.device)[:, None]
    found: Floats = rows.gather(-1, places)[:, 0].double().cpu().numpy()
    return found


def target_probabilities(target: Scorer, answer: Answer) -> Floats:
    """Return the target's probability of each token of a sampled answer, by its own pass."""
    prompt, text, found = len(answer.prompt), [*answer.prompt, *answer.tokens], list[Floats]()
    target.begin()
    for first in range(prompt, len(text), _ROWS):
        last = min(first + _ROWS, len(text))
        request = ForwardRequest(target, text[: last - 1], rows=last - first, prompt=prompt)
        after = text[first:last]
        p = answer.transforms.probabilities(target.score(request).logits, text[:first], after[:-1])
        found.append(_of(p, after))
    return np.concatenate(found)


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
        self._bit_by_bit = any(
            isinstance(model, SelfDrafter) or getattr(model.scorer, "target_cache", None) is not None
            for model in models_of(drafter)
        )
        self._whole: torch.Tensor | None = None

    def begin(self) -> None:
        """Begin the answer, again or for the first time."""
        if self._bit_by_bit or (self._layers and self._whole is None):
            self._target.begin()
        if self._layers and not self._bit_by_bit and self._whole is None:
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


# -- drafts ----------------------------------------------------------------------------------------


def _contexts(
    drafter: Drafter, answer: Answer, states: TargetStates | None
) -> Iterator[tuple[int, list[int]]]:
    """Yield the places after which a step can begin, with the context, which the drafter has learned from."""
    nothing = torch.zeros(1, 1)  # in place of the target's logits
    context = list(answer.prompt)
    if states is not None:
        states.begin()
    drafter.begin(context)
    for i, token in enumerate(answer.tokens[:-1], 1):
        fed = None if states is None else states.of(0 if i == 1 else len(context) - 1, len(context))
        context.append(token)
        drafter.update(StepOutcome(context, 1, nothing, states=fed))
        yield i, context


class _AlongAnswer(FixedLength):
    """The policy of drafts that end at their first token that is not the answer's, and the source of their draws.

    What a drafter draws is the answer's token; what the test of it would be is noted.

    Args:
        answer: The answer.
        longest: The longest draft.
        certain: Whether nothing is gained by ending a draft, so that its length is known too.
        most_passes: The most passes of a draft; ``None`` for any number.

    Attributes:
        first: After how many tokens the draft begins.
    """

    unconditional = False
    first = 0

    def __init__(
        self, answer: Answer, longest: int, *, certain: bool, most_passes: int | None = None
    ) -> None:
        super().__init__(longest)
        self._most_passes = longest if most_passes is None else most_passes
        n = len(answer.tokens)
        self._answer, self._certain = answer, certain
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
            wrong = place > 0 and draft.tokens[-1] != tokens[self.first + place - 1]
            self._ended = wrong or self.first + place >= len(tokens) or self._survival < _RARE
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
        right = next(
            (
                j
                for j, (a, b) in enumerate(zip(draft.tokens, self._answer.tokens[i:], strict=False))
                if a != b
            ),
            min(count, len(self._answer.tokens) - i),
        )
        self._accept[i, :right] = [self._drawn.get(j, 1.0) for j in range(right)]
        # Behind a wrong token each pass that is left gives one more.
        left = max(0, self._most_passes - (draft.passes or 0))
        self._drafts[i] = min(self._limit, count + left) if self._ended else count
        self._passes[i, :count] = np.diff([*self._before[:count], draft.passes or 0])

    def chances(self) -> Chances:
        """Return what was noted; behind wrong tokens a pass is as likely as at this place of other drafts."""
        known = ~np.isnan(self._passes)
        seen = known.sum(axis=0)
        means = np.where(known, self._passes, 0.0).sum(axis=0) / np.maximum(seen, 1)
        means[seen == 0] = means[seen > 0][-1] if seen.any() else 0.0
        return Chances(self._accept, self._drafts, np.where(known, self._passes, means))


def matching_path(draft: Draft, answer: Answer, i: int) -> list[int]:
    """Return the nodes of a draft after the first i tokens that are the answer's next tokens."""
    path: list[int] = []
    for token in answer.tokens[i:]:
        node = draft.child(path[-1] if path else -1, token)
        if node is None:
            break
        path.append(node)
    return path


# -- passes that are known -------------------------------------------------------------------------


@contextmanager
def known_passes(drafter: Drafter, answer: Answer, read: ReadAnswer | None) -> Iterator[None]:
    """Within the block, answer the passes of a drafter's model from what it has read; without that, let it run."""
    models: list[Any] = models_of(drafter) if read is not None else []
    scorers = [model.scorer for model in models]
    try:
        for model in models:
            model.scorer = _KnownPasses(model.scorer, len(answer.prompt), read)
        yield
    finally:
        for model, scorer in zip(models, scorers, strict=True):
            model.scorer = scorer


class _KnownPasses:
    """A scorer that gives the logits of one pass over an answer, whatever it is fed.

    Behind a token that is not the answer's, the logits at the places of the answer's next tokens stand for those that
    only the drafter could give.
    """

    def __init__(self, scorer: Any, prompt: int, read: Any) -> None:
        self._scorer, self._prompt, self._logits = scorer, prompt, read.logits
        self.cached_len = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def begin(self, cached_tokens: int = 0) -> None:  # noqa: ARG002
        self.cached_len = 0

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.cached_len = min(self.cached_len, length)

    def score(self, request: ForwardRequest) -> ForwardOutput:
        self.cached_len = len(request.context) + len(request.tokens)
        first, depths = len(request.context) - self._prompt, [0]
        for i in range(len(request.tokens)):
            parent = i - 1 if request.parents is None else request.parents[i]
            depths.append(depths[parent + 1] + 1)
        last = len(self._logits) - 1
        wanted = depths[-(request.rows or 1) :]
        return ForwardOutput(self._logits[[min(first + depth, last) for depth in wanted]])


class KnownTests:
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
