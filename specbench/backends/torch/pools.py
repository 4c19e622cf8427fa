"""Keys and values of many requests in buffers of one size: who holds what, and how a pass over several reads it.

A pool is cut up into blocks of positions, and a request holds a list of them (``Blocks``). *Paged*: blocks are short,
so that little is held and not used, and requests that begin alike share those they have in common. *Slotted*: a block
is as long as the longest request, and each holds one; then attention takes neighbours in one call, as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
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

from specbench.backends.torch.kernels.attention import LONGEST_PASS, NativeSpan, Ragged, Span
from specbench.backends.torch.kernels.native import Request, attends
from specbench.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PoolKind = Literal["slotted", "paged"]

PAGE = 16
"""Positions in a block of a paged pool."""

_MOST_WASTE = 2
"""Requests attend in one call as long as that makes no more than so many times the scores."""


@dataclass(frozen=True)
class PoolUse:
    """How much of a pool is taken.

    Attributes:
        block: Positions in a block.
        blocks: How many there are.
        used: Of these, those that some request holds.
        shared: Of these, those that several hold.
        peak: The most that were used at a time.
        bytes: Of the whole pool's buffers, or what they had before they were released; 0 before anything is in them.
    """

    block: int
    blocks: int
    used: int
    shared: int
    peak: int
    bytes: int


class Table:
    """The blocks that a request holds, in the order of its positions.

    Attributes:
        blocks: Their numbers.
        known: Of the first ones, a digest of all tokens up to the end of each: what they hold will not change.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.known: list[bytes] = []


class Blocks:
    """Which blocks are whose. Knows nothing of what they hold but the tokens.

    Args:
        count: How many there are.
        size: Positions in each.
        most: The most that one request may hold; ``None`` for all.

    Attributes:
        count, size, most: The same.
        free: How many nobody holds.
        peak: The most that were held at a time.
    """

    def __init__(self, count: int, size: int, most: int | None = None) -> None:
        self.count, self.size, self.most = count, size, min(count, most or count)
        self.free, self.peak = count, 0
        self._holders = np.zeros(count, dtype=np.int32)
        self._digests: dict[int, bytes] = {}  # of blocks that others may share
        self._found: dict[bytes, int] = {}  # the other way round

    @property
    def shared(self) -> int:
        """How many several hold."""
        return int((self._holders > 1).sum())

    def extend(self, table: Table, start: int, end: int) -> list[tuple[int, int]] | None:
        """Let a request write its positions from ``start`` to ``end``.

        Returns:
            Which blocks are to be copied, from where and where to, for others go on reading what is changed now (copy
            on write); ``None`` if there are not as many free ones, and nothing has changed.

        Raises:
            UsageError: More than one request may hold.
        """
        blocks, needed = table.blocks, -(-end // self.size)
        if needed > self.most:
            raise UsageError(
                f"A request of {end} tokens needs more than the pool has for one: {self.most * self.size} tokens.",
                "Give the pool more memory, or the request a shorter prompt or output.",
            )
        written = range(start // self.size, min(needed, len(blocks)))
        shared = [i for i in written if self._holders[blocks[i]] > 1]
        if len(shared) + max(0, needed - len(blocks)) > self.free:
            return None
        copied = []
        for i in written:
            if i in shared:
                old = blocks[i]
                blocks[i] = self._take(None)
                self._release(old)
                if i * self.size < start:
                    copied.append((old, blocks[i]))
            else:
                self._forget(blocks[i])
        while len(blocks) < needed:
            blocks.append(self._take(blocks[-1] if blocks else None))
        del table.known[start // self.size :]
        self.peak = max(self.peak, self.count - self.free)
        return copied

    def truncate(self, table: Table, length: int) -> None:
        """Keep the blocks of the first ``length`` positions."""
        kept = -(-length // self.size)
        for block in table.blocks[kept:]:
            self._release(block)
        del table.blocks[kept:]
        del table.known[length // self.size :]

    def publish(self, table: Table, tokens: Sequence[int]) -> None:
        """Let others share the whole blocks of a request's first tokens."""
        if self.most == 1:
            return
        for i in range(len(table.known), len(tokens) // self.size):
            digest = self._digest(table, tokens, i)
            table.known.append(digest)
            block = table.blocks[i]
            if digest not in self._found and block not in self._digests:
                self._found[digest] = block
                self._digests[block] = digest

    def adopt(self, table: Table, tokens: Sequence[int]) -> int:
        """Let a request that holds nothing share the blocks of the longest beginning of ``tokens`` that is there.

        Returns:
            The positions in these.
        """
        for i in range(len(tokens) // self.size):
            digest = self._digest(table, tokens, i)
            block = self._found.get(digest)
            if block is None:
                break
            self._holders[block] += 1
            table.blocks.append(block)
            table.known.append(digest)
        return len(table.blocks) * self.size

    def _digest(self, table: Table, tokens: Sequence[int], index: int) -> bytes:
        """Of all tokens up to the end of a block, those of the blocks before it being known."""
        before = table.known[index - 1] if index else b""
        part = np.array(tokens[index * self.size : (index + 1) * self.size], dtype=np.int64)
        return blake2b(before + part.tobytes(), digest_size=16).digest()

    def _take(self, before: int | None) -> int:
        """A free block: the one behind ``before`` if it can be, for neighbours are read without copying them."""
        block = -1 if before is None else before + 1
        if not 0 < block < self.count or self._holders[block]:
            block = self._lonely()
        self._holders[block] = 1
        self.free -= 1
        return block

    def _lonely(self) -> int:
        """A free block with many free ones behind it, and before it."""
        free = np.flatnonzero(self._holders == 0)
        if self.most == 1:
            return int(free[0])  # those that are held stay close together
        edges = np.flatnonzero(np.diff(free) > 1) + 1
        starts, ends = np.r_[0, edges], np.r_[edges, len(free)]
        longest = int((ends - starts).argmax())
        first = int(free[starts[longest]])
        return first if first == 0 else first + int(ends[longest] - starts[longest]) // 2

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._forget(block)
            self.free += 1

    def _forget(self, block: int) -> None:
        """Its content changes: nobody else shares it from now on."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._found[digest]


class _Store:
    """The keys and values of one layer for all requests, [1, heads, positions, size], made when the first ones come.

    Args:
        positions: In the whole pool.
        window: How many positions a token sees, its own among them; ``None`` for all.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, positions: int, window: int | None) -> None:
        self._positions, self.window = positions, window
        self.made = False

    def write(self, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put entries, [1, heads, tokens, size], in their places, [tokens]."""
        self.make(keys, values)
        places = places.to(keys.device)  # of a model that is spread over several, each layer has its own
        self.keys.index_copy_(2, places, keys)
        self.values.index_copy_(2, places, values)

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make the buffers for entries like these, unless they are there."""
        if not self.made:
            self.made = True
            for name, like in (("keys", keys), ("values", values)):
                # Zeros are given memory when something else is written there.
                shape = (1, like.shape[1], self._positions, like.shape[3])
                setattr(self, name, like.new_zeros(shape))

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the entries in some places, [n], to others."""
        if self.made:
            for entries in (self.keys, self.values):
                source, target = source.to(entries.device), target.to(entries.device)
                entries.index_copy_(2, target, entries.index_select(2, source))

    def clean(self, first: int, end: int) -> None:
        """Take what is no number out of a stretch that others read behind their end: 0 · NaN is NaN."""
        if self.made:
            for entries in (self.keys, self.values):
                stretch = entries[:, :, first:end]
                if not stretch.sum().isfinite():
                    stretch.zero_()


class Mark:
    """Another object is a sign of another context."""


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
        self.blocks = Blocks(tokens // size, size, 1 if kind == "slotted" else None)
        self.stores: list[_Store | None] = []  # None for a layer that reads the keys of others
        for layer in DynamicCache(config=config).layers:
            if not _is_attention(layer):
                raise UsageError(
                    f"A pool cannot hold layers of the kind {type(layer).__name__}.",
                    "Decode the prompts one by one with this model.",
                )
            window = getattr(layer, "sliding_window", None)
            self.stores.append(
                None if type(layer) is DummyLayer else _Store(self.blocks.count * size, window)
            )
        self.mark = Mark()
        self._let_go = 0

    @property
    def use(self) -> PoolUse:
        """How much of it is taken now."""
        blocks = self.blocks
        size = self._bytes() or self._let_go
        return PoolUse(
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

    def slot(self) -> Slot:
        """Room for the keys and values of one request; it holds none yet."""
        return Slot(self)


def fits_pools(config: PretrainedConfig) -> bool:
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


class _SlotLayer(CacheLayerMixin):
    """One request's part of a layer, for passes of its own.

    Attributes:
        used: Positions held.
    """

    is_croppable = True

    def __init__(self, slot: Slot, store: _Store) -> None:
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
        reach = _reach(places, device)
        return reach(self.store.keys), reach(self.store.values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


class Slot:
    """What one request holds of a pool: a ``KVCache``. A cheaper form of the model may share it.

    Attributes:
        pool: Whose it is.
        own: So many of the first positions the model itself has read. Where a form that shares the slot has read
            others, as it does when the slot was emptied under its draft, the model reads them again.
    """

    prefill_apart = False
    widest_pass = None

    def __init__(self, pool: KVPool) -> None:
        self.pool, self.own = pool, 0
        self._table, self._end = Table(), 0  # room was made up to there
        self.layers = [None if store is None else _SlotLayer(self, store) for store in pool.stores]
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

    def model_arguments(self) -> dict[str, Any]:
        return {"past_key_values": self._cache, "use_cache": True}

    def after_pass(self) -> None:
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
            adopted = blocks.adopt(self._table, beginning)
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
                layer.store.clean(first, first + self._end)
        self._hold(0)
        self._end = 0
        self._shorten()
        self._cache, self.pool.mark = self._as_cache(), Mark()  # signs of another context


class Part(NamedTuple):
    """What one request brings to a pass.

    Attributes:
        slot: Its keys and values.
        positions: Of its tokens in the context.
        seen: Of a tree, what each attends to: bool [tokens, positions held and tokens]; ``None`` for a chain.
    """

    slot: Slot
    positions: Sequence[int]
    seen: np.ndarray[Any, Any] | None = None

    @property
    def end(self) -> int:
        """Positions held behind the pass."""
        return self.slot.length + len(self.positions)


class Joined:
    """The keys and values of several requests, as the cache of one pass whose rows are theirs one behind the other.

    Args:
        pool: Theirs.
        parts: What they bring, by the places of their slots; there is room for it.
        device: Of the pass.

    Attributes:
        position_ids: [1, rows].
        mark: See ``KVPool``.
    """

    def __init__(self, pool: KVPool, parts: Sequence[Part], device: torch.device) -> None:
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
            else _JoinedLayer(store, self._places, self._parts, i, spans[store.window])
            for i, store in enumerate(self._pool.stores)
        ]

    def lengthened(
        self, layers: Sequence[int], dtypes: Sequence[torch.dtype], empty: torch.Tensor
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[Request]] | None:
        """Hold the rows from now on, whose keys and values the caller writes; compare ``caches.Held``.

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

    def model_arguments(self) -> dict[str, Any]:
        """The keyword arguments that hand it to a ``transformers`` model."""
        rows = self._places.shape[0]
        return {
            "past_key_values": Cache(layers=self.layers),
            "use_cache": True,
            "position_ids": self.position_ids,
            # Handed through to where nobody reads it: nothing is made in its place.
            "attention_mask": torch.ones(1, 1, rows, 1, dtype=torch.bool, device=self._device),
        }

    def _groups(self, natively: bool) -> list[list[Part]]:
        """Those that attend in one call: neighbours in the pass with few rows each where that is a native one, else
        neighbours in the pool, where it wastes little to see them as equally long."""
        groups: list[list[Part]] = []
        for part in self._parts:
            few = groups and max(len(each.positions) for each in (groups[-1][-1], part)) <= LONGEST_PASS
            if few and (natively or self._may_join(groups[-1], part)):
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups

    def _may_join(self, group: Sequence[Part], part: Part) -> bool:
        if self._pool.kind != "slotted" or part.slot.place != group[-1].slot.place + 1:
            return False
        together = [*group, part]
        rows, ends = [len(each.positions) for each in together], [each.end for each in together]
        scores = sum(row * end for row, end in zip(rows, ends, strict=True))
        return len(together) * max(rows) * max(ends) <= _MOST_WASTE * scores

    def _spans(self, window: int | None) -> list[tuple[Span | NativeSpan, _Reach | None]]:
        """How the rows of each group attend, and to what of a layer's buffers; ``None`` for all of them."""
        stores = [store for store in self._pool.stores if store is not None and store.window == window]
        natively = window is None and all(
            store.made and attends(store.keys, store.values) for store in stores
        )
        found: list[tuple[Span | NativeSpan, _Reach | None]] = []
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

    def _span(self, group: Sequence[Part], rows: slice, window: int | None) -> tuple[Span, _Reach]:
        if len(group) > 1:
            return self._together(group, rows, window)
        part = group[0]
        past, end, count = part.slot.length, part.end, len(part.positions)
        first = _first_seen(part, window)
        reach = _reach(part.slot.places(first, end), self._device)
        whole = past == 0 and count > LONGEST_PASS and (window is None or window >= end)
        if part.seen is None and (count == 1 or whole):
            return Span(rows, 1, None), reach
        mask = torch.from_numpy(_seen(part, first, end, window))[None, None].to(self._device)
        return Span(rows, 1, mask), reach

    def _together(self, group: Sequence[Part], rows: slice, window: int | None) -> tuple[Span, _Reach]:
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
        reach = _Reach(len(group), group[0].slot.place * step + first, last - first, step)
        spread = None if len(places) == len(group) * width else torch.tensor(places, device=self._device)
        return Span(rows, len(group), torch.from_numpy(mask).to(self._device), spread), reach


def _request(part: Part) -> Request:
    """Its rows, as native passes and native attention know them."""
    seen = None if part.seen is None else torch.from_numpy(part.seen)
    return Request(len(part.positions), part.slot.length, seen, part.slot.places(0, part.end).int())


def _first_seen(part: Part, window: int | None) -> int:
    """The first position that any of its tokens sees."""
    return 0 if window is None else max(0, part.slot.length - window + 1)


def _seen(part: Part, first: int, end: int, window: int | None) -> np.ndarray[Any, Any]:
    """What each of its tokens sees of the positions from ``first`` to ``end``, bool [tokens, end - first]."""
    if part.seen is not None:
        return part.seen[:, first:end]
    own, keys = np.array(part.positions)[:, None], np.arange(first, end)
    return keys <= own if window is None else (keys <= own) & (keys > own - window)


class _Reach:
    """Which positions of a layer's buffers some requests attend to.

    Args:
        requests: How many they are.
        first: The place of the first position of the first one.
        count: How many positions.
        step: Between the places of two requests.
        places: Instead of all that, those of one request whose blocks do not stand side by side.
    """

    def __init__(
        self, requests: int, first: int, count: int, step: int, places: torch.Tensor | None = None
    ) -> None:
        self._requests, self._first, self._count, self._step = requests, first, count, step
        self._places = places

    def __call__(self, entries: torch.Tensor) -> torch.Tensor:
        """[1, heads, positions in the pool, size] -> [requests, heads, count, size]."""
        if self._places is not None:
            return entries.index_select(2, self._places.to(entries.device))
        _, heads, _, size = entries.shape
        _, of_heads, of_positions, of_size = entries.stride()
        shape = (self._requests, heads, self._count, size)
        steps = (self._step * of_positions, of_heads, of_positions, of_size)
        return entries.as_strided(shape, steps, self._first * of_positions)


def _reach(places: torch.Tensor, device: torch.device) -> _Reach:
    """Of one request, by the places of its positions on the CPU, [count]; there is at least one."""
    first, count = int(places[0]), len(places)
    if bool((places[1:] - places[:-1] == 1).all()):
        return _Reach(1, first, count, 0)
    return _Reach(1, first, count, 0, places.to(device))


class _JoinedLayer(CacheLayerMixin):
    """One layer of what several requests hold."""

    is_sliding = False  # masks are made here

    def __init__(
        self,
        store: _Store,
        places: torch.Tensor,
        parts: Sequence[Part],
        index: int,
        spans: Sequence[tuple[Span | NativeSpan, _Reach | None]],
    ) -> None:
        CacheLayerMixin.__init__(self)
        self._store, self._places, self._parts, self._index = store, places, parts, index
        self._spans, self._reaches = [span for span, _ in spans], [reach for _, reach in spans]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The store makes its buffers itself."""

    def update(  # type: ignore[override]  # what stands for the tensors of one request
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Ragged, Ragged]:
        store = self._store
        store.write(self._places, key_states, value_states)
        for part in self._parts:
            part.slot.lengthen(self._index, len(part.positions))
        keys, values = (
            [each if reach is None else reach(each) for reach in self._reaches]
            for each in (store.keys, store.values)
        )
        ragged = Ragged(self._spans, keys, values)
        return ragged, ragged

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
