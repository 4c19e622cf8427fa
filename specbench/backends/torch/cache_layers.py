"""Layers of keys and values that are written by index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from specbench.backends.torch.attention import LONGEST_PASS
from specbench.kernels import Buffers

INITIAL_CAPACITY = 256
_MIN_GROWTH = 256
_GROWTH_SHARE = 4
"""A growing layer gets ``_MIN_GROWTH`` spare positions, or this part of those it needs where that is more."""

SLIDING_SLACK = 256
"""Tokens a sliding-window layer keeps before its window, so that as many can be rolled back: the longest draft."""


@torch.inference_mode()
def gather(layers: Iterable[Any], start: int, positions: Sequence[int]) -> None:
    """Move entries, see ``KVCache.gather``, in layers that keep every position."""
    count = len(positions)
    # Often it is one, and an index by a number takes half the time.
    index = None if count == 1 else torch.tensor(positions)
    for layer in layers:
        if not isinstance(layer, DummyLayer):
            for entries in (layer.keys, layer.values):
                if index is None:
                    entries.select(2, start).copy_(entries.select(2, positions[0]))
                else:
                    entries.narrow(2, start, count).copy_(entries.index_select(2, index.to(entries.device)))


class PreallocatedLayer(CacheLayerMixin):
    """Keys and values of one full-attention layer, written by index.

    Buffers have shape [1, heads, capacity, head size], and their capacity doubles when they are full; a rollback only
    changes the length. Short forwards get keys and values up to a multiple of ``block`` positions; those after the used
    ones are finite and must be masked.
    """

    is_sliding = False
    is_croppable = True
    dropped = 0  # positions before the first that the buffers hold
    keys: Any
    values: Any

    def __init__(self, block: int = 1) -> None:
        CacheLayerMixin.__init__(self)
        self.used = self.written = 0
        self.block = block

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(INITIAL_CAPACITY, self.block)
        self.keys, self.values = self._buffer(key_states, capacity), self._buffer(value_states, capacity)
        self.is_initialized = True

    def _buffer(self, states: Tensor, capacity: int) -> Tensor:
        return buffer_like(states, capacity)

    def _reserve(self, capacity: int) -> None:
        """Make sure that ``capacity`` positions fit, keeping the used ones."""
        if capacity <= self.keys.shape[-2]:
            return
        capacity = self._grown(capacity)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self._buffer(old, capacity)
            new[:, :, : self.used] = old[:, :, : self.used]
            setattr(self, name, new)

    def _grown(self, capacity: int) -> int:
        """Return the capacity of new buffers for this many positions."""
        return max(-(-capacity // self.block) * self.block, int(2 * self.keys.shape[-2]))

    def _append(self, key_states: Tensor, value_states: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[-2]
        self.extend(count)
        first = self.used - count
        self.keys[:, :, first : self.used] = key_states
        self.values[:, :, first : self.used] = value_states

    def extend(self, count: int) -> None:
        """Count more positions as used, which are still to be written."""
        self._reserve(self.used + count)
        self.used += count
        self.written = max(self.written, self.used)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._append(key_states, value_states)
        end = self._visible_len(self.used, key_states.shape[-2])
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _visible_len(self, used: int, queries: int) -> int:
        return used if queries > LONGEST_PASS else -(-used // self.block) * self.block

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._visible_len(self.used + query_length, query_length), 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1

    def repeat(self, length: int) -> None:
        """Grow to ``length`` positions by repeating them."""
        while self.used < length:
            count = min(self.used, length - self.used)
            self._append(self.keys[:, :, :count], self.values[:, :, :count])

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` positions."""
        if self.used > length:
            self.used = max(length, 0)

    def reset(self) -> None:
        if self.block > 1 and self.written:  # without blocks nothing is given out after the used positions
            zero_nonfinite(self, self.written)
        self.used = self.written = 0


class PreallocatedSlidingLayer(PreallocatedLayer):
    """The same for a layer that attends to the last ``window`` positions.

    The buffer contains the positions from ``dropped`` on. When it is full, many older positions are dropped together.
    The last ``SLIDING_SLACK`` positions and the window before them are never dropped, since they can still be rolled
    back.
    """

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.dropped = 0

    def _reserve(self, capacity: int) -> None:
        keep = self.sliding_window - 1 + SLIDING_SLACK
        if capacity > self.keys.shape[-2] and self.used > 2 * keep:
            first = self.used - keep
            for buffer in (self.keys, self.values):
                buffer[:, :, :keep] = buffer[:, :, first : self.used].clone()
            self.dropped += first
            capacity -= first
            self.used = keep
        super()._reserve(capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._append(key_states, value_states)
        first = max(0, self.used - (self.sliding_window - 1 + key_states.shape[-2]))
        return self.keys[:, :, first : self.used], self.values[:, :, first : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = min(self.get_seq_length(), self.sliding_window - 1)
        return visible + query_length, self.get_seq_length() - visible

    def get_seq_length(self) -> int:
        return self.dropped + self.used

    def get_max_length(self) -> int:
        return self.sliding_window

    def rollback(self, length: int) -> None:
        if length >= self.get_seq_length():
            return
        if self.dropped and length - self.dropped < self.sliding_window - 1:
            raise ValueError(f"cannot roll back to {length}: the window before it has been given up")
        self.used = length - self.dropped

    def reset(self) -> None:
        super().reset()
        self.dropped = 0


class GrowingLayer(PreallocatedLayer):
    """Replaces a ``DynamicLayer``: its buffers grow in steps, since they may hold long contexts.

    Attributes:
        expected: Positions that will be used soon: new buffers have them and those that growing adds.
    """

    expected = 0

    def _buffer(self, states: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = states.shape  # nothing is given out after the used positions
        return states.new_empty((batch, heads, capacity, size))

    def _grown(self, capacity: int) -> int:
        capacity = max(capacity, self.expected)
        return capacity + max(_MIN_GROWTH, capacity // _GROWTH_SHARE)


class GrowingSlidingLayer(GrowingLayer, PreallocatedSlidingLayer):
    """Replaces a ``DynamicSlidingWindowLayer``."""


def growing(layer: Any) -> Any:
    """Return the growing layer that replaces an empty layer of ``DynamicCache``; layers of other kinds as they are."""
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingSlidingLayer(layer.sliding_window)
    return layer


_INDEXED = (PreallocatedLayer, PreallocatedSlidingLayer, GrowingLayer, GrowingSlidingLayer)


class LayerGroup:
    """Layers of a cache that native passes extend together, and whose keys and values they find in ``buffers``."""

    def __init__(self, layers: Sequence[PreallocatedLayer]) -> None:
        self._held = [(layer, layer.keys, layer.dropped) for layer in layers]
        self._capacity = min(keys.shape[-2] + dropped for _, keys, dropped in self._held)
        dropped = [layer.dropped for layer in layers]
        self.buffers = Buffers(
            [(layer.keys, layer.values) for layer in layers], dropped if any(dropped) else None
        )

    @classmethod
    def extended(
        cls,
        layers: Sequence[Any],
        places: Sequence[int],
        tokens: int,
        empty: Tensor,
    ) -> LayerGroup | None:
        """Count ``tokens`` more positions of layers as used, which the caller writes.

        Args:
            layers: The layers of a cache.
            places: Indices of the layers.
            empty: Keys or values of no position, [1, heads, 0, head size], from which layers without buffers make them.

        Returns:
            ``None``, and nothing is extended, if layers are of other kinds or lengths, or have dtypes that native
                passes do not take.
        """
        own = [layers[place] for place in places]
        length = own[0].get_seq_length()
        if not all(type(layer) in _INDEXED and layer.get_seq_length() == length for layer in own):
            return None
        for layer in own:
            if not layer.is_initialized:
                layer.lazy_initialization(empty, empty)
        kinds = {entries.dtype for layer in own for entries in (layer.keys, layer.values)}
        if len(kinds) > 1 or not kinds.issubset(Buffers.dtypes):
            return None
        for layer in own:
            layer.extend(tokens)
        return cls(own)

    def extend(self, tokens: int) -> bool:
        """Count more positions as used; return ``False``, with nothing changed, if that needs other buffers."""
        first, _, before = self._held[0]
        length = first.used + before
        if length + tokens > self._capacity:
            return False
        for layer, keys, dropped in self._held:
            if layer.used + dropped != length or layer.keys is not keys:
                return False
        for layer, _, _ in self._held:
            layer.used += tokens
            if layer.written < layer.used:
                layer.written = layer.used
        return True


@torch.inference_mode()
def zero_nonfinite(layer: Any, length: int) -> None:
    """Set the first positions of a layer to zero if they have a NaN or infinity.

    Masked entries are multiplied by 0, and 0 · NaN is NaN.
    """
    for buffer in (layer.keys, layer.values):
        used = buffer[:, :, :length]
        if not used.sum().isfinite():
            used.zero_()


def buffer_like(states: Tensor, capacity: int) -> Tensor:
    """Return a buffer of zeros, [1, heads, capacity, head size]; ``states`` gives all but the capacity."""
    batch, heads, _, size = states.shape
    return states.new_zeros((batch, heads, capacity, size))
