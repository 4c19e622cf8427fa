"""Decoder layers of the Llama family in few operators.

A forward of a token or two reads all weights through the processor's caches. This evicts the code and data needed
between two matrix products, which then takes several times as long as in a loop, so the number of operators, modules
and lines of Python matters. Here the formulas of ``transformers`` are computed with merged products, one rotation for
queries and keys, norms by vector length, and no modules in between. Everything is computed row by row, so that a row's
result is bitwise independent of the other rows in the forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specbench.backends.torch.kernels.attention import attend
from specbench.backends.torch.kernels.decoder_parts import LayerParts, Norm
from specbench.backends.torch.kernels.linear import QuantizedLinear


class FusedLayer:
    """A decoder layer in few operators, made from the layer's state when a context begins.

    Where all products have ``float32_io``, everything but attention is float32, and nothing is converted. Queries, keys
    and values keep the model's dtype, since the cache may be the target's.

    Attributes:
        place: Index of its keys and values among the layers of a cache.
        dtype: Dtype of its queries, keys and values.
    """

    def __init__(self, layer: LayerParts) -> None:
        self._projections, self._output, self._gates, self._down = layer.products
        norms = layer.norms
        self._head_norms = (
            (norms["query_norm"].module, norms["key_norm"].module) if "query_norm" in norms else None
        )
        self._size, self._scaling, self._heads = layer.head_size, layer.scaling, layer.heads
        self._rotated_heads = layer.heads + layer.kv_heads
        self._attention_scale, self._mlp_scale = (
            _scale_of(norms["attention_norm"]),
            _scale_of(norms["mlp_norm"]),
        )
        self.place, self.dtype = layer.place, layer.dtype
        float32_io = all(
            isinstance(product, QuantizedLinear) and product.float32_io for product in layer.products
        )
        self._residual_dtype = torch.float32 if float32_io else self.dtype

    def __call__(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], masks: Sequence[Tensor] | None, cached: Any
    ) -> Tensor:
        """Run the layer over one sequence.

        Args:
            residual: [1, tokens, hidden size].
            rotation: From ``spread_rotation``.
            masks: From ``attention.fold_mask``; ``None`` for a single token that sees all keys, and for several
                requests.
            cached: The layer of the cache at ``place``.
        """
        length, carried, heads, turned = (
            residual.shape[1],
            self._residual_dtype,
            self._heads,
            self._rotated_heads,
        )
        residual = residual.to(carried)
        x = _root_mean_square_norm(residual.float(), *self._attention_scale).to(carried)
        x = self._projections.forward(x).to(self.dtype).view(1, length, -1, self._size)
        rotated = x[:, :, :turned]
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            rotated = torch.cat((query_norm(rotated[:, :, :heads]), key_norm(rotated[:, :, heads:])), dim=2)
        cosines, sines = rotation
        rotated = (rotated * cosines).addcmul_(rotated.roll(self._size // 2, -1), sines).transpose(1, 2)
        keys, values = cached.update(rotated[:, heads:], x[:, :, turned:].transpose(1, 2))
        x = attend(rotated[:, :heads], keys, values, masks, self._scaling)
        residual = self._output.forward(x.view(1, length, heads * self._size).to(carried)).add_(residual)

        x = _root_mean_square_norm(residual.float(), *self._mlp_scale).to(carried)
        x = self._gates.forward(x)
        middle = x.shape[-1] // 2
        x = silu(x[..., :middle]).mul_(x[..., middle:])
        out: Tensor = self._down.forward(x).add_(residual)
        return out


def spread_rotation(cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [1, tokens, head size], for all heads:
    [1, tokens, 1, head size], the first sines negated.
    """
    half = sines.shape[-1] // 2
    signed = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
    return cosines.unsqueeze(2), signed.unsqueeze(2)


def _root_mean_square_norm(x: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    """Compute RMS norm (Zhang and Sennrich 2019) of [..., n] in few operators, in float32.

    x·w / sqrt(mean(x²) + ε) = x·(w·√n) / hypot(‖x‖, √(n·ε)), with ``scale`` = w·√n, [n], and ``least`` = √(n·ε), [1].
    """
    length = torch.linalg.vector_norm(x, 2, -1, True)
    return (x * scale).div_(length.hypot_(least))


def _scale_of(norm: Norm) -> tuple[Tensor, Tensor]:
    """Return ``scale`` and ``least`` of a norm for ``_root_mean_square_norm``."""
    root = math.sqrt(norm.weight.numel())
    least = torch.tensor([norm.epsilon], dtype=torch.float64).sqrt()  # of what is below 0 NaN
    return norm.weight.float() * root, (root * least).float()
