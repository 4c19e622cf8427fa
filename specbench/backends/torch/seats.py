"""Scorers and drafters for many requests, of models that are loaded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from specbench.backends.torch.batch import BatchedModel
from specbench.backends.torch.blocks import PoolUse
from specbench.backends.torch.caches import KVCache, NoKVCache, PreallocatedKVCache, make_cache
from specbench.backends.torch.head_scorers import AnyHeadScorer, HeadBatch, HeadScorer
from specbench.backends.torch.pools import KVPool, PoolKind, fits_pools
from specbench.backends.torch.scorer import Scorer
from specbench.options import CacheKind

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter

_AnyScorer = TypeVar("_AnyScorer", Scorer, AnyHeadScorer)


class Seats:
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
        if kept and self.why_apart is not None:
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
    def why_apart(self) -> str | None:
        """Why the target's passes are made one by one, in a sentence; ``None`` if they are not."""
        batched = self._batched(self._target)
        return "Every request has a cache of its own." if batched is None else batched.why_apart

    @property
    def use(self) -> PoolUse | None:
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
                fits = fits_pools(config)
                pool = KVPool(config, self._kind, self._tokens, self._requests) if fits else None
            self._models[loaded] = BatchedModel(loaded, pool, exact=own)
            if own:
                self._pool = pool
        return self._models[loaded]


def _cache_like(loaded: Scorer) -> KVCache:
    """An empty one of that kind; those of fixed shapes belong to one scorer."""
    kinds: dict[type, CacheKind] = {PreallocatedKVCache: "preallocated", NoKVCache: "none"}
    return make_cache(kinds.get(type(loaded.cache), "dynamic"), loaded.model.config)
