"""Implementations of a model's forward pass: the model's own, a native one, and one for several requests.

Each is a ``Forward`` bound to a model and its cache, chosen by ``trials.choose_forward``; ``GraphForward`` is another
one. A ``RaggedForward`` runs several requests together, and gets their cache with every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specbench.backends.torch.attention import LONGEST_PASS, is_folded
from specbench.backends.torch.cache_layers import LayerGroup
from specbench.backends.torch.caches import KVCache
from specbench.backends.torch.pools import BatchedCache, KVPool
from specbench.backends.torch.recurrent import keep_states
from specbench.backends.torch.recurrent_cache import running
from specbench.decoding.protocols import ForwardOutput
from specbench.kernels import Buffers, ModelPasses, Request, forward_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        """Return logits and the hidden states of some layers at all tokens; no later pass overwrites these tensors.

        Args:
            ids: Token ids, [1, tokens].
            rows: Number of last positions whose logits are returned; at least 1.
            layers: See ``ForwardRequest``; in any order, with repeats.
            positions: Positions of the tokens, [1, tokens]; ``None`` for those after the cached ones.
            mask: Bool [1, 1, tokens, ``cache.key_len(tokens)``], true where a token attends; ``None`` for causal.
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

        Given a number, Gemma 4 reads only these tokens in layers that share keys. It then makes masks for the attention
        of ``transformers`` alone, and without a mask several tokens would see those after them.
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


_CHUNK_ROWS = 512
"""Rows of one request in a native call: more would take much memory in addition to the weights."""


class NativeForward(Forward):
    """A forward in one native call, up to as many rows as native passes take.

    All values between matrix products are float32, and so are the logits. Longer forwards, models with hooks and other
    caches go to ``HFForward``.

    Args:
        model: A model that ``trials.choose_forward`` has tried; what it consists of is looked up in every new context.
        cache: Its keys and values.
    """

    def __init__(self, model: Any, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._fallback = HFForward(model, cache)
        self._native = forward_for(model)
        self._groups: WeakKeyDictionary[Any, LayerGroup] = WeakKeyDictionary()  # freed with their context

    def is_available(self) -> bool:
        """Return whether the model is of a known kind with native products, and has no hooks now."""
        return self._native(self._cache.held) is not None

    def run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        tokens, cache = ids.shape[1], self._cache.held
        native = self._native(cache)
        if native is None:
            return self._fallback.run(ids, rows, layers, positions, mask)
        takes, past = native.takes(tokens, masked=mask is not None), cache.get_seq_length()
        buffers = self._extend(cache, native, min(tokens, _CHUNK_ROWS)) if takes else None
        if buffers is None:
            return self._read(ids, rows, layers, positions, mask)
        cosines, sines = native.rotation(range(past, past + tokens) if positions is None else positions[0])
        outputs = []
        for first in range(0, tokens, _CHUNK_ROWS):
            chunk = slice(first, min(first + _CHUNK_ROWS, tokens))
            if first:  # by chunks, since layers with windows give up what is behind them
                buffers = self._extend(cache, native, chunk.stop - first)
                assert buffers is not None
            own_mask = None if mask is None else mask[0, 0, chunk]
            request = Request(chunk.stop - first, past + first, own_mask)
            wanted = range(max(0, tokens - rows - first), chunk.stop - first)
            rotation = cosines[:, chunk], sines[:, chunk]
            output = native.run(ids[:, chunk], rotation, buffers, [request], wanted, layers)
            outputs.append(ForwardOutput(*output))
        self._cache.after_forward()
        return join_passes(outputs, rows)

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

    def _extend(self, cache: Any, native: ModelPasses, tokens: int) -> Buffers | None:
        """Extend the cache by ``tokens`` positions and return where its buffers are."""
        group = self._groups.get(cache)
        if group is None or not group.extend(tokens):
            layers = [cache.layers[place] for place in native.places]
            group = LayerGroup.extended(layers, tokens, native.empty)
            if group is None:
                return None
            self._groups[cache] = group
        return group.buffers


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
            takes_logits_to_keep(model) and len({weight.device for weight in model.parameters()}) == 1
        )
        self._native = forward_for(model) if issubclass(forward_type, NativeForward) else None

    def is_row_invariant(self, pool: KVPool) -> bool:
        """Return whether the results of a token are bitwise independent of the other tokens in the forward."""
        native = None if self._native is None else self._native(pool.context_id)
        return native is not None and native.rounds_rows

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
        native = None if self._native is None else self._native(cache.context_id)
        if native is not None and native.takes(ids.shape[1]):
            extended = cache.extend(native.places, native.empty)
            if extended is not None:
                buffers, requests = extended
                rotation = native.rotation(cache.position_ids[0])
                made = native.run(ids, rotation, Buffers(buffers), requests, wanted.tolist(), layers)
                return ForwardOutput(*made)
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
