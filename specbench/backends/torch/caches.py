"""Key/value caches that can be rolled back.

All caches follow one rule: a model is fed ``context[cache.length:]``, and after a step the cache keeps the first
``len(context) - 1`` tokens. ``rollback(length)`` keeps the first ``length`` positions *of each layer*, since a drafter
that uses the target's cache and only its first layers extends only these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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

from specbench.backends.torch.attention import KEY_BLOCK, LONGEST_PASS, is_folded
from specbench.backends.torch.cache_layers import (
    INITIAL_CAPACITY,
    PreallocatedLayer,
    PreallocatedSlidingLayer,
    gather,
    zero_nonfinite,
)
from specbench.backends.torch.recurrent import cache_argument, is_recurrent
from specbench.backends.torch.recurrent_cache import RecurrentCache, running
from specbench.base.errors import UsageError
from specbench.options import CacheKind as CacheKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


CACHE_KINDS: tuple[CacheKind, ...] = ("dynamic", "preallocated", "static", "none")
"""Those that are available on every device."""


class KVCache:
    """Keys and values of one context, batch size 1, of a model with this configuration.

    A scorer need not know which kind it is: it asks how many tokens there are (``length``), which passes read the rest
    (``passes``), whether it can go back to every place (``takes_trees``), and to go back (``rollback``).

    Attributes:
        kind: Which kind each of several scorers of the model gets; a static one can serve only one.
        reads_in_parts: Whether a long context may be read in several forward passes.
        separate_prefill: Whether the prompt needs its own forward pass, before tokens that can be rolled back.
        max_exact_tokens: Length up to which a position's sums do not depend on the forward pass; ``None`` if not known.
        held: The cache of ``transformers``.
        recurrent: Its recurrent layers; ``None`` without.
    """

    kind: CacheKind = "dynamic"
    reads_in_parts = True
    separate_prefill = False
    max_exact_tokens: int | None = None
    recurrent: RecurrentCache | None = None
    held: Cache

    @property
    def length(self) -> int:
        """Tokens that are cached: the model feeds ``context[length:]``."""
        raise NotImplementedError

    @property
    def own_len(self) -> int:
        """How many of these the model itself has read; a cheaper form that shares the cache may have read the rest."""
        return self.length

    @property
    def takes_trees(self) -> bool:
        """Whether every layer keeps every position as it is, so that a forward pass may hold branches."""
        raise NotImplementedError

    def passes(self, context: int, draft: int, *, tree: bool) -> list[range]:
        """Return the forward passes that read a context and a draft, each as a range of tokens.

        Args:
            context, draft: Their lengths.
            tree: Whether the draft is a tree, whose pass begins with the context's last token.
        """
        passes, first, ends = list[range](), self.length, [context + draft]
        if first == 0 and draft and self.separate_prefill:
            ends = [context, *ends]
        elif tree and first < context - 1:
            ends = [context - 1, *ends]
        for end in ends:
            widest = end if first == 0 else self.max_exact_tokens or end
            passes += [range(place, min(end, place + widest)) for place in range(first, end, widest)]
            first = end
        return passes

    def reserve(self, end: int, context: Sequence[int] | None = None, shared: int = 0) -> bool:
        """Reserve the positions up to ``end`` for a forward pass, and return whether there is memory.

        Args:
            end: The tokens that are cached then.
            context: What the model reads; ``None`` for a cheaper form that shares the cache.
            shared: How many of the first tokens need not be read if others have read them.
        """
        return True

    def publish(self, tokens: Sequence[int]) -> None:
        """Note that the model itself has read a context that begins with these tokens."""

    def key_len(self, tokens: int) -> int:
        """Return how many positions attention gets in a forward pass."""
        return self.length + tokens

    def gather(self, start: int, positions: Sequence[int]) -> None:
        """Move the entries at these positions to ``start`` and after it, in every layer; only if trees are possible."""
        gather(self.held.layers, start, positions)

    def last_entries(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the last ``count`` keys and values of a layer, or all if it has fewer, [1, heads, positions, size]."""
        own: Any = self.held.layers[layer]
        end = getattr(own, "used", own.keys.shape[-2])
        kept = slice(max(0, end - count), end)
        return own.keys[:, :, kept], own.values[:, :, kept]

    def model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments that pass this cache to a ``transformers`` model."""
        return {"past_key_values": self.held, "use_cache": True}

    def expect(self, tokens: int) -> None:
        """Note that so many tokens will be read in several forward passes."""

    def set_prompt(self, tokens: int) -> None:
        """Note how many tokens of the context are its prompt."""
        if self.recurrent is not None:
            self.recurrent.set_prompt(tokens)

    def after_forward(self) -> None:
        """Note that a forward pass has just been made."""
        if self.recurrent is not None:
            self.recurrent.end_forward()

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens. Rolling back to 0 is ``reset``."""
        if self.recurrent is not None:
            length = self.recurrent.most_kept(length)
        if length <= 0 or self.length == 0:
            self.reset()
            return
        if self.recurrent is not None:
            self.recurrent.rollback(length)
        self._cut(length)

    def _cut(self, length: int) -> None:
        """Cut the layers with keys and values to this many tokens, at least one."""
        raise NotImplementedError

    def reset(self) -> None:
        """Empty the cache for a new context."""
        raise NotImplementedError


def make_cache(kind: CacheKind, config: PretrainedConfig) -> KVCache:
    """Make an empty cache for a model.

    For ``dynamic``, ``preallocated`` and ``bit-exact`` see ``BufferedKVCache``. ``static`` is for forwards with fixed
    tensor shapes, ``compiled`` for compiled forwards. ``none`` recomputes everything (the reference in tests).

    Raises:
        UsageError: The kind is unknown, or cannot hold this model's layers.
    """
    preallocated = partial(BufferedKVCache, kind="preallocated")
    made: dict[str, Callable[[PretrainedConfig], KVCache]] = {
        "dynamic": BufferedKVCache,
        "preallocated": preallocated,
        "static": StaticKVCache,
        "compiled": partial(StaticKVCache, compiled=True),
        "none": lambda _: NoKVCache(),
        "bit-exact": preallocated,
    }
    if kind not in made:
        raise UsageError(f"Cache kind {kind!r} is unknown.", f"Choose one of {', '.join(CACHE_KINDS)}.")
    return made[kind](config)


class NoKVCache(KVCache):
    """No cache: every forward pass feeds the whole context."""

    kind = "none"
    reads_in_parts = False
    length = 0
    takes_trees = False
    _prompt: int | None = None

    def gather(self, start: int, positions: Sequence[int]) -> None:
        pass

    def set_prompt(self, tokens: int) -> None:
        self._prompt = tokens

    def model_kwargs(self) -> dict[str, Any]:
        running.prompt = self._prompt
        return {"use_cache": False}

    def after_forward(self) -> None:
        running.clear()

    def reset(self) -> None:
        pass


class BufferedKVCache(KVCache):
    """Keys and values in buffers that grow, written by index; a rollback moves an offset.

    Recurrent layers store some states (``RecurrentCache``). A rollback to before these empties the cache.

    Args:
        config: The model's.
        kind: ``preallocated`` takes only layers of attention, and gives folded attention whole blocks of keys, whose
            unused positions it masks, so that sums do not depend on the forward pass.

    Raises:
        UsageError: The cache is to be preallocated, and layers are of other kinds.
    """

    def __init__(self, config: PretrainedConfig, kind: CacheKind = "dynamic") -> None:
        self.kind, self._config, self._block = kind, config, 1
        if kind == "preallocated":
            kinds = _layer_kinds(kind, config, DynamicLayer, DynamicSlidingWindowLayer)
            # Sliding windows begin anywhere, not at a block's edge.
            if is_folded(config) and DynamicSlidingWindowLayer not in kinds:
                self._block, self.max_exact_tokens = KEY_BLOCK, LONGEST_PASS
        self.reset()

    def reset(self) -> None:
        self.recurrent = RecurrentCache(self._config) if is_recurrent(self._config) else None
        self.separate_prefill = self.recurrent is not None or self._block > 1
        self.held: DynamicCache = self.recurrent or DynamicCache(config=self._config)
        self.held.layers = [self._indexed(layer) for layer in self.held.layers]
        self._arguments = cache_arguments(self.held, self._config)

    def _indexed(self, layer: Any) -> Any:
        """Return what replaces a layer of ``DynamicCache``; layers of other kinds stay as they are."""
        if type(layer) is DynamicLayer:
            return PreallocatedLayer(self._block)
        if type(layer) is DynamicSlidingWindowLayer:
            return PreallocatedSlidingLayer(layer.sliding_window)
        return layer

    @property
    def length(self) -> int:
        return int(self.held.get_seq_length())

    @property
    def takes_trees(self) -> bool:
        return all(type(layer) in (PreallocatedLayer, DummyLayer) for layer in self.held.layers)

    def key_len(self, tokens: int) -> int:
        end = self.length + tokens
        return end if tokens > LONGEST_PASS else -(-end // self._block) * self._block

    def model_kwargs(self) -> dict[str, Any]:
        return {**self._arguments}

    def after_forward(self) -> None:
        super().after_forward()
        if self.recurrent is None and not self.held.is_croppable:
            raise UsageError(
                "This model keeps a recurrent state that cannot be rolled back after a rejected draft.",
                "Choose a model of a family that docs/models.md lists.",
            )

    def expect(self, tokens: int) -> None:
        for layer in self.held.layers:
            if type(layer) is PreallocatedLayer:
                layer.expected = self.length + tokens

    def _cut(self, length: int) -> None:
        for layer in self.held.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.rollback(length)
            elif isinstance(layer, DynamicLayer) and layer.is_initialized and layer.get_seq_length() > length:
                # Recurrent states next to keys and values are rolled back already.
                has_states = isinstance(layer, LinearAttentionCacheLayerMixin)
                crop = DynamicLayer.crop if has_states else type(layer).crop
                crop(layer, length - layer.get_seq_length())


def cache_arguments(cache: Cache, config: PretrainedConfig) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward that pass it a cache."""
    attends = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    keyword = "past_key_values" if attends else cache_argument(config)
    return {keyword: cache, "use_cache": True}


def _layer_kinds(kind: CacheKind, config: PretrainedConfig, *allowed: type) -> list[type]:
    """Return the kinds of a model's layers; raise ``UsageError`` if this kind of cache cannot hold one."""
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    other = next((layer.__name__ for layer in kinds if layer not in (*allowed, DummyLayer)), None)
    if other is not None:
        raise UsageError(
            f"The {kind} cache cannot hold layers of the kind {other}.",
            "Use --cache dynamic for this model.",
        )
    return kinds


class _StaticLayer(PreallocatedLayer):
    """Keys and values of one layer of a ``StaticKVCache``, which knows where the next ones go."""

    def __init__(self, owner: StaticKVCache) -> None:
        super().__init__(INITIAL_CAPACITY)
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        capacity = self._owner.capacity
        self.keys, self.values = self._buffer(key_states, capacity), self._buffer(value_states, capacity)
        self.is_initialized = True

    def _grown(self, capacity: int) -> int:
        return capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._owner.slots, key_states)
        self.values.index_copy_(2, self._owner.slots, value_states)
        return self.keys, self.values

    def grow(self, capacity: int) -> None:
        """Move to buffers of this capacity, with all that was written."""
        if self.is_initialized:
            self.used = self.keys.shape[-2]
            self._reserve(capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.capacity, 0

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return self._owner.capacity

    def reset(self) -> None:
        """Do nothing: the owner's length counts."""


class StaticKVCache(KVCache):
    """A cache for forwards whose tensor shapes do not depend on the cached length (see ``GraphForward``).

    Every forward gets the whole buffers and a mask. The number of cached tokens is stored here, not on the device.

    Attributes:
        capacity: Tokens that fit; doubles when full.
        compiled: Whether short forwards over it are to be compiled.
        generation: Grows by 1 whenever the buffers move.
        slots: Where the current forward writes, a tensor on its device.

    Raises:
        UsageError: The model has layers without full attention.
    """

    length = 0
    takes_trees = True
    slots: Tensor

    def __init__(self, config: PretrainedConfig, *, compiled: bool = False) -> None:
        self.capacity, self.generation = INITIAL_CAPACITY, 0
        self.compiled = compiled
        kinds = _layer_kinds("static", config, DynamicLayer)
        self.held = Cache(
            layers=[_StaticLayer(self) if kind is DynamicLayer else DummyLayer() for kind in kinds]
        )

    def key_len(self, tokens: int) -> int:
        self.reserve(self.length + tokens)
        return self.capacity

    @torch.inference_mode()
    def reserve(self, end: int, context: Sequence[int] | None = None, shared: int = 0) -> bool:
        if end > self.capacity:
            while self.capacity < end:
                self.capacity *= 2
            self.generation += 1
            for layer in self.held.layers:
                if isinstance(layer, _StaticLayer):
                    layer.grow(self.capacity)
        return True

    def _cut(self, length: int) -> None:
        self.length = min(self.length, length)

    def reset(self) -> None:
        for layer in self.held.layers:
            if isinstance(layer, _StaticLayer) and layer.is_initialized:
                zero_nonfinite(layer, self.capacity)
        self.length = 0
        self.held = Cache(layers=self.held.layers)  # another object, as a sign of another context
