"""Gated delta rules and Mamba 2 in a short pass by one native call (native.h), for recurrent layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_int32, c_void_p

import torch
from torch import Tensor

from specbench.kernels import native


class _DeltaRule(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ["query", "key", "value", "decay", "beta", "before", "after", "out"]),
        *(
            (name, c_int32)
            for name in ["batch", "rows", "heads", "shared", "keys", "values", "decays", "normalizes", "adds"]
        ),
    )


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor,
    after: Sequence[Tensor],
    *,
    normalize: bool,
    adds: bool = False,
) -> Tensor:
    """Return what each row reads; a row's bits do not depend on those behind it, nor on how rows are split into passes.

    Args:
        query, key: [batch, rows, key heads, key size].
        value: [batch, rows, heads, value size].
        g: Logarithms of the decay, [batch, rows, heads] or, with one for each key, [batch, rows, heads, key size].
        beta: [batch, rows, heads].
        before: The state, float32 [batch, heads, key size, value size], contiguous.
        after: Gets the states after each row; like ``before``.
        normalize: Whether queries and keys are scaled to length 1.
        adds: Whether values are added to the state without what it holds for their keys, and queries are not scaled.

    Returns:
        [batch, rows, heads, value size], in the dtype of ``query``.
    """
    decay = g.float().exp()
    given = [each.float().contiguous() for each in (query, key, value, decay, beta)]
    out = torch.empty_like(given[2])
    batch, rows, heads, values = value.shape
    states = native.array(c_void_p, rows)(*(state.data_ptr() for state in after))
    decays = decay.shape[-1] if decay.dim() == 4 else 1
    rule = _DeltaRule(
        *(each.data_ptr() for each in (*given, before)), ctypes.cast(states, c_void_p), out.data_ptr(),
        batch, rows, heads, *key.shape[2:], values, decays, normalize, adds,
    )  # fmt: skip
    native.loaded().call("delta_rule", byref(rule))
    return out.to(query.dtype)


def takes_keys(key: Tensor) -> bool:
    """Return whether ``delta_rule`` takes keys like these, [.., key size], on this machine."""
    return native.is_available() and key.device.type == "cpu" and key.shape[-1] <= native.MOST_HEAD_SIZE
