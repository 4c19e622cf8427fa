"""Blocks against a plain model of them, and slots against contexts read alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_llama

from specbench.backends.torch.blocks import BlockAllocator, BlockTable
from specbench.backends.torch.pools import PAGE, KVPool, PooledCache, cache_size
from specbench.backends.torch.scorer import Scorer
from specbench.backends.torch.submodels import first_layers
from specbench.base.errors import UsageError
from specbench.decoding.protocols import ForwardRequest

# -- who holds what --------------------------------------------------------------------------------


@dataclass
class Holding:
    """A request as the plain model has it: the tokens it has written, and room for more."""

    table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    room: int = 0


class Plain:
    """What blocks hold, written out: by place, a token behind all that came before it; nothing is shared knowingly."""

    def __init__(self, count: int, size: int) -> None:
        self.blocks, self.requests = BlockAllocator(count, size), [Holding() for _ in range(3)]
        self.content: dict[int, tuple[int, ...]] = {}

    def places(self, held: Holding, start: int, end: int) -> list[int]:
        size = self.blocks.size
        return [held.table.blocks[i // size] * size + i % size for i in range(start, end)]

    def append(self, held: Holding, tokens: list[int]) -> None:
        start, end = len(held.tokens), len(held.tokens) + len(tokens)
        before = [list(held.table.blocks), self.blocks.free]
        copied = self.blocks.extend(held.table, start, end)
        if copied is None:
            assert [held.table.blocks, self.blocks.free] == before, "it was changed all the same"
            fresh = -(-end // self.blocks.size) - len(held.table.blocks)
            assert self.blocks.free < fresh + len(held.table.blocks)
            return
        for source, target in copied:
            for i in range(self.blocks.size):
                copied_entry = self.content.get(source * self.blocks.size + i, ())
                self.content[target * self.blocks.size + i] = copied_entry
        held.tokens += tokens
        for place, i in zip(self.places(held, start, end), range(start, end), strict=True):
            self.content[place] = tuple(held.tokens[: i + 1])
        held.room = end
        self.blocks.publish(held.table, held.tokens)

    def truncate(self, held: Holding, length: int) -> None:
        del held.tokens[length:]
        held.room = len(held.tokens)
        self.blocks.truncate(held.table, len(held.tokens))

    def share_prefix(self, held: Holding, tokens: list[int]) -> None:
        self.truncate(held, 0)
        count = self.blocks.share_prefix(held.table, tokens)
        assert count % self.blocks.size == 0
        held.tokens, held.room = tokens[:count], count

    def check(self) -> None:
        holders: dict[int, int] = {}
        for held in self.requests:
            assert len(held.table.blocks) == -(-held.room // self.blocks.size)
            assert len(set(held.table.blocks)) == len(held.table.blocks)
            for block in held.table.blocks:
                holders[block] = holders.get(block, 0) + 1
            read = [self.content[place] for place in self.places(held, 0, len(held.tokens))]
            assert read == [tuple(held.tokens[: i + 1]) for i in range(len(read))], (
                "others have written there"
            )
        assert self.blocks.count - self.blocks.free == len(holders)
        assert self.blocks.shared == sum(count > 1 for count in holders.values())
        assert self.blocks.peak >= len(holders)


@pytest.mark.smoke
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 9), st.integers(1, 4))
def test_blocks_hold_what_was_written_whatever_others_do(seed, count, size):
    choice = random.Random(seed)
    plain = Plain(count, size)
    for _ in range(80):
        held, other = choice.choices(plain.requests, k=2)
        tokens = [choice.randrange(2) for _ in range(choice.randrange(1, 2 * size + 1))]
        action = choice.choices(("append", "truncate", "adopt", "free"), (6, 3, 3, 1))[0]
        if action == "append" and len(held.tokens) + len(tokens) <= count * size:
            plain.append(held, tokens)
        elif action == "adopt":
            plain.share_prefix(held, [*other.tokens, *tokens])
        elif action == "truncate":
            plain.truncate(held, max(0, len(held.tokens) - choice.randrange(1, size + 2)))
        elif action == "free":
            plain.truncate(held, 0)
        plain.check()
    for held in plain.requests:
        plain.truncate(held, 0)
    assert plain.blocks.free == count
    assert not plain.blocks._digests
    assert not plain.blocks._by_digest


def test_a_request_that_never_fits_is_told_apart_from_one_that_waits():
    blocks, first, second = BlockAllocator(4, 4), BlockTable(), BlockTable()
    assert blocks.extend(first, 0, 9) == []
    assert blocks.extend(second, 0, 9) is None
    assert second.blocks == []
    with pytest.raises(UsageError, match="17 tokens is longer than the KV cache pool: 16"):
        blocks.extend(second, 0, 17)


# -- what a slot holds -----------------------------------------------------------------------------


CONTEXT = [(7 * i * i + 3 * i) % 50 for i in range(60)]


@cache
def model() -> Any:
    return tiny_llama(vocab_size=50)


def alone(tokens: list[int], rows: int) -> torch.Tensor:
    return Scorer(model(), "none").logits(tokens[:-1], tokens[-1:], rows)


def pool(tokens: int = 256, page: int = PAGE) -> KVPool:
    return KVPool(model().config, tokens, page)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4)


def test_requests_that_begin_alike_share_blocks_until_they_part():
    held = pool()
    prompt = CONTEXT[: 2 * PAGE + 5]
    first, second, third = (Scorer(model(), PooledCache(held)) for _ in range(3))
    first.logits(prompt)
    asked = ForwardRequest(second, prompt)
    assert second.reserve(asked)
    assert second.cached_len == 2 * PAGE
    assert held.use.shared == 2
    assert close(second.score(asked).logits, alone(prompt, 1))
    # The last token has to be read for its row.
    assert third.reserve(ForwardRequest(third, prompt[: 2 * PAGE]))
    assert third.cached_len == PAGE
    third.rollback(0)
    # The second goes back into what is shared, and writes something else there: the first keeps its own.
    other = [*prompt[: PAGE + 3], 49, 48, 47]
    second.rollback(PAGE + 3)
    assert held.use.shared == 2
    assert close(second.logits(other), alone(other, 1))
    assert held.use.shared == 1
    first.rollback(len(prompt) - 1)
    assert close(first.logits(prompt, [1, 2]), alone([*prompt, 1, 2], 3))
    first.rollback(0)
    assert close(second.logits(other, [3], 1), alone([*other, 3], 1))
    second.rollback(0)
    assert held.use.used == 0


def test_what_all_tokens_states_are_wanted_of_is_not_shared():
    held = pool()
    first, second = (Scorer(model(), PooledCache(held)) for _ in range(2))
    first.logits(CONTEXT)
    hidden = second.score(ForwardRequest(second, CONTEXT, layers=(1,))).hidden
    assert hidden is not None
    assert len(hidden) == len(CONTEXT)


def test_what_a_cheaper_form_has_read_is_read_again_and_not_shared():
    held = pool()
    target = Scorer(model(), PooledCache(held))
    cheap = Scorer(first_layers(model(), 1), target.cache).clone_for(target.cache, shares=True)
    prompt = CONTEXT[: 2 * PAGE]
    target.logits(prompt)
    cheap.logits(prompt, [1, 2], 1)
    assert (target.cached_len, cheap.cached_len) == (len(prompt), len(prompt) + 2)
    cheap.rollback(len(prompt))
    target.rollback(0)  # under a draft
    cheap.logits(prompt, [1], 1)
    cheap.rollback(len(prompt))
    assert target.cached_len == 0
    other = Scorer(model(), PooledCache(held))
    assert other.reserve(ForwardRequest(other, [*prompt, 5]))
    assert other.cached_len == 0
    assert close(target.logits([*prompt, 5]), alone([*prompt, 5], 1))


@pytest.mark.parametrize("page", [PAGE, 32])
def test_a_full_pool_changes_nothing_and_says_so(page):
    held = pool(64, page)
    first, second, third = (Scorer(model(), PooledCache(held)) for _ in range(3))
    first.logits(CONTEXT[:20])
    second.logits(CONTEXT[20:50])
    asked = ForwardRequest(third, CONTEXT[30:50])
    before = held.use
    assert not third.reserve(asked)
    assert held.use == before
    with pytest.raises(UsageError, match="full"):
        third.score(asked)
    with pytest.raises(UsageError, match="longer than the KV cache pool: 64"):
        third.reserve(ForwardRequest(third, [*CONTEXT, *CONTEXT]))
    assert held.use == before
    first.rollback(0)
    assert third.reserve(asked)
    assert close(third.score(asked).logits, alone(CONTEXT[30:50], 1))


def test_a_pool_without_room_is_refused():
    with pytest.raises(UsageError, match="has no room"):
        pool(PAGE - 1)


def test_a_pool_takes_no_more_memory_than_its_tokens_need():
    token = cache_size(model()).token
    assert token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, float32
    for page, tokens in ((PAGE, 6 * PAGE), (33, 99)):
        held = pool(100, page)
        assert held.use.bytes == 0
        Scorer(model(), PooledCache(held)).logits(CONTEXT[:3])
        assert held.use.bytes == tokens * token
        assert held.use.block * held.use.blocks == tokens
