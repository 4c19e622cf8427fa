"""The loop's own output distribution, computed exactly over all drafts and verdicts, is the target's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from scripted import ScriptedCache, ScriptedScorer, enumerate_outcomes, random_table, steps_of, tokens_of

from specbench.decoding import verify
from specbench.decoding.protocols import NoDraft
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import StopRules
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.model import ModelDrafter, SelfDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.suffix import SuffixDrafter
from specbench.policies import FixedLength
from specbench.specs.drafters import NGram

VOCAB = 4
NEW = 3
"""Tokens of a generation; one more is enumerated where it takes no minutes."""
LENGTHS = [NEW, pytest.param(NEW + 1, marks=pytest.mark.slow)]
PROMPT = [1, 2, 0, 1, 2]
TARGET, DRAFT = random_table(1, VOCAB), random_table(2, VOCAB)

Build = Callable[[ScriptedScorer], object]
DRAFTERS: dict[str, Build] = {
    "none": lambda target: NoDraft(),
    "model": lambda target: ModelDrafter(ScriptedScorer(DRAFT, VOCAB), "model"),
    "self": lambda target: SelfDrafter(
        ScriptedScorer(DRAFT, VOCAB, cache=target.cache, own_entries_only=False), "self"
    ),
    "model with a short context": lambda target: ModelDrafter(
        ScriptedScorer(DRAFT, VOCAB, context_limit=len(PROMPT) + 1), "short"
    ),
    "lookup": lambda target: LookupDrafter(),
    "ngram": lambda target: NGramDrafter(),
    "ngram:top-k=2": lambda target: NGramDrafter(NGram(top_k=2)),
    "ngram:sample": lambda target: NGramDrafter(NGram(sample=True)),
    "suffix": lambda target: SuffixDrafter(),
}
SAMPLINGS: dict[str, Sampling] = {
    "multinomial": Sampling(1.0),
    "temperature": Sampling(0.6),
    "top-k": Sampling(temperature=1.3, top_k=3),
    "nucleus": Sampling(temperature=1.0, top_p=0.8),
    "both": Sampling(temperature=0.8, top_k=3, top_p=0.9),
    "min-p": Sampling(temperature=1.0, min_p=0.3),
    "repetition penalty": Sampling(0.9, repetition_penalty=1.7),
    "everything": Sampling(temperature=1.2, top_k=3, top_p=0.95, min_p=0.05, repetition_penalty=1.3),
}


def loop_distribution(
    build: Build,
    sampling: Sampling,
    gamma: int,
    end_ids: tuple[int, ...] = (),
    *,
    new: int = NEW,
    **options: bool,
) -> dict[tuple[int, ...], float]:
    def run(random: object) -> tuple[int, ...]:
        target = ScriptedScorer(TARGET, VOCAB, cache=ScriptedCache())
        records = steps_of(
            PROMPT,
            target,
            build(target),
            policy=FixedLength(gamma),
            sampling=sampling,
            random=random,
            max_new_tokens=new,
            stops=StopRules(end_ids),
            **options,
        )
        return tuple(tokens_of(records))

    return enumerate_outcomes(run, new)


@cache
def target_distribution(
    sampling: Sampling, end_ids: tuple[int, ...] = (), new: int = NEW
) -> dict[tuple[int, ...], float]:
    """By the chain rule, token by token: written without anything of the loop."""
    finished: dict[tuple[int, ...], float] = {}
    growing = {(): 1.0}
    for _ in range(new):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, weight in growing.items():
            context = [*PROMPT, *tokens]
            p = sampling.probabilities(TARGET(context).unsqueeze(0), context)[0].double()
            for token in range(VOCAB):
                (finished if token in end_ids else grown)[*tokens, token] = weight * float(p[token] / p.sum())
        growing = grown
    return {k: v for k, v in {**finished, **growing}.items() if v > 0}


def largest_gap(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def cells() -> Iterator[Any]:
    """Every drafter with every sampling; a token more for each of both at least once, and for all where it is slow."""
    for (row, drafter), (column, name) in itertools.product(enumerate(DRAFTERS), enumerate(SAMPLINGS)):
        yield pytest.param(drafter, SAMPLINGS[name], NEW, id=f"{drafter}-{name}")
        slow = row % len(SAMPLINGS) != column or drafter == "self"
        yield pytest.param(
            drafter,
            SAMPLINGS[name],
            NEW + 1,
            id=f"{drafter}-{name}-{NEW + 1}",
            marks=pytest.mark.slow if slow else (),
        )


@pytest.mark.parametrize(("drafter", "sampling", "new"), list(cells()))
def test_the_output_distribution_is_the_targets(drafter, sampling, new):
    expected = target_distribution(sampling, new=new)
    for gamma in (1, 3):
        found = loop_distribution(DRAFTERS[drafter], sampling, gamma, new=new)
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
        assert largest_gap(found, expected) < 1e-6


@pytest.mark.parametrize("new", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_so_it_is_without_a_first_target_pass(drafter, new):
    found = loop_distribution(DRAFTERS[drafter], Sampling(0.8), 2, first_target=False, new=new)
    assert largest_gap(found, target_distribution(Sampling(0.8), new=new)) < 1e-6


@pytest.mark.parametrize("new", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_so_it_is_with_end_tokens(drafter, new):
    expected = target_distribution(Sampling(1.0), end_ids=(2, 3), new=new)
    assert any(len(tokens) < new for tokens in expected)
    for first_target in (True, False):
        found = loop_distribution(
            DRAFTERS[drafter], Sampling(1.0), 2, end_ids=(2, 3), first_target=first_target, new=new
        )
        assert largest_gap(found, expected) < 1e-6


@pytest.mark.parametrize("drafter", ["model", "self", "lookup", "ngram", "ngram:sample"])
def test_without_the_residual_adjustment_it_is_not(drafter, monkeypatch):
    monkeypatch.setattr(verify, "residual", lambda draft, p, i: p[i])
    found = loop_distribution(DRAFTERS[drafter], Sampling(1.0), 1, first_target=False)
    assert largest_gap(found, target_distribution(Sampling(1.0))) > 1e-3
