"""Keys and values of many requests in buffers of fixed size, and how one forward pass uses them.

A pool is divided into blocks of positions; a request has a list of blocks (``BlockAllocator``). With short blocks
little allocated memory is unused, and requests with a common prefix share blocks. A request in a single long block
attends to it without copying. The states of recurrent layers are not in the buffers: each request has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from specbench.backends.torch.attention import LONGEST_PASS, NativeSpan, RaggedKV, Span
from specbench.backends.torch.blocks import (
    BlockAllocator,
    BlockTable,
    ContextId,
    KVBuffers,
    KVView,
    PoolUsage,
    view_of,
)
from specbench.backends.torch.cache_layers import PreallocatedLayer
from specbench.backends.torch.caches import KVCache, cache_arguments
from specbench.backends.torch.recurrent import is_recurrent, keep_states
from specbench.backends.torch.recurrent_cache import MOST_SPARE, JointRecurrentCache, RecurrentCache
from specbench.base.errors import UsageError
from specbench.kernels import Buffers, Request, can_attend

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


PAGE = 16
"""Positions in a block."""


class KVPool:
    """The keys and values of many requests, in buffers of fixed size for ``tokens`` positions.

    ``buffers`` has ``None`` for a layer that has no keys, or uses those of other layers. ``context_id`` becomes a new
    object when a request starts a new context; the parts of the model are then looked up again.

    Args:
        config: The model's, for which ``supports_pool`` is true.
        size: Positions in a block.

    Raises:
        UsageError: There is no room for one block.
    """

    def __init__(self, config: PretrainedConfig, tokens: int, size: int = PAGE) -> None:
        if tokens < size:
            raise UsageError(f"A pool of {tokens} tokens has no room for a request.", "Give it more memory.")
        self.blocks = BlockAllocator(tokens // size, size)
        self.config, self.is_recurrent = config, is_recurrent(config)
        self.requests: WeakSet[PooledCache] = WeakSet()
        self.buffers: list[KVBuffers | None] = []
        for layer in DynamicCache(config=config).layers:
            window = getattr(layer, "sliding_window", None)
            attends = isinstance(layer, CacheLayerMixin)
            self.buffers.append(KVBuffers(self.blocks.count * size, window) if attends else None)
        self.context_id = ContextId()
        self._released_bytes = 0

    @property
    def use(self) -> PoolUsage:
        """How much of it is taken now."""
        blocks = self.blocks
        size = self._bytes() or self._released_bytes
        return PoolUsage(
            blocks.size, blocks.count, blocks.count - blocks.free, blocks.shared, blocks.peak, size
        )

    def _bytes(self) -> int:
        states = [state for cache in self.requests if cache.recurrent for state in cache.recurrent.tensors()]
        return sum({id(state): state.nbytes for state in states}.values()) + sum(
            buffers.keys.nbytes + buffers.values.nbytes
            for buffers in self.buffers
            if buffers and buffers.is_allocated
        )

    def release(self) -> None:
        """Free the buffers, when no request uses any block; they are allocated again if necessary."""
        self._released_bytes = self._bytes() or self._released_bytes
        for buffers in self.buffers:
            if buffers is not None and buffers.is_allocated:
                buffers.is_allocated = False
                del buffers.keys, buffers.values


def supports_pool(config: PretrainedConfig) -> bool:
    """Return whether a pool can hold the layers of a model of this configuration."""
    recurrent, plain = is_recurrent(config), (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    return all(
        recurrent if isinstance(layer, LinearAttentionCacheLayerMixin) else type(layer) in plain
        for layer in DynamicCache(config=config).layers
    )


class CacheSize(NamedTuple):
    """The memory of a model's cache, in bytes.

    Attributes:
        token: Of a token's keys and values; at least 1.
        request: Of a request's recurrent states, with those after each token of a draft.
    """

    token: int
    request: int

    def tokens(self, memory: int, requests: int) -> int:
        """Return how many tokens some requests may have together in this much memory."""
        return (memory - requests * self.request) // self.token


@torch.inference_mode()
def cache_size(model: PreTrainedModel) -> CacheSize:
    """Return the memory of a model's cache, found by reading a token."""
    recurrent = is_recurrent(model.config)
    cache = RecurrentCache(model.config) if recurrent else DynamicCache(config=model.config)
    untyped = cast("Any", model)
    ids = torch.zeros(1, 1, dtype=torch.long, device=untyped.get_input_embeddings().weight.device)
    keep_states(model)
    untyped(input_ids=ids, **cache_arguments(cache, model.config))
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    token = sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in layers)
    states = 0
    if isinstance(cache, RecurrentCache):
        cache.end_forward()
        states = sum(state.nbytes for state in cache.tensors())
    return CacheSize(max(1, token), states * (1 + MOST_SPARE))


class _PooledLayer(PreallocatedLayer):
    """One request's part of a layer, for a forward pass over this request alone. The buffers are the pool's."""

    def __init__(self, owner: PooledCache, buffers: KVBuffers) -> None:
        super().__init__()
        self._owner, self.buffers = ref(owner), buffers  # no cycle, which only the collector would free
        self.is_sliding = buffers.window is not None
        self.sliding_window = buffers.window

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        end = self.used + key_states.shape[-2]
        owner = self._owner()
        assert owner is not None
        owner.require(end)
        device = key_states.device
        indices = owner.indices(0, end)
        self.buffers.write(indices[self.used :].to(device), key_states, value_states)
        self.used = end
        view = view_of(indices, device)
        return view(self.buffers.keys), view(self.buffers.values)


class PooledCache(KVCache):
    """The part of a pool that belongs to one request. A cheaper form of the model can share it.

    Positions after ``own_len`` were computed by a form that shares the cache, after the cache was emptied during a
    draft; the model computes them again. A new request shares what others have read of its prefix.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool, self._own = pool, 0
        self._table = BlockTable()
        self.layers = [None if buffers is None else _PooledLayer(self, buffers) for buffers in pool.buffers]
        self._own_layers = [layer for layer in self.layers if layer is not None]
        self.held = self._new_cache()
        pool.requests.add(self)

    def _new_cache(self) -> Cache:
        if self.pool.is_recurrent:
            cache = self.recurrent = RecurrentCache(self.pool.config)
            cache.layers = [own or layer for own, layer in zip(self.layers, cache.layers, strict=True)]
            return cache
        return Cache(layers=[DummyLayer() if layer is None else layer for layer in self.layers])

    @property
    def length(self) -> int:
        return self._own_layers[0].used if self.recurrent is None else self.recurrent.length

    @property
    def own_len(self) -> int:
        return min(self._own, self.length)

    @property
    def takes_trees(self) -> bool:
        slides = any(layer.is_sliding for layer in self._own_layers)
        return self.recurrent is None and not slides

    def last_entries(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        own = self.layers[layer]
        assert own is not None
        view = view_of(self.indices(max(0, own.used - count), own.used), own.buffers.keys.device)
        return view(own.buffers.keys), view(own.buffers.values)

    def model_kwargs(self) -> dict[str, Any]:
        return cache_arguments(self.held, self.pool.config)

    @torch.inference_mode()
    def reserve(self, end: int, context: Sequence[int] | None = None, shared: int = 0) -> bool:
        blocks, taken = self.pool.blocks, 0
        if context is not None and self.own_len < self.length:
            self.rollback(self.own_len)
        if context is not None and not self._table.blocks and self.recurrent is None:
            taken = blocks.share_prefix(self._table, context[:shared])
            self._set_length(taken)
        copied = None
        try:
            copied = blocks.extend(self._table, self.length, max(end, self.length))
        finally:
            if copied is None and taken:
                self.reset()
        if copied is None:
            return False
        within = torch.arange(blocks.size)
        for source, target in copied:
            for layer in self._own_layers:
                layer.buffers.move(source * blocks.size + within, target * blocks.size + within)
        return True

    def require(self, end: int) -> None:
        """Reserve the positions up to ``end``; raise ``UsageError`` if they are not free."""
        if not self.reserve(end):
            raise UsageError(
                f"The pool is full: {self.pool.blocks.free} of its {self.pool.blocks.count} blocks are free.",
                "Give it more memory, or decode fewer requests at a time.",
            )

    def advance(self, layer: int, count: int) -> None:
        """Note that entries of ``count`` more positions of a layer are written."""
        own = self.layers[layer]
        assert own is not None
        own.used += count

    def _set_length(self, length: int) -> None:
        self._own = length
        for layer in self._own_layers:
            layer.used = length

    def publish(self, tokens: Sequence[int]) -> None:
        self._own = self.length
        self.pool.blocks.publish(self._table, tokens)

    def indices(self, start: int, end: int) -> Tensor:
        """Return where positions are in the pool's buffers, [end - start], on the CPU."""
        positions = np.arange(start, end)
        size = self.pool.blocks.size
        blocks = np.array(self._table.blocks, dtype=np.int64)
        return torch.from_numpy(blocks[positions // size] * size + positions % size)

    @torch.inference_mode()
    def gather(self, start: int, positions: Sequence[int]) -> None:
        indices = self.indices(0, max(start + len(positions), *(position + 1 for position in positions)))
        source, target = indices[list(positions)], indices[start : start + len(positions)]
        for layer in self._own_layers:
            layer.buffers.move(source, target)

    def _cut(self, length: int) -> None:
        for layer in self._own_layers:
            layer.rollback(length)
        self._truncate()

    def _truncate(self) -> None:
        self._own = self.own_len
        self.pool.blocks.truncate(self._table, self.length)

    @torch.inference_mode()
    def reset(self) -> None:
        if not self._table.blocks:
            return
        self._set_length(0)
        self.held, self.pool.context_id = self._new_cache(), ContextId()
        self._truncate()


class RequestTokens(NamedTuple):
    """The tokens of one request in a forward pass."""

    cache: PooledCache  # the request's
    positions: Sequence[int]  # of the tokens in the context
    # of a tree, what each attends to: bool [tokens, cached positions and tokens]; None for a chain
    seen: np.ndarray[Any, Any] | None = None

    @property
    def end(self) -> int:
        """Positions cached after the forward pass."""
        return self.cache.length + len(self.positions)


class BatchedCache:
    """The keys and values of several requests, as the cache of one forward pass over their rows, one after the other.

    ``parts`` are their tokens, with memory reserved; ``position_ids`` is [1, rows].
    """

    def __init__(self, pool: KVPool, parts: Sequence[RequestTokens], device: torch.device) -> None:
        self._pool, self._parts, self._device = pool, parts, device
        self.context_id = pool.context_id
        self._cache: Cache | None = None
        positions = [position for part in parts for position in part.positions]
        self.position_ids = torch.tensor([positions], device=device)

    @cached_property
    def _indices(self) -> Tensor:
        indices = [part.cache.indices(part.cache.length, part.end) for part in self._parts]
        return torch.cat(indices).to(self._device)

    @cached_property
    def layers(self) -> list[Any]:
        """One for each layer of the model."""
        windows = {buffers.window for buffers in self._pool.buffers if buffers is not None}
        spans = {window: self._spans(window) for window in windows}
        return [
            DummyLayer()
            if buffers is None
            else _BatchedLayer(buffers, self._indices, self._parts, i, spans[buffers.window])
            for i, buffers in enumerate(self._pool.buffers)
        ]

    def extend(
        self, layers: Sequence[int], empty: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Request]] | None:
        """Count the rows as cached, whose keys and values the caller writes, as ``LayerGroup.extended`` does.

        Returns:
            Keys and values of each layer, [1, heads, positions of the pool, head size], and what each request attends
                to; ``None``, and nothing has changed, where layers are of other kinds or dtypes.
        """
        used = [buffers for layer in layers if (buffers := self._pool.buffers[layer]) is not None]
        if len(used) < len(layers) or empty.dtype not in Buffers.dtypes:
            return None
        for buffers in used:
            buffers.allocate(empty, empty)
        if any(buffers.keys.dtype not in Buffers.dtypes for buffers in used):
            return None
        requests = [_native_request(part) for part in self._parts]
        for part in self._parts:
            for layer in layers:
                part.cache.advance(layer, len(part.positions))
        return [(buffers.keys, buffers.values) for buffers in used], requests

    def model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments that pass it to a ``transformers`` model."""
        rows = self._indices.shape[0]
        cache = self._cache = Cache(layers=self.layers)
        recurrent = [states for part in self._parts if (states := part.cache.recurrent) is not None]
        if recurrent:
            counts = [len(part.positions) for part in self._parts]
            cache = self._cache = JointRecurrentCache(self.layers, recurrent, counts)
        arguments = cache_arguments(cache, self._pool.config)
        if "past_key_values" not in arguments:  # without attention there are no positions and no masks
            return arguments
        return {
            **arguments,
            "position_ids": self.position_ids,
            # Not read by the attention used here; it keeps transformers from making a mask.
            "attention_mask": torch.ones(1, 1, rows, 1, dtype=torch.bool, device=self._device),
        }

    def after_forward(self) -> None:
        """Note that the pass has been made."""
        if isinstance(self._cache, JointRecurrentCache):
            self._cache.end_forward()

    def _spans(self, window: int | None) -> list[tuple[Span | NativeSpan, KVView | None]]:
        """Return how the rows of each request attend, and to what of a layer's buffers; ``None`` for all of them.

        Neighbors with few rows each attend in one call if it is native.
        """
        same = [buffers for buffers in self._pool.buffers if buffers is not None and buffers.window == window]
        natively = window is None and all(
            buffers.is_allocated and can_attend(buffers.keys, buffers.values) for buffers in same
        )
        spans: list[tuple[Span | NativeSpan, KVView | None]] = []
        begin = 0
        for few, group in groupby(self._parts, lambda part: len(part.positions) <= LONGEST_PASS):
            parts = [*group]
            if natively and few:
                rows = slice(begin, begin + sum(len(part.positions) for part in parts))
                spans.append((NativeSpan(rows, [_native_request(part) for part in parts]), None))
                begin = rows.stop
                continue
            for part in parts:
                rows = slice(begin, begin + len(part.positions))
                spans.append(self._span(part, rows, window))
                begin = rows.stop
        return spans

    def _span(self, part: RequestTokens, rows: slice, window: int | None) -> tuple[Span, KVView]:
        past, end, count = part.cache.length, part.end, len(part.positions)
        first = 0 if window is None else max(0, past - window + 1)  # that any of its tokens sees
        view = view_of(part.cache.indices(first, end), self._device)
        if part.seen is None and (count == 1 or count > LONGEST_PASS):
            return Span(rows, None, window or 0), view
        mask = torch.from_numpy(_seen(part, first, end, window))[None, None].to(self._device)
        return Span(rows, mask), view


def _native_request(part: RequestTokens) -> Request:
    seen = None if part.seen is None else torch.from_numpy(part.seen)
    indices = part.cache.indices(0, part.end).int()
    return Request(len(part.positions), part.cache.length, seen, indices)


def _seen(part: RequestTokens, first: int, end: int, window: int | None) -> np.ndarray[Any, Any]:
    """Return what each token sees of the positions from ``first`` to ``end``, bool [tokens, end - first]."""
    if part.seen is not None:
        return part.seen[:, first:end]
    own, keys = np.array(part.positions)[:, None], np.arange(first, end)
    seen: np.ndarray[Any, Any] = keys <= own
    return seen if window is None else seen & (keys > own - window)


class _BatchedLayer(PreallocatedLayer):
    """One layer of a ``BatchedCache``, which has the masks. The buffers are the pool's, and no position is cached."""

    def __init__(
        self,
        buffers: KVBuffers,
        indices: Tensor,
        parts: Sequence[RequestTokens],
        layer: int,
        spans: Sequence[tuple[Span | NativeSpan, KVView | None]],
    ) -> None:
        super().__init__()
        self._buffers, self._indices, self._parts, self._layer = buffers, indices, parts, layer
        self._spans, self._views = [span for span, _ in spans], [view for _, view in spans]

    def update(  # type: ignore[override]  # what stands for the tensors of one request
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[RaggedKV, RaggedKV]:
        buffers = self._buffers
        buffers.write(self._indices, key_states, value_states)
        for part in self._parts:
            part.cache.advance(self._layer, len(part.positions))
        keys, values = (
            [entries if view is None else view(entries) for view in self._views]
            for entries in (buffers.keys, buffers.values)
        )
        ragged = RaggedKV(self._spans, keys, values)
        return ragged, ragged
