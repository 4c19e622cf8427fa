"""Guesses of prompt lookup in the passes of a drafter's model: the same drafts in fewer passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from scripted import Careful, ScriptedCache, ScriptedScorer, fixed_script, random_table, steps_of, tokens_of

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import Drafter, StepPlan, run_to_end
from specbench.decoding.records import Step
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.guesses import Guesses
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.parts import models_of
from specbench.policies import FixedLength, build_policy
from specbench.policies.base import ChainPolicy
from specbench.specs.drafters import Lookup

VOCAB = 4
PROMPT = [1, 2, 3, 0, 1, 2, 3, 1, 2]
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)


def own_model() -> ModelDrafter:
    return ModelDrafter(Careful(DRAFT, VOCAB), "model")  # type: ignore[arg-type]


def cascade(min_match: int = 2) -> CascadeDrafter:
    return CascadeDrafter(LookupDrafter(Lookup(n=None, min=min_match)), own_model())


DRAFTERS: dict[str, Callable[[ScriptedCache], Drafter]] = {
    "model": lambda cache: own_model(),
    "self": lambda cache: SelfDrafter(
        Careful(DRAFT, VOCAB, cache=cache, own_entries_only=False),  # type: ignore[arg-type]
        "self",
    ),
    "cascade": lambda cache: cascade(),
    "cascade that seldom copies": lambda cache: cascade(4),
}

SAMPLINGS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "multinomial": Sampling(0.7),
    "top-k": Sampling(temperature=1.0, top_k=2),
    "repetition penalty": Sampling(0.8, repetition_penalty=1.3),
    "greedy with a repetition penalty": Sampling(repetition_penalty=1.5),
}

POLICIES = ("fixed:gamma=6", "confidence:threshold=0.6", "svip:threshold=0.4", "heuristic")


def decode(
    drafter: str, sampling: Sampling, policy: str, seed: int, guesses: bool = True, **options: Any
) -> tuple[list[int], list[Step], int]:
    """Decode 40 tokens; return them, the steps, and how many passes the drafter's model has made."""
    cache = ScriptedCache()
    made = DRAFTERS[drafter](cache)
    (model,) = models_of(made)
    if not guesses:
        model.takes_guesses = False
    target = ScriptedScorer(TARGET, VOCAB, cache=cache)
    records = [
        *steps_of(
            PROMPT,
            target,
            made,
            policy=build_policy(policy),
            sampling=sampling,
            random=Randomness(seed),
            max_new_tokens=40,
            **options,
        )
    ]
    steps = [record for record in records if isinstance(record, Step)]
    return tokens_of(records), steps, len(model.scorer.passes)  # type: ignore[attr-defined]


# -- the same drafts -----------------------------------------------------------------------------------


def pairs() -> Iterator[tuple[str, str, str]]:
    """Every drafter with every sampling, and every sampling with every policy."""
    for (row, drafter), (column, name) in itertools.product(enumerate(DRAFTERS), enumerate(SAMPLINGS)):
        yield drafter, name, POLICIES[(row + column) % len(POLICIES)]


@pytest.mark.parametrize(("drafter", "name", "policy"), list(pairs()))
def test_drafts_and_outputs_are_those_without_guesses(drafter, name, policy):
    saved = 0
    for seed in range(2 if SAMPLINGS[name].temperature else 1):
        tokens, steps, passes = decode(drafter, SAMPLINGS[name], policy, seed)
        plain_tokens, plain, most = decode(drafter, SAMPLINGS[name], policy, seed, guesses=False)
        assert tokens == plain_tokens
        assert [step.drafted for step in steps] == [step.drafted for step in plain]
        assert [step.expected_acceptance for step in steps] == [step.expected_acceptance for step in plain]
        assert passes == sum(step.passes or 0 for step in steps) <= most
        saved += most - passes
    assert saved > 0 or drafter == "cascade" or not policy.startswith("fixed")


# -- passes --------------------------------------------------------------------------------------------


def repeating(script: Sequence[int], **options: Any) -> tuple[ModelDrafter, list[int]]:
    """A model that goes on with the script, and a context of two rounds of it, which it has read."""
    context = [*script, *script]
    scorer = Careful(fixed_script(script, 9, 0), 9, **options)
    drafter = ModelDrafter(scorer, "model")  # type: ignore[arg-type]
    drafter.begin(context)
    read(drafter, context)
    scorer.passes.clear()
    return drafter, context


def read(drafter: ModelDrafter, context: list[int]) -> None:
    """Let it read the context but for its last token."""
    run_to_end(drafter.propose(context, StepPlan(1, FixedLength(1), Sampling(), Randomness(0))))
    drafter.update(StepOutcome(context, 0, torch.empty(0)))


def propose(
    drafter: ModelDrafter, context: Sequence[int], length: int, policy: ChainPolicy | None = None
) -> Draft:
    policy = policy or FixedLength(length)
    draft: Draft = run_to_end(drafter.propose(context, StepPlan(length, policy, Sampling(), Randomness(0))))
    return draft


@pytest.mark.smoke
def test_a_pass_gives_up_to_five_tokens_of_a_repetition():
    script = [1, 2, 3, 4, 5, 6, 7]
    drafter, context = repeating(script)
    draft = propose(drafter, context, 10)
    assert draft.tokens == [*script, 1, 2, 3]
    assert draft.passes == len(drafter.scorer.passes) == 2
    assert drafter.scorer.passes == [5, 5]


def test_a_policy_can_stop_among_guesses_and_is_told_what_needs_no_pass():
    told = []

    class Stops(FixedLength):
        def should_continue(self, draft: Draft) -> bool:
            told.append((len(draft.tokens), draft.passes, draft.next_is_read))
            return len(draft.tokens) < 3

    drafter, context = repeating([1, 2, 3, 4])
    assert propose(drafter, context, 9, Stops(9)).tokens == [1, 2, 3]
    assert told == [(0, 0, False), (1, 1, True), (2, 1, True), (3, 1, True)]
    assert drafter.scorer.cached_len == len(context) + 3, "what was guessed beyond the draft is gone"


def test_guesses_that_are_never_used_end():
    """Whatever the match, its chance falls below the price of a row; the next prompt begins afresh."""
    guesses = Guesses()
    guesses.begin()
    context = [1, 2, 3, 1, 2, 3, 1, 2]
    counts = []
    for _ in range(150):
        found = guesses.find(context, [], 9, Sampling())
        counts.append(len(found))
        guesses.keep([], found, torch.zeros(1 + len(found), 9))
        assert guesses.row_after([]) is not None
        guesses.settle([8])
    assert counts[0] > 0
    assert counts[-1] == 0
    assert counts == sorted(counts, reverse=True)
    guesses.begin()
    assert len(guesses.find(context, [], 9, Sampling())) == counts[0]


# -- where there are none ------------------------------------------------------------------------------


def test_none_is_read_beyond_the_context_limit():
    """The scripted model fails where it is fed more."""
    script = [1, 2, 3, 4]
    for limit in range(8, 14):
        drafter, context = repeating(script, context_limit=limit)
        drafted = propose(drafter, context, 9).tokens
        assert drafted == [script[i % 4] for i in range(min(9, limit - len(context) + 1))]


@pytest.mark.parametrize("missing", ["cheap rollbacks", "a pass of its own"])
def test_there_are_none_without(missing):
    drafter, context = repeating([1, 2, 3, 4])
    if missing == "cheap rollbacks":
        drafter.scorer.reads_trees = False
    else:
        drafter.scorer.batch = object()
    assert propose(drafter, context, 5).passes == 5
    assert drafter.scorer.passes == [1] * 5
