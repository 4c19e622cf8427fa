"""Implementations of a model's forward pass: the model's own, a native one, and one for several requests.

Each is a ``Forward`` bound to a model and its cache, chosen by ``trials.choose_forward``; ``GraphForward`` is another
one. A ``RaggedForward`` runs several requests together, and gets their cache with every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from specbench.backends.torch.cache_layers import LayerGroup
from specbench.backends.torch.caches import KVCache, rotates_by_length
from specbench.backends.torch.pools import BatchedCache, KVPool
from specbench.backends.torch.recurrent import keep_states
from specbench.backends.torch.recurrent_cache import running
from specbench.decoding.protocols import ForwardOutput
from specbench.kernels.attention import LONGEST_PASS, is_folded
from specbench.kernels.decoder_parts import ModelParts, read_parts
from specbench.kernels.native import DecoderStack, KVPointers, NativeRequest
from specbench.kernels.surgery import Hooks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Forward:
    """A forward pass over the tokens that follow those in a KV cache; it adds their keys and values to the cache.

    Attributes:
        shows_experts: Whether hooks can watch which experts it reads.
    """

    shows_experts = True

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    def over(self, cache: KVCache) -> Forward:
        """Return such a forward over another cache of the model."""
        return type(self)(self._model, cache)

    def __call__(
        self, ids: Tensor, rows: int, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return only the logits, [rows, vocab]; for the arguments see ``run``."""
        return self.run(ids, rows, (), positions, mask).logits

    def run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        """Run a forward pass, with the hidden states of some layers at all tokens.

        Args:
            ids: Token ids, [1, tokens].
            rows: Number of last positions whose logits are returned; at least 1.
            layers: See ``ForwardRequest``; in any order, with repeats.
            positions: Positions of the tokens, [1, tokens]; ``None`` for those after the cached ones.
            mask: Bool [1, 1, tokens, ``cache.key_len(tokens)``], true where a token attends; ``None`` for causal.

        Returns:
            Logits and hidden states, in tensors that no later forward overwrites.
        """
        raise NotImplementedError


class HFForward(Forward):
    """The model's own ``forward`` in ``transformers``."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._limits_logits = takes_logits_to_keep(model)
        keep_states(model)
        # As `generate` does: those that models make themselves are others in Bamba, RoBERTa and models with pictures.
        self._gives_positions = "position_ids" in inspect.signature(model.forward).parameters
        text = model.config.get_text_config(decoder=True)
        self._shares_keys = bool(getattr(text, "num_kv_shared_layers", 0))

    def _kept_logits(self, rows: int, ids: Tensor) -> int | Tensor:
        """Return which logits are wanted, by number or by index.

        Given a number, Gemma 4 reads only these tokens in layers that share keys. Several are causal no more then if
        there is no mask, which it knows of the attention of ``transformers`` alone.
        """
        if rows == 1 or not self._shares_keys:
            return rows
        return torch.arange(max(0, ids.shape[1] - rows), ids.shape[1], device=ids.device)

    def run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        arguments = self._cache.model_kwargs()
        if positions is None and self._gives_positions:
            past = self._cache.length
            positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
        if positions is not None:
            arguments["position_ids"] = positions
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._limits_logits:
            arguments["logits_to_keep"] = self._kept_logits(rows, ids)
        if layers:
            arguments["output_hidden_states"] = [*layers]
        try:
            output = self._model(input_ids=ids, **arguments)
        except BaseException:
            running.clear()
            raise
        self._cache.after_forward()
        return read_output(output, rows, layers)


def read_output(output: Any, rows: int, layers: Sequence[int]) -> ForwardOutput:
    """Convert the output of a model of ``transformers``."""
    states = [output.hidden_states[layer][0].to(output.logits.device) for layer in layers]
    return ForwardOutput(output.logits[0, -rows:], torch.stack(states, dim=1) if states else None)


def join_passes(parts: Sequence[ForwardOutput], rows: int) -> ForwardOutput:
    """Join consecutive forward passes: their last ``rows`` logits, and all hidden states."""
    logits = concat([part.logits for part in parts])[-rows:]
    hidden = [part.hidden for part in parts if part.hidden is not None]
    return ForwardOutput(logits, concat(hidden) if hidden else None)


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


NATIVE_KV_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of keys and values that native forwards read and write."""

_ROTARY_STEP = 512  # positions that are rotated in advance
_CHUNK_ROWS = 512
"""Rows of one request in a native call: more would take much memory in addition to the weights."""


class RotaryTable:
    """Cosines and sines by position, [rotations, positions, rotated numbers of a head], computed once.

    They are those of a model or head with this configuration; ``names`` are the rotations that its module knows, if it
    has several.
    """

    def __init__(self, module: Any, config: PretrainedConfig, names: Sequence[str] = ("",)) -> None:
        self._module, self._names = module, names
        self._is_fixed = not rotates_by_length(config)
        self._cosines = self._sines = torch.empty(1, 0, 0)

    def of(self, positions: Tensor | range) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of these positions, [tokens], in float32."""
        if not self._is_fixed:
            return self._compute(torch.as_tensor(positions))
        last = positions[-1] if isinstance(positions, range) else int(positions.max())
        if last >= self._cosines.shape[1]:
            self._cosines, self._sines = self._compute(torch.arange(last + 1 + _ROTARY_STEP))
        rows = slice(positions[0], last + 1) if isinstance(positions, range) else positions
        return self._cosines[:, rows], self._sines[:, rows]

    def size(self) -> int:
        """Return how many numbers of a head are rotated."""
        return self.of(range(1))[0].shape[-1]

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        empty = torch.empty(0)  # gives the dtype alone
        made = [
            self._module(empty, positions[None], name) if name else self._module(empty, positions[None])
            for name in self._names
        ]
        cosines, sines = (torch.cat(each) for each in zip(*made, strict=True))
        return cosines, sines


class _Parts:
    """The parts of a model, as found when a context begins.

    Attributes:
        context: A weak reference to an object that is new in every context.
        is_known: Whether they were ``read``; everything else needs that.
    """

    read: ModelParts

    def __init__(self, model: Any, context: object) -> None:
        self._model = model
        self.context, self.hooks = ref(context), Hooks(model.modules())
        found = read_parts(model)
        self.is_known = found is not None
        if found is not None:
            self.read = found

    @cached_property
    def stack(self) -> DecoderStack | None:
        """The native stack of its layers; ``None`` where there is none."""
        return self.read.stack(self._model.lm_head, self.rotary.size())

    @cached_property
    def rotary(self) -> RotaryTable:
        return RotaryTable(self._model.model.rotary_emb, self._model.config, self.read.rotations)

    @cached_property
    def empty(self) -> Tensor:
        """Keys or values of no position, from which layers of a cache make their buffers."""
        config = self.read.config
        return torch.empty(1, config.kv_heads, 0, config.head_size, dtype=self.read.dtype)

    @cached_property
    def places(self) -> list[int]:
        return [layer.place for layer in self.read.layers]

    def stack_for(self, rows: int, *, masked: bool = False) -> DecoderStack | None:
        """Return the native stack if it is the fastest for ``rows`` rows; ``None`` for masks together with windows."""
        if (
            self.stack is None
            or rows > self.stack.max_rows
            or (masked and any(each.window for each in self.read.layers))
        ):
            return None
        return self.stack

    def embed(self, ids: Tensor) -> Tensor:
        """Return the inputs of the first layer, [rows, hidden size], float32."""
        embedded: Tensor = self._model.model.embed_tokens(ids)[0].float()
        multiplier = self.read.embedding_multiplier
        return embedded if multiplier == 1.0 else embedded * multiplier


class _PartsLookup:
    """Lookup of a model's parts, repeated when a new context begins."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._last: _Parts | None = None

    def __call__(self, context: object) -> _Parts | None:
        """Return the parts; ``None`` for a model that is not known, or has hooks, which would be skipped."""
        parts = self._last
        if parts is None or parts.context() is not context:
            parts = self._last = _Parts(self._model, context)
        return parts if parts.is_known and not parts.hooks.are_present() else None


class NativeForward(Forward):
    """A forward in one native call, up to ``DecoderStack.max_rows`` rows.

    All values between matrix products are float32, and so are the logits. Longer forwards, models with hooks and other
    caches go to ``HFForward``.

    Args:
        model: A model that ``trials.choose_forward`` has tried; what it consists of is looked up in every new context.
        cache: Its keys and values.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._fallback = HFForward(model, cache)
        self._lookup = _PartsLookup(model)
        self._groups: WeakKeyDictionary[Any, LayerGroup] = WeakKeyDictionary()  # freed with their context

    def is_available(self) -> bool:
        """Return whether the model is of a known kind with native products, and has no hooks now."""
        parts = self._lookup(self._cache.held)
        return parts is not None and parts.stack is not None

    def run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        tokens, cache = ids.shape[1], self._cache.held
        parts = self._lookup(cache)
        if parts is None:
            return self._fallback.run(ids, rows, layers, positions, mask)
        stack, past = parts.stack_for(tokens, masked=mask is not None), cache.get_seq_length()
        pointers = None if stack is None else self._extend(cache, parts, min(tokens, _CHUNK_ROWS))
        if stack is None or pointers is None:
            return self._read(ids, rows, layers, positions, mask)
        cosines, sines = parts.rotary.of(range(past, past + tokens) if positions is None else positions[0])
        outputs = []
        for first in range(0, tokens, _CHUNK_ROWS):
            chunk = slice(first, min(first + _CHUNK_ROWS, tokens))
            if first:  # by chunks, since layers with windows give up what is behind them
                pointers = self._extend(cache, parts, chunk.stop - first)
                assert pointers is not None
            own_mask = None if mask is None else mask[0, 0, chunk]
            request = NativeRequest(chunk.stop - first, past + first, own_mask)
            wanted = range(max(0, tokens - rows - first), chunk.stop - first)
            inputs = parts.embed(ids[:, chunk]), cosines[:, chunk], sines[:, chunk]
            outputs.append(stack(*inputs, pointers, [request], wanted, layers))
        self._cache.after_forward()
        return _join_outputs(outputs, parts)

    def _read(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        """Run the model's own forward, over a prompt in chunks whose activations stay in the processor's caches."""
        left = ids.shape[1]
        is_prompt = left > LONGEST_PASS and positions is None and mask is None
        if not (is_prompt and is_folded(self._model.config) and self._cache.takes_trees):
            return self._fallback.run(ids, rows, layers, positions, mask)
        self._cache.expect(left)
        passes = []
        for chunk in ids.tensor_split(-(-left // _CHUNK_ROWS), dim=1):
            left -= chunk.shape[1]
            wanted = min(chunk.shape[1], max(1, rows - left))
            passes.append(self._fallback.run(chunk, wanted, layers, None, None))
        return join_passes(passes, rows)

    def _extend(self, cache: Any, parts: _Parts, tokens: int) -> KVPointers | None:
        """Extend the cache by ``tokens`` positions and return where its buffers are."""
        group = self._groups.get(cache)
        if group is None or not group.extend(tokens):
            group = LayerGroup.extended(cache.layers, parts.places, tokens, NATIVE_KV_DTYPES, parts.empty)
            if group is None:
                return None
            self._groups[cache] = group
        return group.pointers


def _join_outputs(outputs: Sequence[tuple[Tensor, Tensor | None]], parts: _Parts) -> ForwardOutput:
    """Join logits and hidden states of consecutive native calls, the states in the model's dtype."""
    logits = [logits for logits, _ in outputs]
    states = [states.to(parts.read.dtype) for _, states in outputs if states is not None]
    return ForwardOutput(parts.read.finish(concat(logits)), concat(states) if states else None)


def concat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim)


class RaggedForward:
    """A forward over the concatenated tokens of several requests; each request attends to its own positions.

    It is native if possible and if forwards over one context (``forward_type``) are.
    """

    def __init__(self, model: Any, forward_type: type[Forward]) -> None:
        self._model = model
        # A model spread over devices ends on another one than that of the index of wanted logits.
        self._limits_logits = (
            takes_logits_to_keep(model) and len({each.device for each in model.parameters()}) == 1
        )
        self._lookup = _PartsLookup(model) if issubclass(forward_type, NativeForward) else None

    def is_row_invariant(self, pool: KVPool) -> bool:
        """Return whether the results of a token are bitwise independent of the other tokens in the forward."""
        parts = None if self._lookup is None else self._lookup(pool.context_id)
        if parts is None:
            return False
        stack = parts.stack
        return stack is not None and stack.quantizes_rows and parts.read.dtype in NATIVE_KV_DTYPES

    def __call__(
        self, ids: Tensor, cache: BatchedCache, wanted: Tensor, layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Run a forward pass, with the hidden states of some layers at all tokens.

        Args:
            ids: [1, tokens].
            cache: Cache of the requests; the tokens are added to it.
            wanted: Indices of the tokens whose logits are wanted, ascending.
            layers: See ``Forward.run``; without repeats.
        """
        parts = None if self._lookup is None else self._lookup(cache.context_id)
        native = None if parts is None else self._run_native(parts, ids, cache, wanted, layers)
        if native is not None:
            return native
        arguments = cache.model_kwargs()
        if self._limits_logits:
            arguments["logits_to_keep"] = wanted
        if layers:
            arguments["output_hidden_states"] = [*layers]
        output = read_output(self._model(input_ids=ids, **arguments), 0, layers)
        cache.after_forward()
        if self._limits_logits:
            return output
        return output._replace(logits=output.logits[wanted.to(output.logits.device)])

    def _run_native(
        self, parts: _Parts, ids: Tensor, cache: BatchedCache, wanted: Tensor, layers: Sequence[int]
    ) -> ForwardOutput | None:
        """Run it in one native call; ``None`` where that is impossible or slower."""
        stack = parts.stack_for(ids.shape[1])
        if stack is None:
            return None
        extended = cache.extend(parts.places, NATIVE_KV_DTYPES, parts.empty)
        if extended is None:
            return None
        buffers, requests = extended
        rotation = parts.rotary.of(cache.position_ids[0])
        output = stack(parts.embed(ids), *rotation, KVPointers(buffers), requests, wanted.tolist(), layers)
        return _join_outputs([output], parts)
