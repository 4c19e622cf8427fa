from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Ticking

from specbench.decoding.drafts import Draft, StepOutcome
from specbench.decoding.protocols import Drafter, StepPlan, run_to_end
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.ngram import NGramDrafter
from specbench.policies import FixedLength
from specbench.specs.drafters import NGram

GREEDY = Sampling()
SAMPLING = Sampling(temperature=0.7, top_k=1)


class Scripted(Randomness):
    """Draws the given tokens, as long as their probability allows, and notes what they were drawn from."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(0)
        self.tokens = list(tokens)
        self.drawn_from: list[torch.Tensor] = []

    def draw(self, probabilities: torch.Tensor) -> int:
        token = self.tokens.pop(0)
        assert probabilities[token] > 0
        self.drawn_from.append(probabilities)
        return token


def draft(
    drafter: Drafter,
    context: Sequence[int],
    room: int = 100,
    gamma: int = 5,
    sampling: Sampling = GREEDY,
    random: Randomness | None = None,
) -> Draft:
    return run_to_end(
        drafter.propose(context, StepPlan(room, FixedLength(gamma), sampling, random or Scripted()))
    )


def drafted(drafter: Drafter, context: Sequence[int], **options: Any) -> list[int]:
    """What a drafter that has just begun proposes behind ``context``."""
    drafter.begin(context)
    return draft(drafter, context, **options).tokens


def ranking(rows: Sequence[Sequence[int]], vocabulary: int) -> torch.Tensor:
    """Logits in which the tokens of each row come in the order given, the most probable first."""
    logits = torch.full((len(rows), vocabulary), -100.0)
    for row, tokens in zip(logits, rows, strict=True):
        for rank, token in enumerate(tokens):
            row[token] = -rank
    return logits


CONTINUATIONS = [
    ({"order": 2}, [1, 5, 1, 6, 1, 5, 1, 7, 1], [5]),
    ({"order": 2}, [1, 5, 1, 6, 1], [6]),  # of equals the last
    ({"order": 3}, [1, 2, 3, 2, 9, 2, 9, 1, 2], [3]),  # after 2 alone 9 is more frequent
    ({"order": 4}, [1, 2, 3, 8, 3], [8]),
    # 4 was followed by 1 last; after the own draft 1 2 3 it is 5.
    ({}, [1, 2, 3, 4, 5, 3, 9, 4, 1, 1, 2], [3, 4, 5]),
]


@pytest.mark.parametrize(("spec", "prompt", "expected"), CONTINUATIONS)
def test_continuations(spec, prompt, expected):
    assert drafted(NGramDrafter(NGram(**spec)), prompt)[: len(expected) or None] == expected


class Counting(list[int]):
    """A list that is never walked, and notes what is asked of it."""

    def __init__(self, *tokens: Any) -> None:
        super().__init__(*tokens)
        self.asked: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole context is walked")

    def __getitem__(self, key: Any) -> Any:
        result = super().__getitem__(key)
        self.asked.append(len(result) if isinstance(result, list) else 1)
        return result


@pytest.mark.parametrize("sample", [False, True])
def test_no_step_reads_the_whole_context(sample):
    drafter = NGramDrafter(NGram(order=4, sample=sample, top_k=2))
    context = Counting([1, 2, 3] * 1000)
    drafter.begin(context)
    draft(drafter, context)
    context.asked.clear()
    for _ in range(4):
        context.append(2)
        drafter.update(StepOutcome(context, 1, torch.zeros(1, 4)))
        draft(drafter, context, sampling=SAMPLING, random=Randomness(0))
    assert max(context.asked) == 3
    assert len(context.asked) < 80


# Against a recount from scratch.


class Reference:
    """The rule written down plainly: a list of every sight, recounted for every draft."""

    def __init__(self, order: int, keep: bool, top_k: int) -> None:
        self.order, self.keep, self.top_k = order, keep, top_k
        self.sights: list[list[tuple[tuple[int, ...], int]]] = []  # one list for each token read

    def begin(self, prompt: Sequence[int]) -> None:
        if not self.keep:
            self.sights = []
        for i in range(len(prompt)):
            self.see(prompt[:i], [prompt[i]])

    def see(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        lengths = [n for n in range(1, self.order) if n <= len(before)]
        self.sights.append([(tuple(before[len(before) - n :]), token) for n in lengths for token in tokens])

    def emit(self, context: Sequence[int], token: int, ranked: Sequence[int]) -> None:
        others = [other for other in ranked[: self.top_k] if other != token] if self.top_k > 1 else []
        self.see(context, [*reversed(others), token])

    def counts(self, context: Sequence[int]) -> Counter[int]:
        for n in range(min(self.order - 1, len(context)), 0, -1):
            suffix = tuple(context[len(context) - n :])
            seen = [token for sights in self.sights for known, token in sights if known == suffix]
            if seen:
                # In the order of their last sight, so that the last of the most frequent is the answer.
                return Counter(
                    {t: seen.count(t) for t in sorted(set(seen), key=lambda t: seen[::-1].index(t))}
                )
        return Counter()

    def propose(self, context: Sequence[int], gamma: int) -> tuple[list[int], list[Counter[int]]]:
        tokens: list[int] = []
        rows = []
        while len(tokens) < gamma and (counts := self.counts([*context, *tokens])):
            tokens.append(max(counts, key=lambda token: counts[token]))  # the first of equals: the newest
            rows.append(counts)
        return tokens, rows


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[list[tuple[int, list[int]]]]]]]:
    """A vocabulary and prompts, each with steps of emitted tokens and the target's ranking at each."""
    vocabulary = draw(st.integers(1, 4))
    token = st.integers(0, vocabulary - 1)
    emitted = st.tuples(token, st.permutations(range(vocabulary)))
    prompt = st.tuples(
        # Drawn as a whole: lists drawn token by token are mostly too short to repeat themselves.
        st.builds(
            lambda seed, length: Random(seed).choices(range(vocabulary), k=length),
            st.integers(0, 2**32),
            st.integers(1, 40),
        ),
        st.lists(st.lists(emitted, min_size=1, max_size=4), max_size=6),
    )
    return vocabulary, draw(st.lists(prompt, min_size=1, max_size=3))


@settings(max_examples=100, deadline=None)
@given(
    runs(),
    st.integers(2, 5),
    st.booleans(),
    st.integers(1, 5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_agrees_with_a_recount(run, order, keep, top_k, first_target, chance):
    vocabulary, prompts = run
    drafter = NGramDrafter(NGram(order=order, keep=keep, top_k=top_k, sample=True))
    reference = Reference(order, keep, top_k)
    for prompt, steps in prompts:
        context = list(prompt)
        drafter.begin(prompt)
        reference.begin(prompt if steps else [])  # a prompt behind which nothing is drafted is never read
        for number, step in enumerate(steps):
            if number or not first_target:
                gamma = chance.randint(0, 6)
                tokens, rows = reference.propose(context, gamma)
                assert draft(drafter, context, room=gamma, gamma=9).tokens == tokens
                if number:
                    # The most frequent tokens are one possible draw, behind which q must be the counts.
                    result = draft(
                        drafter, context, room=gamma, gamma=9, sampling=SAMPLING, random=Scripted(*tokens)
                    )
                    assert result.tokens == tokens
                    assert (result.q is None) == (not tokens)
                    for i, counts in enumerate(rows):
                        q = [counts[t] / counts.total() for t in range(vocabulary)]
                        assert result.q is not None
                        assert result.q[i].tolist() == pytest.approx(q, abs=1e-6)
            rankings = [ranked for _, ranked in step]
            for token, ranked in step:
                reference.emit(context, token, ranked)
                context.append(token)
            drafter.update(
                StepOutcome(context, len(step), ranking([*rankings, range(vocabulary)], vocabulary))
            )


def test_the_reading_of_the_prompt_is_timed_once():
    drafter = NGramDrafter()
    drafter.clock = Ticking()
    drafter.begin([1, 2])
    assert draft(drafter, [1, 2]).prefill_s == 1.0
    assert draft(drafter, [1, 2]).prefill_s == 0.0
    drafter.begin([1, 2])
    drafter.update(StepOutcome([1, 2, 3], 1, torch.zeros(1, 4)))
    assert draft(drafter, [1, 2, 3]).prefill_s == 0.0
