"""Forward passes with fixed tensor shapes, which a CUDA device can replay in one launch instead of some hundred.

Over a ``StaticKVCache`` a forward of n tokens always is the same sequence of kernels: it writes keys and values at
given slots of buffers that do not move, and attends to all of them under a mask. On a CUDA device each width is
captured once as a graph and then replayed; elsewhere operators run one by one, as in the tests. Compiled forwards
(``torch.compile``) consist of fewer, larger kernels, and are captured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from specbench.backends.torch.caches import KVCache, StaticKVCache
from specbench.backends.torch.forward import Forward, HFForward, read_output, takes_logits_to_keep
from specbench.backends.torch.submodels import decoder_layers
from specbench.base.errors import RunError, UsageError
from specbench.decoding.protocols import ForwardOutput
from specbench.kernels import Hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


COMPILERS: dict[str, Any] = {"cuda": "inductor"}
"""Backend of ``torch.compile`` by type of device. A CPU has packed layers instead, which cannot be traced."""

WIDEST_GRAPH = 32
"""Wider forwards read prompts, and rarely have the same width twice."""

_WARM_UPS = 2

Given = TypeVar("Given")

Capture = Callable[[Callable[[], Given]], tuple[Callable[[], None], Given]]
"""Takes a forward on fixed buffers; returns a function that repeats it, and its result, which is then overwritten."""


def cuda_capture(run: Callable[[], Given]) -> tuple[Callable[[], None], Given]:
    """Capture a forward as a CUDA graph.

    Raises:
        RunError: It does something that cannot be captured.
    """
    current: Any = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    try:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"The forward pass cannot be captured as a CUDA graph: {reason}.", "Use --cache dynamic."
        ) from error
    return graph.replay, output


def compiled(model: PreTrainedModel, device: torch.device) -> Callable[..., Any]:
    """Return a model's ``forward`` in which decoder layers are compiled, once for all that are alike.

    Compiled as a whole it would take as many times longer as it has layers.

    Raises:
        UsageError: There is no compiler for this device, or the layers were not found.
        RunError: The result could not compile them.
    """
    backend = COMPILERS.get(device.type)
    if backend is None:
        raise UsageError(
            f"Compilation is not supported on the device {device.type}.",
            "Choose another --cache: on a CPU the packed layers are the faster way.",
        )
    try:
        layers = decoder_layers(model)
    except ValueError as error:
        raise UsageError(
            f"This model cannot be compiled: {error}.", "Choose another --cache than compiled."
        ) from error
    if any("forward" in vars(layer) for layer in layers):
        raise UsageError(
            "This model cannot be compiled: its layers are wrapped, as on several devices.",
            "Choose another --cache than compiled.",
        )
    config: Any = torch._dynamo.config
    # With a lower limit later widths would run uncompiled.
    config.recompile_limit = max(config.recompile_limit, 4 * WIDEST_GRAPH)
    fast = torch.compile(_run_layer, backend=backend, dynamic=False)
    forwards = [(layer, partial(_run_compiled, fast, layer, _cache_index(layer))) for layer in layers]

    def run(**arguments: Any) -> Any:
        for layer, forward in forwards:
            layer.forward = forward
        try:
            return model(**arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(
                f"This model cannot be compiled here: {reason}", "Choose another --cache than compiled."
            ) from error
        finally:
            for layer, _ in forwards:
                del layer.forward

    return run


def _run_layer(layer: torch.nn.Module, *inputs: Any, **arguments: Any) -> Any:
    return type(layer).forward(layer, *inputs, **arguments)


def _cache_index(layer: torch.nn.Module) -> int | None:
    """Return which layer of a cache a decoder layer uses; ``None`` if that was not found."""
    indices = {
        index for part in layer.modules() if isinstance(index := getattr(part, "layer_idx", None), int)
    }
    return indices.pop() if len(indices) == 1 else None


def _run_compiled(
    fast: Callable[..., Any], layer: torch.nn.Module, index: int | None, *inputs: Any, **arguments: Any
) -> Any:
    cache = arguments.get("past_key_values")
    if cache is not None and index is not None:
        arguments["past_key_values"] = _CacheOfLayer(cache.layers[index])
    return fast(layer, *inputs, **arguments)


class _CacheOfLayer:
    """One layer of a cache in place of the whole, whose index would be compiled into the code of every layer."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._layer.update(keys, values)


class _Inputs(NamedTuple):
    """The inputs of a forward pass, of which only values change from pass to pass, not shapes."""

    ids: Tensor  # token ids, [1, n]
    past: Tensor  # tokens in the cache, [1]
    positions: Tensor | None  # of the tokens, [1, n]; None for those after the cached ones
    mask: Tensor | None  # bool [1, 1, n, capacity]: what each attends to; None: causal


class GraphForward(Forward):
    """Forwards of static shapes over a static cache, each width captured once and then replayed.

    Args:
        capture: Makes a forward repeatable; ``None`` runs each again.
        compiled: A faster ``forward`` of the model for short forwards; ``None`` for its own.
    """

    shows_experts = False  # watching would compile captured passes again
    _cache: StaticKVCache

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticKVCache,
        capture: Capture[ForwardOutput] | None = None,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, cache)
        self._capture = capture
        self._compiled = compiled or model
        self._limits_logits = takes_logits_to_keep(model)
        self._hooks = Hooks(model.modules())  # a replay would leave them out
        self._captured: dict[Hashable, tuple[_Inputs, Callable[[], None], ForwardOutput]] = {}
        self._generation = cache.generation

    def over(self, cache: KVCache) -> Forward:
        return HFForward(self._model, cache)

    def run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        count, past = ids.shape[1], self._cache.length
        self._cache.reserve(past + count)
        inputs = _Inputs(ids, torch.full((1,), past, device=ids.device), positions, mask)
        if count > WIDEST_GRAPH or self._hooks.are_present():
            output = self._call_model(self._model, inputs, rows, layers)
        elif self._capture is None:
            output = self._call_model(self._compiled, inputs, rows, layers)
        else:
            output = self._replayed(self._capture, inputs, rows, layers)
        self._cache.length = past + count
        return output

    def _call_model(
        self, forward: Callable[..., Any], inputs: _Inputs, rows: int, layers: Sequence[int]
    ) -> ForwardOutput:
        """Run a forward that reads and writes its inputs and the buffers of the cache alone."""
        ids, past, positions, mask = inputs
        slots = past + torch.arange(ids.shape[1], device=ids.device)
        if mask is None:
            mask = (torch.arange(self._cache.capacity, device=ids.device) <= slots[:, None])[None, None]
        self._cache.slots = slots
        more: dict[str, Any] = {"logits_to_keep": rows} if self._limits_logits else {}
        if layers:
            more["output_hidden_states"] = [*layers]
        output = forward(
            input_ids=ids,
            position_ids=slots[None] if positions is None else positions,
            attention_mask=mask,
            **self._cache.model_kwargs(),
            **more,
        )
        return read_output(output, rows, layers)

    def _replayed(
        self, capture: Capture[ForwardOutput], inputs: _Inputs, rows: int, layers: Sequence[int]
    ) -> ForwardOutput:
        if self._generation != self._cache.generation:  # its buffers are elsewhere now
            self._captured.clear()
            self._generation = self._cache.generation
        key = (inputs.ids.shape[1], rows, tuple(layers), tuple(value is None for value in inputs))
        if key not in self._captured:
            own = _Inputs(*(None if value is None else value.clone() for value in inputs))  # type: ignore[arg-type]
            self._captured[key] = (
                own,
                *capture(lambda: self._call_model(self._compiled, own, rows, layers)),
            )
        buffers, replay, output = self._captured[key]
        for buffer, value in zip(buffers, inputs, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        replay()
        logits, hidden, _ = output  # the next pass of this width writes there again
        return ForwardOutput(logits.clone(), None if hidden is None else hidden.clone())
