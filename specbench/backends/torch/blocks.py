"""Blocks of a pool: their allocation, their buffers, and views of a request's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from specbench.base.errors import UsageError


@dataclass(frozen=True)
class PoolUsage:
    """How much of a pool is taken."""

    block: int  # positions in a block
    blocks: int  # blocks of the pool
    used: int  # blocks that some request holds
    shared: int  # blocks that several requests hold
    peak: int  # the most blocks that were used at a time
    bytes: int  # of all buffers, or what they had before they were released; 0 before anything is in them


@dataclass
class BlockTable:
    """The blocks of a request, in the order of its positions."""

    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(
        default_factory=list
    )  # of all tokens up to the end of each of the first full blocks


class BlockAllocator:
    """Allocator of ``count`` blocks of ``size`` positions; of their content it knows only the tokens.

    Attributes:
        free: Unused blocks.
        peak: The most blocks in use at a time.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free, self.peak = count, 0
        self._holders = np.zeros(count, dtype=np.int32)
        self._digests: dict[int, bytes] = {}  # of blocks that others may share
        self._by_digest: dict[bytes, int] = {}

    @property
    def shared(self) -> int:
        """Blocks that several requests hold."""
        return int((self._holders > 1).sum())

    def extend(self, table: BlockTable, start: int, end: int) -> list[tuple[int, int]] | None:
        """Prepare the blocks of a request for writing its positions from ``start`` to ``end``.

        Returns:
            Pairs of blocks (source, copy) that the caller must copy, since other requests still use the source (copy on
                write). ``None`` if there are too few free blocks; nothing has changed then.

        Raises:
            UsageError: There are not as many.
        """
        blocks, needed = table.blocks, -(-end // self.size)
        if needed > self.count:
            raise UsageError(
                f"A request of {end} tokens is longer than the KV cache pool: {self.count * self.size} tokens.",
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
                self._unpublish(blocks[i])
        while len(blocks) < needed:
            blocks.append(self._take(blocks[-1] if blocks else None))
        del table.digests[start // self.size :]
        self.peak = max(self.peak, self.count - self.free)
        return copied

    def truncate(self, table: BlockTable, length: int) -> None:
        """Keep the blocks of the first ``length`` positions."""
        kept = -(-length // self.size)
        for block in table.blocks[kept:]:
            self._release(block)
        del table.blocks[kept:]
        del table.digests[length // self.size :]

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Let others share the full blocks of a request's first tokens."""
        for i in range(len(table.digests), len(tokens) // self.size):
            digest = self._digest(table, tokens, i)
            table.digests.append(digest)
            block = table.blocks[i]
            if digest not in self._by_digest and block not in self._digests:
                self._by_digest[digest] = block
                self._digests[block] = digest

    def share_prefix(self, table: BlockTable, tokens: Sequence[int]) -> int:
        """Let a new request share the published blocks of the longest prefix of ``tokens``; return their positions."""
        for i in range(len(tokens) // self.size):
            digest = self._digest(table, tokens, i)
            block = self._by_digest.get(digest)
            if block is None:
                break
            self._holders[block] += 1
            table.blocks.append(block)
            table.digests.append(digest)
        return len(table.blocks) * self.size

    def _digest(self, table: BlockTable, tokens: Sequence[int], index: int) -> bytes:
        """Return the digest of all tokens up to the end of a block, given those of the blocks before it."""
        before = table.digests[index - 1] if index else b""
        part = np.array(tokens[index * self.size : (index + 1) * self.size], dtype=np.int64)
        return blake2b(before + part.tobytes(), digest_size=16).digest()

    def _take(self, before: int | None) -> int:
        """Take a free block: the one after ``before`` if it is free, since neighbors are read without a copy."""
        block = -1 if before is None else before + 1
        if not 0 < block < self.count or self._holders[block]:
            block = self._best_free_block()
        self._holders[block] = 1
        self.free -= 1
        return block

    def _best_free_block(self) -> int:
        """Return the middle of the longest free stretch, so that the requests on both sides can grow."""
        free = np.flatnonzero(self._holders == 0)
        edges = np.flatnonzero(np.diff(free) > 1) + 1
        starts, ends = np.r_[0, edges], np.r_[edges, len(free)]
        longest = int((ends - starts).argmax())
        first = int(free[starts[longest]])
        return first if first == 0 else first + int(ends[longest] - starts[longest]) // 2

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._unpublish(block)
            self.free += 1

    def _unpublish(self, block: int) -> None:
        """Let nobody share a block any more, as its content changes."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._by_digest[digest]


class KVBuffers:
    """The keys and values of one layer for all requests, [1, heads, positions, size], allocated at the first write.

    ``window`` is the number of positions that a token sees, including its own; ``None`` for all.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, positions: int, window: int | None) -> None:
        self._positions, self.window = positions, window
        self.is_allocated = False

    def write(self, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write entries, [1, heads, tokens, size], at indices, [tokens]."""
        self.allocate(keys, values)
        indices = indices.to(keys.device)  # layers of a model may be on several devices
        self.keys.index_copy_(2, indices, keys)
        self.values.index_copy_(2, indices, values)

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Allocate the buffers for entries like these, unless they are there."""
        if not self.is_allocated:
            self.is_allocated = True
            for name, like in (("keys", keys), ("values", values)):
                # The system backs zeros with memory when something else is written there.
                shape = (1, like.shape[1], self._positions, like.shape[3])
                setattr(self, name, like.new_zeros(shape))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy entries between indices, [n] each."""
        if self.is_allocated:
            for entries in (self.keys, self.values):
                source, target = source.to(entries.device), target.to(entries.device)
                entries.index_copy_(2, target, entries.index_select(2, source))


class ContextId:
    """Identifies a context: every new one has another object, which weak references can have as their key."""


KVView = Callable[[Tensor], Tensor]
"""From a layer's buffers, [1, heads, positions in the pool, size], to what a request attends to of them."""


def view_of(indices: Tensor, device: torch.device) -> KVView:
    """Return the view of one request's positions at indices on the CPU, [count], at least one."""
    first, count = int(indices[0]), len(indices)
    if bool((indices[1:] - indices[:-1] == 1).all()):
        return lambda entries: entries.narrow(2, first, count)
    indices = indices.to(device)
    return lambda entries: entries.index_select(2, indices.to(entries.device))
