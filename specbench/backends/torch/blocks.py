"""Which blocks of a pool are taken, their buffers, and the places that a request reaches in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbench.base.errors import UsageError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class PoolUsage:
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


class BlockTable:
    """The blocks that a request holds, in the order of its positions.

    Attributes:
        blocks: Their numbers.
        known: Of the first ones, a digest of all tokens up to the end of each: what they hold will not change.
    """

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.known: list[bytes] = []


class BlockAllocator:
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

    def extend(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]] | None:
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

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the blocks of the first ``length`` positions."""
        kept = -(-length // self.size)
        for block in table.blocks[kept:]:
            self._release(block)
        del table.blocks[kept:]
        del table.known[length // self.size :]

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
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

    def share_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
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

    def _digest(self, table: BlockTable, tokens: Sequence[int], index: int) -> bytes:
        """Of all tokens up to the end of a block, those of the blocks before it being known."""
        before = table.known[index - 1] if index else b""
        part = np.array(tokens[index * self.size : (index + 1) * self.size], dtype=np.int64)
        return blake2b(before + part.tobytes(), digest_size=16).digest()

    def _take(self, before: int | None) -> int:
        """A free block: the one behind ``before`` if it can be, for neighbors are read without copying them."""
        block = -1 if before is None else before + 1
        if not 0 < block < self.count or self._holders[block]:
            block = self._best_free_block()
        self._holders[block] = 1
        self.free -= 1
        return block

    def _best_free_block(self) -> int:
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


class KVBuffers:
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

    def zero_nonfinite(self, first: int, end: int) -> None:
        """Take what is no number out of a stretch that others read behind their end: 0 · NaN is NaN."""
        if self.made:
            for entries in (self.keys, self.values):
                stretch = entries[:, :, first:end]
                if not stretch.sum().isfinite():
                    stretch.zero_()


class ContextId:
    """Another object is a sign of another context."""


class KVView:
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


def view_of(places: torch.Tensor, device: torch.device) -> KVView:
    """Of one request, by the places of its positions on the CPU, [count]; there is at least one."""
    first, count = int(places[0]), len(places)
    if bool((places[1:] - places[:-1] == 1).all()):
        return KVView(1, first, count, 0)
    return KVView(1, first, count, 0, places.to(device))
