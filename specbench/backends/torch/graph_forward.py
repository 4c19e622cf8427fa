"""Passes of fixed shapes, captured on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specbench.backends.torch.caches import StaticKVCache
from specbench.backends.torch.forward import Forward, keeps_logits, rows_of
from specbench.backends.torch.kernels.graphs import WIDEST_GRAPH, Capture
from specbench.backends.torch.kernels.surgery import Hooks
from specbench.decoding.protocols import ForwardOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Inputs(NamedTuple):
    """What a pass of fixed shapes is made of.

    Attributes:
        ids: Token ids, [1, n].
        slots: Where in the cache their keys and values go, [n].
        positions: Of the tokens, [1, n].
        mask: Bool [1, 1, n, capacity]: what each attends to.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


class _Captured(NamedTuple):
    inputs: _Inputs
    replay: Callable[[], None]
    output: ForwardOutput


class GraphForward(Forward):
    """Passes of fixed shapes over a static cache, each width captured once and replayed from then on.

    Args:
        model: A causal language model of ``transformers``.
        cache: Its keys and values.
        capture: How a pass is made repeatable; ``None`` runs each anew.
        compiled: A quicker ``forward`` of the model for the passes that come again and again; ``None`` for its own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticKVCache,
        capture: Capture[ForwardOutput] | None = None,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self._model, self._cache, self._capture = model, cache, capture
        self._compiled = compiled or model
        self._keeps_logits = keeps_logits(model)
        self._hooks = Hooks(model.modules())  # a replay would leave them out
        self._captured: dict[tuple[int, int, tuple[int, ...]], _Captured] = {}
        self._generation = cache.generation

    def _rows(
        self,
        ids: torch.Tensor,
        rows: int,
        layers: Sequence[int],
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> ForwardOutput:
        count, past, device = ids.shape[1], self._cache.length, ids.device
        self._cache.reserve(past + count)
        slots = torch.arange(past, past + count, device=device)
        if attention_mask is None:
            attention_mask = (torch.arange(self._cache.capacity, device=device) <= slots[:, None])[None, None]
        inputs = _Inputs(ids, slots, slots[None] if position_ids is None else position_ids, attention_mask)
        # Who wants hidden states has them gathered on the way, which is not compiled.
        quick = self._model if layers else self._compiled
        if count > WIDEST_GRAPH or self._hooks.there():
            found = self._run(self._model, inputs, rows, layers)
        elif self._capture is None:
            found = self._run(quick, inputs, rows, layers)
        else:
            found = self._replayed(self._capture, quick, inputs, rows, layers)
        self._cache.length = past + count
        return found

    def _run(
        self, forward: Callable[..., Any], inputs: _Inputs, rows: int, layers: Sequence[int]
    ) -> ForwardOutput:
        """A pass that reads and writes nothing but its inputs and the buffers of the cache."""
        self._cache.slots = inputs.slots
        more: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_logits else {}
        if layers:
            more["output_hidden_states"] = [*layers]
        output = forward(
            input_ids=inputs.ids,
            position_ids=inputs.positions,
            attention_mask=inputs.mask,
            **self._cache.model_kwargs(),
            **more,
        )
        return rows_of(output, rows, layers)

    def _replayed(
        self,
        capture: Capture[ForwardOutput],
        forward: Callable[..., Any],
        inputs: _Inputs,
        rows: int,
        layers: Sequence[int],
    ) -> ForwardOutput:
        if self._generation != self._cache.generation:  # its buffers are elsewhere now
            self._captured.clear()
            self._generation = self._cache.generation
        key = (inputs.ids.shape[1], rows, tuple(layers))
        if key not in self._captured:
            own = _Inputs(*(each.clone() for each in inputs))
            self._captured[key] = _Captured(own, *capture(lambda: self._run(forward, own, rows, layers)))
        captured = self._captured[key]
        for buffer, value in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(value)
        captured.replay()
        logits, hidden = captured.output  # the next pass of this width writes there again
        return ForwardOutput(logits.clone(), None if hidden is None else hidden.clone())
