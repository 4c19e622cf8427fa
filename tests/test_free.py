"""`suffix`, a drafter without a model that drafts trees too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedScorer, random_table, steps_of

from specbench.decoding.drafts import Draft, Guess, StepOutcome
from specbench.decoding.protocols import DraftPolicy, StepPlan, run_to_end
from specbench.decoding.sampling import Randomness, Sampling
from specbench.drafters.cascade import CascadeDrafter
from specbench.drafters.free import CandidateDrafter
from specbench.drafters.model import ModelDrafter
from specbench.drafters.suffix import SuffixDrafter, SuffixTrie
from specbench.policies import FixedLength
from specbench.policies.trees import DynamicTreePolicy, StaticTreePolicy
from specbench.specs.drafters import Suffix
from specbench.specs.policies import DynamicTree, StaticTree

TREES: dict[str, Callable[[], DraftPolicy]] = {
    "static": lambda: StaticTreePolicy.shaped((-1, -1, 0, 0, 1)),
    "dynamic": lambda: DynamicTreePolicy(DynamicTree(2, 4, 3)),
}


def drafted(drafter: CandidateDrafter, context: Sequence[int], gamma: int = 5) -> Draft:
    """What a drafter that has just begun proposes behind ``context``."""
    drafter.begin(context)
    return chain(drafter, context, gamma)


def chain(drafter: CandidateDrafter, context: Sequence[int], gamma: int = 5) -> Draft:
    return run_to_end(drafter.propose(context, StepPlan(100, FixedLength(gamma), Sampling(), Randomness(0))))


def tree(drafter: CandidateDrafter, context: Sequence[int], policy: DraftPolicy, room: int = 100) -> Draft:
    return run_to_end(drafter.propose(context, StepPlan(room, policy, Sampling(), Randomness(0))))


# The trie.


def counted(texts: Sequence[Sequence[int]], tail: Sequence[int], longest: int) -> tuple[int, Counter[int]]:
    """By looking at every place of every text."""
    for length in range(min(longest, len(tail)), 0, -1):
        end = [*tail[len(tail) - length :]]
        found = Counter(
            text[i + length]
            for text in texts
            for i in range(len(text) - length)
            if [*text[i : i + length]] == end
        )
        if found:
            return length, found
    return 0, Counter()


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 11), st.integers(1, 6), st.integers(0, 2**32), st.integers(1, 4))
def test_the_trie_agrees_with_a_recount(vocab, longest, seed, texts):
    random = Random(seed)
    trie = SuffixTrie(longest)
    read: list[list[int]] = []
    for _ in range(texts):
        read.append([])
        for _ in range(random.randint(1, 4)):
            more = random.choices(range(vocab), k=random.randint(0, 12))
            read[-1] += more
            trie.extend(more)
            for tail in (read[-1], random.choices(range(vocab), k=random.randint(0, 8))):
                length, found = trie.match(tail)
                expected, counts = counted(read, tail, longest)
                assert length == expected
                assert {token: count for token, (count, _) in found.items()}.items() <= counts.items()
                assert {total for _, total in found.values()} <= {counts.total()}
                kept = [count for count, _ in found.values()]
                assert kept == sorted(counts.values(), reverse=True)[:8]
        trie.end()


def test_no_string_spans_two_texts():
    trie = SuffixTrie(3)
    for _ in range(3):
        trie.extend([1, 2])
        trie.end()
    assert trie.match([2]) == (0, {})
    assert trie.match([1]) == (1, {2: (3, 3)})


# suffix, as a chain.


@pytest.mark.parametrize(
    ("spec", "prompt", "expected"),
    [
        (Suffix(), [1, 2, 3, 2, 9, 2, 9, 1, 2], [3, 2]),  # the longest match first
        (Suffix(n=1), [1, 2, 3, 2, 9, 2, 9, 1, 2], [9, 1]),
        (Suffix(n=1), [1, 5, 1, 6, 1, 5, 1, 6, 1, 7, 1], [6]),  # of equally frequent ones the last
        (Suffix(), [1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3, 1]),  # a period goes on past the end
        (Suffix(n=2), [7, 7, 7], [7] * 9),
        (Suffix(min=2), [1, 2, 3, 2], []),
        (Suffix(min=2), [1, 2, 3, 1, 2], [3]),
    ],
)
def test_drafts_follow_the_longest_match(spec, prompt, expected):
    assert drafted(SuffixDrafter(spec), prompt, max(1, len(expected))).tokens == expected


def test_evidence_grows_with_the_match_and_the_share():
    found = drafted(SuffixDrafter(), [1, 5, 1, 6, 1, 5, 2, 1], 2)
    assert found.tokens == [5, 2]
    sure = [source.match_confidence for source in found.sources if isinstance(source, Guess)]
    assert sure == pytest.approx([2 / (3 + 1), 2 * 1 / (2 * 2 + 1)])
    assert found.q is None


@pytest.mark.parametrize("context", [[1], [1, 2], [5, 6, 7]])
@pytest.mark.parametrize("tree_too", [False, True])
def test_nothing_known_is_nothing_drafted(context, tree_too):
    drafter = SuffixDrafter()
    drafter.begin(context)
    found = tree(drafter, context, StaticTreePolicy(StaticTree())) if tree_too else chain(drafter, context)
    assert found.tokens == []


def test_a_new_prompt_leaves_nothing_of_the_last():
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 1, 2])
    chain(drafter, [1, 2, 1, 2])
    drafter.update(StepOutcome([1, 2, 1, 2, 3], 1, torch.zeros(1, 9)))
    assert drafted(drafter, [5, 3, 6, 2]).tokens == []


def test_keep_looks_in_earlier_outputs_and_not_in_earlier_prompts():
    drafter = SuffixDrafter(Suffix(keep=True))
    drafter.begin([1, 2])
    context = [1, 2]
    for step in ([3], [4, 5], [3]):
        context += step
        drafter.update(StepOutcome(context, len(step), torch.zeros(len(step), 9)))
    assert drafted(drafter, [8, 1]).tokens == []
    assert drafted(drafter, [8, 3], 2).tokens == [4, 5]
    # The longer match counts: here 4 stood behind 5, there 3 behind 4 5.
    assert drafted(drafter, [5, 4, 6, 4, 5], 1).tokens == [3]
    assert drafted(drafter, [6, 4, 5, 7, 6, 4, 5], 1).tokens == [7]


# As trees.


@pytest.mark.parametrize("shape", TREES)
def test_a_tree_is_no_deeper_than_the_room(shape):
    drafter = SuffixDrafter()
    context = [1, 2, 3, 1, 2, 4, 1, 2]
    drafter.begin(context)
    for room in (0, 1, 2):
        found = tree(drafter, context, TREES[shape](), room)
        depths = [len(found.branch(node)) for node in range(len(found.tokens))]
        assert max(depths, default=0) == room


def test_the_likeliest_nodes_are_kept():
    # Behind 1 stood 2 three times and 3 once; behind 1 2 only 4.
    context = [1, 2, 4, 1, 2, 4, 1, 2, 4, 1, 3, 9, 1]
    drafter = SuffixDrafter(Suffix(n=2))
    drafter.begin(context)
    found = tree(drafter, context, DynamicTreePolicy(DynamicTree(2, 3, 3)))
    assert sorted(tuple(found.branch(node)) for node in range(3)) == [(2,), (2, 4), (2, 4, 1)]


VOCAB = 3
PROMPT = [1, 2, 0, 1, 1, 2]
TARGET = random_table(5, VOCAB)


def test_in_a_cascade_the_model_goes_on_where_nothing_matches():
    target = ScriptedScorer(TARGET, VOCAB)
    drafter = CascadeDrafter(
        SuffixDrafter(Suffix(min=2)), ModelDrafter(ScriptedScorer(TARGET, VOCAB), "model")
    )
    drafter.model.takes_guesses = False  # a pass for each of its tokens
    _, *steps = steps_of([1, 0, 2], target, drafter, policy=FixedLength(4), max_new_tokens=30)
    assert {step.passes for step in steps} == {0, 2, 4}, "each alone, and both in one draft"
    assert all(step.accepted == 4 for step in steps if step.passes == 4), "the model is the target"
