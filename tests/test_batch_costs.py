"""Rules that read costs, with many requests: what a batch's passes cost one of them, and what they make of it."""

from __future__ import annotations

import itertools
import random as standard_random
from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import pytest
from scripted import Logits, ScriptedScorer, Ticking, enumerate_outcomes, random_table

from specbench.decoding.clocks import Clock
from specbench.decoding.protocols import ForwardOutput, ForwardRequest
from specbench.decoding.records import SharedPass, Step, StepTimes
from specbench.decoding.request import Request
from specbench.decoding.sampling import Greedy, Multinomial, Randomness, Sampling
from specbench.decoding.schedule import Scheduler, loaded_of
from specbench.decoding.theory import PassCosts
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.plain import NoDraft
from specbench.policies import build_policy
from specbench.policies.batch_costs import BatchCosts, RequestCosts, share_costs
from specbench.policies.costs import GivenCosts, MeasuredCosts

VOCAB = 6
TARGET = random_table(1, VOCAB, order=5, spread=2.0)
NOISE, OTHER = random_table(2, VOCAB, order=5, spread=0.8), random_table(3, VOCAB, order=5, spread=2.0)

Seconds = Callable[[int], float]


def good(tokens: Sequence[int]) -> Any:
    """Logits of a model that agrees with the target most of the time."""
    return TARGET(tokens) + NOISE(tokens)


def fair(tokens: Sequence[int]) -> Any:
    """Logits of one that agrees with it less often."""
    return TARGET(tokens) + 1.6 * NOISE(tokens)


class Model:
    """Reads for several requests at once, and takes as long as it is told for so many rows, and for unequal ones."""

    def __init__(self, logits: Logits, seconds: Seconds, clock: Ticking, uneven_s: float = 0.0) -> None:
        self.logits, self.seconds, self.clock, self.uneven_s = logits, seconds, clock, uneven_s

    @property
    def loaded(self) -> object:
        return self

    def score(self, asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        rows = [len(each.context) + len(each.tokens) - each.scorer.cached_len for each in asked]
        self.clock.time += self.seconds(sum(rows)) + (self.uneven_s if len(set(rows)) > 1 else 0.0)
        return [ScriptedScorer.score(each.scorer, each) for each in asked]  # type: ignore[arg-type]

    def seat(self) -> Seat:
        return Seat(self)


class Seat(ScriptedScorer):
    """One request's scorer of such a model."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.logits, VOCAB)
        self.batch = model  # type: ignore[assignment]

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        return self.batch.score([asked])[0]  # type: ignore[attr-defined, no-any-return]


class House:
    """A target and a drafter's models, and requests that share them.

    Args:
        target_s, draft_s: Seconds of a pass by its rows.
        uneven_s: Seconds more of a pass of the target to which requests bring unequal numbers of them.
        prompt: Tokens of each request's.
    """

    def __init__(self, target_s: Seconds, draft_s: Seconds, uneven_s: float = 0.0, prompt: int = 4) -> None:
        self.clock, self.batch_costs, self.prompt = Ticking(0.0), BatchCosts(), prompt
        self.target = Model(TARGET, target_s, self.clock, uneven_s)
        logits = {"good": good, "fair": fair, "bad": OTHER}
        self.models = {name: Model(each, draft_s, self.clock) for name, each in logits.items()}

    def request(self, number: int, kind: str, rule: str, tokens: int) -> Request:
        policy = build_policy(rule)
        drafter: Any = NoDraft()
        if kind == "lookup":
            drafter = LookupDrafter(clock=self.clock)
        elif kind != "none":
            drafter = ModelDrafter(self.models[kind].seat(), kind, self.clock)  # type: ignore[arg-type]
        models = [loaded_of(drafter.scorer)] if kind in self.models else []
        share_costs(policy, self.batch_costs, models, self.prompt)
        choice = standard_random.Random(number)
        return Request(
            prompt=[choice.randrange(VOCAB) for _ in range(self.prompt)],
            target=self.target.seat(),
            drafter=drafter,
            plan=policy,
            sampling=Greedy(),
            random=Randomness(0),
            max_new_tokens=tokens,
        )

    def run(self, kinds: Sequence[str], rule: str, tokens: int = 80) -> tuple[float, float]:
        """Tokens per second of all together, and the mean draft length."""
        scheduler = Scheduler(max_batch=len(kinds), clock=self.clock, watch=self.batch_costs.observe)
        for number, kind in enumerate(kinds):
            scheduler.add(partial(self.request, number, kind, rule, tokens))
        steps: list[Step] = []
        for _, event in scheduler:
            assert not isinstance(event, Exception), event
            if isinstance(event, Step):
                steps.append(event)
        drafted = sum(step.gamma for step in steps) / len(steps)
        return sum(len(step.tokens) for step in steps) / self.clock.time, drafted

    def served(self, kinds: Sequence[str], rule: str, batch: int, tokens: int = 64) -> list[float]:
        """Seconds from each request's prompt to its end, so many of them at a time and in turn."""
        scheduler = Scheduler(max_batch=batch, clock=self.clock, watch=self.batch_costs.observe)
        for number, kind in enumerate(kinds):
            scheduler.add(partial(self.request, number, kind, rule, tokens))
        began: dict[int, float] = {}
        ended: dict[int, float] = {}
        for number, event in scheduler:
            assert not isinstance(event, Exception), event
            began.setdefault(number, self.clock.time)
            ended[number] = self.clock.time
        return [ended[number] - began[number] for number in range(len(kinds))]


def roofline(rows: int) -> float:
    """Reading the weights takes as long as computing 12 rows."""
    return max(12.0, rows) + 0.05 * rows


def test_drafts_shrink_and_stop_as_the_batch_grows():
    lengths = []
    for batch in (1, 8, 20):
        kinds = ["good"] * batch
        speed, drafted = House(roofline, lambda rows: 0.5).run(kinds, "auto")
        fixed = [House(roofline, lambda rows: 0.5).run(kinds, f"fixed:gamma={gamma}")[0] for gamma in (1, 4)]
        plain, _ = House(roofline, lambda rows: 0.5).run(["none"] * batch, "fixed")
        lengths.append(drafted)
        assert speed > 0.9 * plain, batch
        assert speed > 0.8 * max(*fixed, plain), batch
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2.5
    assert lengths[-1] < 0.3


def test_what_does_not_pay_in_a_batch_costs_little():
    kinds = ["bad"] * 12
    speed, _ = House(roofline, lambda rows: 2.0).run(kinds, "auto")
    plain, _ = House(roofline, lambda rows: 2.0).run(["none"] * 12, "fixed")
    assert speed > 0.9 * plain


def test_one_whose_drafts_are_good_does_not_hold_up_those_who_have_none():
    """A pass of the drafter costs as much for one as for all."""
    kinds = ["good", *["bad"] * 7]
    speed, _ = House(roofline, lambda rows: 5.0).run(kinds, "auto")
    plain, _ = House(roofline, lambda rows: 5.0).run(["none"] * 8, "fixed")
    assert speed > 0.9 * plain
    speed, _ = House(roofline, lambda rows: 5.0).run(["good"] * 3, "auto")
    assert speed > 0.9 * House(roofline, lambda rows: 5.0).run(["none"] * 3, "fixed")[0]


def test_each_keeps_its_own_acceptance():
    house = House(roofline, lambda rows: 0.3)
    scheduler = Scheduler(max_batch=4, clock=house.clock, watch=house.batch_costs.observe)
    for number, kind in enumerate(("good", "bad", "good", "bad")):
        scheduler.add(partial(house.request, number, kind, "auto", 100))
    gammas: dict[int, list[int]] = {number: [] for number in range(4)}
    for number, event in scheduler:
        if isinstance(event, Step):
            gammas[number].append(event.gamma)
    means = {number: sum(each) / len(each) for number, each in gammas.items()}
    assert min(means[0], means[2]) > 2 * max(means[1], means[3])


def test_copies_cost_their_rows_alone():
    house = House(roofline, lambda rows: 0.0)
    request = house.request(0, "lookup", "auto", 5)
    assert request.plan.costs() == {"drafter_pass_s": 0.0, "target_pass_s": {"1": pytest.approx(1.0)}}
    speed, _ = house.run(["lookup"] * 8, "auto")
    assert speed > 0.9 * House(roofline, lambda rows: 0.0).run(["none"] * 8, "fixed")[0]


def measured(rows: int) -> float:
    """Milliseconds of SmolLM2-135M in bfloat16 with 8 requests of 150 to 250 tokens."""
    return 17.0 + 1.1 * rows


UNEVEN_MS = 4.0


@pytest.mark.parametrize("batch", [2, 8])
def test_copies_that_are_mostly_wrong_are_hardly_made(batch):
    """Outputs are short, so that what is learned at their beginning may not cost much."""
    speed, _ = House(measured, measured, UNEVEN_MS).run(["lookup"] * batch, "auto", 64)
    plain, _ = House(measured, measured, UNEVEN_MS).run(["none"] * batch, "fixed", 64)
    assert speed > 0.97 * plain
    fixed, _ = House(measured, measured, UNEVEN_MS).run(["lookup"] * batch, "fixed:gamma=3", 64)
    assert fixed < 0.9 * plain, "drafts would have paid"


def test_drafts_of_some_hold_up_the_others_little():
    """With one price for all, that of the tokens of all together, those who draft badly get 0.82 of plain decoding."""
    kinds = ["good", "fair", "bad", "bad"] * 6
    observe = House(measured, lambda rows: 1.0).served(kinds, "auto", 8)
    plain = House(measured, lambda rows: 1.0).served(["none"] * len(kinds), "fixed", 8)
    assert sum(plain) > sum(observe)
    ratios = {
        kind: [b / a for a, b, each in zip(observe, plain, kinds, strict=True) if each == kind]
        for kind in kinds
    }
    speeds = {kind: geometric_mean(each) for kind, each in ratios.items()}
    assert speeds["good"] > speeds["fair"] > 1.1
    assert speeds["bad"] > 0.85


def large(rows: int) -> float:
    """Milliseconds of Qwen2.5-Coder 1.5B with 8 requests: a row more costs two requests' parts."""
    return 140.0 + 30.0 * min(max(0, rows - 8), 24) + 8.0 * max(0, rows - 32)


def small(rows: int) -> float:
    """Of its drafter."""
    return 13.0 + 1.5 * rows


def even(rows: int) -> float:
    """Milliseconds of the same, where a row costs little less than a draft that is mostly accepted brings."""
    return 118.0 + 6.0 * max(0, rows - 8)


@pytest.mark.parametrize("target", [large, even])
def test_where_drafts_cannot_surely_pay_the_drafter_hardly_reads_a_prompt(target):
    house, kinds = House(target, small, prompt=150), ["good"] * 8
    read: list[int] = []
    observe = house.batch_costs.observe

    def noticed(pass_: SharedPass) -> None:
        read.append(0 if pass_.target else sum(fed > 8 for fed in pass_.fed))
        observe(pass_)

    house.batch_costs.observe = noticed  # type: ignore[method-assign]
    speed, _ = house.run(kinds, "auto", 64)
    plain, _ = House(target, small, prompt=150).run(["none"] * 8, "fixed", 64)
    assert sum(read) <= 3
    assert speed > 0.95 * plain


@pytest.mark.parametrize("kind", ["good", "lookup"])
def test_costs_learnt_on_a_busy_machine_are_learnt_anew(kind):
    """Passes with drafts take eight times as long at first, and answers are too short to save up for a look."""
    house = House(lambda rows: 1.0, lambda rows: 0.3)
    quiet = 300.0

    def busy(rows: int) -> float:
        return (1.0 + 0.02 * rows) * (8.0 if house.clock.time < quiet and rows > 1 else 1.0)

    house.target.seconds = busy
    for model in house.models.values():
        model.seconds = lambda rows: 0.3 * (8.0 if house.clock.time < quiet else 1.0)
    scheduler = Scheduler(max_batch=1, clock=house.clock, watch=house.batch_costs.observe)
    for number in range(24):
        scheduler.add(partial(house.request, number, kind, "auto", 40))
    began: dict[int, float] = {}
    drafted: dict[int, int] = {}
    for number, event in scheduler:
        assert not isinstance(event, Exception), event
        began.setdefault(number, house.clock.time)
        drafted[number] = drafted.get(number, 0) + (event.gamma if isinstance(event, Step) else 0)
    first = next(number for number, time in began.items() if time > quiet)
    assert first < 12
    assert all(drafted[number] > 5 for number in range(first + 6, 24))


def test_where_drafts_pay_for_it_every_prompt_is_read():
    """A pass takes as long for 24 rows as for one."""
    kinds = ["good"] * 4
    observe = House(lambda rows: 140.0 + rows, small, prompt=150).served(kinds, "auto", 4)
    plain = House(lambda rows: 140.0 + rows, small, prompt=150).served(["none"] * 4, "fixed", 4)
    assert sum(plain) > 1.3 * sum(observe)


def test_what_uneven_passes_cost_is_weighed():
    """One row more is nothing, but that there is one at all costs half a pass."""
    batch_costs = BatchCosts()
    for _ in range(10):
        batch_costs.observe(made(10.0, [0] * 4))
        batch_costs.observe(made(15.0, [1, 0, 0, 0]))
        batch_costs.observe(made(15.5, [3, 0, 0, 0]))
    costs = RequestCosts(batch_costs, [], MeasuredCosts())
    batch_costs.observe(made(10.0, [0] * 4))
    costs.observe(step(1), True)
    first = costs.verify_s(4)
    assert first[1] == pytest.approx(10 / 4)
    assert first[2] - first[1] == pytest.approx(5.0, rel=0.1)
    batch_costs.observe(made(15.5, [0, 3, 0, 0]))
    costs.observe(step(1), True)
    others = costs.verify_s(4)
    assert others[1] == pytest.approx(10 / 4)
    assert others[2] - others[1] == pytest.approx(2.6, rel=0.2), "somebody else drafts anyway, and pays half"


# -- the figures -------------------------------------------------------------------------------------


def made(
    seconds: float, drafted: Sequence[int], *, target: bool = True, read: int = 1, model: object = BatchCosts
) -> SharedPass:
    numbers = tuple(range(len(drafted)))
    fed = tuple(read + each for each in drafted)
    return SharedPass(model, target, numbers, fed, tuple(drafted), 0.0, seconds, len(drafted), 0)


def step(verified: int, tokens: int = 1) -> Step:
    return Step(
        index=0, position=1, drafted=(0,) * (verified - 1), accepted=tokens - 1, tested=tokens - 1,
        tokens=(0,) * tokens, closing="target", expected_acceptance=(), times=StepTimes(0, 0, 0, 0, 0, 0),
        finish_reason=None, policy={},
    )  # fmt: skip


def known(batch_costs: BatchCosts, seconds: Seconds, batch: int, rounds: int = 20) -> None:
    """Let it see passes of that batch with 0, 1, 2 and 3 drafts each."""
    for _, drafts in itertools.product(range(rounds), range(4)):
        batch_costs.observe(made(seconds(batch * (1 + drafts)), [drafts] * batch))


def test_rows_cost_a_part_of_the_plain_pass_and_what_they_prolong_it_by():
    batch_costs, batch = BatchCosts(), 4
    known(batch_costs, lambda rows: 10.0 + rows, batch)
    costs = RequestCosts(batch_costs, [], MeasuredCosts())
    batch_costs.observe(made(20.0, [2, 3, 0, 1]))
    costs.observe(step(3), True)
    found = costs.verify_s(5)
    assert found[1] == pytest.approx((10 + batch) / batch, rel=0.03)
    assert found[5] - found[1] == pytest.approx(4.0, rel=0.1)
    assert costs.draft_s == 0.0
    assert costs.timings == float("inf")


def test_a_pass_that_only_catches_up_counts_the_request_itself_among_those_that_draft():
    """Its rows are more than its requests though nobody drafted, and this request drafted in an earlier one."""
    batch_costs, batch = BatchCosts(), 4
    known(batch_costs, lambda rows: 10.0 + rows, batch)
    costs = RequestCosts(batch_costs, [], MeasuredCosts())
    costs.observe(step(3), True)
    batch_costs.observe(made(20.0, [0] * batch, read=3))
    assert batch_costs.drafters == 0
    assert batch_costs.rows - 3 > batch_costs.requests
    found = costs.verify_s(3)
    assert found[1] == pytest.approx((10 + batch) / batch, rel=0.03)
    assert found[3] > found[2] > 0


def test_a_drafter_s_pass_costs_each_a_part():
    batch_costs = BatchCosts()
    known(batch_costs, lambda rows: 10.0 + rows, 4)
    costs = RequestCosts(batch_costs, [Model], MeasuredCosts())
    assert costs.timings == 0
    assert costs.draft_s == pytest.approx(0.2 * costs.verify_s(1)[1])
    batch_costs.observe(made(8.0, [1, 1, 1, 1], target=False, model=Model, read=1))
    assert costs.timings == 0, "it may have been disturbed"
    batch_costs.observe(made(8.0, [1, 1, 1, 1], target=False, model=Model, read=1))
    batch_costs.observe(made(80.0, [0, 0], target=False, model=Model, read=30))  # reads prompts
    batch_costs.observe(made(1.0, [1, 1], target=False, model=House))  # somebody else's
    assert costs.timings == 2
    assert costs.draft_s == 2.0


def test_passes_that_read_prompts_are_not_timed():
    batch_costs = BatchCosts()
    batch_costs.observe(made(500.0, [0, 0], read=100))
    assert not batch_costs.plain_s.seen
    known(batch_costs, lambda rows: 10.0 + rows, 2)
    before = batch_costs.target_s(2)
    batch_costs.observe(made(500.0, [0, 0], read=100))
    assert batch_costs.target_s(2) == before


def test_time_is_worth_to_each_what_a_round_gives_it():
    """A plain round takes 10 seconds, one with drafts 15."""
    batch_costs = BatchCosts()
    slow, fast = (RequestCosts(batch_costs, [], MeasuredCosts()) for _ in range(2))
    assert slow.rate(0.0, 0.4) == fast.rate(0.0, 0.4) == 0.4
    for _ in range(300):
        batch_costs.observe(made(10.0, [0] * 4))
    for _ in range(300):
        batch_costs.observe(made(2.0, [1] * 4, target=False, model=Model))
        batch_costs.observe(made(13.0, [1] * 4))
        slow.observe(step(1, 1), True)
        fast.observe(step(4, 3), True)
    assert batch_costs.stretch == pytest.approx(1.5, rel=0.03)
    plain = 4 / 10.0
    assert slow.rate(0.0, plain) == plain
    assert fast.rate(0.0, plain) == pytest.approx(3 * 4 / 15.0, rel=0.03)
    fast.reset()
    assert fast.rate(0.0, plain) == slow.rate(0.0, plain)


def test_given_costs_are_those_of_a_pass_over_so_many_rows():
    given = GivenCosts(3.0, PassCosts({1: 11.0, 101: 111.0}))
    batch_costs = BatchCosts()
    costs = RequestCosts(batch_costs, [Model], given)
    batch_costs.observe(made(0.1, [0, 0, 0]))
    batch_costs.observe(made(0.1, [1, 1, 1], target=False, model=Model))
    assert costs.verify_s(2)[1:] == pytest.approx([13 / 3, 13 / 3 + 1])
    assert costs.draft_s == 1.0
    assert (costs.rate(1.5, 1.0), costs.rate(0.5, 1.0)) == (1.5, 1.0)
    assert costs.timings == costs.reach == float("inf")


def test_all_look_again_in_the_same_round():
    batch_costs = BatchCosts()
    first, second = (RequestCosts(batch_costs, [], MeasuredCosts()) for _ in range(2))
    assert [first.may_look(False), second.may_look(True), first.may_look(False)] == [False] * 3
    batch_costs.observe(made(1.0, [0, 0]))
    assert [first.may_look(False), second.may_look(True)] == [True, True]
    batch_costs.observe(made(1.0, [1, 1]))
    assert [first.may_look(False), second.may_look(False)] == [False, False]


def test_one_drafts_before_all_do():
    """Until a pass of the drafter, and one of the target with drafts, have been timed."""
    batch_costs = BatchCosts()
    first, second = (RequestCosts(batch_costs, [Model], MeasuredCosts()) for _ in range(2))
    assert first.reach == second.reach == 0, "what a plain pass takes is not known"
    batch_costs.observe(made(10.0, [0, 0]))
    assert (first.reach, second.reach) == (3, 0)
    for _ in range(2):
        batch_costs.observe(made(3.0, [0], target=False, model=Model))
    for _ in range(3):
        assert (first.reach, second.reach) == (3, 0)
        batch_costs.observe(made(12.0, [2, 0]))
        first.observe(step(3), True, 2)
    assert first.reach > 0
    assert second.reach > 0


def test_who_does_not_come_to_the_end_of_its_draft_keeps_nobody_from_drafting():
    batch_costs = BatchCosts()
    first, second = (RequestCosts(batch_costs, [Model], MeasuredCosts()) for _ in range(2))
    batch_costs.observe(made(10.0, [0, 0]))
    assert (first.reach, second.reach) == (3, 0)
    for _ in range(66):
        batch_costs.observe(made(10.0, [0, 0]))
    assert (second.reach, first.reach) == (3, 0)


def test_what_the_drafter_lacks_is_weighed():
    batch_costs = BatchCosts()
    costs, selfish = (RequestCosts(batch_costs, [model], MeasuredCosts(), 100) for model in (Model, House))
    assert costs.catching_up_s == 0.0, "nobody knows yet how long it takes"
    batch_costs.observe(made(40.0, [0, 0], target=False, model=Model, read=100))
    assert costs.catching_up_s == pytest.approx(20.0)
    assert selfish.catching_up_s == 0.0
    costs.observe(step(1, 5), True, 0)
    assert costs.catching_up_s == pytest.approx(21.0)
    batch_costs.may_look(True)
    batch_costs.observe(made(10.0, [0, 0]))
    assert (costs.may_look(False), costs.may_look(True), selfish.may_look(False)) == (False, True, True)
    costs.observe(step(2, 1), True, 1)
    assert costs.catching_up_s == 0.0


def test_rules_that_read_no_costs_are_left_alone():
    policy = build_policy("egag")
    share_costs(policy, BatchCosts(), [])
    assert policy.costs() is None


# -- exactness ---------------------------------------------------------------------------------------

FEW = 2
SMALL, SMALL_DRAFT = random_table(5, FEW), random_table(6, FEW)


class Unsteady:
    """A clock that moves on by 1 to 9 whenever it is read, in an order of its own."""

    def __init__(self) -> None:
        self.random, self.time = standard_random.Random(3), 0.0

    def now(self) -> float:
        self.time += self.random.randint(1, 9)
        return self.time


class Pair:
    """Scorers of one small model, whose passes are made together."""

    @property
    def loaded(self) -> object:
        return self

    def score(self, asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        return [each.scorer.score(each) for each in asked]

    def seat(self, logits: Logits) -> ScriptedScorer:
        scorer = ScriptedScorer(logits, FEW)
        scorer.batch = self  # type: ignore[assignment]
        return scorer


PROMPTS = ((1, 0, 1), (0, 0, 1, 1))


def together(rule: str, new: int, lengths: set[tuple[int, ...]], random: Any) -> tuple[tuple[int, ...], ...]:
    """What two requests come to, whose every event is one of the same randomness."""
    clock: Clock = Unsteady()
    batch_costs, target, model = BatchCosts(), Pair(), Pair()
    known(batch_costs, lambda rows: 20.0 + rows, 2, rounds=3)
    for _ in range(3):
        batch_costs.observe(made(4.0, [1, 1], target=False, model=model))

    def request(prompt: Sequence[int]) -> Request:
        policy = build_policy(rule)
        drafter = ModelDrafter(model.seat(SMALL_DRAFT), "model", clock)  # type: ignore[arg-type]
        share_costs(policy, batch_costs, [model])
        return Request(
            prompt, target.seat(SMALL), drafter, policy, Multinomial(), random, new, first_target=False
        )

    scheduler = Scheduler(max_batch=2, clock=clock, watch=batch_costs.observe)
    for prompt in PROMPTS:
        scheduler.add(partial(request, prompt))
    tokens: list[list[int]] = [[], []]
    gammas = []
    for number, event in scheduler:
        assert not isinstance(event, Exception), event
        if isinstance(event, Step):
            gammas.append(event.gamma)
            tokens[number] += event.tokens
        elif event.token is not None:
            tokens[number].append(event.token)
    lengths.add(tuple(gammas))
    return tuple(map(tuple, tokens))


def alone(prompt: Sequence[int], new: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The target's own distribution, by the chain rule."""
    grown: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        longer = {}
        for tokens, weight in grown.items():
            p = sampling.probabilities(SMALL([*prompt, *tokens]).unsqueeze(0), [*prompt, *tokens])[0].double()
            longer |= {(*tokens, token): weight * float(p[token] / p.sum()) for token in range(FEW)}
        grown = longer
    return grown


@pytest.mark.parametrize("new", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_two_requests_keep_their_distributions_and_know_nothing_of_each_other(new):
    lengths: set[tuple[int, ...]] = set()
    found: dict[Any, float] = enumerate_outcomes(lambda replay: together("auto", new, lengths, replay))  # type: ignore[arg-type, return-value]
    first, second = (alone(prompt, new, Multinomial()) for prompt in PROMPTS)
    for (a, p), (b, q) in itertools.product(first.items(), second.items()):
        assert found.get((a, b), 0.0) == pytest.approx(p * q, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    assert len(lengths) > 1, "a rule that never changes its mind here shows nothing"
