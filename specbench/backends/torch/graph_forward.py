"""Forward passes with fixed tensor shapes, which a CUDA device can replay in one launch instead of some hundred.

Over a ``StaticKVCache`` a forward of n tokens always is the same sequence of kernels: it writes keys and values at
given slots of buffers that do not move, and attends to all of them under a mask. On a CUDA device each width is
captured once as a graph and then replayed; elsewhere operators run one by one, as in the tests. Compiled forwards
(``torch.compile``) consist of fewer, larger kernels, and are captured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from specbench.backends.torch.caches import StaticKVCache
from specbench.backends.torch.forward import Forward, read_output, takes_logits_to_keep
from specbench.backends.torch.kernels.surgery import Hooks
from specbench.base.errors import RunError, UsageError
from specbench.decoding.protocols import ForwardOutput

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


def compiled(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a model's ``forward``, compiled for every width and number of logits.

    Raises:
        UsageError: There is no compiler for this device.
        RunError: The result could not compile it.
    """
    backend = COMPILERS.get(device.type)
    if backend is None:
        raise UsageError(
            f"Compilation is not supported on the device {device.type}.",
            "Leave --compile out: on a CPU the packed layers are the faster way.",
        )
    config: Any = torch._dynamo.config
    config.recompile_limit = max(
        config.recompile_limit, 4 * WIDEST_GRAPH
    )  # or later widths would run uncompiled
    fast = torch.compile(forward, backend=backend, dynamic=False)

    def run(**arguments: Any) -> Any:
        try:
            return fast(**arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"This model cannot be compiled here: {reason}", "Leave --compile out.") from error

    return run


class _Inputs(NamedTuple):
    """The inputs of a forward pass whose tensors have fixed shapes."""

    ids: Tensor  # token ids, [1, n]
    slots: Tensor  # where in the cache their keys and values go, [n]
    positions: Tensor  # of the tokens, [1, n]
    mask: Tensor  # bool [1, 1, n, capacity]: what each attends to


class _Captured(NamedTuple):
    inputs: _Inputs
    replay: Callable[[], None]
    output: ForwardOutput


class GraphForward(Forward):
    """Forwards of static shapes over a static cache, each width captured once and then replayed.

    Args:
        capture: Makes a forward repeatable; ``None`` runs each again.
        compiled: A faster ``forward`` of the model for short forwards; ``None`` for its own.
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
        self._limits_logits = takes_logits_to_keep(model)
        self._hooks = Hooks(model.modules())  # a replay would leave them out
        self._captured: dict[tuple[int, int, tuple[int, ...]], _Captured] = {}
        self._generation = cache.generation

    def _run(
        self, ids: Tensor, rows: int, layers: Sequence[int], positions: Tensor | None, mask: Tensor | None
    ) -> ForwardOutput:
        count, past, device = ids.shape[1], self._cache.length, ids.device
        self._cache.reserve(past + count)
        slots = torch.arange(past, past + count, device=device)
        if mask is None:
            mask = (torch.arange(self._cache.capacity, device=device) <= slots[:, None])[None, None]
        inputs = _Inputs(ids, slots, slots[None] if positions is None else positions, mask)
        # Hidden states are gathered during the forward, which is not compiled.
        forward = self._model if layers else self._compiled
        if count > WIDEST_GRAPH or self._hooks.are_present():
            found = self._call_model(self._model, inputs, rows, layers)
        elif self._capture is None:
            found = self._call_model(forward, inputs, rows, layers)
        else:
            found = self._replayed(self._capture, forward, inputs, rows, layers)
        self._cache.length = past + count
        return found

    def _call_model(
        self, forward: Callable[..., Any], inputs: _Inputs, rows: int, layers: Sequence[int]
    ) -> ForwardOutput:
        """Run a forward that reads and writes its inputs and the buffers of the cache alone."""
        self._cache.slots = inputs.slots
        more: dict[str, Any] = {"logits_to_keep": rows} if self._limits_logits else {}
        if layers:
            more["output_hidden_states"] = [*layers]
        output = forward(
            input_ids=inputs.ids,
            position_ids=inputs.positions,
            attention_mask=inputs.mask,
            **self._cache.model_kwargs(),
            **more,
        )
        return read_output(output, rows, layers)

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
            self._captured[key] = _Captured(
                own, *capture(lambda: self._call_model(forward, own, rows, layers))
            )
        captured = self._captured[key]
        for buffer, value in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(value)
        captured.replay()
        logits, hidden, _ = captured.output  # the next pass of this width writes there again
        return ForwardOutput(logits.clone(), None if hidden is None else hidden.clone())
