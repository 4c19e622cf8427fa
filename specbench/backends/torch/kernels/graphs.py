"""Passes of fixed shapes, which a CUDA device can replay: one launch in place of some hundred.

Over a static cache (``StaticKVCache``) a pass of n tokens is the same sequence of kernels every time:
it writes keys and values at given slots of buffers that stay where they are, and attends to all of them under a mask.
On a CUDA device each width is captured once as a graph and replayed from then on. Elsewhere the same passes run one
operator at a time, which is how the tests see them. Compiled passes (``torch.compile``) are made of fewer, larger
kernels, and captured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specbench.backends.torch.caches import StaticKVCache
from specbench.backends.torch.kernels.linear import Hooks
from specbench.errors import RunError, UsageError

__all__ = ["COMPILERS", "PassInputs", "StaticPasses", "compiled", "cuda_capture"]

COMPILERS: dict[str, Any] = {"cuda": "inductor"}
"""By type of device, what ``torch.compile`` gets. A CPU has packed layers instead, which cannot be traced."""

_WIDEST_GRAPH = 32
"""Wider passes read prompts, and have a width of their own each."""

_WARM_UPS = 2


class PassInputs(NamedTuple):
    """What a pass is made of.

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


Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]
"""Takes a pass on fixed buffers; gives what repeats it, and where its result is then."""


class _Captured(NamedTuple):
    inputs: PassInputs
    replay: Callable[[], None]
    output: torch.Tensor


class StaticPasses:
    """The passes of one model over a static cache.

    Args:
        forward: ``(inputs, rows) -> logits``, [rows, vocab]; writes to the cache and reads its sizes nowhere.
        cache: The cache.
        device: Of the model.
        capture: How a pass is made repeatable; ``None`` runs each anew.
        short_forward: A quicker way for the passes that come again and again; ``None`` for the same.
        hooks: Of the model; where there are some, which a replay would leave out, passes run anew.
    """

    def __init__(
        self,
        forward: Callable[[PassInputs, int], torch.Tensor],
        cache: StaticKVCache,
        device: torch.device,
        capture: Capture | None,
        short_forward: Callable[[PassInputs, int], torch.Tensor] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._hooks = hooks or Hooks(())
        self._short_forward = short_forward or forward
        self._forward, self.cache, self.device, self._capture = forward, cache, device, capture
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._generation = cache.generation

    def run(
        self,
        ids: torch.Tensor,
        rows: int,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed tokens behind those in the cache.

        Args:
            ids: [1, n].
            rows: How many positions' logits are wanted, counted from the end.
            positions: [1, n]; ``None`` for one behind the other.
            mask: Bool [1, 1, n, capacity] for a cache of ``cache.keys(n)``; ``None`` for what lies before each token.

        Returns:
            Logits, [rows, vocab]; the caller's own.
        """
        count = ids.shape[1]
        past = self.cache.length
        self.cache.reserve(past + count)
        slots = torch.arange(past, past + count, device=self.device)
        if mask is None:
            mask = (torch.arange(self.cache.capacity, device=self.device) <= slots[:, None])[None, None]
        inputs = PassInputs(ids, slots, slots[None] if positions is None else positions, mask)
        replays = count <= _WIDEST_GRAPH and not self._hooks.there()
        logits = self._replayed(inputs, rows) if replays else self._forward(inputs, rows)
        self.cache.length = past + count
        return logits

    def _replayed(self, inputs: PassInputs, rows: int) -> torch.Tensor:
        if self._capture is None:
            return self._short_forward(inputs, rows)
        if self._generation != self.cache.generation:  # its buffers are elsewhere now
            self._captured.clear()
            self._generation = self.cache.generation
        key = (inputs.ids.shape[1], rows)
        if key not in self._captured:
            own = PassInputs(*(each.clone() for each in inputs))
            self._captured[key] = _Captured(own, *self._capture(lambda: self._short_forward(own, rows)))
        captured = self._captured[key]
        for buffer, value in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(value)
        captured.replay()
        return captured.output.clone()  # the next pass of this width writes there again


def cuda_capture(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
    """Capture a pass as a CUDA graph.

    Raises:
        RunError: It does something that cannot be captured.
    """
    device: Any = torch.cuda.current_stream()
    beside = torch.cuda.Stream()
    try:
        beside.wait_stream(device)
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                run()
        device.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"A pass of this model cannot be captured as a CUDA graph: {reason}.", "Use --cache dynamic."
        ) from error
    return graph.replay, output


def compiled(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A model's ``forward``, compiled anew for every width and number of rows of its logits.

    Raises:
        UsageError: There is no compiler for passes on this device.
        RunError: From the result: it could not be compiled.
    """
    backend = COMPILERS.get(device.type)
    if backend is None:
        raise UsageError(
            f"Passes are not compiled on the device {device.type}.",
            "Leave --compile out: on a CPU the packed layers are the faster way.",
        )
    config: Any = torch._dynamo.config
    config.recompile_limit = max(
        config.recompile_limit, 4 * _WIDEST_GRAPH
    )  # or later widths would run uncompiled
    quick = torch.compile(forward, backend=backend, dynamic=False)

    def run(**arguments: Any) -> Any:
        try:
            return quick(**arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"This model cannot be compiled here: {reason}", "Leave --compile out.") from error

    return run
