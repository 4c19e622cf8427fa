"""Native passes on CPUs: products, attention and whole forward passes in C, over packed and quantized layers.

The rest of the package imports only these names, and ``weights``. docs/kernels.md says what each takes and gives.
"""

from specbench.kernels.hooks import Hooks
from specbench.kernels.native import Attention, Buffers, Request, attend, can_attend, is_available
from specbench.kernels.passes import (
    HeadPasses,
    ModelPasses,
    describe,
    forward_for,
    forward_for_head,
    reads_bfloat16,
    why_not,
)
from specbench.kernels.recurrence import delta_rule, takes_keys
from specbench.kernels.surgery import layers_of, pack, quantize, unpack

__all__ = [
    "Attention",
    "Buffers",
    "HeadPasses",
    "Hooks",
    "ModelPasses",
    "Request",
    "attend",
    "can_attend",
    "delta_rule",
    "describe",
    "forward_for",
    "forward_for_head",
    "is_available",
    "layers_of",
    "pack",
    "quantize",
    "reads_bfloat16",
    "takes_keys",
    "unpack",
    "why_not",
]
