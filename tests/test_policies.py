"""Draft policies: that the output's distribution is kept, their numbers, what they learn and forget."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted import (
    GivenCosts,
    ScriptedScorer,
    build_with,
    enumerate_outcomes,
    fixed_script,
    random_table,
    steps_of,
    tokens_of,
)
from situations import GOAL, Situation, draft_length

from specbench.base.errors import UsageError
from specbench.decoding.drafts import Draft, Guess
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import DraftPolicy, NewPrompt, StepPlan, run_to_end
from specbench.decoding.records import Prefill, Step, StepTimes
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.policies import FixedLength, build_policy
from specbench.policies.base import confidence, is_guess, normalized_entropy
from specbench.policies.costs import MeasuredCosts
from specbench.specs.drafters import NGram

VOCAB = 3
PROMPT = [1, 2, 0, 1, 2]
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)


class UnsteadyClock:
    """Moves on by 1 to ``most`` milliseconds whenever it is read, in an order fixed by the seed."""

    def __init__(self, seed: int = 0, most: int = 9) -> None:
        self.random, self.most, self.time = random.Random(seed), most, 0.0

    def __call__(self) -> float:
        self.time += self.random.randint(1, self.most) / 1000
        return self.time


# Options under which these small models make every rule draft longer here and shorter there.
RULES: dict[str, Callable[[], DraftPolicy]] = {
    "fixed": lambda: build_policy("fixed:gamma=3"),
    "egag": lambda: build_policy("egag:max=2,scale=1"),
    "egag, smoothed": lambda: build_policy("egag:max=2,scale=1,beta=0.3"),
    "confidence": lambda: build_policy("confidence:threshold=0.6"),
    "entropy-bound": lambda: build_policy("entropy-bound:lambda=0.6"),
    "svip": lambda: build_policy("svip:threshold=0.35"),
    "heuristic": lambda: build_policy("heuristic:gamma=1,max=3"),
    "auto, measured": lambda: build_policy("auto:max=2"),
    "auto, given": lambda: build_with(GivenCosts(0.4, {1: 1.0, 17: 1.32}), "auto"),
}


def rule(spec: str) -> Any:
    policy = build_policy(spec)
    policy.begin(NewPrompt())
    return policy


def model() -> ModelDrafter:
    drafter = ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model")
    drafter.clock = UnsteadyClock()
    return drafter


def good_model() -> ModelDrafter:
    """Nearly the target: most of what it drafts is accepted."""
    noise = random_table(7, VOCAB, spread=0.3)
    drafter = ModelDrafter(ScriptedScorer(lambda t: TARGET(t) + noise(t), VOCAB), "good")
    drafter.clock = UnsteadyClock(4)
    return drafter


def decode(
    policy: DraftPolicy, drafter: Any = None, *, random: Any = None, max_new_tokens: int = 40, **options: Any
) -> tuple[list[int], list[Step]]:
    first, *steps = steps_of(
        PROMPT, ScriptedScorer(TARGET, VOCAB), drafter or model(), policy=policy, sampling=Sampling(1.0),
        random=random or Randomness(0), max_new_tokens=max_new_tokens, clock=UnsteadyClock(), **options,
    )  # fmt: skip
    assert isinstance(first, Prefill)
    return tokens_of([first, *steps]), steps


def experienced(rule: str) -> DraftPolicy:
    """A rule that has decoded a prompt already, and keeps what it learned."""
    policy = RULES[rule]()
    decode(policy, good_model(), max_new_tokens=60)
    policy.begin = lambda prompt: None  # type: ignore[method-assign]
    return policy


# -- the distribution is kept ------------------------------------------------------------------------


def chain_rule(
    table: Callable[[Sequence[int]], torch.Tensor], prompt: Sequence[int], new: int
) -> dict[tuple[int, ...], float]:
    """The distribution of the next tokens at temperature 1, without anything of the loop."""
    found = {(): 1.0}
    for _ in range(new):
        found = {
            (*tokens, token): weight * chance
            for tokens, weight in found.items()
            for token, chance in enumerate(table([*prompt, *tokens]).double().softmax(0).tolist())
        }
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_output_distribution_is_the_targets_whatever_was_learnt_before(rule):
    policy = experienced(rule)

    def run(replay: Any) -> tuple[int, ...]:
        return tuple(decode(copy.deepcopy(policy), random=replay, max_new_tokens=3, first_target=False)[0])

    found = enumerate_outcomes(run, 3)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    for tokens, weight in chain_rule(TARGET, PROMPT, 3).items():
        assert found.get(tokens, 0.0) == pytest.approx(weight, rel=0, abs=1e-6)


# -- limits, passes, questions -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_pass_of_the_drafter_gives_a_draft(rule):
    drafter = model()
    drafter.takes_guesses = False
    _, steps = decode(RULES[rule](), drafter)
    assert len(drafter.scorer.passes) == sum(step.gamma for step in steps)


def test_a_rule_is_asked_before_each_pass_and_before_each_draw():
    events: list[Any] = []

    class Noting(FixedLength):
        def should_continue(self, draft: Draft) -> bool:
            events.append(("another", list(draft.tokens), len(drafter.scorer.passes)))
            return len(draft.tokens) < 2

        def num_children(
            self, draft: Draft, nodes: Sequence[int], distributions: Sequence[Any]
        ) -> Sequence[int]:
            events.append(("draws", distributions[0].best(1)[0], len(drafter.scorer.passes)))
            return (1,)

    drafter = ModelDrafter(ScriptedScorer(fixed_script([4, 5, 6, 7, 8, 9], 12, 3), 12), "model")
    draft = run_to_end(drafter.propose([1, 2, 3], StepPlan(9, Noting(7), Sampling(), Randomness(0))))
    assert draft.tokens == [4, 5]
    assert events == [
        ("another", [], 0),
        ("draws", 4, 1),
        ("another", [4], 1),
        ("draws", 5, 2),
        ("another", [4, 5], 2),
    ]


# -- what rules read ---------------------------------------------------------------------------------


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def drafted(*rows: torch.Tensor, tokens: Sequence[int] | None = None) -> Draft:
    return Draft(tokens=list(tokens or [0] * len(rows)), sources=[Logits(row) for row in rows])


def test_entropy_is_in_nats_of_the_untempered_softmax():
    assert Logits(logits_of(0.5, 0.5, 0.0, 0.0)).entropy == pytest.approx(math.log(2))
    assert Logits(logits_of(0.75, 0.25)).entropy == pytest.approx(0.562335)
    assert Logits(logits_of(1.0, 0.0).bfloat16()).entropy == 0.0
    assert normalized_entropy(Logits(logits_of(0.5, 0.5, 0.0, 0.0))) == pytest.approx(0.5)
    assert normalized_entropy(Logits(torch.zeros(7))) == pytest.approx(1.0)
    assert normalized_entropy(Logits(torch.zeros(1))) == 0.0


def test_confidence_is_the_probability_of_the_token_that_was_drawn():
    draft = drafted(logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.6, 0.3) + 5.0, tokens=[1, 1])
    assert confidence(draft, 0) == pytest.approx(0.2)
    assert confidence(draft, 1) == pytest.approx(0.6)
    assert confidence(Draft([4, 5], sources=[Guess(4, 0.5), Guess(5, 0.75)]), 1) == 0.75
    assert confidence(Draft([4, 5]), 1) == 1.0


def test_ngram_knows_how_often_its_token_came():
    drafter, context = NGramDrafter(NGram(order=2)), [1, 2, 1, 2, 1, 3, 2, 1]
    drafter.begin(context)
    draft = run_to_end(drafter.propose(context, StepPlan(99, FixedLength(2), Sampling(), Randomness(0))))
    assert draft.tokens == [2, 1]
    # 1 → 2, 2, 3 and 2 → 1, 1, 1, with one sight of something else.
    assert draft.sources == [Guess(2, 2 / 4), Guess(1, 3 / 4)]


# -- the rules, by hand ------------------------------------------------------------------------------


def a_step(gamma: int, accepted: int, *, index: int = 1, stopped: bool = False, **times: float) -> Step:
    tested = accepted if stopped else min(gamma, accepted + 1)
    closing = None if stopped else "corrected" if accepted < gamma else "bonus" if gamma else "target"
    return Step(
        index=index,
        position=10,
        drafted=(0,) * gamma,
        accepted=accepted,
        tested=tested,
        tokens=(0,) * (accepted + (not stopped)),
        closing=closing,
        expected_acceptance=(1.0,) * tested,
        times=StepTimes(**times),
    )


def egag_gamma(policy: Any, logits: torch.Tensor, room: int = 20) -> dict[str, float]:
    """What EGAG notes in a step whose first token has these logits."""
    policy.begin_step(room)
    policy.num_children(Draft(), (-1,), (Logits(logits),))
    return dict(policy.notes())


HALF, CERTAIN = logits_of(0.5, 0.5, 0.0, 0.0), logits_of(1.0, 0.0, 0.0, 0.0)  # H_norm 0.5 and 0


def test_egag():
    policy = rule("egag:max=9,scale=1")
    assert policy.begin_step(20) == 9
    assert policy.should_continue(Draft())
    assert egag_gamma(policy, HALF) == pytest.approx(
        {"H_norm": 0.5, "H_ema": 0.5, "gamma": 5.0}
    )  # 9 - 8 · 0.5
    assert [policy.should_continue(Draft([0] * n)) for n in (1, 4, 5)] == [True, True, False]
    policy.num_children(Draft(), (-1,), (Logits(CERTAIN),))
    assert policy.notes()["gamma"] == 5.0, "only the first distribution of a step counts"
    assert egag_gamma(policy, CERTAIN, 3) == pytest.approx({"H_norm": 0.0, "H_ema": 0.0, "gamma": 3.0})


def test_the_average_and_the_scale_of_egag():
    policy = rule("egag:beta=0.75,scale=1")
    averages = [egag_gamma(policy, logits)["H_ema"] for logits in (HALF, CERTAIN, torch.zeros(4))]
    assert averages == pytest.approx([0.5, 0.375, 0.53125])
    for scale, gamma in ((0.5, 2), (0.8, 4), (0.25, 2)):  # 7 - 5 · min(1, 0.5 / scale)
        assert egag_gamma(rule(f"egag:min=2,max=7,scale={scale}"), HALF)["gamma"] == gamma


def test_confidence():
    policy = rule("confidence:max=6")
    rows = [logits_of(0.5, 0.5), logits_of(0.41, 0.59), logits_of(0.39, 0.61)]
    assert policy.begin_step(20) == 6
    assert [policy.should_continue(drafted(*rows[:n])) for n in range(4)] == [True, True, True, False]
    policy.begin_step(20)
    assert not policy.should_continue(drafted(rows[2]))


@pytest.mark.parametrize(("threshold", "drafted"), [(0.7, [4]), (0.6, [4, 5, 9])])
def test_confidence_reads_the_evidence_of_drafters_without_logits(threshold, drafted):
    """A match of two speaks for its token with 2/3."""
    policy = rule(f"confidence:threshold={threshold},max=3")
    drafter, context = LookupDrafter(), [1, 2, 3, 4, 5, 9, 2, 3]
    drafter.begin(context)
    assert (
        run_to_end(drafter.propose(context, StepPlan(99, policy, Sampling(), Randomness(0)))).tokens
        == drafted
    )


def test_the_entropy_bound():
    policy = rule("entropy-bound")
    two, three = logits_of(0.5, 0.5, 0.0), torch.zeros(3)  # bounds 0.6277 and 0.5312
    assert policy.begin_step(50) == 20
    assert policy.should_continue(Draft())
    assert policy.should_continue(drafted(two))
    assert not policy.should_continue(drafted(two, three))
    assert policy.notes() == {"lambda": 0.6}


@pytest.mark.parametrize(
    ("room", "step", "threshold"),
    [
        (50, a_step(4, 1), 0.601),  # AR = 0.45 + 0.125
        (50, a_step(4, 4), 0.599),  # AR = 0.95, and more than four could have been accepted
        (4, a_step(4, 4), 0.6),  # AR = 0.95, and no more could
        (50, a_step(10, 9), 0.599),  # AR = 0.9 is not below 0.9
        (50, a_step(0, 0), 0.6),
        (50, a_step(4, 1, stopped=True), 0.6),
    ],
)
def test_the_threshold_of_the_entropy_bound(room, step, threshold):
    policy = rule("entropy-bound")
    policy.begin_step(room)
    policy.observe(step)
    assert policy.notes()["lambda"] == pytest.approx(threshold, abs=1e-12)


def test_svip():
    policy = rule("svip")
    assert policy.begin_step(99) == 40
    assert policy.should_continue(Draft())
    assert policy.should_continue(drafted(logits_of(0.75, 0.25)))  # sqrt(0.15 · 0.5623) = 0.2904
    assert not policy.should_continue(drafted(logits_of(0.5, 0.5)))  # sqrt(0.15 · 0.6931) = 0.3224
    assert policy.should_continue(Draft([1], sources=[Guess(1, 0.1)]))


def test_the_heuristic():
    policy = rule("heuristic")
    seen = []
    for gamma, accepted in ((5, 5), (7, 7), (9, 8), (8, 0), (7, 3), (3, 3), (0, 0)):
        seen.append(policy.begin_step(99))
        policy.observe(a_step(gamma, accepted))
    assert seen == [5, 7, 9, 8, 7, 6, 8]
    assert policy.begin_step(99) == 8, "a step without drafts teaches nothing"
    policy.observe(a_step(8, 2, stopped=True))
    assert policy.begin_step(99) == 8, "nor does one that a stop cut short"
    for _ in range(20):
        policy.observe(a_step(1, 0))
    assert policy.notes() == {"gamma": 1.0}
    for _ in range(30):
        policy.observe(a_step(1, 1))
    assert policy.notes() == {"gamma": 40.0}
    assert [rule(f"heuristic:{each}").begin_step(99) for each in ("gamma=4,min=3,max=5", "max=4")] == [4, 4]


# -- learning what is accepted -----------------------------------------------------------------------


# -- costs -------------------------------------------------------------------------------------------


def timed(gamma: int, draft: float, verify: float) -> Step:
    return a_step(gamma, gamma, draft_s=draft, verify_s=verify / 2, accept_s=verify / 2)


@pytest.mark.parametrize(
    ("lengths", "first", "later"), [((1, 3), 0.5, 0.1), ((1, 1, 1, 3), 0.5, 0.0), ((1, 2, 5), 0.2, 0.2)]
)
def test_a_drafts_first_pass_has_its_own_price(lengths, first, later):
    measured = MeasuredCosts()
    for index in range(36):
        gamma = lengths[index % len(lengths)]
        slow = 4.0 if index % 9 == 5 else 1.0
        measured.observe(timed(gamma, slow * (first + (gamma - 1) * later), 1.0))
    found = [measured.drafting_s(k) for k in (1, 2, 3)]
    assert found == pytest.approx([first + k * later for k in range(3)], rel=0.15)
    assert measured.drafting_s(1, 2) == pytest.approx(later, abs=0.06)


# -- auto --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "situation",
    [
        Situation("flat", "0.7", "0.1"),
        Situation("linear", "0.95", "0.02"),
        Situation("steep", "0.7", "0.3"),
        Situation("steep", "0.95", "slowed"),
        Situation("dear-second", "0.3", "0.1"),
        Situation("cliff-4", "0.95", "0.02"),
        Situation("high-cliff-4", "0.7", "lookup"),
        Situation("high-cliff-4", "0.95", "0.1"),
        Situation("stairs", "0.7", "0.02"),
        Situation("experts-8-of-128", "0.7", "0.1"),
        Situation("experts-8-of-128", "0.7", "lookup"),
        Situation("experts-2-of-8", "0.7", "dear-first"),
        Situation("cliff-8", "period-40", "lookup"),
        Situation("noisy", "0.7", "0.1"),
        Situation("gentle", "0", "0.8"),
        Situation("gentle", "falls", "0.3"),
        Situation("gentle", "rises", "0.3"),
        Situation("flat", "0.7", "slowed"),
    ],
    ids=str,
)
def test_auto_is_as_fast_as_plain_decoding_and_the_best_fixed_length(situation):
    """benchmarks/situations.py has all of them."""
    assert min(situation.shares()) >= GOAL


@pytest.mark.parametrize(("alpha", "least"), [(0.7, 2.0), (0.9, 4.0)])
def test_auto_drafts_on_where_only_a_steps_first_pass_is_dear(alpha, least):
    """As beside a busy core: who takes all passes to be as dear as the first drafts one token or none."""
    found = []
    for seed in range(3):
        policy, generator, gammas = rule("auto:max=16"), random.Random(seed), []
        for index in range(80):
            gamma = draft_length(policy)
            gammas.append(gamma)
            accepted = next((i for i in range(gamma) if generator.random() >= alpha), gamma)
            draft_s = (0.7 + 0.1 * (gamma - 1)) * math.exp(generator.gauss(0.0, 0.2)) if gamma else 0.0
            policy.observe(a_step(gamma, accepted, index=index, draft_s=draft_s, verify_s=1.0))
        found.append(sum(gammas[40:]) / 40)
    assert sum(found) / 3 >= least


@pytest.mark.parametrize("disturbed", [1, 2, 3])
def test_auto_gets_over_slow_first_passes_of_the_drafter(disturbed):
    policy = rule("auto:max=16")
    gammas = []
    for index in range(90):
        gamma = draft_length(policy)
        gammas.append(gamma)
        slow = 1.8 if sum(each > 0 for each in gammas) <= disturbed else 1.0
        policy.observe(a_step(gamma, gamma, index=index, draft_s=0.65 * gamma * slow, verify_s=1.0))
    assert gammas.count(0) <= 20
    assert 0 not in gammas[-20:]


# -- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "fixed:gamma=0", "auto:max=0", "egag:min=0", "egag:min=9", "egag:beta=1", "egag:beta=nan", "egag:scale=0",
        "egag:scale=1.5", "confidence:threshold=1.1", "confidence:threshold=nan", "entropy-bound:lambda=-0.1",
        "svip:threshold=0", "svip:threshold=inf", "heuristic:gamma=0",
        "heuristic:min=6", "heuristic:gamma=5,max=4",
    ],
)  # fmt: skip
def test_values_outside_their_range_are_refused(spec):
    with pytest.raises(UsageError) as caught:
        build_policy(spec)
    assert caught.value.hint


# -- drafts that cost a pass for some of their tokens only -------------------------------------------


def mixed(kinds: str, ahead: bool = False, evidence: float = 0.75) -> Draft:
    """A draft of a cascade: f is a free token with evidence, m one of the model's with confidence 0.6."""
    sources = [Guess(1, evidence) if kind == "f" else Logits(logits_of(0.4, 0.6)) for kind in kinds]
    guess = Guess(1, evidence) if ahead else None
    return Draft([1] * len(kinds), sources=sources, guess=guess, passes=kinds.count("m"))


def test_confidence_of_a_mixed_draft():
    made = mixed("fmf")
    assert [confidence(made, i) for i in range(3)] == pytest.approx([0.75, 0.6, 0.75])
    assert [is_guess(made, i) for i in range(4)] == [True, False, True, False]
    assert is_guess(mixed("m", ahead=True), 1)


def test_auto_takes_free_tokens_where_the_model_does_not_pay():
    policy = build_with(GivenCosts(0.9, {1: 1.0, 9: 1.05}), "auto:max=8")
    for index in range(60):
        limit = policy.begin_step(20)
        made = mixed("")
        if policy.should_continue(made):
            made = mixed("m")
        policy.observe(a_step(len(made.tokens), 0, index=index, draft_s=0.9, verify_s=1.0))
    assert policy.begin_step(20) == 8
    assert not policy.should_continue(mixed("")), "a pass of the model does not pay"
    assert policy.should_continue(mixed("", ahead=True))
    assert policy.should_continue(mixed("f", ahead=True))
    assert not policy.should_continue(mixed("f"))
    assert limit > 0


@pytest.mark.parametrize("right", [True, False])
def test_auto_learns_from_copies_that_it_does_not_make(right):
    policy = build_with(GivenCosts(0.0, {1: 1.0, 2: 1.3, 9: 3.4}), "auto:max=8")
    lengths = []
    for index in range(40):
        policy.begin_step(20)
        guess = Guess(0 if right else 1, 0.5)
        made = Draft(guess=guess)
        if policy.should_continue(made):
            made.tokens.append(0)
            made.sources.append(guess)
            made.guess = None
        lengths.append(len(made.tokens))
        policy.observe(a_step(lengths[-1], lengths[-1] * right, index=index))
        assert policy.notes()["probe"] == 0, "there is nothing to find out"
    assert lengths[0] == 0, "a row is dear here, and the match is of one token"
    assert lengths[-1] == right
    assert right or sum(lengths) == 0


def step_of(kinds: str, accepted: int, index: int) -> tuple[Draft, Step]:
    """A cascade's draft (m for the model's tokens, f for free ones with an evidence of 0.6) and what became of it."""
    made = mixed(kinds, evidence=0.6)
    step = a_step(len(kinds), accepted, index=index, draft_s=0.2 * kinds.count("m"), verify_s=1.0)
    return made, replace(step, passes=kinds.count("m"))


@pytest.mark.parametrize(
    ("draft_s", "free_is_right", "model_is_right", "rather"),
    [(0.05, 0.2, 0.95, True), (0.3, 0.95, 0.95, False), (0.05, 0.95, 0.2, False), (0.6, 0.2, 0.7, False)],
)
def test_auto_lets_the_model_draft_where_a_match_is_doubtful(draft_s, free_is_right, model_is_right, rather):
    policy = build_with(GivenCosts(draft_s, {1: 1.0, 9: 1.05}), "auto:max=8")
    chances = random.Random(0)
    for index in range(120):
        kind = "f" if index % 2 else "m"
        policy.begin_step(20)
        made, step = step_of(
            kind, int(chances.random() < (free_is_right if kind == "f" else model_is_right)), index
        )
        policy.should_continue(made)
        policy.observe(step)
    policy.begin_step(20)
    assert policy.prefers_model(mixed("", ahead=True, evidence=0.6)) == rather


def test_auto_looks_again_with_one_pass_and_all_free_tokens():
    policy = build_with(GivenCosts(0.9, {1: 1.0, 9: 1.05}), "auto:max=8")
    probes = 0
    for index in range(300):
        assert policy.begin_step(20) == 8
        probing = bool(policy.notes()["probe"])
        probes += probing
        assert policy.should_continue(mixed("")) == probing
        if probing:
            assert not policy.prefers_model(mixed("", ahead=True))
            assert policy.should_continue(mixed("", ahead=True)), "free"
            assert policy.should_continue(mixed("f", ahead=True))
            assert not policy.should_continue(mixed("fm")), "one pass is enough"
            assert policy.should_continue(mixed("fm", ahead=True))
        made, step = step_of("m" if probing else "", 0, index)
        policy.should_continue(made)
        policy.observe(step)
    assert 2 <= probes <= 20
