"""Layers of keys and values that are written by index, into buffers that grow in steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from specbench.backends.torch.attention import LONGEST_PASS
from specbench.kernels import Buffers

INITIAL_CAPACITY = 256
_MIN_GROWTH = 256
_GROWTH_SHARE = 4
"""New buffers have ``_MIN_GROWTH`` spare positions, or this part of those they need where that is more."""

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
    """Keys and values of one layer, written by index into buffers, [1, heads, capacity, head size].

    A rollback only changes the length. Short forwards get keys and values up to a multiple of ``block`` positions;
    those after the used ones are finite and must be masked.

    Attributes:
        used: Positions that the buffers hold.
        dropped: Positions before these.
        expected: Positions that will be used soon, for which new buffers have room.
    """

    is_sliding = False
    is_croppable = True
    dropped = expected = 0
    keys: Any
    values: Any

    def __init__(self, block: int = 1) -> None:
        CacheLayerMixin.__init__(self)
        self.used, self.block = 0, block

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        capacity = max(INITIAL_CAPACITY, self.block)
        self.keys, self.values = self._buffer(key_states, capacity), self._buffer(value_states, capacity)
        self.is_initialized = True

    def _buffer(self, states: Tensor, capacity: int) -> Tensor:
        """Return a buffer for entries like these: zeros, if positions after the used ones are given out."""
        batch, heads, _, size = states.shape
        make = states.new_empty if self.block == 1 else states.new_zeros
        return make((batch, heads, capacity, size))

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
        capacity = max(capacity, self.expected)
        capacity += max(_MIN_GROWTH, capacity // _GROWTH_SHARE)
        return -(-capacity // self.block) * self.block

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
        self.used = 0


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


_KINDS = (PreallocatedLayer, PreallocatedSlidingLayer)


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
    def extended(cls, layers: Sequence[Any], tokens: int, empty: Tensor) -> LayerGroup | None:
        """Count ``tokens`` more positions of layers as used, which the caller writes.

        ``None``, and nothing is extended, if layers are of other kinds or lengths, or have dtypes that native passes do
        not take. Layers without buffers make them like ``empty``, keys or values of no position.
        """
        length = layers[0].get_seq_length()
        if not all(type(layer) in _KINDS and layer.get_seq_length() == length for layer in layers):
            return None
        for layer in layers:
            if not layer.is_initialized:
                layer.lazy_initialization(empty, empty)
        kinds = {entries.dtype for layer in layers for entries in (layer.keys, layer.values)}
        if len(kinds) > 1 or not kinds.issubset(Buffers.dtypes):
            return None
        for layer in layers:
            layer.extend(tokens)
        return cls(layers)

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
