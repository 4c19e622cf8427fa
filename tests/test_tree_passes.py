"""Forward passes over trees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from test_zoo import zoo_model
from tiny import tiny_llama

from specbench.backends.torch.attention import fold_attention
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardRequest
from specbench.decoding.tree import tree_rows
from specbench.options import CacheKind


def test_a_node_sees_its_ancestors_alone():
    parents = (-1, 0, 0, -1)
    positions, mask = tree_rows(2, parents, 9, torch.device("cpu"))
    assert positions.tolist() == [[2, 3, 4, 4, 3]]
    assert mask.shape == (1, 1, 5, 9)
    assert mask[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0, 0, 0],  # the context's last
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 1, 0, 0, 0],  # the second child of the first
        [1, 1, 1, 0, 0, 0, 1, 0, 0],  # another child of the context
    ]


# --- Real passes ----------------------------------------------------------------------------------

CONTEXT = [5, 9, 14, 3, 8, 21, 2]
FLAT = ((11, 4, 17, 6, 12, 1, 13), (-1, 0, 1, 0, -1, 1, 0))  # a chain of three, and leaves
DEEP = ((11, 4, 17, 6, 12, 1, 13, 9, 2, 8), (-1, 0, 1, 0, -1, 4, 4, 6, 7, 3))  # with branches of their own
CACHES: list[CacheKind] = ["dynamic", "preallocated", "static"]


def branch(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to this one."""
    return [] if node < 0 else [*branch(parents[node], parents), node]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("tree", "fold"), [(FLAT, True), (DEEP, False)], ids=["flat", "deep"])
def test_a_pass_over_a_tree_is_the_separate_passes(cache, fold, tree):
    model = tiny_llama()
    if fold:
        fold_attention(model)
    scorer, other = Scorer(model, cache), Scorer(model, "dynamic")
    assert scorer.takes_trees
    tokens, parents = tree
    paths = [branch(node, parents) for node in range(len(tokens))]
    expected = []
    for path in [[], *paths]:
        other.begin()
        expected.append(other.logits(CONTEXT, [tokens[node] for node in path], rows=1)[0])
    for fresh in (1, 3, len(CONTEXT)):
        scorer.begin()
        if fresh < len(CONTEXT):
            scorer.logits(CONTEXT[:-fresh])
        found = scorer.score(ForwardRequest(scorer, CONTEXT, tokens, parents)).logits
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    # Whatever branch was right, or the beginning of one: the context goes on behind it.
    for path in paths:
        for kept in range(len(path) + 1):
            scorer.rollback(len(CONTEXT) - 1)
            scorer.score(ForwardRequest(scorer, CONTEXT, tokens, parents))
            scorer.rollback(len(CONTEXT) + kept, path)
            assert scorer.cache.length == len(CONTEXT) + kept
            text = [*CONTEXT, *(tokens[node] for node in path[:kept]), 7]
            other.begin()
            torch.testing.assert_close(scorer.logits(text), other.logits(text), rtol=1e-4, atol=1e-5)
            scorer.rollback(len(CONTEXT))


def test_what_a_cache_has_not_read_of_a_path_is_not_kept():
    scorer = Scorer(tiny_llama())
    scorer.logits(CONTEXT, [11, 4], rows=1)  # a drafter that has drafted a third token
    scorer.rollback(len(CONTEXT) + 3, range(3))
    assert scorer.cache.length == len(CONTEXT) + 2
    scorer.rollback(len(CONTEXT) + 2, [0, 5])  # and verified others beside
    assert scorer.cache.length == len(CONTEXT) + 1


def test_caches_that_forget_and_models_that_go_by_the_order_of_tokens_take_none():
    sliding = zoo_model("mistral")
    assert not Scorer(sliding).takes_trees
    assert not Scorer(sliding, "preallocated").takes_trees
    assert not Scorer(tiny_llama(), "none").takes_trees
    # ALiBi takes distances from the places of tokens in the pass: the trial shows that trees come out wrong.
    assert not Scorer(zoo_model("bloom")).takes_trees
