"""One loaded model for many requests: a scorer for each, and passes over all that they ask for at once.

The rows of all requests stand one behind the other, without padding: every linear layer reads its weights once for all
of them, and only attention goes by request (``kernels.attention.RaggedKV``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
import torch

from specbench.backends.torch.blocks import PoolUsage
from specbench.backends.torch.caches import KVCache, NoKVCache, PreallocatedKVCache, make_cache
from specbench.backends.torch.forward import RaggedForward
from specbench.backends.torch.head_scorers import AnyHeadScorer, HeadBatch, HeadScorer
from specbench.backends.torch.pools import (
    BatchedCache,
    KVPool,
    PooledCache,
    PoolKind,
    RequestTokens,
    supports_pool,
)
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardOutput, ForwardRequest
from specbench.decoding.tree import tree_mask, tree_positions
from specbench.options import CacheKind

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter


class BatchedModel:
    """Opens a scorer for every request, and makes their passes together where the model can.

    Args:
        scorer: Of the loaded model; its settings are those of all.
        pool: Of its keys and values, or of those of the model it is a cheaper form of; ``None`` for a cache that grows
            for each request: passes are then made one by one.
        exact: Whether rows have to be those of a pass of one's own up to the rounding of the weights, as a target's
            have, and a drafter's have not. Where layers round what they are given to bytes, only the same bits are.

    Attributes:
        why_not_batched: Why passes are made one by one, in a sentence; ``None`` if they are not.
    """

    def __init__(self, scorer: Scorer, pool: KVPool | None, *, exact: bool = True) -> None:
        self._scorer, self.pool = scorer, pool
        self.why_not_batched: str | None
        if pool is None:
            self.why_not_batched = "Every request has a cache of its own, which grows."
            return
        self._forward = RaggedForward(scorer.model, scorer.way)
        if exact and scorer.rounding == torch.int8 and not self._forward.is_row_invariant(pool):
            self.why_not_batched = (
                "Its layers round what they are given to bytes, which makes much of a sum's last bit, and not all of"
                " its passes are native ones."
            )
        else:
            self.why_not_batched = scorer.why_not_batchable(pool.kind)

    def open(self, shared: KVCache | None = None) -> Scorer:
        """A scorer for one more request.

        Args:
            shared: What the request's target holds, for a form of it that drafts on that; ``None`` for its own.
        """
        cache = shared
        if cache is None:
            cache = (
                make_cache("dynamic", self._scorer.model.config) if self.pool is None else self.pool.slot()
            )
        batch = self if self.why_not_batched is None else None
        return self._scorer.twin(cache, batch, shares=shared is not None)

    @property
    def loaded(self) -> Scorer:
        return self._scorer

    @torch.inference_mode()
    def score(self, asked: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        """One pass of all that is asked, see ``decoding.protocols.Batch``."""
        assert self.pool is not None
        scorers = [cast("Scorer", each.scorer) for each in asked]
        for scorer, each in zip(scorers, asked, strict=True):
            scorer.require(each)
        feeds = [_feed(scorer, each) for scorer, each in zip(scorers, asked, strict=True)]
        order = sorted(range(len(feeds)), key=lambda i: feeds[i].part.slot.place)
        tokens: list[int] = []
        wanted: list[int] = []
        fed: dict[int, slice] = {}
        given: dict[int, slice] = {}
        for i in order:
            first, rows = len(tokens), feeds[i].rows
            tokens += feeds[i].tokens
            fed[i] = slice(first, len(tokens))
            given[i] = slice(len(wanted), len(wanted) + rows)
            wanted += range(len(tokens) - rows, len(tokens))
        layers = sorted({layer for each in asked for layer in each.layers})
        device = self._scorer.device
        ids, places = torch.tensor([tokens], device=device), torch.tensor(wanted, device=device)
        held = [feed.part.slot.length for feed in feeds]
        try:
            made = self._forward(
                ids, BatchedCache(self.pool, [feeds[i].part for i in order], device), places, layers
            )
            found = []
            for i, (scorer, each) in enumerate(zip(scorers, asked, strict=True)):
                hidden = None
                if each.layers and made.hidden is not None:
                    hidden = made.hidden[fed[i]][:, [layers.index(layer) for layer in each.layers]]
                found.append(ForwardOutput(scorer.fit(made.logits[given[i]]), hidden))
        except BaseException:
            for feed, length in zip(feeds, held, strict=True):
                feed.part.slot.rollback(length)
            raise
        for scorer, each in zip(scorers, asked, strict=True):
            scorer.mark_read(each)
        return found


class _Feed(NamedTuple):
    """What one request brings to a pass, and how many of its rows are wanted, counted from the end."""

    tokens: list[int]
    part: RequestTokens
    rows: int


def _feed(scorer: Scorer, asked: ForwardRequest) -> _Feed:
    """What a pass feeds, by what the scorer holds."""
    slot = cast("PooledCache", scorer.cache)
    context, drafted, held = asked.context, asked.tokens, slot.length
    lacking = list(context[held:])
    left = list(drafted[max(0, held - len(context)) :])
    tokens = lacking + left
    if asked.parents is None:
        rows = len(drafted) + 1 if asked.rows is None else asked.rows
        return _Feed(tokens, RequestTokens(slot, range(held, held + len(tokens))), rows)
    past, end = len(context) - 1, held + len(tokens)
    before = range(held, past)  # of the context, in front of its last token
    cpu = torch.device("cpu")
    seen = np.tri(len(before), end, held, dtype=np.bool_)
    tree = tree_mask(past, asked.parents, end, cpu)[0, 0].numpy()
    positions = [*before, *tree_positions(past, asked.parents, cpu)[0].tolist()[max(0, held - past) :]]
    rows = len(tokens) - len(before) if asked.rows is None else asked.rows
    return _Feed(
        tokens, RequestTokens(slot, positions, np.concatenate([seen, tree[max(0, held - past) :]])), rows
    )


_AnyScorer = TypeVar("_AnyScorer", Scorer, AnyHeadScorer)


class RequestFactory:
    """Opens what a request needs of its own: a scorer of the target, and a drafter with its scorers.

    Keys and values lie in one pool for each model, whose passes are then made together. Where a target was loaded with
    a cache that is no pool's (``--cache none``, ``--bit-exact``), every request gets one of that kind, and passes are
    made one by one. Those of an int8 or int4 target have to be the same to the bit: where they are in a pool as well,
    they are made together all the same.

    Args:
        target: The model of all requests.
        tokens: Positions there is room for in each pool; ``None`` for caches that grow, one for each request.
        requests: How many there are at a time.
        kind: Of the pools.
    """

    def __init__(self, target: Scorer, tokens: int | None, requests: int, kind: PoolKind = "paged") -> None:
        self._target = target
        self._requests, self._kind = requests, kind
        self._models: dict[Scorer, BatchedModel] = {}
        self._heads: dict[AnyHeadScorer, HeadBatch] = {}
        self._pool: KVPool | None = None  # of the target, and of those that share its keys and values
        kept = isinstance(target.cache, PreallocatedKVCache)
        own = isinstance(target.cache, NoKVCache) or (kept and target.rounding != torch.int8)
        self._tokens = None if own else tokens
        if kept and self.why_not_batched is not None:
            self._tokens = self._pool = None
            self._models.clear()

    def open(self, drafter: Drafter) -> tuple[Scorer, Drafter]:
        """A scorer of the target, and a drafter like this one.

        Raises:
            UsageError: A pool has no room for a request, or cannot hold a model's layers.
        """
        scorer = self._opened(self._target, None)

        def scorer_like(loaded: _AnyScorer) -> _AnyScorer:
            if isinstance(loaded, HeadScorer):
                return self._opened_head(loaded)
            shares = loaded.cache is self._target.cache
            return self._opened(loaded, scorer.cache if shares else None)

        return scorer, drafter.fork(scorer_like)

    @property
    def why_not_batched(self) -> str | None:
        """Why the target's passes are made one by one, in a sentence; ``None`` if they are not."""
        batched = self._batched(self._target)
        return "Every request has a cache of its own." if batched is None else batched.why_not_batched

    @property
    def use(self) -> PoolUsage | None:
        """How much of the target's pool is taken; ``None`` without one."""
        return None if self._pool is None else self._pool.use

    def release(self) -> None:
        """Give the pools' memory back, when all requests have ended: the collector may take long to find them."""
        for batched in self._models.values():
            if batched.pool is not None:
                batched.pool.release()

    def _opened(self, loaded: Scorer, shared: KVCache | None) -> Scorer:
        batched = self._batched(loaded)
        if batched is not None:
            return batched.open(shared)
        return loaded.twin(shared or _cache_like(loaded), shares=shared is not None)

    def _opened_head(self, loaded: AnyHeadScorer) -> AnyHeadScorer:
        return loaded.twin(
            None if self._tokens is None else self._heads.setdefault(loaded, HeadBatch(loaded))
        )

    def _batched(self, loaded: Scorer) -> BatchedModel | None:
        if self._tokens is None:
            return None
        if loaded not in self._models:
            own, pool = loaded is self._target, self._pool
            if own or loaded.cache is not self._target.cache:
                config = loaded.model.config
                fits = supports_pool(config)
                pool = KVPool(config, self._kind, self._tokens, self._requests) if fits else None
            self._models[loaded] = BatchedModel(loaded, pool, exact=own)
            if own:
                self._pool = pool
        return self._models[loaded]


def _cache_like(loaded: Scorer) -> KVCache:
    """An empty one of that kind; those of fixed shapes belong to one scorer."""
    kinds: dict[type, CacheKind] = {PreallocatedKVCache: "preallocated", NoKVCache: "none"}
    return make_cache(kinds.get(type(loaded.cache), "dynamic"), loaded.model.config)
