"""Drive the decoding loop and keep what it did in every step: what was proposed, fed, drawn and tested, and how long
the caches were. The loop runs as it always does; the passes it asks for are noted, its drafter and its dice watched.
"""

from __future__ import annotations

import random as standard_random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specbench.backends.torch.caches import NoKVCache
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.clocks import Stopwatch, clock_for
from specbench.decoding.drafts import Draft
from specbench.decoding.loop import Decoding, decode
from specbench.decoding.protocols import (
    Asking,
    Drafter,
    DraftPolicy,
    Drawing,
    Pass,
    Rows,
    ScorerLike,
)
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import DraftPlan, Request
from specbench.decoding.sampling import Greedy, Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.verdicts import top
from specbench.drafters.parts import models_of
from specbench.drafters.plain import NoDraft
from specbench.drafters.translate import TranslatingDrafter
from specbench.policies import FixedLength

Decoder = Callable[[Request, Stopwatch], Decoding]
"""Something like ``decode``."""


@dataclass(frozen=True)
class DecodingSetup:
    """What is checked: everything that decides an output, but for the prompt.

    Attributes:
        target: The model whose output is kept.
        drafter: What proposes.
        policy: How much it proposes.
        sampling: As asked for; greedy runs keep its repetition penalty and the model's own settings only.
        max_new_tokens: Longest output.
        end_ids: Tokens that end an output.
        stop: Texts that do; they need the tokenizer.
        tokenizer: The target's, or ``None``.
        first_target: See ``decode_steps``.
        residual_adjustment: See ``decode_steps``.
        seed: Of every random draw.
        decoder: The loop; another one in tests of the check itself.
    """

    target: Scorer
    drafter: Drafter
    policy: DraftPolicy | DraftPlan = field(default_factory=FixedLength)
    sampling: Sampling = field(default_factory=Greedy)
    max_new_tokens: int = 64
    end_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    tokenizer: Any = None
    first_target: bool = True
    residual_adjustment: bool = True
    seed: int = 0
    decoder: Decoder = decode

    @property
    def greedy(self) -> Sampling:
        """The transforms of greedy decoding."""
        return self.sampling.greedily()

    def transforms(self, prompt: Sequence[int], *, greedy: bool) -> Sampling:
        """The transforms of the output of a prompt."""
        asked = len(prompt) + self.max_new_tokens
        return (self.greedy if greedy else self.sampling).at(len(prompt), asked, self.end_ids)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn from a distribution, [vocab], that need not sum to 1."""

    distribution: torch.Tensor
    token: int


@dataclass(frozen=True, slots=True)
class Tested:
    """Drafts tested in order.

    Attributes:
        acceptance: The chance each had, float32 [γ].
        accepted: How many passed before one failed.
        r: The γ uniform numbers.
        forced: Whether the outcome was prescribed, to see a place that chance seldom leads to.
    """

    acceptance: torch.Tensor
    accepted: int
    r: tuple[float, ...]
    forced: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """A call of the drafter: the context's length, the room it was given, its draft, and what was drawn meanwhile."""

    context: int
    room: int
    draft: Draft
    events: tuple[Drawn | Tested, ...]


@dataclass(frozen=True, slots=True)
class MadePass:
    """A target pass.

    Attributes:
        context, tokens, parents: What was asked for, see ``Pass``.
        cached: Length of the target's cache before it.
        logits: [rows, vocab].
    """

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None
    cached: int
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Observation:
    """One record of the loop and what happened until it came.

    Attributes:
        record: ``Prefill`` or ``Step``.
        context: Prompt and output before it.
        proposals, passes: Calls of the drafter and of the target.
        events: Random events that were not the drafter's.
        target_cache: Length of the target's cache when the record came; ``None`` if it keeps no cache.
        drafter_caches: The same of each model that drafts.
    """

    record: Prefill | Step
    context: tuple[int, ...]
    proposals: tuple[Proposal, ...]
    passes: tuple[MadePass, ...]
    events: tuple[Drawn | Tested, ...]
    target_cache: int | None
    drafter_caches: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was emitted."""
        if isinstance(self.record, Step):
            return self.record.tokens
        return () if self.record.token is None else (self.record.token,)

    @property
    def draft(self) -> Draft:
        """What was proposed; nothing in the first-target pass."""
        return self.proposals[0].draft if self.proposals else Draft()

    @property
    def verified(self) -> Draft:
        """What the target's last pass was given behind the context."""
        return Draft(list(self.passes[-1].tokens), parents=self.passes[-1].parents)

    @property
    def nodes(self) -> list[int]:
        """The node that each emitted token follows, -1 for the context, as far as the target's pass has rows."""
        if not self.passes or not self.tokens:
            return []
        verified, nodes = self.verified, [-1]
        for token in self.tokens[:-1]:
            node = verified.child(nodes[-1], token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    @property
    def deciding(self) -> list[torch.Tensor]:
        """The logits before every emitted token, [vocab] each, as far as the target's pass has them."""
        return [self.passes[-1].logits[node + 1] for node in self.nodes]


@dataclass(slots=True)
class _Log:
    """What happened since the last record."""

    proposals: list[Proposal] = field(default_factory=list)
    passes: list[MadePass] = field(default_factory=list)
    events: list[Drawn | Tested] = field(default_factory=list)
    drafting: bool = False

    def clear(self) -> None:
        self.proposals, self.passes, self.events = [], [], []


class _WatchedDrafter:
    """A drafter, its proposals noted. Random events within them are moved there from the log's own."""

    def __init__(self, drafter: Drafter, log: _Log) -> None:
        self._drafter, self._log = drafter, log
        self.name = drafter.name
        self.takes_trees, self.certain, self.several = drafter.takes_trees, drafter.certain, drafter.several
        self.begin, self.resume, self.update = drafter.begin, drafter.resume, drafter.update
        self.layers = drafter.layers

    def fork(self, scorer_like: ScorerLike) -> _WatchedDrafter:
        return _WatchedDrafter(self._drafter.fork(scorer_like), self._log)

    @property
    def epoch(self) -> object:
        return self._drafter.epoch

    @property
    def draftable(self) -> frozenset[int] | None:
        return self._drafter.draftable

    def propose(
        self,
        context: Sequence[int],
        room: int,
        policy: DraftPolicy,
        sampling: Sampling,
        random: Randomness,
        drawing: Drawing = top,
    ) -> Asking[Draft]:
        asking = self._drafter.propose(context, room, policy, sampling, random, drawing)
        return (yield from self._noted(context, room, asking))

    def _noted(self, context: Sequence[int], room: int, asking: Asking[Draft]) -> Asking[Draft]:
        before = len(self._log.events)
        self._log.drafting = True
        draft = yield from asking
        self._log.drafting = False
        events = tuple(self._log.events[before:])
        del self._log.events[before:]
        self._log.proposals.append(Proposal(len(context), room, draft, events))
        return draft


class _WatchedRandomness(Randomness):
    """Notes every event. With ``forcing``, every other test has an outcome of our choice among the possible ones.

    What a step emits is computed from its distributions, not from how the dice fell: forcing only leads to rejections
    at all positions, also where nearly everything is accepted.
    """

    def __init__(self, seed: int, device: torch.device | str, log: _Log, *, forcing: bool) -> None:
        super().__init__(seed, device)
        self._log = log
        self._choices = standard_random.Random(seed) if forcing else None

    def draw(self, probabilities: torch.Tensor) -> int:
        token = super().draw(probabilities)
        self._log.events.append(Drawn(probabilities, token))
        return token

    def test(self, acceptance: torch.Tensor) -> tuple[int, list[float]]:
        accepted, r = super().test(acceptance)
        forced = self._choices is not None and self._choices.random() < 0.5
        if forced and self._choices is not None:
            accepted = self._choices.choice(_possible_outcomes(acceptance.tolist()))
            r = [0.0] * accepted + [1.0] * (len(r) - accepted)
        self._log.events.append(Tested(acceptance, accepted, tuple(r), forced))
        return accepted, r


def _possible_outcomes(acceptance: Sequence[float]) -> list[int]:
    """The numbers of accepted drafts that have a chance."""
    outcomes = []
    for position, chance in enumerate(acceptance):
        if chance < 1.0:
            outcomes.append(position)
        if not chance > 0.0:
            return outcomes
    return [*outcomes, len(acceptance)]


def scorers_of(drafter: Drafter) -> list[Scorer]:
    """The models that a drafter drafts with, as far as they read the target's tokens."""
    return [model.scorer for model in models_of(drafter) if not isinstance(model, TranslatingDrafter)]


def observe(
    setup: DecodingSetup,
    prompt: Sequence[int],
    *,
    greedy: bool,
    plain: bool = False,
    forcing: bool = False,
    seed: int | None = None,
) -> Iterator[Observation]:
    """Decode a prompt and yield every record with what happened.

    Args:
        setup: What decodes.
        prompt: Token ids.
        greedy: Decode greedily, whatever the setup's temperature.
        plain: Without the drafter.
        forcing: Prescribe half of the outcomes of tests, see ``Tested``.
        seed: Instead of the setup's.
    """
    log = _Log()
    target = setup.target
    drafter: Drafter = NoDraft() if plain else setup.drafter
    request = Request(
        prompt=prompt,
        target=target,
        drafter=_WatchedDrafter(drafter, log),
        policy=DraftPlan.of(FixedLength(1) if plain else setup.policy),
        sampling=setup.greedy if greedy else setup.sampling,
        random=_WatchedRandomness(setup.seed if seed is None else seed, target.device, log, forcing=forcing),
        max_new_tokens=setup.max_new_tokens,
        stops=StopRules(setup.end_ids, setup.stop, setup.tokenizer),
        first_target=setup.first_target,
        residual_adjustment=plain or setup.residual_adjustment,
    )
    decoding = setup.decoder(request, Stopwatch(clock_for(str(target.device))))
    keeps_cache = not isinstance(target.cache, NoKVCache)
    models = scorers_of(drafter)
    context = list(prompt)
    for each in decoding:
        while isinstance(each, Pass):
            each = decoding.send(_made(each, target, log))
        observation = Observation(
            each,
            tuple(context),
            tuple(log.proposals),
            tuple(log.passes),
            tuple(log.events),
            target.cache.length if keeps_cache else None,
            tuple(scorer.cached_len for scorer in models),
        )
        log.clear()
        context += observation.tokens
        yield observation


def _made(asked: Pass, target: Scorer, log: _Log) -> Rows:
    """The rows of a pass, noted if it is the target's."""
    cached = target.cache.length
    rows = asked.scorer.score(asked)
    if not log.drafting:
        parents = None if asked.parents is None else tuple(asked.parents)
        log.passes.append(MadePass(tuple(asked.context), tuple(asked.tokens), parents, cached, rows.logits))
    return rows
