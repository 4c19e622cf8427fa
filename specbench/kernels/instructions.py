"""Instructions that matrix products can use: the processor's, unless an environment variable excludes them.

``ONEDNN_MAX_CPU_ISA`` limits oneDNN, and ``ATEN_CPU_CAPABILITY`` torch's own operators, so that a new processor can
imitate an older one. The processor's features as reported by torch ignore both.
"""

from __future__ import annotations

import os
import platform
from typing import Literal

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # variables that limit oneDNN, the newer one first
_NO_AVX512 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"})
_WITHOUT = {
    "avx512": _NO_AVX512,
    "vnni": frozenset({"SSE41", "AVX", "AVX2", "AVX512_CORE"}),
    "bfloat16": _NO_AVX512 | {"AVX512_CORE", "AVX512_CORE_VNNI"},
}
"""Values of these variables that exclude instructions."""


def is_allowed(instructions: Literal["avx512", "vnni", "bfloat16"]) -> bool:
    """Return whether no variable excludes such instructions; the processor can still lack them."""
    limit = next((os.environ[name] for name in _LIMITS if name in os.environ), "")
    return limit.upper() not in _WITHOUT[instructions]


def has_vnni() -> bool:
    """Return whether bytes are multiplied and summed in 32 bits by one instruction."""
    import torch

    return bool(torch.cpu._is_vnni_supported()) and is_allowed("vnni")


def has_bfloat16() -> bool:
    """Return whether bfloat16 matrices are multiplied as they are; elsewhere they are converted first."""
    import torch

    if not is_allowed("bfloat16"):
        return False
    try:
        if platform.machine() in ("aarch64", "arm64"):
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return bool(torch.cpu._is_avx512_bf16_supported())
    except (AttributeError, RuntimeError):  # questions that other versions or builds of torch do not know
        return False
