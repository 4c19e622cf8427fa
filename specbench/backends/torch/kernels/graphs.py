"""Passes of fixed shapes, which a CUDA device can replay: one launch in place of some hundred.

Over a static cache (``StaticKVCache``) a pass of n tokens is the same sequence of kernels every time:
it writes keys and values at given slots of buffers that stay where they are, and attends to all of them under a mask.
On a CUDA device each width is captured once as a graph and replayed from then on. Elsewhere the same passes run one
operator at a time, which is how the tests see them. Compiled passes (``torch.compile``) are made of fewer, larger
kernels, and captured in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from specbench.base.errors import RunError, UsageError

COMPILERS: dict[str, Any] = {"cuda": "inductor"}
"""By type of device, what ``torch.compile`` gets. A CPU has packed layers instead, which cannot be traced."""

WIDEST_GRAPH = 32
"""Wider passes read prompts, and have a width of their own each."""

_WARM_UPS = 2

Given = TypeVar("Given")

Capture = Callable[[Callable[[], Given]], tuple[Callable[[], None], Given]]
"""Takes a pass on fixed buffers; gives what repeats it, and where its result is then."""


def cuda_capture(run: Callable[[], Given]) -> tuple[Callable[[], None], Given]:
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
        config.recompile_limit, 4 * WIDEST_GRAPH
    )  # or later widths would run uncompiled
    quick = torch.compile(forward, backend=backend, dynamic=False)

    def run(**arguments: Any) -> Any:
        try:
            return quick(**arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise RunError(f"This model cannot be compiled here: {reason}", "Leave --compile out.") from error

    return run
