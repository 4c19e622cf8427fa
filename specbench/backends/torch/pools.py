"""Keys and values of many requests in buffers of one size: who holds what, and how a pass over several reads it.

A pool is cut into blocks of positions; a request holds a list of them (``BlockAllocator``). *Paged*: blocks are short,
so that little is held and not used, and requests that begin alike share those they have in common. *Slotted*: a block
is as long as the longest request, and each holds one; then attention takes neighbors in one call, as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import ref

import numpy as np
import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from specbench.backends.torch.blocks import (
    BlockAllocator,
    BlockTable,
    ContextId,
    KVBuffers,
    KVView,
    PoolUsage,
    view_of,
)
from specbench.backends.torch.kernels.attention import LONGEST_PASS, NativeSpan, RaggedKV, Span
from specbench.backends.torch.kernels.native import NativeRequest, supports_attention
from specbench.base.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


PoolKind = Literal["slotted", "paged"]

PAGE = 16
"""Positions in a block of a paged pool."""

_MOST_WASTE = 2
"""Requests attend in one call as long as that makes no more than so many times the scores."""


class KVPool:
    """The keys and values of many requests, in buffers that do not grow.

    Args:
        config: The model's.
        kind: See the module.
        tokens: Positions there is room for, in all; at least one block.
        slots: How many requests a slotted pool is for: each gets an equal stretch.

    Attributes:
        mark: Another object as soon as any request begins anew: what was looked up of a model is looked up again.

    Raises:
        UsageError: There is no room for a single block, or the model has layers that are no attention.
    """

    def __init__(self, config: PretrainedConfig, kind: PoolKind, tokens: int, slots: int = 1) -> None:
        size = PAGE if kind == "paged" else tokens // slots
        if size < 1 or tokens < size:
            raise UsageError(
                f"A pool of {tokens} tokens has no room for a request.",
                "Give it more memory, or fewer requests.",
            )
        self.kind = kind
        self.blocks = BlockAllocator(tokens // size, size, 1 if kind == "slotted" else None)
        self.stores: list[KVBuffers | None] = []  # None for a layer that reads the keys of others
        for layer in DynamicCache(config=config).layers:
            if not _is_attention(layer):
                raise UsageError(
                    f"A pool cannot hold layers of the kind {type(layer).__name__}.",
                    "Decode the prompts one by one with this model.",
                )
            window = getattr(layer, "sliding_window", None)
            self.stores.append(
                None if type(layer) is DummyLayer else KVBuffers(self.blocks.count * size, window)
            )
        self.mark = ContextId()
        self._let_go = 0

    @property
    def use(self) -> PoolUsage:
        """How much of it is taken now."""
        blocks = self.blocks
        size = self._bytes() or self._let_go
        return PoolUsage(
            blocks.size, blocks.count, blocks.count - blocks.free, blocks.shared, blocks.peak, size
        )

    def _bytes(self) -> int:
        return sum(store.keys.nbytes + store.values.nbytes for store in self.stores if store and store.made)

    def release(self) -> None:
        """Give the memory of the buffers back at once, when nobody holds anything; they are made anew if need be."""
        self._let_go = self._bytes() or self._let_go
        for store in self.stores:
            if store is not None and store.made:
                store.made = False
                del store.keys, store.values

    def slot(self) -> PooledCache:
        """Room for the keys and values of one request; it holds none yet."""
        return PooledCache(self)


def supports_pool(config: PretrainedConfig) -> bool:
    """Whether a pool can hold what a model of this configuration keeps of its context."""
    return all(_is_attention(layer) for layer in DynamicCache(config=config).layers)


def _is_attention(layer: object) -> bool:
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


@torch.inference_mode()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes that the keys and values of a token take, found by reading one."""
    cache, untyped = DynamicCache(config=model.config), cast("Any", model)
    ids = torch.zeros(1, 1, dtype=torch.long, device=untyped.get_input_embeddings().weight.device)
    untyped(input_ids=ids, past_key_values=cache, use_cache=True)
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in layers)


class _PooledLayer(CacheLayerMixin):
    """One request's part of a layer, for passes of its own.

    Attributes:
        used: Positions held.
    """

    is_croppable = True

    def __init__(self, slot: PooledCache, store: KVBuffers) -> None:
        CacheLayerMixin.__init__(self)
        self._slot, self.store = ref(slot), store  # nobody but the collector would find a circle
        self.used = 0
        self.is_sliding = store.window is not None
        self.sliding_window = store.window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The store makes its buffers itself."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.used + key_states.shape[-2]
        slot = self._slot()
        assert slot is not None
        slot.require(end)
        device = key_states.device
        places = slot.places(0, end)
        self.store.write(places[self.used :].to(device), key_states, value_states)
        self.used = end
        reach = view_of(places, device)
        return reach(self.store.keys), reach(self.store.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


class PooledCache:
    """What one request holds of a pool: a ``KVCache``. A cheaper form of the model may share it.

    Attributes:
        pool: Whose it is.
        own: So many of the first positions the model itself has read. Where a form that shares the slot has read
            others, as it does when the slot was emptied under its draft, the model reads them again.
    """

    separate_prefill = False
    max_exact_tokens = None

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.own = pool, 0
        self._table, self._end = BlockTable(), 0  # room was made up to there
        self.layers = [None if store is None else _PooledLayer(self, store) for store in pool.stores]
        self._held = [layer for layer in self.layers if layer is not None]
        self._cache = self._as_cache()

    def _as_cache(self) -> Cache:
        return Cache(layers=[DummyLayer() if layer is None else layer for layer in self.layers])

    @property
    def length(self) -> int:
        return self._held[0].used

    @property
    def takes_trees(self) -> bool:
        return not any(layer.is_sliding for layer in self._held)

    @property
    def place(self) -> int:
        """The number of its first block; slots that stand side by side attend together."""
        return self._table.blocks[0]

    def keys(self, tokens: int) -> int:
        return self.length + tokens

    def model_kwargs(self) -> dict[str, Any]:
        return {"past_key_values": self._cache, "use_cache": True}

    def after_forward(self) -> None:
        """``Scorer`` says who has read."""

    @torch.inference_mode()
    def reserve(self, end: int, beginning: Sequence[int] = ()) -> bool:
        """Make room for positions up to ``end`` in all; see ``Scorer.reserve``.

        Args:
            end: In tokens.
            beginning: Where nothing is held, what others have read of a context that begins so is held at once.
        """
        blocks, adopted = self.pool.blocks, 0
        if not self._table.blocks:
            adopted = blocks.share_prefix(self._table, beginning)
            self._hold(adopted)
        copied = None
        try:
            copied = blocks.extend(self._table, self.length, max(end, self.length))
        finally:
            if copied is None and adopted:
                self.reset()
        if copied is None:
            return False
        self._end = max(self._end, end)
        within = torch.arange(blocks.size)
        for source, target in copied:
            for layer in self._held:
                layer.store.move(source * blocks.size + within, target * blocks.size + within)
        return True

    def lengthen(self, layer: int, count: int) -> None:
        """So many entries have been written behind those of a layer."""
        held = self.layers[layer]
        assert held is not None
        held.used += count

    def _hold(self, length: int) -> None:
        self.own = length
        for layer in self._held:
            layer.used = length

    def publish(self, tokens: Sequence[int]) -> None:
        """Let others hold what was read here of a context that begins with these tokens, all read by the model."""
        self.pool.blocks.publish(self._table, tokens)

    def require(self, end: int) -> None:
        """Make room for positions up to ``end``.

        Raises:
            UsageError: There is none.
        """
        if not self.reserve(end):
            raise UsageError(
                f"The pool is full: {self.pool.blocks.free} of its {self.pool.blocks.count} blocks are free.",
                "Give it more memory, or fewer requests at a time.",
            )

    def places(self, start: int, end: int) -> torch.Tensor:
        """Where in the pool's buffers these positions are, [end - start], on the CPU."""
        positions = np.arange(start, end)
        size = self.pool.blocks.size
        blocks = np.array(self._table.blocks, dtype=np.int64)
        return torch.from_numpy(blocks[positions // size] * size + positions % size)

    @torch.inference_mode()
    def gather(self, start: int, positions: Sequence[int]) -> None:
        places = self.places(0, max(start + len(positions), *(position + 1 for position in positions)))
        source, target = places[list(positions)], places[start : start + len(positions)]
        for layer in self._held:
            layer.store.move(source, target)

    def rollback(self, length: int) -> None:
        if length <= 0:
            self.reset()
            return
        for layer in self._held:
            layer.used = min(layer.used, length)
        self._shorten()

    def _shorten(self) -> None:
        self.own = min(self.own, self.length)
        self.pool.blocks.truncate(self._table, self.length)

    @torch.inference_mode()
    def reset(self) -> None:
        if not self._table.blocks:
            return
        if self.pool.kind == "slotted":
            first = self.place * self.pool.blocks.size
            for layer in self._held:
                layer.store.zero_nonfinite(first, first + self._end)
        self._hold(0)
        self._end = 0
        self._shorten()
        self._cache, self.pool.mark = self._as_cache(), ContextId()  # signs of another context


class RequestTokens(NamedTuple):
    """What one request brings to a pass.

    Attributes:
        slot: Its keys and values.
        positions: Of its tokens in the context.
        seen: Of a tree, what each attends to: bool [tokens, positions held and tokens]; ``None`` for a chain.
    """

    slot: PooledCache
    positions: Sequence[int]
    seen: np.ndarray[Any, Any] | None = None

    @property
    def end(self) -> int:
        """Positions held behind the pass."""
        return self.slot.length + len(self.positions)


class BatchedCache:
    """The keys and values of several requests, as the cache of one pass whose rows are theirs one behind the other.

    Args:
        pool: Theirs.
        parts: What they bring, by the places of their slots; there is room for it.
        device: Of the pass.

    Attributes:
        position_ids: [1, rows].
        mark: See ``KVPool``.
    """

    def __init__(self, pool: KVPool, parts: Sequence[RequestTokens], device: torch.device) -> None:
        self._pool, self._parts, self._device = pool, parts, device
        self.mark = pool.mark
        positions = [position for part in parts for position in part.positions]
        self.position_ids = torch.tensor([positions], device=device)

    @cached_property
    def _places(self) -> torch.Tensor:
        places = [part.slot.places(part.slot.length, part.end) for part in self._parts]
        return torch.cat(places).to(self._device)

    @cached_property
    def layers(self) -> list[Any]:
        """One for each of the model."""
        windows = {store.window for store in self._pool.stores if store is not None}
        spans = {window: self._spans(window) for window in windows}
        return [
            DummyLayer()
            if store is None
            else _BatchedLayer(store, self._places, self._parts, i, spans[store.window])
            for i, store in enumerate(self._pool.stores)
        ]

    def lengthened(
        self, layers: Sequence[int], dtypes: Sequence[torch.dtype], empty: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[NativeRequest]] | None:
        """Hold the rows from now on, whose keys and values the caller writes; compare ``caches.LayerGroup``.

        Args:
            layers: In which they are held.
            dtypes: What keys and values may be.
            empty: Keys or values of no position, [1, heads, 0, head size], like those of which layers that have no
                buffers yet make them.

        Returns:
            Keys and values of each layer, [1, heads, positions of the pool, head size], and which of the places
            each request attends to; ``None``, and nothing has changed, where layers hold others.
        """
        stores = [
            store
            for layer in layers
            if (store := self._pool.stores[layer]) is not None and store.window is None
        ]
        if len(stores) < len(layers) or empty.dtype not in dtypes:
            return None
        for store in stores:
            store.make(empty, empty)
        if any(store.keys.dtype not in dtypes for store in stores):
            return None
        requests = [_request(part) for part in self._parts]
        for part in self._parts:
            for layer in layers:
                part.slot.lengthen(layer, len(part.positions))
        return [(store.keys, store.values) for store in stores], requests

    def model_kwargs(self) -> dict[str, Any]:
        """The keyword arguments that hand it to a ``transformers`` model."""
        rows = self._places.shape[0]
        return {
            "past_key_values": Cache(layers=self.layers),
            "use_cache": True,
            "position_ids": self.position_ids,
            # Handed through to where nobody reads it: nothing is made in its place.
            "attention_mask": torch.ones(1, 1, rows, 1, dtype=torch.bool, device=self._device),
        }

    def _groups(self, natively: bool) -> list[list[RequestTokens]]:
        """Those that attend in one call: neighbors in the pass with few rows each where that is a native one, else
        neighbors in the pool, where it wastes little to see them as equally long."""
        groups: list[list[RequestTokens]] = []
        for part in self._parts:
            few = groups and max(len(each.positions) for each in (groups[-1][-1], part)) <= LONGEST_PASS
            if few and (natively or self._may_join(groups[-1], part)):
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups

    def _may_join(self, group: Sequence[RequestTokens], part: RequestTokens) -> bool:
        if self._pool.kind != "slotted" or part.slot.place != group[-1].slot.place + 1:
            return False
        together = [*group, part]
        rows, ends = [len(each.positions) for each in together], [each.end for each in together]
        scores = sum(row * end for row, end in zip(rows, ends, strict=True))
        return len(together) * max(rows) * max(ends) <= _MOST_WASTE * scores

    def _spans(self, window: int | None) -> list[tuple[Span | NativeSpan, KVView | None]]:
        """How the rows of each group attend, and to what of a layer's buffers; ``None`` for all of them."""
        stores = [store for store in self._pool.stores if store is not None and store.window == window]
        natively = window is None and all(
            store.made and supports_attention(store.keys, store.values) for store in stores
        )
        found: list[tuple[Span | NativeSpan, KVView | None]] = []
        begin = 0
        for group in self._groups(natively):
            count = sum(len(part.positions) for part in group)
            rows = slice(begin, begin + count)
            begin += count
            if natively and len(group[0].positions) <= LONGEST_PASS:
                found.append((NativeSpan(rows, [_request(part) for part in group]), None))
            else:
                found.append(self._span(group, rows, window))
        return found

    def _span(self, group: Sequence[RequestTokens], rows: slice, window: int | None) -> tuple[Span, KVView]:
        if len(group) > 1:
            return self._together(group, rows, window)
        part = group[0]
        past, end, count = part.slot.length, part.end, len(part.positions)
        first = _first_seen(part, window)
        reach = view_of(part.slot.places(first, end), self._device)
        whole = past == 0 and count > LONGEST_PASS and (window is None or window >= end)
        if part.seen is None and (count == 1 or whole):
            return Span(rows, 1, None), reach
        mask = torch.from_numpy(_seen(part, first, end, window))[None, None].to(self._device)
        return Span(rows, 1, mask), reach

    def _together(
        self, group: Sequence[RequestTokens], rows: slice, window: int | None
    ) -> tuple[Span, KVView]:
        first = min(_first_seen(part, window) for part in group)
        last, width = max(part.end for part in group), max(len(part.positions) for part in group)
        mask = np.zeros((len(group), 1, width, last - first), dtype=np.bool_)
        mask[..., 0] = True  # rows that are there for the shape alone see something
        places: list[int] = []
        for i, part in enumerate(group):
            count = len(part.positions)
            mask[i, 0, :count, : part.end - first] = _seen(part, first, part.end, window)
            places += range(i * width, i * width + count)
        step = self._pool.blocks.size
        reach = KVView(len(group), group[0].slot.place * step + first, last - first, step)
        spread = None if len(places) == len(group) * width else torch.tensor(places, device=self._device)
        return Span(rows, len(group), torch.from_numpy(mask).to(self._device), spread), reach


def _request(part: RequestTokens) -> NativeRequest:
    """Its rows, as native passes and native attention know them."""
    seen = None if part.seen is None else torch.from_numpy(part.seen)
    return NativeRequest(len(part.positions), part.slot.length, seen, part.slot.places(0, part.end).int())


def _first_seen(part: RequestTokens, window: int | None) -> int:
    """The first position that any of its tokens sees."""
    return 0 if window is None else max(0, part.slot.length - window + 1)


def _seen(part: RequestTokens, first: int, end: int, window: int | None) -> np.ndarray[Any, Any]:
    """What each of its tokens sees of the positions from ``first`` to ``end``, bool [tokens, end - first]."""
    if part.seen is not None:
        return part.seen[:, first:end]
    own, keys = np.array(part.positions)[:, None], np.arange(first, end)
    return keys <= own if window is None else (keys <= own) & (keys > own - window)


class _BatchedLayer(CacheLayerMixin):
    """One layer of what several requests hold."""

    is_sliding = False  # masks are made here

    def __init__(
        self,
        store: KVBuffers,
        places: torch.Tensor,
        parts: Sequence[RequestTokens],
        index: int,
        spans: Sequence[tuple[Span | NativeSpan, KVView | None]],
    ) -> None:
        CacheLayerMixin.__init__(self)
        self._store, self._places, self._parts, self._index = store, places, parts, index
        self._spans, self._reaches = [span for span, _ in spans], [reach for _, reach in spans]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The store makes its buffers itself."""

    def update(  # type: ignore[override]  # what stands for the tensors of one request
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[RaggedKV, RaggedKV]:
        store = self._store
        store.write(self._places, key_states, value_states)
        for part in self._parts:
            part.slot.lengthen(self._index, len(part.positions))
        keys, values = (
            [each if reach is None else reach(each) for reach in self._reaches]
            for each in (store.keys, store.values)
        )
        ragged = RaggedKV(self._spans, keys, values)
        return ragged, ragged

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
