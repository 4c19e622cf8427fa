"""Key/value caches that can be rolled back.

One rule serves every cache: a model feeds ``context[cache.length:]``, and after a step the cache keeps the first
``len(context) - 1`` tokens. ``rollback(length)`` keeps the first ``min(length, own length)`` positions *of each layer*:
an early exit on the target's cache lengthens only the first layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from specbench.backends.torch.cache_layers import (
    FIRST_CAPACITY,
    GrowingLayer,
    PreallocatedLayer,
    PreallocatedSlidingLayer,
    buffer_like,
    drops_positions,
    gather,
    zero_nonfinite,
)
from specbench.backends.torch.kernels.attention import KEY_BLOCK, LONGEST_PASS, is_folded
from specbench.base.errors import UsageError
from specbench.options import CacheKind as CacheKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig


CACHE_KINDS: tuple[CacheKind, ...] = ("dynamic", "preallocated", "static", "none")
"""Those that hold on every device."""


class KVCache(Protocol):
    """What the loop asks of a cache. Batch size is 1 throughout."""

    @property
    def length(self) -> int:
        """Number of tokens held: the model feeds ``context[length:]``."""
        ...

    @property
    def separate_prefill(self) -> bool:
        """Whether the prompt needs a pass of its own before tokens that may be rolled back."""
        ...

    @property
    def max_exact_tokens(self) -> int | None:
        """Tokens up to which a position's sums do not depend on the pass it is computed in; ``None``: not known."""
        ...

    @property
    def takes_trees(self) -> bool:
        """Whether every layer keeps every position as it is, so that a pass may hold several branches."""
        ...

    def keys(self, tokens: int) -> int:
        """Positions that attention is handed in a pass of so many tokens."""
        ...

    def gather(self, start: int, positions: Sequence[int]) -> None:
        """Have the entries at these positions stand from ``start`` on, in every layer; where trees are taken."""
        ...

    def model_kwargs(self) -> dict[str, Any]:
        """The keyword arguments that hand this cache to a ``transformers`` model."""
        ...

    def after_forward(self) -> None:
        """A pass has just been made on this cache."""
        ...

    def rollback(self, length: int) -> None:
        """Keep at most the first ``length`` tokens. Rolling back to 0 is ``reset``."""
        ...

    def reset(self) -> None:
        """Empty the cache for a new context."""
        ...


def make_cache(kind: CacheKind, config: PretrainedConfig) -> KVCache:
    """A new, empty cache for a model of this configuration.

    Args:
        kind: ``dynamic`` grows by concatenation (``transformers``' DynamicCache), ``preallocated`` writes by index into
            buffers that double when full, ``static`` does so in passes of fixed shapes, ``compiled`` in compiled ones,
            ``none`` recomputes everything (the reference in tests).
        config: The model's. If its attention is ``kernels.attention``'s, a preallocated cache hands keys and values
            out in whole blocks, which that attention masks.

    Raises:
        UsageError: The kind is unknown, or cannot hold this model's layers.
    """
    if kind == "dynamic":
        return DynamicKVCache(config)
    if kind == "preallocated":
        return PreallocatedKVCache(config, KEY_BLOCK if is_folded(config) else 1)
    if kind == "static":
        return StaticKVCache(config)
    if kind == "compiled":
        return StaticKVCache(config, compiled=True)
    if kind == "none":
        return NoKVCache()
    raise UsageError(f"There is no cache kind {kind!r}.", f"Choose one of {', '.join(CACHE_KINDS)}.")


def change_of_rotation(config: PretrainedConfig) -> int | None:
    """The longest context with the short factors of "longrope" (Ding et al. 2024); longer ones have the long ones.

    ``transformers`` chooses by the last position of a pass; its ``generate`` computes everything anew at the change.

    Returns:
        ``None`` for models whose positions are rotated alike in contexts of any length.
    """
    for kind in _rotations(config):
        if kind.get("rope_type") == "longrope":
            return int(kind["original_max_position_embeddings"])
    return None


def rotates_by_length(config: PretrainedConfig) -> bool:
    """Whether how a position is rotated depends on the last position of the pass."""
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in _rotations(config))


def _rotations(config: PretrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [
        kind for kind in (rope, *rope.values()) if isinstance(kind, dict)
    ]  # of all layers, or by their type


class NoKVCache:
    """No cache: every pass feeds the whole context."""

    length = 0
    separate_prefill = False
    max_exact_tokens = None
    takes_trees = False

    def keys(self, tokens: int) -> int:
        return tokens

    def gather(self, start: int, positions: Sequence[int]) -> None:
        """Nothing is kept."""

    def model_kwargs(self) -> dict[str, Any]:
        return {"use_cache": False}

    def after_forward(self) -> None:
        """Nothing was kept."""

    def rollback(self, length: int) -> None:
        """Nothing to roll back."""

    def reset(self) -> None:
        """Nothing to empty."""


class DynamicKVCache:
    """``transformers``' DynamicCache with the layer kinds the model's configuration asks for.

    Native passes make ``GrowingLayer`` of its full-attention layers (``LayerGroup``).

    Layers that forget (sliding windows, convolution states) can be rolled back only if they record the past: recording
    is switched on after the first pass, so that a long prompt is not kept whole, and from then on every rollback crops
    every such layer, also when nothing is removed (that trims it to its window).
    """

    max_exact_tokens = None

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config
        self.reset()

    def reset(self) -> None:
        self._cache = DynamicCache(config=self._config)
        self._recording = False
        self.separate_prefill = any(drops_positions(layer) for layer in self._cache.layers)

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def takes_trees(self) -> bool:
        kinds = (DynamicLayer, GrowingLayer, DummyLayer)
        return all(type(layer) in kinds for layer in self._cache.layers)

    def keys(self, tokens: int) -> int:
        return self.length + tokens

    def gather(self, start: int, positions: Sequence[int]) -> None:
        gather(self._cache.layers, start, positions)

    def model_kwargs(self) -> dict[str, Any]:
        return {"past_key_values": self._cache, "use_cache": True}

    def after_forward(self) -> None:
        if self._recording:
            return
        if not self._cache.is_croppable:
            raise UsageError(
                "This model keeps a recurrent state, which cannot be rolled back after a rejected draft.",
                "Choose a target and a drafter with attention caches only.",
            )
        self._cache.activate_past_recording()
        self._recording = True

    def rollback(self, length: int) -> None:
        held = self.length
        if length <= 0 or held == 0:
            self.reset()
            return
        surplus = max(held - length, 0)
        for layer in self._cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.rollback(length)
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                self._rollback_convolution(layer, surplus)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                self._rollback_sliding(layer, length)
            elif (
                isinstance(layer, CacheLayerMixin)
                and layer.is_initialized
                and layer.get_seq_length() > length
            ):
                layer.crop(length - layer.get_seq_length())  # type: ignore[attr-defined]

    def _rollback_sliding(self, layer: DynamicSlidingWindowLayer, length: int) -> None:
        if layer.keys is None:
            return
        surplus = max(layer.get_seq_length() - length, 0)
        if surplus and layer.keys.shape[-2] - surplus < min(length, layer.sliding_window - 1):
            raise ValueError(f"cannot roll back to {length}: the window before it has been given up")
        layer.crop(-surplus)

    def _rollback_convolution(self, layer: Any, surplus: int) -> None:
        # Such a layer knows no length; what it recorded stands behind the few positions its kernel needs.
        for index, state in layer.conv_states.items():
            if surplus > state.shape[-1] - layer.conv_kernel_size[index]:
                raise ValueError(f"cannot roll back by {surplus}: the states before have been given up")
        layer.crop(-surplus)


class PreallocatedKVCache:
    """A cache whose layers write by index and roll back by moving an offset.

    Args:
        config: The model's.
        block: See ``PreallocatedLayer``.
    """

    def __init__(self, config: PretrainedConfig, block: int = 1) -> None:
        layers: list[CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer] = []
        for layer in DynamicCache(config=config).layers:
            kind = type(layer).__name__
            if kind == "DynamicLayer":
                layers.append(PreallocatedLayer(block))
            elif type(layer) is DynamicSlidingWindowLayer:
                layers.append(PreallocatedSlidingLayer(layer.sliding_window))
            elif kind == "DummyLayer":
                layers.append(DummyLayer())
            else:
                raise UsageError(
                    f"The preallocated cache cannot hold layers of the kind {kind}.",
                    "Use --cache dynamic for this model.",
                )
        # Sliding windows begin anywhere, not at a block's edge.
        blocked = block > 1 and not any(isinstance(layer, PreallocatedSlidingLayer) for layer in layers)
        self.max_exact_tokens = LONGEST_PASS if blocked else None
        self.separate_prefill = blocked
        self._cache = Cache(layers=layers)
        self._layers = [layer for layer in layers if isinstance(layer, PreallocatedLayer)]

    @property
    def length(self) -> int:
        return self._layers[0].get_seq_length()

    @property
    def takes_trees(self) -> bool:
        return not any(layer.is_sliding for layer in self._layers)

    def keys(self, tokens: int) -> int:
        return self._layers[0].get_mask_sizes(tokens)[0]

    def gather(self, start: int, positions: Sequence[int]) -> None:
        gather(self._layers, start, positions)

    def model_kwargs(self) -> dict[str, Any]:
        return {"past_key_values": self._cache, "use_cache": True}

    def after_forward(self) -> None:
        """Every layer can always be rolled back."""

    def rollback(self, length: int) -> None:
        if length <= 0:
            self.reset()
            return
        for layer in self._layers:
            layer.rollback(length)

    def reset(self) -> None:
        for layer in self._layers:
            layer.reset()
        self._cache = Cache(layers=self._cache.layers)  # another object, as a sign of another context

    @torch.inference_mode()
    def repeat(self, length: int) -> None:
        """Hold so many tokens by repeating the entries there are: makes no sense, but the shapes of such passes."""
        for layer in self._layers:
            layer.repeat(length)


class _StaticLayer(CacheLayerMixin):
    """Keys and values of one layer of a ``StaticKVCache``, which knows where the next ones go."""

    is_sliding = False
    keys: Any
    values: Any

    def __init__(self, owner: StaticKVCache) -> None:
        CacheLayerMixin.__init__(self)
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        capacity = self._owner.capacity
        self.keys, self.values = buffer_like(key_states, capacity), buffer_like(value_states, capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._owner.slots, key_states)
        self.values.index_copy_(2, self._owner.slots, value_states)
        return self.keys, self.values

    def grow(self, capacity: int) -> None:
        """Move to buffers of this capacity."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = buffer_like(old, capacity)
            new[:, :, : old.shape[-2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self._owner.capacity, 0

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return self._owner.capacity

    def reset(self) -> None:
        """The owner's length says what counts."""


class StaticKVCache:
    """A cache whose forwards have the same shapes whatever it holds (see ``GraphForward``).

    Every pass is handed the whole buffers and a mask. The number of tokens held is kept here and not by the layers, and
    changes nothing on the device.

    Args:
        config: The model's.
        compiled: Whether short passes over it are to be compiled.

    Attributes:
        length: Tokens held.
        capacity: Tokens there is room for; doubles when it is full.
        generation: Grows by 1 whenever the buffers move.
        slots: Where the pass that runs writes, a tensor on its device.

    Raises:
        UsageError: The model has layers that are no full attention, or rotates positions otherwise in long contexts.
    """

    separate_prefill = False
    max_exact_tokens = None
    takes_trees = True
    slots: torch.Tensor

    def __init__(self, config: PretrainedConfig, *, compiled: bool = False) -> None:
        self.length, self.capacity, self.generation = 0, FIRST_CAPACITY, 0
        self.compiled = compiled
        kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
        other = next((kind for kind in kinds if kind not in ("DynamicLayer", "DummyLayer")), None)
        if other is not None:
            raise UsageError(
                f"The static cache cannot hold layers of the kind {other}.",
                "Use --cache dynamic for this model.",
            )
        if change_of_rotation(config) is not None:
            raise UsageError(
                "The static cache cannot hold a model whose positions are rotated otherwise in long contexts.",
                "Use --cache dynamic for this model.",
            )
        self._cache = Cache(
            layers=[_StaticLayer(self) if kind == "DynamicLayer" else DummyLayer() for kind in kinds]
        )

    def keys(self, tokens: int) -> int:
        self.reserve(self.length + tokens)
        return self.capacity

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        """Make room for so many tokens."""
        if length <= self.capacity:
            return
        while self.capacity < length:
            self.capacity *= 2
        self.generation += 1
        for layer in self._cache.layers:
            if isinstance(layer, _StaticLayer):
                layer.grow(self.capacity)

    def gather(self, start: int, positions: Sequence[int]) -> None:
        gather(self._cache.layers, start, positions)

    def model_kwargs(self) -> dict[str, Any]:
        return {"past_key_values": self._cache, "use_cache": True}

    def after_forward(self) -> None:
        """``GraphForward`` counts."""

    def rollback(self, length: int) -> None:
        self.length = min(self.length, max(length, 0))

    def reset(self) -> None:
        for layer in self._cache.layers:
            if isinstance(layer, _StaticLayer) and layer.is_initialized:
                zero_nonfinite(layer, self.capacity)
        self.length = 0
        if not self.compiled:  # passes are compiled for the object
            self._cache = Cache(layers=self._cache.layers)  # another object, as a sign of another context


LegacyCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]


def prune_legacy(past: LegacyCache, length: int) -> LegacyCache:
    """Keep the first ``length`` positions of a tuple cache as older models and exporters use it.

    Args:
        past: Per layer a pair of keys and values, each [batch, heads, positions, head size].
        length: Positions to keep; layers that are shorter stay as they are.

    Raises:
        ValueError: ``length`` is negative.
    """
    if length < 0:
        raise ValueError(f"length is {length}; it must be 0 or more")
    return tuple((keys[..., :length, :], values[..., :length, :]) for keys, values in past)
