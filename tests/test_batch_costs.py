"""Rules that read costs, with many requests: what a batch's passes cost one of them, and what they make of it."""

from __future__ import annotations

import itertools
import math
import random as standard_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import pytest
from scripted import Logits, ScriptedScorer, Ticking, enumerate_outcomes, random_table
from test_policies import UnsteadyClock, chain_rule

from specbench.decoding.protocols import ForwardOutput, ForwardRequest, NoDraft
from specbench.decoding.records import SharedPass, Step
from specbench.decoding.request import Request
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.schedule import Scheduler, loaded_of
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.policies import build_policy
from specbench.policies.batch_costs import BatchCosts, RequestCosts, share_costs

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


@dataclass(eq=False)
class Model:
    """Reads for several requests at once, and takes as long as it is told for so many rows, and for unequal ones."""

    logits: Logits
    seconds: Seconds
    clock: Any
    uneven_s: float = 0.0
    vocab: int = VOCAB

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
        super().__init__(model.logits, model.vocab)
        self.batch = model  # type: ignore[assignment]

    def score(self, asked: ForwardRequest) -> ForwardOutput:
        return self.batch.score([asked])[0]  # type: ignore[attr-defined, no-any-return]


class Served(NamedTuple):
    """What became of requests: by number their steps, and when their prompts were read and their outputs ended."""

    steps: dict[int, list[Step]]
    began: dict[int, float]
    ended: dict[int, float]

    @property
    def speed(self) -> float:
        """Tokens per second of all together."""
        tokens = sum(len(step.tokens) for steps in self.steps.values() for step in steps)
        return tokens / max(self.ended.values())

    @property
    def gammas(self) -> list[float]:
        """The mean draft length of each."""
        return [fmean(step.gamma for step in self.steps[number]) for number in sorted(self.steps)]

    @property
    def seconds(self) -> list[float]:
        """From each request's prompt to its end."""
        return [self.ended[number] - self.began[number] for number in sorted(self.steps)]


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
            drafter = LookupDrafter()
        elif kind != "none":
            drafter = ModelDrafter(self.models[kind].seat(), kind)  # type: ignore[arg-type]
        drafter.clock = self.clock
        models = [loaded_of(drafter.scorer)] if kind in self.models else []
        share_costs(policy, self.batch_costs, models)
        choice = standard_random.Random(number)
        return Request(
            prompt=[choice.randrange(VOCAB) for _ in range(self.prompt)],
            target=self.target.seat(),
            drafter=drafter,
            policy=policy,
            sampling=Sampling(),
            random=Randomness(0),
            max_new_tokens=tokens,
        )

    def serve(self, kinds: Sequence[str], rule: str, batch: int | None = None, tokens: int = 80) -> Served:
        """Serve requests, so many at a time and in turn; all together without a number."""
        scheduler = Scheduler(max_batch=batch or len(kinds), clock=self.clock, watch=self.batch_costs.observe)
        for number, kind in enumerate(kinds):
            scheduler.add(partial(self.request, number, kind, rule, tokens))
        served = Served({}, {}, {})
        for number, event in scheduler:
            assert not isinstance(event, Exception), event
            served.began.setdefault(number, self.clock.time)
            served.ended[number] = self.clock.time
            if isinstance(event, Step):
                served.steps.setdefault(number, []).append(event)
        return served


def speeds(kinds: Sequence[str], *house: Any, tokens: int = 80, **more: Any) -> tuple[float, float]:
    """Tokens per second with ``auto``, over those of plain decoding, and the mean draft length."""
    found = House(*house, **more).serve(kinds, "auto", tokens=tokens)
    plain = House(*house, **more).serve(["none"] * len(kinds), "fixed", tokens=tokens)
    return found.speed / plain.speed, fmean(found.gammas)


def roofline(rows: int) -> float:
    """Reading the weights takes as long as computing 12 rows."""
    return max(12.0, rows) + 0.05 * rows


def measured(rows: int) -> float:
    """Milliseconds of SmolLM2-135M in bfloat16 with 8 requests of 150 to 250 tokens."""
    return 17.0 + 1.1 * rows


UNEVEN_MS = 4.0


def large(rows: int) -> float:
    """Milliseconds of Qwen2.5-Coder 1.5B with 8 requests: a row more costs two requests' parts."""
    return 140.0 + 30.0 * min(max(0, rows - 8), 24) + 8.0 * max(0, rows - 32)


def small(rows: int) -> float:
    """Of its drafter."""
    return 13.0 + 1.5 * rows


def even(rows: int) -> float:
    """Milliseconds of the same, where a row costs little less than a draft that is mostly accepted brings."""
    return 118.0 + 6.0 * max(0, rows - 8)


def test_drafts_shrink_and_stop_as_the_batch_grows():
    lengths = []
    for batch in (1, 8, 20):
        kinds = ["good"] * batch
        speed, drafted = speeds(kinds, roofline, lambda rows: 0.5)
        plain = House(roofline, lambda rows: 0.5).serve(["none"] * batch, "fixed").speed
        fixed = [
            House(roofline, lambda rows: 0.5).serve(kinds, f"fixed:gamma={gamma}").speed for gamma in (1, 4)
        ]
        lengths.append(drafted)
        assert speed > 0.9
        assert speed > 0.8 * max(fixed) / plain
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2.5
    assert lengths[-1] < 0.3


@pytest.mark.parametrize(
    ("kinds", "target_s", "draft_s", "uneven_s", "least"),
    [
        (["bad"] * 12, roofline, 2.0, 0.0, 0.9),
        # A pass of the drafter costs as much for one as for all.
        (["good", *["bad"] * 7], roofline, 5.0, 0.0, 0.9),
        (["good"] * 3, roofline, 5.0, 0.0, 0.9),
        (["lookup"] * 8, roofline, 0.0, 0.0, 0.9),
        # Outputs are short, so that what is learned at their beginning may not cost much.
        (["lookup"] * 2, measured, 0.0, UNEVEN_MS, 0.97),
        (["lookup"] * 8, measured, 0.0, UNEVEN_MS, 0.97),
    ],
)
def test_what_does_not_pay_in_a_batch_costs_little(kinds, target_s, draft_s, uneven_s, least):
    assert speeds(kinds, target_s, lambda rows: draft_s, uneven_s, tokens=64)[0] > least


def test_drafts_of_some_hold_up_the_others_little():
    """With one price for all, that of the tokens of all together, those who draft badly get 0.82 of plain decoding."""
    kinds = ["good", "fair", "bad", "bad"] * 6
    found = House(measured, lambda rows: 1.0).serve(kinds, "auto", 8, 64).seconds
    plain = House(measured, lambda rows: 1.0).serve(["none"] * len(kinds), "fixed", 8, 64).seconds
    assert sum(plain) > sum(found)
    ratios = {
        kind: geometric_mean(b / a for a, b, each in zip(found, plain, kinds, strict=True) if each == kind)
        for kind in kinds
    }
    assert ratios["good"] > ratios["fair"] > 1.1
    assert ratios["bad"] > 0.85


@pytest.mark.parametrize("target", [large, even])
def test_where_drafts_cannot_surely_pay_the_drafter_hardly_reads_a_prompt(target):
    house = House(target, small, prompt=150)
    read: list[int] = []
    observe = house.batch_costs.observe

    def noticed(pass_: SharedPass) -> None:
        read.append(0 if pass_.target else sum(fed > 8 for fed in pass_.fed))
        observe(pass_)

    house.batch_costs.observe = noticed  # type: ignore[method-assign]
    speed = house.serve(["good"] * 8, "auto", tokens=64).speed
    plain = House(target, small, prompt=150).serve(["none"] * 8, "fixed", tokens=64).speed
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
    found = house.serve([kind] * 24, "auto", 1, 40)
    first = next(number for number, time in found.began.items() if time > quiet)
    assert first < 12
    for number in range(first + 6, 24):
        assert sum(step.gamma for step in found.steps[number]) > 5


def test_where_drafts_pay_for_it_every_prompt_is_read():
    """A pass takes as long for 24 rows as for one."""
    found = House(lambda rows: 140.0 + rows, small, prompt=150).serve(["good"] * 4, "auto", tokens=64)
    plain = House(lambda rows: 140.0 + rows, small, prompt=150).serve(["none"] * 4, "fixed", tokens=64)
    assert sum(plain.seconds) > 1.3 * sum(found.seconds)


# -- the figures -------------------------------------------------------------------------------------


def made(
    seconds: float, drafted: Sequence[int], *, target: bool = True, read: int = 1, model: object = BatchCosts
) -> SharedPass:
    numbers = tuple(range(len(drafted)))
    fed = tuple(read + each for each in drafted)
    return SharedPass(model, target, numbers, fed, tuple(drafted), seconds)


def known(batch_costs: BatchCosts, seconds: Seconds, batch: int, rounds: int = 20) -> None:
    """Let it see passes of that batch with 0, 1, 2 and 3 drafts each."""
    for _, drafts in itertools.product(range(rounds), range(4)):
        batch_costs.observe(made(seconds(batch * (1 + drafts)), [drafts] * batch))


@pytest.mark.parametrize(
    ("rounds", "row_s"),
    [
        ([], 0.02 * 10.0),  # assumed
        ([(11.0, [1, 0, 0, 0]), (14.0, [1] * 4), (18.0, [2] * 4)], 1.0),
        (
            [(15.0, [1, 0, 0, 0]), (15.5, [2, 0, 0, 0]), (16.0, [3, 0, 0, 0])],
            2.75,
        ),  # 4.5 for a row, 0.5 for each
        ([(11.0, [1, 0, 0, 0]), (14.0, [1] * 4), (18.0, [2] * 4), (900.0, [2] * 4)], 1.0),  # disturbed
        ([(12.0, [1, 1, 1, 1])], 0.5),
    ],
)
def test_a_draft_token_has_one_price_at_a_batch_size(rounds, row_s):
    batch_costs = BatchCosts()
    costs = RequestCosts(batch_costs, [])
    for _ in range(8):
        batch_costs.observe(made(10.0, [0] * 4))
        for seconds, drafted in rounds:
            batch_costs.observe(made(seconds, drafted))
    assert costs.verify_s(1) == pytest.approx(10.0 / 4)
    assert costs.verify_s(4) - costs.verify_s(1) == pytest.approx(3 * row_s, rel=0.05)
    assert (costs.drafting_s(3), costs.timings) == (0.0, math.inf)
    batch_costs.observe(made(7.0, [0, 0]))
    assert costs.verify_s(1) == pytest.approx(7.0 / 2), "each size has its own"


def test_those_who_draft_share_the_drafters_passes():
    batch_costs = BatchCosts()
    costs, other = (RequestCosts(batch_costs, [model]) for model in (Model, House))
    assert costs.longest == 0, "what a plain round takes is not known"
    batch_costs.observe(made(10.0, [0, 0]))
    assert (costs.longest, costs.timings, costs.drafting_s(1)) == (1, 0, 0.2 * 10.0 / 2)
    for _ in range(2):
        batch_costs.observe(made(4.0, [0, 0], target=False, model=Model))
        batch_costs.observe(made(3.0, [0], target=False, model=Model))
        batch_costs.observe(made(12.0, [2, 1]))
    assert costs.drafting_s(3) == pytest.approx(2.0 + 2 * 3.0)
    assert (costs.longest, other.longest) == (4, 1)
    for _ in range(64):
        batch_costs.observe(made(10.0, [0, 0]))
    assert {batch_costs.round_without_drafts} | {costs.longest > 0} == {False, True}
    for _ in range(64):
        batch_costs.observe(made(10.0, [0, 0]))
    assert costs.timings == 0, "the times have expired"


# -- exactness ---------------------------------------------------------------------------------------

FEW = 2
SMALL, SMALL_DRAFT = random_table(5, FEW), random_table(6, FEW)
PROMPTS = ((1, 0, 1), (0, 0, 1, 1))


def together(rule: str, new: int, lengths: set[tuple[int, ...]], random: Any) -> tuple[tuple[int, ...], ...]:
    """What two requests come to, whose every event is one of the same randomness."""
    clock, batch_costs = UnsteadyClock(3), BatchCosts()
    target, model = (Model(each, lambda _: 0.0, clock, vocab=FEW) for each in (SMALL, SMALL_DRAFT))
    known(batch_costs, lambda rows: 0.02 + 0.001 * rows, 2, rounds=3)
    for _ in range(3):
        batch_costs.observe(made(0.004, [1, 1], target=False, model=model))

    def request(prompt: Sequence[int]) -> Request:
        policy = build_policy(rule)
        drafter = ModelDrafter(model.seat(), "model")  # type: ignore[arg-type]
        drafter.clock = clock
        share_costs(policy, batch_costs, [model])
        return Request(prompt, target.seat(), drafter, policy, Sampling(1.0), random, new, first_target=False)

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


@pytest.mark.parametrize("new", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_two_requests_keep_their_distributions_and_know_nothing_of_each_other(new):
    lengths: set[tuple[int, ...]] = set()
    found: dict[Any, float] = enumerate_outcomes(lambda replay: together("auto", new, lengths, replay))  # type: ignore[arg-type, return-value]
    first, second = (chain_rule(SMALL, prompt, new) for prompt in PROMPTS)
    for (a, p), (b, q) in itertools.product(first.items(), second.items()):
        assert found.get((a, b), 0.0) == pytest.approx(p * q, abs=1e-6)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    assert len(lengths) > 1, "a rule that never changes its mind here shows nothing"
