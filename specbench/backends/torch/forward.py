"""The ways through a model: the one of ``transformers``, one in few operators, one in a single call, and one of fixed
shapes.

Each is a ``Forward``, bound to a model and its cache; ``trials.choose_forward`` tells which one a model may take.
Only a ``RaggedForward`` is not: it reads several contexts at once, and is handed their keys and values every time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from specbench.backends.torch.cache_layers import LayerGroup
from specbench.backends.torch.caches import KVCache, rotates_by_length
from specbench.backends.torch.kernels.attention import LONGEST_PASS, fold_mask
from specbench.backends.torch.kernels.llama_layers import (
    FusedLayer,
    fused_layers,
    native_stack,
    spread_rotation,
)
from specbench.backends.torch.kernels.native import DecoderStack, KVPointers, NativeRequest
from specbench.backends.torch.kernels.surgery import Hooks
from specbench.backends.torch.pools import BatchedCache, KVPool
from specbench.decoding.protocols import ForwardOutput

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Forward:
    """Feeds tokens behind those in a cache, which holds them afterwards."""

    def __call__(
        self,
        ids: torch.Tensor,
        rows: int,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass; for the arguments see ``rows``.

        Returns:
            Logits, [rows, vocab]; the caller's own.
        """
        return self.rows(ids, rows, (), position_ids, attention_mask).logits

    def rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> ForwardOutput:
        """One pass, with the hidden states of these layers at all tokens.

        Args:
            ids: [1, tokens].
            rows: How many positions' logits are wanted, counted from the end; at least 1.
            layers: See ``ForwardRequest``; in any order, and one as often as it is wanted.
            position_ids: [1, tokens]; ``None`` for those that follow the cache.
            attention_mask: Bool [1, 1, tokens, ``cache.keys(tokens)``], true where a token attends; ``None`` for what
                comes before it, and itself.

        Returns:
            All of it the caller's own.
        """
        once = [*dict.fromkeys(layers)]
        made = self._rows(ids, rows, once, position_ids, attention_mask)
        if made.hidden is None or len(once) == len(layers):
            return made
        return made._replace(hidden=made.hidden[:, [once.index(layer) for layer in layers]])

    def _rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> ForwardOutput:
        """The same for layers of which none is named twice."""
        raise NotImplementedError


class HFForward(Forward):
    """The model's own ``forward``.

    Args:
        model: A causal language model of ``transformers``.
        cache: Its keys and values.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._keeps_logits = keeps_logits(model)

    def _rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> ForwardOutput:
        arguments = self._cache.model_kwargs()
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        if self._keeps_logits:
            arguments["logits_to_keep"] = rows
        if layers:
            arguments["output_hidden_states"] = [*layers]
        output = self._model(input_ids=ids, **arguments)
        self._cache.after_forward()
        return rows_of(output, rows, layers)


def rows_of(output: Any, rows: int, layers: Sequence[int]) -> ForwardOutput:
    """What a model of ``transformers`` has given."""
    states = [output.hidden_states[layer][0].to(output.logits.device) for layer in layers]
    return ForwardOutput(output.logits[0, -rows:], torch.stack(states, dim=1) if states else None)


def keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models of ``transformers`` that compute around their layers what ``FusedForward`` computes."""


class FusedForward(Forward):
    """A pass over a few tokens in few operators; wider ones, and all that hooks could see, are ordinary.

    What the model is made of is looked up when a context begins, and whether it has hooks once for a pass.

    Args:
        model: One that ``trials.choose_forward`` has tried.
        cache: Its keys and values.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._ordinary = HFForward(model, cache)
        self._layers = _FoundLayers(model)

    def is_available(self) -> bool:
        """Whether the model is one that is known, and has no hooks now, some of which would be passed by."""
        return self._layers(self._held()) is not None

    def _rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> ForwardOutput:
        tokens, held = ids.shape[1], self._held()
        own = self._layers(held) if tokens <= LONGEST_PASS else None
        if own is None:
            return self._ordinary.rows(ids, rows, layers, position_ids, attention_mask)
        past, groups, dtype = held.get_seq_length(), own[0].groups, own[0].dtype
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens)[None]
        masks: dict[int | None, list[torch.Tensor] | None] = {}

        def masks_of(kept: Any) -> list[torch.Tensor] | None:
            window = kept.sliding_window if kept.is_sliding else None
            if window not in masks:
                mask = attention_mask
                if mask is None:
                    keys, first = kept.get_mask_sizes(tokens)
                    mask = _causal_mask(past, tokens, keys, first, window, dtype)
                masks[window] = None if mask is None else fold_mask(mask, groups, dtype)
            return masks[window]

        found = _through(self._model, own, ids, position_ids, held, masks_of, slice(-rows, None), layers)
        self._cache.after_forward()
        return found

    def _held(self) -> Any:
        return self._cache.model_kwargs()["past_key_values"]


NATIVE_ENTRIES = (torch.float32, torch.bfloat16)
"""What keys and values may be in a native pass."""

_POSITIONS = 512
"""So many more are rotated at once."""


_AT_ONCE = 512
"""Rows of one request that are read in one call: more would take much memory beside the weights."""


class RotaryTable:
    """Cosines and sines of positions, [positions, head size], made once and kept for a context.

    Args:
        module: Makes them.
        config: Of the model or head whose rotation it is.
    """

    def __init__(self, module: Any, config: PretrainedConfig) -> None:
        self._module = module
        self._kept = not rotates_by_length(config)
        self._cosines = self._sines = torch.empty(0)

    def of(self, positions: torch.Tensor | range) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions, [tokens], in float32."""
        if not self._kept:
            return self._made(torch.as_tensor(positions))
        last = positions[-1] if isinstance(positions, range) else int(positions.max())
        if last >= len(self._cosines):
            self._cosines, self._sines = self._made(torch.arange(last + 1 + _POSITIONS))
        places = slice(positions[0], last + 1) if isinstance(positions, range) else positions
        return self._cosines[places], self._sines[places]

    def _made(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self._module(torch.empty(0), positions[None])  # only told the dtype
        return cosines[0], sines[0]


class _Stacked(NamedTuple):
    """What native passes need in a context.

    Attributes:
        own: The model's layers.
        stack: What makes the passes; ``None`` where they cannot be made.
        rotations: Of the model.
        empty: Keys or values of no position, from which layers of a cache make their buffers.
    """

    own: tuple[FusedLayer, ...]
    stack: DecoderStack | None
    rotations: RotaryTable
    empty: torch.Tensor

    def stack_for(self, rows: int) -> DecoderStack | None:
        """What makes a pass of so many rows; ``None`` where torch's own products are quicker."""
        return self.stack if self.stack is not None and rows <= self.stack.widest else None


class _Stacks:
    """What native passes of a model need, made again where its layers are others."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: _Stacked | None = None

    def __call__(self, own: tuple[FusedLayer, ...]) -> _Stacked:
        """For the model's layers as they are in this context."""
        if self._last is None or self._last.own is not own:
            first = own[0]
            empty = torch.empty(1, first.heads // first.groups, 0, first.size, dtype=first.dtype)
            self._last = _Stacked(
                own,
                native_stack(self._model, own),
                RotaryTable(self._model.model.rotary_emb, self._model.config),
                empty,
            )
        return self._last


class NativeForward(FusedForward):
    """A pass in one call up to ``Stack.widest`` rows, which are any number where they are rounded to bytes and so have
    the same bits in every pass; one of ``FusedForward`` beyond, or where the cache is no plain one.

    Between its products everything is in float32, and so are its logits.

    Args:
        model: One that ``trials.choose_forward`` has tried.
        cache: Its keys and values.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._stacked = _Stacks(model)
        self._told: WeakKeyDictionary[Any, _Told] = WeakKeyDictionary()  # lets go of a cache with its context

    def is_available(self) -> bool:
        """Whether the model is one that is known, of native products, and has no hooks now."""
        return self.stack() is not None

    def _rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> ForwardOutput:
        tokens, held = ids.shape[1], self._held()
        own = self._layers(held)
        made = None if own is None else self._stacked(own)
        stack = None if made is None else made.stack_for(tokens)
        if own is None or made is None or stack is None:
            return super()._rows(ids, rows, layers, position_ids, attention_mask)
        past = held.get_seq_length()
        entries = self._lengthened(held, own, tokens, made.empty)
        if entries is None:
            return super()._rows(ids, rows, layers, position_ids, attention_mask)
        x = self._model.model.embed_tokens(ids)[0].float()
        cosines, sines = made.rotations.of(
            range(past, past + tokens) if position_ids is None else position_ids[0]
        )
        parts = []
        for first in range(0, tokens, _AT_ONCE):
            part = slice(first, min(first + _AT_ONCE, tokens))
            mask = None if attention_mask is None else attention_mask[0, 0, part]
            request = NativeRequest(part.stop - first, past + first, mask)
            wanted = range(max(0, tokens - rows - first), part.stop - first)
            own_rows = (x, cosines, sines) if tokens <= _AT_ONCE else (x[part], cosines[part], sines[part])
            parts.append(stack(*own_rows, entries, [request], wanted, layers))
        self._cache.after_forward()
        return _together(parts, own[0].dtype)

    def _lengthened(
        self, held: Any, own: Sequence[FusedLayer], tokens: int, empty: torch.Tensor
    ) -> KVPointers | None:
        """Keys and values with room for so many tokens, told anew where they are others than in the last pass."""
        told = self._told.get(held)
        if told is None or not told.held.lengthen(tokens):
            found = LayerGroup.of(held.layers, [layer.place for layer in own], tokens, NATIVE_ENTRIES, empty)
            if found is None:
                return None
            told = self._told[held] = _Told(found, KVPointers(found.entries))
        return told.entries

    def stack(self) -> DecoderStack | None:
        """What makes its passes now; ``None`` where they cannot be made in one call."""
        own = self._layers(self._held())
        return None if own is None else self._stacked(own).stack


class _Told(NamedTuple):
    """What native.c was last told of a cache.

    Attributes:
        held: Which layers.
        entries: Where they are.
    """

    held: LayerGroup
    entries: KVPointers


def _together(parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]], dtype: torch.dtype) -> ForwardOutput:
    """Logits and hidden states of calls one behind the other, the states in the model's dtype."""
    logits = [logits for logits, _ in parts]
    states = [states.to(dtype) for _, states in parts if states is not None]
    return ForwardOutput(_joined(logits), _joined(states) if states else None)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _FoundLayers:
    """The layers of a model in few operators, looked up again when a context begins."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: _Found | None = None

    def __call__(self, mark: object) -> tuple[FusedLayer, ...] | None:
        """The layers, by what is another object in every context; ``None`` for an ordinary pass."""
        found = self._found
        if found is None or found.mark() is not mark:
            layers = fused_layers(self._model) if _is_bare(self._model) else None
            found = self._found = _Found(ref(mark), Hooks(self._model.modules()), layers)
        return None if found.hooks.there() else found.layers


class _Found(NamedTuple):
    """What a model was made of when a context began."""

    mark: ReferenceType[Any]
    hooks: Hooks
    layers: tuple[FusedLayer, ...] | None


class RaggedForward:
    """A pass over the rows of several requests, one behind the other; every request attends to its own positions.

    Args:
        model: One that ``trials.why_not_batchable`` has tried.
        way: How passes over one context are made: in one call or in few operators, these are too, where they can.
    """

    def __init__(self, model: Any, way: type[Forward]) -> None:
        self._model = model
        # Which logits are wanted is told where the pass begins, and a spread model ends on another device.
        self._keeps_logits = keeps_logits(model) and len({each.device for each in model.parameters()}) == 1
        self._layers = _FoundLayers(model) if issubclass(way, FusedForward) else None
        self._stacked = _Stacks(model) if issubclass(way, NativeForward) else None

    def is_row_invariant(self, pool: KVPool) -> bool:
        """Whether a row has the same bits in every pass over what is in a pool, whatever else is read in it."""
        own = None if self._layers is None else self._layers(pool.mark)
        if own is None or self._stacked is None:
            return False
        stack = self._stacked(own).stack
        windows = any(store is not None and store.window is not None for store in pool.stores)
        return stack is not None and stack.quantizes_rows and own[0].dtype in NATIVE_ENTRIES and not windows

    def __call__(
        self, ids: torch.Tensor, joined: BatchedCache, wanted: torch.Tensor, layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """One pass, with the hidden states of these layers at all tokens.

        Args:
            ids: [1, tokens].
            joined: What the requests hold; it holds these tokens afterwards.
            wanted: Which tokens' logits are wanted: their places, ascending.
            layers: See ``ForwardRequest``; none twice.
        """
        own = None if self._layers is None else self._layers(joined.mark)
        if own is not None:
            found = self._in_one_call(own, ids, joined, wanted, layers)
            if found is not None:
                return found
            return _through(self._model, own, ids, joined.position_ids, joined, _no_masks, wanted, layers)
        arguments = joined.model_kwargs()
        if self._keeps_logits:
            arguments["logits_to_keep"] = wanted
        if layers:
            arguments["output_hidden_states"] = [*layers]
        output = self._model(input_ids=ids, **arguments)
        found = rows_of(output, 0, layers)
        return (
            found
            if self._keeps_logits
            else found._replace(logits=found.logits[wanted.to(found.logits.device)])
        )

    def _in_one_call(
        self,
        own: tuple[FusedLayer, ...],
        ids: torch.Tensor,
        joined: BatchedCache,
        wanted: torch.Tensor,
        layers: Sequence[int],
    ) -> ForwardOutput | None:
        """``None`` where that cannot be, or is slower."""
        if self._stacked is None:
            return None
        made = self._stacked(own)
        stack = made.stack_for(ids.shape[1])
        if stack is None:
            return None
        held = joined.lengthened([layer.place for layer in own], NATIVE_ENTRIES, made.empty)
        if held is None:
            return None
        entries, requests = held
        x = self._model.model.embed_tokens(ids)[0].float()
        rotation = made.rotations.of(joined.position_ids[0])
        found = stack(x, *rotation, KVPointers(entries), requests, wanted.tolist(), layers)
        return _together([found], own[0].dtype)


def _no_masks(kept: Any) -> None:
    """What a layer has to be told where that of the cache knows who attends to what."""


def _through(
    model: Any,
    own: Sequence[FusedLayer],
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    held: Any,
    masks_of: Callable[[Any], list[torch.Tensor] | None],
    wanted: slice | torch.Tensor,
    layers: Sequence[int],
) -> ForwardOutput:
    """A pass in few operators.

    Args:
        model, ids, position_ids, layers: See ``Forward.rows``.
        own: The model's layers.
        held: The cache, with its layers.
        masks_of: By a layer of the cache, see ``FusedLayer``.
        wanted: Which tokens' logits are.
    """
    inner = model.model
    x = inner.embed_tokens(ids)
    rotation = spread_rotation(*inner.rotary_emb(x, position_ids))
    states: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(own):
        if index in layers:
            states[index] = x[0].to(layer.dtype)
        kept = held.layers[layer.place]
        x = layer(x, rotation, masks_of(kept), kept)
    if len(own) in layers:
        x = inner.norm(x)
        states[len(own)] = x[0]
        x = x[:, wanted]
    else:
        x = inner.norm(x[:, wanted])
    logits: torch.Tensor = model.lm_head(x)[0]
    return ForwardOutput(logits, torch.stack([states[layer] for layer in layers], dim=1) if layers else None)


def _is_bare(model: Any) -> bool:
    """Whether all that ``FusedForward`` goes by around the layers is the models' own."""
    known = any(kind.__name__ in _MODELS for kind in type(model).__mro__)
    parts = ("model", "lm_head")
    return (
        known
        and all(hasattr(model, name) for name in parts)
        and all("forward" not in vars(module) for module in (model, model.model))
    )


def _causal_mask(
    past: int, tokens: int, keys: int, first: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """What is added to the scores of tokens, [1, 1, tokens, keys]; ``None`` for a single one that sees all keys.

    Args:
        past: Tokens before them.
        tokens: How many there are.
        keys: Positions that attention is handed, some of them perhaps behind the last token.
        first: The position of the first key.
        window: How many positions a token sees, its own among them; ``None`` for all.
        dtype: Of the scores.
    """
    if tokens == 1 and first + keys == past + 1 and (window is None or keys < window):
        return None
    if window is None:
        added = torch.zeros(1, 1, tokens, keys, dtype=dtype)
        added[0, 0, :, past:] = _behind(tokens, keys - past, dtype)
        return added
    own = torch.arange(past, past + tokens)[:, None]
    seen = torch.arange(first, first + keys)
    return ((seen <= own) & (seen > own - window))[None, None]


def _behind(tokens: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of tokens for keys from the first of them on, [tokens, keys]."""
    return torch.full((tokens, keys), -math.inf, dtype=dtype).triu_(1)
