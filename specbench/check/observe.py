"""Run the decoding loop and record what it does in every step: drafts, forwards, random events and cache lengths.

The loop is not changed: the caller records its forwards, and wrappers record its drafter and its randomness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from specbench.backends.torch.caches import NoKVCache
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.clocks import Stopwatch, clock_for
from specbench.decoding.drafts import Draft
from specbench.decoding.loop import decode
from specbench.decoding.protocols import Decoding, Drafter, ForwardOutput, ForwardRequest, NoDraft, StepPlan
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness
from specbench.decoding.stops import StopRules
from specbench.drafters.drawn import DrawEvent
from specbench.drafters.parts import models_of
from specbench.drafters.translate import TranslatingDrafter
from specbench.policies import FixedLength


def greedily(request: Request) -> Request:
    """Return a request that takes the best token; the repetition penalty and the model's own settings stay."""
    return replace(request, sampling=request.sampling.greedily())


def plainly(request: Request) -> Request:
    """Return a request that drafts nothing."""
    return replace(request, drafter=NoDraft(), policy=FixedLength(1))


def scorer_of(request: Request) -> Scorer:
    """Return the target of a request."""
    return cast("Scorer", request.target)


@dataclass(frozen=True, slots=True)
class AcceptanceEvent:
    """A test of drafted tokens in order."""

    acceptance: torch.Tensor
    accepted: int


Event = DrawEvent | AcceptanceEvent


@dataclass(frozen=True, slots=True)
class TargetForward:
    """A forward of the target.

    Attributes:
        context, tokens, parents: See ``ForwardRequest``.
        cached_len: Length of the target's cache before it.
        logits: [rows, vocab].
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None
    cached_len: int
    logits: torch.Tensor


@dataclass(slots=True)
class Observation:
    """One record of the loop and what happened since the one before.

    Attributes:
        context: Prompt and output before it.
        drafts: What the drafter proposed.
        drafting: Random events during the drafter's calls.
        forwards: Forwards of the target.
        events: Random events outside the drafter.
        target_cache: Length of the target's cache at the record; ``None`` without a cache.
        drafter_caches: The same for each drafting model.
    """

    context: tuple[int, ...]
    record: Prefill | Step = field(init=False)
    drafts: list[Draft] = field(default_factory=list)
    drafting: list[Event] = field(default_factory=list)
    forwards: list[TargetForward] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    target_cache: int | None = None
    drafter_caches: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Emitted tokens."""
        return self.record.tokens

    @property
    def draft(self) -> Draft:
        """The draft; empty in the prefill."""
        return self.drafts[0] if self.drafts else Draft()

    @property
    def verified(self) -> Draft:
        """The tokens that the target's last forward verified."""
        return Draft(list(self.forwards[-1].tokens), parents=self.forwards[-1].parents)

    @property
    def draws(self) -> list[DrawEvent]:
        return [event for event in self.events if isinstance(event, DrawEvent)]

    @property
    def tests(self) -> list[AcceptanceEvent]:
        return [event for event in self.events if isinstance(event, AcceptanceEvent)]

    @property
    def decision_logits(self) -> list[torch.Tensor]:
        """The logits before every emitted token, [vocab] each, as far as the target's forward has them."""
        if not self.forwards or not self.tokens:
            return []
        verified, nodes = self.verified, [-1]  # the node that each token follows, -1 for the context
        for token in self.tokens[:-1]:
            node = verified.child(nodes[-1], token)
            if node is None:
                break
            nodes.append(node)
        return [self.forwards[-1].logits[node + 1] for node in nodes]


class _RecordingDrafter:
    """A drafter whose calls are recorded."""

    def __init__(self, drafter: Drafter, recorder: _Recorder) -> None:
        self._drafter, self._recorder = drafter, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        self._recorder.drafting = True
        draft = yield from self._drafter.propose(context, plan)
        self._recorder.drafting = False
        self._recorder.seen.drafts.append(draft)
        return draft


class _Recorder(Randomness):
    """Randomness that records every event.

    Attributes:
        seen: What happens until the loop's next record.
        drafting: Whether the drafter is running.
    """

    def __init__(self, seed: int, seen: Observation) -> None:
        super().__init__(seed)
        self.seen, self.drafting = seen, False

    def _note(self, event: Event) -> None:
        (self.seen.drafting if self.drafting else self.seen.events).append(event)

    def draw(self, probabilities: torch.Tensor) -> int:
        token = super().draw(probabilities)
        self._note(DrawEvent(probabilities.clone(), token))
        return token

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        accepted, r = super().test(acceptance)
        self._note(AcceptanceEvent(acceptance, accepted))
        return accepted, r


def scorers_of(drafter: Drafter) -> list[Scorer]:
    """Return the scorers of those of a drafter's models that use the target's vocabulary."""
    return [model.scorer for model in models_of(drafter) if not isinstance(model, TranslatingDrafter)]


def observe(request: Request) -> Iterator[Observation]:
    """Decode a request, which can be decoded again, and yield every record with what happened."""
    seed, target, stops = request.random.generator.initial_seed(), scorer_of(request), request.stops
    recorder = _Recorder(seed, Observation(tuple(request.prompt)))
    drafter: Any = _RecordingDrafter(request.drafter, recorder)
    recorded = replace(
        request,
        drafter=drafter,
        random=recorder,
        stops=StopRules(stops.end_ids, stops.strings, stops.tokenizer),  # they remember what they saw
    )
    models = scorers_of(request.drafter)
    decoding = decode(recorded, Stopwatch(clock_for(str(target.device))))
    for record in decoding:
        while isinstance(record, ForwardRequest):
            record = decoding.send(_run_forward(record, target, recorder))
        seen = recorder.seen
        seen.record = record
        seen.target_cache = None if isinstance(target.cache, NoKVCache) else target.cache.length
        seen.drafter_caches = tuple(scorer.cached_len for scorer in models)
        recorder.seen = Observation((*seen.context, *seen.tokens))
        yield seen


def _run_forward(request: ForwardRequest, target: Scorer, recorder: _Recorder) -> ForwardOutput:
    """Run a forward, and record it if it is the target's."""
    cached_len = target.cache.length
    output = request.scorer.score(request)
    if not recorder.drafting:
        parents = None if request.parents is None else tuple(request.parents)
        context, tokens = tuple(request.context), tuple(request.tokens)
        recorder.seen.forwards.append(TargetForward(context, tokens, parents, cached_len, output.logits))
    return output
