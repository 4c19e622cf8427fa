"""Passes over several requests against passes over each."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from test_zoo import zoo_model
from tiny import tiny_llama

from specbench.backends.torch.batch import BatchedModel
from specbench.backends.torch.pools import KVPool
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardRequest
from specbench.kernels.surgery import quantize
from specbench.models.target import wrap_target

PAGES = (16, 128)
VOCAB = 64
TOGETHER = ("llama", "qwen3", "gemma3", "mistral", "phi3", "mixtral", "gpt2", "gpt-neox")
APART = ("gpt-oss", "deepseek-v3", "falcon")


@cache
def loaded(name: str, pack: bool = True) -> Scorer:
    """The scorer of a tiny model, in few operators where it is packed and known."""
    return wrap_target(zoo_model(name), name=name, pack=pack).scorer


def pool_of(scorer: Scorer, page: int = 16) -> KVPool:
    return KVPool(scorer.model.config, 1024, page)


def tokens_of(choice: random.Random, count: int) -> list[int]:
    return [choice.randrange(VOCAB) for _ in range(count)]


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "page"), [("llama", 128), *((name, PAGES[number % 2]) for number, name in enumerate(TOGETHER))]
)
def test_every_request_gets_the_rows_it_gets_alone(name, page):
    """Chains, trees and prompts of any length side by side, over several steps, each rolled back by its own count."""
    scorer, choice = loaded(name), random.Random(0)
    batch = BatchedModel(scorer, pool_of(scorer, page))
    assert batch.why_not_batched is None
    scorers = [batch.open() for _ in range(5)]
    assert all(scorer.batch is batch for scorer in scorers)
    contexts = [tokens_of(choice, length) for length in (3, 40, 17, 1, 24)]
    limit = 2e-3
    for _ in range(4):
        asked = []
        for scorer, context in zip(scorers, contexts, strict=True):
            drafted = tokens_of(choice, choice.randrange(5))
            parents = None
            if drafted and scorer.takes_trees and choice.random() < 0.5:
                parents = [choice.randrange(-1, node) for node in range(len(drafted))]
            asked.append(ForwardRequest(scorer, context, drafted, parents))
        chosen = choice.sample(range(5), choice.randrange(2, 6))
        for i, rows in zip(chosen, batch.score([asked[i] for i in chosen]), strict=True):
            each = asked[i]
            assert rows.logits.shape == (len(each.tokens) + 1, VOCAB)
            path: list[int] = []
            for node in range(-1, len(each.tokens)):
                behind = branch(each, node)
                expected = Scorer(scorer.model, "none").logits([*each.context, *behind])
                assert (rows.logits[node + 1] - expected[0]).abs().max() < limit * expected.std()
                path = [*path_to(each, node)] if choice.random() < 0.5 else path
            contexts[i] = [*each.context, *(each.tokens[node] for node in path), choice.randrange(VOCAB)]
            scorers[i].rollback(len(contexts[i]) - 1, path)
            assert scorers[i].cached_len == len(contexts[i]) - 1


def path_to(asked: ForwardRequest, node: int) -> list[int]:
    if node < 0:
        return []
    parent = node - 1 if asked.parents is None else asked.parents[node]
    return [*path_to(asked, parent), node]


def branch(asked: ForwardRequest, node: int) -> list[int]:
    return [asked.tokens[each] for each in path_to(asked, node)]


@pytest.mark.parametrize("pack", [False, True])
def test_hidden_states_places_and_widths_are_each_request_s_own(pack):
    scorer = loaded("llama", pack)
    batch = BatchedModel(scorer, pool_of(scorer, 128))
    places = torch.arange(VOCAB).flip(0) + 3
    wide = Scorer(scorer.model, vocab_size=VOCAB + 3, places=places)
    others = BatchedModel(wide, batch.pool)
    first, second, third = batch.open(), batch.open(), others.open()
    contexts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    rows = batch.score([
        ForwardRequest(first, contexts[0], [4, 5], layers=(2, 0)), ForwardRequest(second, contexts[1], layers=(1,)),
    ])  # fmt: skip
    one, other = Scorer(scorer.model), Scorer(scorer.model)
    expected = [
        one.score(ForwardRequest(one, contexts[0], [4, 5], layers=(2, 0))),
        other.score(ForwardRequest(other, contexts[1], layers=(1,))),
    ]
    for found, known in zip(rows, expected, strict=True):
        assert torch.allclose(found.logits, known.logits, atol=1e-4)
        assert found.hidden is not None
        assert known.hidden is not None
        assert torch.allclose(found.hidden, known.hidden, atol=1e-4)
    found = others.score([ForwardRequest(third, contexts[2], rows=1)])[0].logits
    assert torch.allclose(found, Scorer(scorer.model).logits(contexts[2]), atol=1e-4)
    assert third.vocabulary is not None
    assert third.vocabulary.ids == places.tolist()


def test_a_pass_that_fails_leaves_everybody_where_they_were(monkeypatch):
    scorer = loaded("phi3")
    batch = BatchedModel(scorer, pool_of(scorer))
    first, second = batch.open(), batch.open()
    first.logits([1, 2, 3])
    first.rollback(2)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(scorer.model.lm_head, "forward", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            batch.score([ForwardRequest(first, [1, 2, 3]), ForwardRequest(second, [4, 5])])
    assert (first.cached_len, second.cached_len) == (2, 0)
    rows = batch.score([ForwardRequest(first, [1, 2, 3]), ForwardRequest(second, [4, 5])])
    assert torch.allclose(rows[0].logits, Scorer(scorer.model, "none").logits([1, 2, 3]), atol=1e-4)
    assert torch.allclose(rows[1].logits, Scorer(scorer.model, "none").logits([4, 5]), atol=1e-4)


# -- models that are read one by one ---------------------------------------------------------------


@pytest.mark.parametrize("name", APART)
def test_models_that_cannot_be_read_together_are_read_one_by_one(name):
    scorer = loaded(name)
    pool = pool_of(scorer)
    batch = BatchedModel(scorer, pool)
    assert batch.why_not_batched is not None
    first, second = batch.open(), batch.open()
    assert first.batch is None
    for each, context in ((first, [1, 2, 3]), (second, [4, 5])):
        expected = Scorer(scorer.model, "none").logits(context, [6])
        assert torch.allclose(each.logits(context, [6]), expected, atol=1e-3)
    assert pool.use.used == 2


def test_int8_layers_without_native_passes_are_not_read_together():
    model = tiny_llama(vocab_size=VOCAB)
    quantize(model)
    int8 = Scorer(model, "preallocated")
    if int8.rounding == torch.int8:
        assert "bytes" in (BatchedModel(int8, pool_of(int8)).why_not_batched or "")


def test_a_wrong_pass_over_several_is_found_out(monkeypatch):
    """Whatever a model does with its positions: it is tried."""
    scorer = Scorer(tiny_llama(vocab_size=VOCAB))
    pool = pool_of(scorer, 128)
    assert BatchedModel(scorer, pool).why_not_batched is None
    rotary = type(scorer.model.model.rotary_emb)
    real = rotary.forward

    def one_behind_the_other(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *rest: Any) -> Any:
        return real(self, x, torch.arange(position_ids.shape[1])[None] + position_ids[:, :1], *rest)

    monkeypatch.setattr(rotary, "forward", one_behind_the_other)
    assert "different logits" in (BatchedModel(Scorer(scorer.model), pool).why_not_batched or "")


def test_a_trial_that_fails_gives_the_reason(monkeypatch):
    """Where a device cannot run such a pass, requests get passes of their own, and are told why."""

    def fails(*_: object) -> None:
        raise RuntimeError("no kernel\nstack")

    scorer = Scorer(tiny_llama(0))
    monkeypatch.setattr("specbench.backends.torch.trials.RaggedForward.__call__", fails)
    reason = BatchedModel(scorer, pool_of(scorer)).why_not_batched
    assert "no kernel" in (reason or "")
