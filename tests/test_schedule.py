"""Batches of requests, on scripted models: outputs as alone, full passes, bounded memory, ends and failures."""

from __future__ import annotations

import random as standard_random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from scripted import Logits, ScriptedCache, ScriptedScorer, Ticking, random_table

from specbench.base.errors import UsageError
from specbench.decoding.drafts import StepOutcome
from specbench.decoding.loop import decode_steps
from specbench.decoding.protocols import Drafter, DrafterTraits, ForwardOutput, ForwardRequest, NoDraft
from specbench.decoding.records import Prefill, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.schedule import Event, Scheduler
from specbench.decoding.stops import StopRules
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.several import SeveralDrafters
from specbench.drafters.suffix import SuffixDrafter
from specbench.policies import build_policy
from specbench.specs.drafters import NGram

VOCAB = 6
GREEDY = Sampling()
TARGET, DRAFT, OTHER = (random_table(seed, VOCAB, spread=2.0) for seed in (1, 2, 3))


class Room:
    """Memory for so many tokens, of which every cache reserves some."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.reserved: dict[ScriptedCache, int] = {}

    @property
    def taken(self) -> int:
        return sum(self.reserved.values())


class Together:
    """Makes passes of several scorers in one, and keeps the tokens that each has read in it."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    @property
    def loaded(self) -> object:
        return self

    def score(self, asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        assert len({each.scorer for each in asked}) == len(asked)
        self.passes.append([len(each.context) + len(each.tokens) - each.scorer.cached_len for each in asked])
        held = [len(each.scorer.cache.entries) for each in asked]
        try:
            return [each.scorer.score(each) for each in asked]
        except BaseException:
            for each, length in zip(asked, held, strict=True):
                del each.scorer.cache.entries[length:]
            raise


class Member(ScriptedScorer):
    """A scorer with a place in a room; its passes are made with those of others."""

    def __init__(
        self, logits: Logits, room: Room | None = None, batch: Together | None = None, **options: Any
    ) -> None:
        super().__init__(logits, VOCAB, **options)
        self.room, self.batch = room or Room(10**6), batch

    places = None

    def reserve(self, asked: ForwardRequest) -> bool:
        wanted = len(asked.context) + len(asked.tokens)
        if wanted > self.room.tokens:
            raise UsageError(f"The pool holds {self.room.tokens} tokens.", "Give it more.")
        others = self.room.taken - self.room.reserved.get(self.cache, 0)
        if others + wanted > self.room.tokens:
            return False
        self.room.reserved[self.cache] = wanted
        return True

    def begin(self) -> None:
        super().begin()
        self.room.reserved.pop(self.cache, None)

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        if self.room.tokens < 10**6:
            assert self.room.reserved[self.cache] >= len(asked.context) + len(asked.tokens), (
                "nothing was reserved"
            )
        return super().score(asked)

    def rollback(self, length: int, path: Sequence[int] = ()) -> None:
        super().rollback(length, path)
        self.room.reserved.pop(self.cache, None)
        if self.cache.length:
            self.room.reserved[self.cache] = self.cache.length


@dataclass
class House:
    """Models that requests share, with the memory of each."""

    room: Room = field(default_factory=lambda: Room(10**6))
    drafters_room: Room = field(default_factory=lambda: Room(10**6))
    target: Together | None = field(default_factory=Together)
    model: Together | None = field(default_factory=Together)
    form: Together | None = field(default_factory=Together)

    def member(self) -> Member:
        return Member(TARGET, self.room, self.target)

    def drafter(self, kind: str, target: Member) -> Drafter:
        model = partial(Member, DRAFT, self.drafters_room, self.model)
        form = partial(Member, OTHER, self.room, self.form, cache=target.cache, own_entries_only=False)
        made: dict[str, Callable[[], Any]] = {
            "none": NoDraft,
            "lookup": LookupDrafter,
            "ngram": NGramDrafter,
            "drawn": lambda: NGramDrafter(NGram(sample=True)),
            "suffix": SuffixDrafter,
            "model": lambda: ModelDrafter(model(), "model"),
            "self": lambda: SelfDrafter(form(), "self"),
            "lookup+model": lambda: CascadeDrafter(LookupDrafter(), ModelDrafter(model(), "model")),
            "lookup+self": lambda: CascadeDrafter(LookupDrafter(), SelfDrafter(form(), "self")),
            "lookup|self": lambda: SeveralDrafters([LookupDrafter(), SelfDrafter(form(), "self")]),
        }
        return made[kind]()


@dataclass(frozen=True)
class Case:
    """One request with all its settings."""

    prompt: tuple[int, ...]
    drafter: str = "none"
    policy: str = "fixed"
    sampling: Sampling = GREEDY
    seed: int = 0
    tokens: int = 8
    end_ids: tuple[int, ...] = ()
    first_target: bool = True

    def request(self, house: House) -> Request:
        target = house.member()
        return Request(
            prompt=list(self.prompt),
            target=target,
            drafter=house.drafter(self.drafter, target),
            policy=build_policy(self.policy),
            sampling=self.sampling,
            random=Randomness(self.seed),
            max_new_tokens=self.tokens,
            stops=StopRules(self.end_ids),
            first_target=self.first_target,
        )

    def alone(self) -> list[Any]:
        return [told(record) for record in decode_steps(self.request(House()), Ticking())]


CHAINS = ("fixed:gamma=1", "fixed:gamma=3", "fixed:gamma=7", "egag", "svip", "heuristic")
TREES = ("dynamic-tree:nodes=5", "static-tree")
ANY = ("none", "lookup", "ngram", "drawn", "suffix", "model", "self", "lookup+model", "lookup+self")


def mixture(count: int, seed: int, longest: int = 30) -> list[Case]:
    """So many requests, every kind of drafter in turn, all else at random."""
    choice = standard_random.Random(seed)
    cases = []
    for number in range(count):
        drafter = [*ANY, "lookup|self"][number % (len(ANY) + 1)]
        rules = CHAINS[:3] if "|" in drafter else CHAINS
        if drafter in ("model", "self", "suffix"):
            rules += TREES
        cases.append(
            Case(
                tuple(choice.randrange(VOCAB) for _ in range(choice.randint(1, longest))),
                drafter,
                choice.choice(rules),
                choice.choice([GREEDY, Sampling(0.8), Sampling(1.3)]),
                number,
                choice.randint(1, 14),
                choice.choice([(), (), (4,)]),
                choice.random() < 0.8,
            )
        )
    return cases


def told(record: Event) -> Any:
    """What a record says but for times."""
    if isinstance(record, Step):
        return (record.index, record.position, record.drafted, record.tokens, record.finish_reason)
    return (record.token, record.finish_reason) if isinstance(record, Prefill) else record


def scheduled(cases: Iterable[Case], house: House, **options: Any) -> Scheduler:
    """A scheduler that has these requests."""
    scheduler = Scheduler(**options)
    for case in cases:
        scheduler.add(partial(case.request, house))
    return scheduler


def told_by_number(scheduler: Scheduler) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, event in scheduler:
        found.setdefault(number, []).append(told(event))
    return found


MIXED = mixture(44, 0)
ALONE = [case.alone() for case in MIXED]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("batch", "most", "alone"),
    [(1, 512, False), (3, 5, False), (8, 1, False), (16, 40, False), (8, 512, True)],
)
def test_every_request_gets_what_it_gets_alone(batch, most, alone):
    """Also with models that batch nothing, and are asked one by one."""
    house = House(target=None, model=None, form=None) if alone else House()
    found = told_by_number(scheduled(MIXED, house, max_batch=batch, max_tokens_per_pass=most))
    assert [found[number] for number in range(len(MIXED))] == ALONE
    assert house.room.taken == house.drafters_room.taken == 0


# 56 tokens are what one of them needs alone: 40 of context and 16 nodes of a tree.
@pytest.mark.parametrize(("room", "drafters_room"), [(48, 56), (60, 10**6), (200, 60)])
def test_nothing_is_lost_where_memory_is_short(room, drafters_room, monkeypatch):
    house, put_back = House(Room(room), Room(drafters_room)), []
    honest = Scheduler._preempt

    def counting(scheduler: Scheduler, job: Any) -> None:
        assert job is not min(scheduler._active, key=lambda other: other.number)
        put_back.append(job.pending.scorer is job.request.target)
        honest(scheduler, job)

    monkeypatch.setattr(Scheduler, "_preempt", counting)
    found = told_by_number(scheduled(MIXED, house, max_batch=8, max_tokens_per_pass=20))
    assert [found[number] for number in range(len(MIXED))] == ALONE
    assert house.room.taken == house.drafters_room.taken == 0
    assert True in put_back
    assert room > 100 or False in put_back  # one in the middle of its draft as well


def test_a_draft_on_the_targets_cache_goes_on_upon_the_targets_own_keys():
    """Where its request was put back in between, the target reads again first."""
    cases = [Case((1, 2, n % VOCAB) * (1 + n % 4), "self", "fixed:gamma=7", tokens=14) for n in range(8)]
    found = told_by_number(scheduled(cases, House(Room(36)), max_batch=4))
    assert [found[number] for number in range(8)] == [case.alone() for case in cases]


def test_requests_join_and_leave_at_any_step():
    house, choice = House(Room(150)), standard_random.Random(5)
    scheduler = Scheduler(max_batch=5, max_tokens_per_pass=12)
    found: dict[int, list[Any]] = {}
    cancelled, added = set(), 0
    while added < len(MIXED) or len(scheduler):
        while added < len(MIXED) and choice.random() < 0.3:
            assert scheduler.add(partial(MIXED[added].request, house)) == added
            added += 1
        if added and choice.random() < 0.05:
            cancelled.add(number := choice.randrange(added))
            scheduler.cancel(number)
        for number, event in scheduler.step():
            found.setdefault(number, []).append(told(event))
        assert scheduler.active <= 5
    assert cancelled
    for number, alone in enumerate(ALONE):
        records = found.get(number, [])
        assert records == alone or (number in cancelled and records == alone[: len(records)])
    assert house.room.taken == house.drafters_room.taken == 0


def drafting(count: int, gammas: Sequence[int] = (3,), drafters: Sequence[str] = ("model",)) -> list[Case]:
    return [
        Case((1, 2, number % VOCAB), drafters[number % len(drafters)], f"fixed:gamma={gammas[number % len(gammas)]}",
             tokens=30)
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("cases", [drafting(6), drafting(6, (1, 5, 2)), drafting(6, (3,), ANY)])
def test_a_target_s_pass_takes_all_along_and_everybody_steps_alike(cases):
    house = House()
    scheduler = scheduled(cases, house, max_batch=6)
    steps = [0] * 6
    while scheduler.active in (0, 6):
        if scheduler.active:
            assert max(steps) - min(steps) <= 1
        for number, event in scheduler.step():
            steps[number] += isinstance(event, Step)
    assert house.target is not None
    assert max(steps) > 5
    assert {len(each) for each in house.target.passes} == {6}


def emitted(scheduler: Scheduler) -> list[int]:
    """Whose tokens come, in that order."""
    return [number for number, event in scheduler for _ in getattr(event, "tokens", (0,))]


@pytest.mark.parametrize("kind", ["none", "model"])
def test_a_long_prompt_is_read_between_the_steps_of_others(kind):
    house = House()
    long = Case(tuple(i * i % VOCAB for i in range(200)), kind, tokens=3)
    cases = [long, *drafting(2, (2,), (kind,))]
    order = emitted(scheduled(cases, house, max_batch=3, max_tokens_per_pass=20))
    assert house.target is not None
    assert house.model is not None
    passes = [*house.target.passes, *house.model.passes]
    assert max(map(sum, passes)) <= 20
    assert max(map(max, passes)) > 10
    # 200 tokens in parts of at most 19 take 11 passes of the target, and others emit in each of them.
    assert order.index(0) >= 20
    if kind == "model":  # its drafter then reads as many in parts, and nobody waits for it either
        first, second = [place for place, number in enumerate(order) if number == 0][:2]
        assert second - first > 5


def test_whoever_found_no_room_in_a_pass_comes_first_in_the_next():
    cases = [*drafting(3, (1,), ("none",)), Case(tuple(range(VOCAB)) * 3, tokens=2)]
    order = emitted(scheduled(cases, House(), max_batch=4, max_tokens_per_pass=3))
    assert order.index(3) < 60


def test_a_context_that_nobody_keeps_is_read_whole():
    class Forgetful(Member):
        reads_in_parts = False

        def rollback(self, length: int, path: Sequence[int] = ()) -> None:
            super().rollback(0)

    house = House()
    house.member = lambda: Forgetful(TARGET, house.room, house.target)  # type: ignore[method-assign]
    cases = [Case((1, 2, 3, 4) * 4, tokens=4), Case((2, 2), tokens=4)]
    found = told_by_number(scheduled(cases, house, max_tokens_per_pass=6))
    assert [found[0], found[1]] == [case.alone() for case in cases]


def last_token(tokens: Sequence[int]) -> torch.Tensor:
    """Hidden states that say what was fed, [1, 1]."""
    return torch.tensor([[float(tokens[-1])]])


class Listening(NoDraft):
    """Takes in states of the target, and drafts nothing."""

    known = 0

    def __init__(self) -> None:
        super().__init__()
        self.traits = DrafterTraits("listening", layers=(0,))

    def update(self, outcome: StepOutcome) -> None:
        context, states = outcome.context, outcome.states
        assert states is not None
        first = len(context) - 1 - len(states)
        assert first <= self.known
        assert [int(state) for state in states] == context[first:-1]
        self.known = len(context) - 1


def test_states_of_contexts_read_in_parts_and_anew_are_whole():
    house = House(Room(90))
    telling = partial(Member, TARGET, house.room, house.target, states=last_token)
    house.member = telling  # type: ignore[method-assign]
    listening: list[Listening] = []

    def request(case: Case) -> Request:
        listening.append(Listening())
        return replace(case.request(house), drafter=listening[-1])

    scheduler = Scheduler(max_tokens_per_pass=7)
    for number in range(3):
        scheduler.add(partial(request, Case((1, number) * 12, tokens=20)))
    assert [event for _, event in scheduler if isinstance(event, Exception)] == []
    assert [each.known for each in listening] == [43] * 3
    assert house.target is not None
    assert any(max(each) > 4 for each in house.target.passes[-30:])  # somebody was put back, and read again


class BrokenError(Exception):
    """Of nobody else's making."""


def breaking(case: Case, house: House, place: str, at: int) -> Request:
    """A request of which something raises when it is called for that time, and passes always from then on."""
    request = case.request(house)
    whose, name = place.rsplit(".", 1)
    owner: Any = request
    for part in whose.split("."):
        owner = getattr(owner, part)
    honest, calls = getattr(owner, name), 0

    def called(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at or (calls > at and name == "score"):
            raise BrokenError
        return honest(*arguments, **options)

    object.__setattr__(owner, name, called)
    return request


PLACES = (
    "target.score",
    "target.rollback",
    "target.begin",
    "target.reserve",
    "drafter.scorer.score",
    "drafter.scorer.rollback",
    "drafter.begin",
    "drafter.propose",
    "drafter.update",
    "random.draw",
    "random.test",
    "sampling.at",
    "stops.cut",
    "policy.begin",
    "policy.begin_step",
    "policy.observe",
    "policy.should_continue",
)
ONCE = ("target.begin", "drafter.begin", "sampling.at", "policy.begin")  # called once for a request


@pytest.mark.parametrize("room", [10**6, 70], ids=["room for all", "little room"])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_one_raises_ends_that_one(place, room):
    for at in (1,) if place in ONCE else (1, 3):
        house = House(Room(room), Room(10**6))
        scheduler = Scheduler(max_batch=4, max_tokens_per_pass=16)
        case = Case((1, 2, 3, 1, 2), "model", "heuristic", Sampling(1.0), tokens=12)
        own = [0, 4, 6, 7]
        for number in own[:2]:
            scheduler.add(partial(MIXED[number].request, house))
        scheduler.add(partial(breaking, case, house, place, at))
        for number in own[2:]:
            scheduler.add(partial(MIXED[number].request, house))
        found = told_by_number(scheduler)
        assert [found[number] for number in (0, 1, 3, 4)] == [ALONE[number] for number in own]
        *before, last = found[2]
        assert isinstance(last, BrokenError)
        assert before == case.alone()[: len(before)]
        assert house.room.taken == house.drafters_room.taken == 0


def test_one_that_never_begins_or_never_fits_says_so():
    def no_request() -> Request:
        raise UsageError("The prompt is empty.")

    house = House(Room(40))
    cases = [MIXED[0], Case((1,) * 50), Case((2,) * 38, tokens=9), MIXED[1]]
    scheduler = scheduled(cases, house)
    scheduler.add(no_request)
    found = told_by_number(scheduler)
    assert [str(event) for event in found[4]] == ["The prompt is empty."]
    assert [found[0], found[3]] == ALONE[:2]
    assert [type(found[number][-1]) for number in (1, 2)] == [UsageError] * 2
    assert len(found[1]) == 1 < len(found[2])
    assert house.room.taken == 0


def test_times_are_those_of_the_batch_without_the_consumer_s():
    clock, house = Ticking(0.0), House()
    honest = house.target.score

    def slow(asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        clock.time += 1
        return honest(asked)

    house.target.score = slow  # type: ignore[method-assign]
    cases = [*drafting(2, (1,), ("none",)), Case((1, 2), tokens=2)]
    records: dict[int, list[Any]] = {}
    for number, event in scheduled(cases, house, max_batch=2, clock=clock):
        clock.time += 100
        records.setdefault(number, []).append(event)
    for number in (0, 1):
        first, *steps = records[number]
        assert (first.time_s, first.queued_s) == (1, 0)
        assert {step.times.verify_s for step in steps} == {1}
        assert {step.times.total_s for step in steps} == {1}
    assert records[2][0].queued_s == 30
