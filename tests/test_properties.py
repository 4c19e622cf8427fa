"""Properties of the algorithm on arbitrary input.

Distributions with zeros and ties, infinite logits, vocabularies of one token, drafts of any length and none, ends
anywhere.

The n-gram and lookup drafters, the text stream and the sampling transforms on finite logits have properties in their
own test files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedCache, ScriptedScorer, enumerate_outcomes, judge, steps_of, tokens_of
from test_caches import tiny, whole
from test_policies import a_step
from test_zoo import VOCABULARY as VOCAB
from tiny import tiny_tokenizer
from tokenizers import processors

from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import RunError
from specbench.decoding.drafts import Draft, Guess, StepOutcome
from specbench.decoding.logits import Logits
from specbench.decoding.protocols import Decoding, Drafter, DrafterTraits, NewPrompt, NoDraft, StepPlan
from specbench.decoding.records import Prefill, Step, StepTimes
from specbench.decoding.sampling import Randomness, Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.verify import acceptance_probabilities, expected_acceptance, residual
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.suffix import SuffixDrafter
from specbench.generate import encode_prompt
from specbench.policies import FixedLength, build_policy

INFINITY = math.inf

# -- arbitrary input -------------------------------------------------------------------------------

WEIGHTS = (0.0, 0.0, 1.0, 1.0, 2.0, 5.0, 1e-3, 1e-7, 1e-30, 1e-44)
"""Zeros, ties, and what underflows when it is normalized."""

LOGITS = (-INFINITY, 0.0, 0.0, 1.0, 1.0, -2.0, 3.5, -30.0, 90.0, -1e30)
"""Impossible tokens, ties, and more than a float32 softmax can tell apart."""


def distributions(vocabulary: int, rows: int) -> st.SearchStrategy[torch.Tensor]:
    """Float32 [rows, vocabulary], each row summing to 1."""
    row = st.lists(st.sampled_from(WEIGHTS), min_size=vocabulary, max_size=vocabulary).filter(
        lambda weights: sum(weights) > 1e-6
    )
    return st.lists(row, min_size=rows, max_size=rows).map(
        lambda made: torch.tensor(made) / torch.tensor(made).sum(dim=-1, keepdim=True)
    )


def logit_rows(
    vocabulary: int, rows: int, values: Sequence[float] = LOGITS
) -> st.SearchStrategy[torch.Tensor]:
    """Float32 [rows, vocabulary], with a possible token in every row."""
    row = st.lists(st.sampled_from(values), min_size=vocabulary, max_size=vocabulary).filter(
        lambda made: max(made) > -1e30
    )
    return st.lists(row, min_size=rows, max_size=rows).map(torch.tensor)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q of one position, [1, vocabulary] each."""
    vocabulary = draw(st.integers(1, 6))
    return draw(distributions(vocabulary, 1)), draw(distributions(vocabulary, 1))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-3]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.7]),
)

# -- acceptance and residual -----------------------------------------------------------------------


def emitted(draft_of: Any, p: torch.Tensor, proposal: torch.Tensor) -> torch.Tensor:
    """The exact distribution of the first token a step emits, if the drafted one is drawn from ``proposal``."""
    result = torch.zeros(p.shape[-1], dtype=torch.float64)
    for token, chance in enumerate(proposal.double().tolist()):
        if chance == 0.0:
            continue
        draft = draft_of(token)
        accepted = float(acceptance_probabilities(draft, p)[0])
        assert 0.0 <= accepted <= 1.0
        rest = residual(draft, p, 0).double()
        assert bool((rest >= 0).all())
        assert not bool((rest > 0)[p[0] == 0].any()), "a corrected token that the target holds for impossible"
        result[token] += chance * accepted
        result += chance * (1.0 - accepted) * rest / rest.sum()
    return result


@pytest.mark.smoke
@settings(max_examples=100, deadline=None)
@given(pairs())
def test_a_step_emits_p_whatever_the_drafter(pair):
    p, q = pair
    before = p.clone(), q.clone()
    found = [emitted(lambda token: Draft([token], q), p, q[0])]
    certain = torch.eye(p.shape[-1])
    found += [emitted(lambda guess: Draft([guess]), p, one_hot) for one_hot in certain]
    for each in found:
        torch.testing.assert_close(each, p[0].double(), rtol=0, atol=1e-6)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])


@settings(max_examples=80, deadline=None)
@given(pairs())
def test_expected_acceptance_is_the_mean_chance_of_being_kept(pair):
    p, q = pair
    mean = sum(
        chance * float(acceptance_probabilities(Draft([token], q), p)[0])
        for token, chance in enumerate(q[0].tolist())
        if chance > 0.0
    )
    draft = Draft([int(q[0].argmax())], q)
    verdict = judge(draft, torch.cat([p, p]).log(), [0], Sampling(1.0), Randomness(0))
    (value,) = expected_acceptance(draft, verdict, 1)
    assert value == pytest.approx(mean, abs=1e-6)
    assert 0.0 <= value <= 1.0


@st.composite
def judgments(
    draw: st.DrawFn, values: Sequence[float] = LOGITS
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Drafted tokens, q and the target's logits, for γ from 0 to 4."""
    vocabulary, gamma = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    tokens = draw(st.lists(st.integers(0, vocabulary - 1), min_size=gamma, max_size=gamma))
    q = draw(distributions(vocabulary, gamma)) if gamma else torch.empty(0, vocabulary)
    return tokens, q, draw(logit_rows(vocabulary, gamma + 1, values))


@settings(max_examples=80, deadline=None)
@given(judgments((*LOGITS, INFINITY, math.nan)), SAMPLINGS | st.just(Sampling()))
def test_logits_that_are_no_numbers_are_an_error_and_nothing_worse(made, sampling):
    tokens, q, logits = made
    draft = Draft(tokens, q if tokens else None)
    if bool((logits < INFINITY).all()):
        judge(draft, logits, [0], sampling, Randomness(0))
        return
    with suppress(RunError):
        verdict = judge(draft, logits, [0], sampling, Randomness(0))
        assert all(0 <= token < logits.shape[-1] for token in verdict.tokens)
        used = logits[: len(verdict.tokens)]
        assert not bool(used.isnan().any()), "a verdict that rests on NaN"


# -- transforms ------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), max_size=6), st.lists(st.integers(0, 6), max_size=3)),
        min_size=2,
        max_size=6,
    ),
    logit_rows(7, 4, (0.0, 1.0, -1.0, 2.5, -INFINITY)),
)
def test_a_penalty_goes_by_its_own_context_whatever_came_before(asked, logits):
    used = Sampling(1.0, repetition_penalty=1.7)
    for context, drafted in asked:
        rows = logits[: len(drafted) + 1]
        found = used.scores(rows, context, drafted)
        assert torch.equal(found, Sampling(1.0, repetition_penalty=1.7).scores(rows, context, drafted))
        for row, (was, scores) in enumerate(zip(rows.tolist(), found.tolist(), strict=True)):
            seen = {*context, *drafted[:row]}
            penalized = [x if t not in seen else x * 1.7 if x < 0 else x / 1.7 for t, x in enumerate(was)]
            assert scores == pytest.approx(penalized, rel=1e-6)


# -- randomness ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63), st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_no_random_number_is_used_twice(seed, events):
    """A number that decided on a draft must have no say in the token drawn behind it."""
    random = Randomness(seed)
    states = [bytes(random.generator.get_state().numpy())]
    for gamma in events:
        if gamma:
            random.test(torch.full((gamma,), 0.5))
        else:
            random.draw(torch.ones(4))
        states.append(bytes(random.generator.get_state().numpy()))
    assert len(set(states)) == len(states), "the generator was set back"


# -- the whole loop --------------------------------------------------------------------------------


class AnyLength(FixedLength):
    """Draft lengths as a list gives them, step by step and over again, 0 among them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(max(1, *lengths))
        self.lengths, self.step = list(lengths), 0

    def begin(self, prompt: NewPrompt) -> None:
        self.step = 0

    def begin_step(self, room: int) -> int:
        return min(room, self.lengths[self.step % len(self.lengths)])

    def observe(self, step: Step) -> None:
        self.step += 1


class Guesser(Drafter):
    """Proposes tokens from a list, right or wrong, and is sure of them."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(DrafterTraits("guesser"))
        self.tokens = list(tokens)

    def propose(self, context: Sequence[int], plan: StepPlan) -> Decoding[Draft]:
        yield from ()
        at = len(context)
        return Draft(
            [self.tokens[(at + i) % len(self.tokens)] for i in range(plan.policy.begin_step(plan.budget))]
        )

    def update(self, outcome: StepOutcome) -> None:
        assert len(outcome.logits) >= outcome.emitted >= 1


def scripted(table: torch.Tensor, **options: Any) -> ScriptedScorer:
    """A model whose logits depend on the last token alone."""
    return ScriptedScorer(lambda fed: table[fed[-1]].clone(), len(table), **options)


TABLE_LOGITS = (-INFINITY, 0.0, 0.0, 1.0, -1.5)


@st.composite
def loops(draw: st.DrawFn, largest: int, longest: int) -> dict[str, Any]:
    """A target, a drafter's table, lengths, ends and limits."""
    vocabulary = draw(st.integers(1, largest))
    prompt = draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=4))
    return {
        "target": draw(logit_rows(vocabulary, vocabulary, TABLE_LOGITS)),
        "drafter": draw(logit_rows(vocabulary, vocabulary, TABLE_LOGITS)),
        "prompt": prompt,
        "lengths": draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)),
        "end_ids": draw(st.sets(st.integers(0, vocabulary - 1), max_size=vocabulary)),
        "new": draw(st.integers(1, longest)),
        "limit": draw(st.none() | st.integers(len(prompt), len(prompt) + longest + 2)),
        "first_target": draw(st.booleans()),
        "guesses": draw(st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=5)),
    }


def drafter_of(kind: str, made: dict[str, Any], target: ScriptedScorer) -> Any:
    if kind == "model":
        return ModelDrafter(scripted(made["drafter"]), "model")
    if kind == "self":
        return SelfDrafter(scripted(made["drafter"], cache=target.cache, own_entries_only=False), "self")
    if kind == "guesser":
        return Guesser(made["guesses"])
    free = {"lookup": LookupDrafter, "ngram": NGramDrafter, "suffix": SuffixDrafter}
    return {**free, "none": NoDraft}[kind]()


def decoded(
    kind: str, made: dict[str, Any], sampling: Sampling, random: Any
) -> tuple[ScriptedScorer, list[Any]]:
    target = scripted(made["target"], cache=ScriptedCache(), context_limit=made["limit"])
    records = steps_of(
        made["prompt"],
        target,
        drafter_of(kind, made, target),
        policy=AnyLength(made["lengths"]),
        sampling=sampling,
        random=random,
        max_new_tokens=made["new"],
        stops=StopRules(tuple(made["end_ids"])),
        first_target=made["first_target"],
    )
    return target, list(records)


def room_of(made: dict[str, Any]) -> int:
    """The most tokens the output can have."""
    return made["new"] if made["limit"] is None else min(made["new"], made["limit"] - len(made["prompt"]))


KINDS = ("none", "model", "self", "guesser", "lookup", "ngram", "suffix")


@pytest.mark.smoke
@settings(max_examples=120, deadline=None)
@given(st.sampled_from(KINDS), loops(largest=5, longest=14))
def test_greedy_decoding_is_the_targets_own_and_ends_where_it_should(kind, made):
    expected, reason, last = [], None, made["prompt"][-1]
    while len(expected) < room_of(made) and reason is None:
        last = int(made["target"][last].argmax())
        expected.append(last)
        reason = "eos" if last in made["end_ids"] else None
    target, records = decoded(kind, made, Sampling(), Randomness(0))
    assert tokens_of(records) == expected
    assert records[-1].finish_reason == (
        reason or ("length" if len(expected) == made["new"] else "context-limit")
    )
    check_records(made, target, records)


def check_records(made: dict[str, Any], target: ScriptedScorer, records: Sequence[Any]) -> None:
    """What must hold of every step, and of the cache behind the last."""
    output = tokens_of(records)
    first, *steps = records
    assert isinstance(first, Prefill)
    assert len(output) <= room_of(made)
    assert all(record.finish_reason is None for record in records[:-1])
    assert records[-1].finish_reason is not None
    position = len(made["prompt"]) + (first.token is not None)
    for index, step in enumerate(steps):
        assert step.index == index
        assert step.position == position
        assert 0 <= step.accepted <= step.tested <= step.gamma == len(step.drafted)
        assert step.gamma <= made["lengths"][index % len(made["lengths"])]
        assert step.gamma < len(made["prompt"]) + room_of(made) - position, (
            "no room is left for the closing token"
        )
        assert step.tokens[: step.accepted] == step.drafted[: step.accepted]
        assert len(step.tokens) == step.accepted + (step.closing is not None) >= 1
        assert step.tested == step.accepted + (step.closing == "corrected")
        assert len(step.expected_acceptance) == step.tested
        assert all(0.0 <= value <= 1.0 for value in step.expected_acceptance)
        assert (step.closing is None) <= (step.finish_reason == "eos")
        position += len(step.tokens)
    assert position == len(made["prompt"]) + len(output)
    fed = [token for token, _ in target.cache.entries]
    assert fed == [*made["prompt"], *output][: len(fed)], "the cache holds what was not kept"
    assert len(fed) == (0 if not output else len(made["prompt"]) + len(output) - 1)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), loops(largest=3, longest=3), SAMPLINGS)
def test_the_exact_distribution_of_the_output_is_the_targets(kind, made, sampling):
    """Over all drafts and verdicts; the reference goes token by token and knows nothing of drafts."""
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    expected: dict[tuple[int, ...], float] = {}
    for _ in range(room_of(made)):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, weight in growing.items():
            context = [*made["prompt"], *tokens]
            p = sampling.probabilities(made["target"][context[-1]][None], context)[0].double()
            for token, chance in enumerate((p / p.sum()).tolist()):
                if chance > 0.0:
                    (expected if token in made["end_ids"] else grown)[*tokens, token] = weight * chance
        growing = grown
    expected |= growing

    def run(random: Any) -> tuple[int, ...]:
        target, records = decoded(kind, made, sampling, random)
        check_records(made, target, records)
        return tuple(tokens_of(records))

    found = enumerate_outcomes(run)
    for outcome in {*expected, *found}:
        assert found.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=1e-5)


# -- draft policies ----------------------------------------------------------------------------

RULES = ("fixed", "egag", "confidence", "entropy-bound", "svip", "heuristic", "auto")
RULE_LOGITS = (*LOGITS, INFINITY)
TIMES = st.sampled_from([0.0, 1e-9, 1e-3, 0.02, 5.0])


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What a rule may meet step by step: room, logits of every possible draft, verdicts, times."""
    vocabulary = draw(st.integers(1, 5))
    return [
        {
            "room": draw(st.integers(0, 8)),
            "logits": draw(logit_rows(vocabulary, 8, RULE_LOGITS)),
            "tokens": draw(st.lists(st.integers(0, vocabulary - 1), min_size=8, max_size=8)),
            "accepted": draw(st.integers(0, 8)),
            "stopped": draw(st.booleans()),
            "times": StepTimes(*(draw(TIMES) for _ in range(5))),
            "knows": draw(st.sampled_from(["logits", "evidence", "nothing"])),
        }
        for _ in range(draw(st.integers(1, 6)))
    ]


def follow(rule: Any, history: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    """Draft by a rule as a drafter does; the draft lengths and notes of every step."""
    seen = []
    for index, made in enumerate(history):
        limit = rule.begin_step(made["room"])
        assert 0 <= limit <= made["room"]
        logits = made["knows"] == "logits"
        draft = Draft(guess=Guess(0, 0.5) if made["knows"] == "evidence" else None)
        while len(draft.tokens) < limit and rule.should_continue(draft):
            i = len(draft.tokens)
            if logits:
                if rule.num_children(draft, (i - 1,), (Logits(made["logits"][i]),)) == (0,):
                    break
                draft.sources.append(Logits(made["logits"][i]))
            elif draft.guess is not None:
                draft.sources.append(draft.guess)
            draft.tokens.append(made["tokens"][i])
        gamma = len(draft.tokens)
        assert gamma <= made["room"]
        accepted = min(made["accepted"], gamma)
        cut = made["stopped"] and accepted > 0
        tokens = (*draft.tokens[:accepted], *([] if cut else [0]))
        step = a_step(gamma, accepted, index=index, stopped=cut)
        rule.observe(replace(step, drafted=tuple(draft.tokens), tokens=tokens, times=made["times"]))
        notes = dict(rule.notes())
        assert all(math.isfinite(value) for value in notes.values()), notes
        seen.append((gamma, notes))
    return seen


@pytest.mark.parametrize("word", RULES)
def test_a_rule_copes_with_whatever_comes_and_a_new_prompt_finds_it_fresh(word):
    @settings(max_examples=20, deadline=None)
    @given(histories(), histories())
    def check(earlier: list[dict[str, Any]], later: list[dict[str, Any]]) -> None:
        used, fresh = build_policy(word), build_policy(word)
        used.begin(NewPrompt())
        follow(used, earlier)
        used.begin(NewPrompt())
        fresh.begin(NewPrompt())
        if word == "auto":  # what passes cost is a property of the machine, which it may remember
            follow(used, later)
        else:
            assert follow(used, later) == follow(fresh, later)

    check()


# -- rollback -------------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(0, 12)),  # so many drafts
        st.tuples(st.just("keep"), st.integers(0, 12)),  # so many of those that were fed last
        st.tuples(st.just("back"), st.integers(1, 30)),  # so many tokens, which may be out of reach
        st.tuples(st.just("begin"), st.integers(1, 20)),  # a new prompt so long
    ),
    min_size=3,
    max_size=14,
)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            (family, kind)
            for family in ("llama", "mistral", "gemma3")
            for kind in ("dynamic", "preallocated")
        ),
        ("lfm2", "dynamic"),
    ],
)
def test_after_any_roll_back_the_logits_are_those_of_the_whole_context(family, kind):
    @settings(max_examples=20, deadline=None)
    @given(OPERATIONS, st.randoms(use_true_random=False))
    def check(operations: list[tuple[str, int]], chance: Any) -> None:
        scorer = Scorer(tiny(family), kind)
        context, drafted = chance.choices(range(VOCAB), k=9), []
        for word, count in [*operations, ("feed", 3)]:
            if word == "begin":
                scorer.begin()
                context, drafted = chance.choices(range(VOCAB), k=count), []
            elif word == "keep" and drafted:
                context += [*drafted[:count], chance.randrange(VOCAB)]
                drafted = []
                scorer.rollback(len(context) - 1)
                assert scorer.cache.length <= len(context) - 1
            elif word == "back" and len(context) > count:
                try:
                    scorer.rollback(len(context) - count - 1)
                except ValueError as refusal:  # layers that forget may say that they cannot
                    if family == "llama" or "given up" not in str(refusal):
                        raise
                    return
                context, drafted = context[:-count], []
            elif word == "feed" and not drafted:
                drafted = chance.choices(range(VOCAB), k=count)
                found = scorer.logits(context, drafted)
                torch.testing.assert_close(found, whole(tiny(family), context, drafted), rtol=0, atol=1e-4)
                if not drafted:  # nothing to keep: one token more
                    context.append(chance.randrange(VOCAB))
                    scorer.rollback(len(context) - 1)

    check()


# -- prompts ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(str.strip))
def test_a_chat_prompt_has_the_special_tokens_of_its_template_and_no_others(text):
    """A tokenizer that puts a BOS before everything must not put a second one before the template's."""
    tokenizer = bos_tokenizer()
    bos = tokenizer.bos_token_id
    assert tokenizer(text)["input_ids"].count(bos) == 1 + text.count(tokenizer.bos_token)
    ids = encode_prompt(tokenizer, text)
    assert ids[0] == bos
    assert ids.count(bos) == 1 + text.count(tokenizer.bos_token)
    assert encode_prompt(tokenizer, text, chat=False) == tokenizer(text)["input_ids"]


@cache
def bos_tokenizer() -> Any:
    tokenizer: Any = tiny_tokenizer(
        chat_template="{{ bos_token }}{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
    )
    return tokenizer
