"""One loaded model for many requests: a scorer for each, and forward passes over all of them together.

The tokens of all requests are concatenated without padding: every linear layer reads its weights once for all of them,
and only attention is computed by request (``attention.RaggedKV``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch

from specbench.backends.torch.blocks import PoolUsage
from specbench.backends.torch.caches import KVCache, make_cache
from specbench.backends.torch.forward import RaggedForward, join_passes
from specbench.backends.torch.head_scorers import HeadBatch, HeadScorer
from specbench.backends.torch.pools import (
    PAGE,
    BatchedCache,
    KVPool,
    PooledCache,
    RequestTokens,
    supports_pool,
)
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardOutput, ForwardRequest
from specbench.decoding.tree import tree_rows

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter


class BatchedModel:
    """A loaded model with a scorer for every request, whose forward passes it runs together where the model can.

    Args:
        pool: Pool of the model's keys and values; for a cheaper form of a target, the target's pool.
        exact: Whether logits must equal those of separate forward passes up to the rounding of the weights, as a
            target's must; if layers quantize activations, they must be bitwise equal.

    Attributes:
        why_not_batched: Why forward passes are run one by one, as a sentence; ``None`` if they are not.
    """

    def __init__(self, scorer: Scorer, pool: KVPool, *, exact: bool = True) -> None:
        self.loaded, self.pool = scorer, pool
        self.why_not_batched: str | None
        self._forward = RaggedForward(scorer.model, type(scorer.forward))
        if exact and scorer.rounding == torch.int8 and not self._forward.is_row_invariant(pool):
            self.why_not_batched = (
                "Its layers quantize activations to bytes, and not all of its forward passes are native: a row's result"
                " may depend on other requests."
            )
        else:
            self.why_not_batched = scorer.why_not_batchable()

    def open(self, shared: KVCache | None = None) -> Scorer:
        """Return a scorer for one more request, on the cache of the request's target if it drafts on that."""
        batch = self if self.why_not_batched is None else None
        return self.loaded.clone_for(shared or PooledCache(self.pool), batch, shares=shared is not None)

    @torch.inference_mode()
    def score(self, requests: Sequence[ForwardRequest]) -> list[ForwardOutput]:
        """Run all forward passes in one, see ``decoding.protocols.Batch``."""
        scorers = [cast("Scorer", request.scorer) for request in requests]
        new = [
            i
            for i, (scorer, request) in enumerate(zip(scorers, requests, strict=True))
            if request.tokens and cast("PooledCache", scorer.cache).recurrent and not scorer.cache.length
        ]
        if new:  # the first pass keeps its last state alone, which is to be that before the draft
            before = self.score([requests[i]._replace(tokens=(), rows=1) for i in new])
            rest = [*requests]
            for i in new:
                length = len(rest[i].tokens)
                rest[i] = rest[i]._replace(rows=min(length, rest[i].rows or length))
            after = self.score(rest)
            for i, prompt in zip(new, before, strict=True):
                rows = requests[i].rows or len(requests[i].tokens) + 1
                after[i] = join_passes([prompt, after[i]], rows)
            return after
        for scorer, request in zip(scorers, requests, strict=True):
            scorer.require(request)
        ids: list[int] = []
        wanted: list[int] = []
        parts: list[RequestTokens] = []
        fed: list[slice] = []  # which of the rows are each request's
        counts: list[int] = []  # of its logits
        for scorer, request in zip(scorers, requests, strict=True):
            tokens, part, rows = _feed(scorer, request)
            fed.append(slice(len(ids), len(ids) + len(tokens)))
            ids += tokens
            wanted += range(len(ids) - rows, len(ids))
            parts.append(part)
            counts.append(rows)
        layers = sorted({layer for request in requests for layer in request.layers})
        device, lengths = self.loaded.device, [part.cache.length for part in parts]
        try:
            cache = BatchedCache(self.pool, parts, device)
            with self.loaded.watch_experts(any(request.counts_experts for request in requests)) as choices:
                made = self._forward(
                    torch.tensor([ids], device=device), cache, torch.tensor(wanted, device=device), layers
                )
            outputs = []
            for scorer, request, own, logits in zip(
                scorers, requests, fed, made.logits.split(counts), strict=True
            ):
                hidden = experts = None
                if request.layers and made.hidden is not None:
                    hidden = made.hidden[own][:, [layers.index(layer) for layer in request.layers]]
                if choices is not None and request.counts_experts:
                    experts = choices.read(own)
                outputs.append(ForwardOutput(scorer.fit(logits), hidden, experts))
        except BaseException:
            for part, length in zip(parts, lengths, strict=True):
                part.cache.rollback(length)
            raise
        for scorer, request in zip(scorers, requests, strict=True):
            scorer.mark_read(request)
        return outputs


def _feed(scorer: Scorer, request: ForwardRequest) -> tuple[list[int], RequestTokens, int]:
    """Return what a forward pass has to feed, given what is cached, and how many of its last rows are wanted."""
    cache = cast("PooledCache", scorer.cache)
    context, drafted, cached = request.context, request.tokens, cache.length
    missing = list(context[cached:])
    left = list(drafted[max(0, cached - len(context)) :])
    tokens = missing + left
    if request.parents is None:
        rows = len(drafted) + 1 if request.rows is None else request.rows
        return tokens, RequestTokens(cache, range(cached, cached + len(tokens))), rows
    past, end = len(context) - 1, cached + len(tokens)
    before = range(cached, past)  # positions of the context before its last token
    positions, mask = tree_rows(past, request.parents, end, torch.device("cpu"), max(0, cached - past))
    seen = np.concatenate([np.tri(len(before), end, cached, dtype=np.bool_), mask[0, 0].numpy()])
    rows = len(tokens) - len(before) if request.rows is None else request.rows
    return tokens, RequestTokens(cache, [*before, *positions[0].tolist()], seen), rows


_AnyScorer = TypeVar("_AnyScorer", Scorer, HeadScorer)


class RequestFactory:
    """Factory of the objects that each request needs: a scorer of the target, and a drafter with its scorers.

    The keys and values of a model are in one pool, and its forward passes are run together. If the target was loaded
    with a cache that cannot be pooled (none or bit-exact), every request gets its own cache of that kind and its own
    forward passes. An int8 or int4 target is pooled only if its logits stay bitwise equal.

    Args:
        tokens: Positions in each pool; ``None`` for a growing cache for each request.
        page: Positions in a block of a pool.
    """

    def __init__(self, target: Scorer, tokens: int | None, page: int = PAGE) -> None:
        self._target, self._page = target, page
        self._models: dict[Scorer, BatchedModel | None] = {}
        self._heads: dict[HeadScorer, HeadBatch] = {}
        self._pool: KVPool | None = None  # of the target, and of models that share its keys and values
        preallocated = target.cache.kind == "preallocated"
        unpooled = not target.cache.reads_in_parts or (preallocated and target.rounding != torch.int8)
        self._tokens = None if unpooled else tokens
        if preallocated and self.why_not_batched is not None:
            self._tokens = self._pool = None
            self._models.clear()

    def open(self, drafter: Drafter) -> tuple[Scorer, Drafter]:
        """Return a scorer of the target, and a drafter like this one.

        Raises:
            UsageError: A pool has no room for a request.
        """
        scorer = self._opened(self._target, None)

        def scorer_like(loaded: _AnyScorer) -> _AnyScorer:
            if isinstance(loaded, HeadScorer):
                batch = None if self._tokens is None else self._heads.setdefault(loaded, HeadBatch(loaded))
                return loaded.clone_for(batch, scorer.cache)
            shares = loaded.cache is self._target.cache
            return self._opened(loaded, scorer.cache if shares else None)

        return scorer, drafter.fork(scorer_like)

    @property
    def why_not_batched(self) -> str | None:
        """Why the target's forward passes are run one by one, as a sentence; ``None`` if they are not."""
        batched = self._batched(self._target)
        return "Every request has its own cache." if batched is None else batched.why_not_batched

    @property
    def use(self) -> PoolUsage | None:
        """How much of the target's pool is taken; ``None`` without one."""
        return None if self._pool is None else self._pool.use

    def release(self) -> None:
        """Free the pools' memory when all requests have ended, without waiting for the garbage collector."""
        for batched in self._models.values():
            if batched is not None:
                batched.pool.release()

    def _opened(self, loaded: Scorer, shared: KVCache | None) -> Scorer:
        batched = self._batched(loaded)
        if batched is not None:
            return batched.open(shared)
        own = shared or make_cache(loaded.cache.kind, loaded.model.config)
        return loaded.clone_for(own, shares=shared is not None)

    def _batched(self, loaded: Scorer) -> BatchedModel | None:
        if self._tokens is None:
            return None
        if loaded not in self._models:
            is_target, pool = loaded is self._target, self._pool
            if is_target or loaded.cache is not self._target.cache:
                config = loaded.model.config
                fits = supports_pool(config)
                pool = KVPool(config, self._tokens, self._page) if fits else None
            self._models[loaded] = None if pool is None else BatchedModel(loaded, pool, exact=is_target)
            if is_target:
                self._pool = pool
        return self._models[loaded]
