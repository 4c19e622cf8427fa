"""Decoder layers of the Llama family in few operators, and as stacks for native forward passes.

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
from torch import Tensor, nn
from torch.nn.functional import silu

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.attention import attend
from specbench.backends.torch.kernels.linear import PackedLinear, QuantizedLinear
from specbench.backends.torch.kernels.surgery import MergedLinear

_KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Decoder layers of ``transformers`` that compute what ``FusedLayer`` computes."""


class FusedLayer:
    """A decoder layer in few operators, made from the layer's state when a context begins.

    Where all products have ``float32_io``, everything but attention is float32, and nothing is converted. Queries, keys
    and values keep the model's dtype, since the cache may be the target's.

    Attributes:
        products: The matrix products: queries, keys and values; output; gate and up; down.
        norms: The norms before attention and before the MLP.
        head_norms: The norms of queries and keys; ``None`` without.
        groups: Number of query heads per key/value head.
        place: Index of its keys and values among the layers of a cache.
        dtype: Dtype of its queries, keys and values.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        products = (
            attention.q_proj.merged.layer,
            attention.o_proj,
            mlp.gate_proj.merged.layer,
            mlp.down_proj,
        )
        self.products: tuple[Any, Any, Any, Any] = products
        self._projections, self._output, self._gates, self._down = products
        self.norms: tuple[Any, Any] = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms: tuple[Any, Any] | None = (
            (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        )
        self.size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.heads: int = attention.q_proj.out_features // self.size
        self._rotated_heads = self.heads + attention.k_proj.out_features // self.size
        self._attention_scale = _scale_of(layer.input_layernorm)
        self._mlp_scale = _scale_of(layer.post_attention_layernorm)
        self.groups = self.heads // (self._rotated_heads - self.heads)
        self.place: int = attention.layer_idx
        self.dtype: torch.dtype = layer.input_layernorm.weight.dtype
        float32_io = all(isinstance(product, QuantizedLinear) and product.float32_io for product in products)
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
            self.heads,
            self._rotated_heads,
        )
        residual = residual.to(carried)
        x = _root_mean_square_norm(residual.float(), *self._attention_scale).to(carried)
        x = self._projections.forward(x).to(self.dtype).view(1, length, -1, self.size)
        rotated = x[:, :, :turned]
        if self.head_norms is not None:
            query_norm, key_norm = self.head_norms
            rotated = torch.cat((query_norm(rotated[:, :, :heads]), key_norm(rotated[:, :, heads:])), dim=2)
        cosines, sines = rotation
        rotated = (rotated * cosines).addcmul_(rotated.roll(self.size // 2, -1), sines).transpose(1, 2)
        keys, values = cached.update(rotated[:, heads:], x[:, :, turned:].transpose(1, 2))
        x = attend(rotated[:, :heads], keys, values, masks, self.scaling)
        residual = self._output.forward(x.view(1, length, heads * self.size).to(carried)).add_(residual)

        x = _root_mean_square_norm(residual.float(), *self._mlp_scale).to(carried)
        x = self._gates.forward(x)
        middle = x.shape[-1] // 2
        x = silu(x[..., :middle]).mul_(x[..., middle:])
        out: Tensor = self._down.forward(x).add_(residual)
        return out


def fused_layers(model: Any) -> tuple[FusedLayer, ...] | None:
    """Return the layers of ``model.model.layers`` as fused ones;
    ``None`` if some are not of known kinds, or not packed or quantized.
    """
    own = list(getattr(model.model, "layers", ()))
    if not all(_is_known(layer) for layer in own):
        return None
    layers = tuple(FusedLayer(layer) for layer in own)
    alike = {(layer.groups, layer.dtype) for layer in layers}
    return layers if len(alike) == 1 else None


def native_stack(model: Any, layers: Sequence[FusedLayer]) -> native.DecoderStack | None:
    """Return the native stack of a model, unmodified around its layers; ``None`` if it is not supported."""
    final, first = model.model.norm, layers[0]
    head = native_product(model.lm_head)
    norms = [final, *(norm for layer in layers for norm in (*layer.norms, *(layer.head_norms or ())))]
    if (
        head is None
        or type(final) is not type(first.norms[0])
        or len({(layer.heads, layer.groups, layer.size, layer.scaling) for layer in layers}) > 1
        or len({norm.variance_epsilon for norm in norms}) > 1
        or any("forward" in vars(module) for module in (model.lm_head, final))
    ):
        return None
    kv_heads = first.heads // first.groups
    config = native.StackConfig(first.heads, kv_heads, first.size, final.variance_epsilon, first.scaling)
    return make_stack([_native_layer(layer) for layer in layers], final.weight, head, config)


def make_stack(
    layers: Sequence[native.Layer | None], norm: Tensor, head: native.Product, config: native.StackConfig
) -> native.DecoderStack | None:
    """Make a native stack; ``None`` if a layer is missing, layers round differently, or sizes are not supported."""
    found = [layer for layer in layers if layer is not None]
    products = [head, *(product for layer in found for product in layer.products)]
    hidden = head.panels.inputs
    if (
        len(found) < len(layers)
        or {(own.output.panels.outputs, own.down.panels.inputs) for own in found}
        != {(hidden, found[0].down.panels.inputs)}
        or len({max(8, product.panels.bits) for product in products}) > 1
        or hidden % native.STEP
        or config.head_size % native.STEP
        or config.head_size > native.MOST_HEAD_SIZE
        or any(own.down.panels.inputs % own.gates.panels.width for own in found)
    ):
        return None
    return native.DecoderStack(found, norm, head, config)


def _native_layer(layer: FusedLayer) -> native.Layer | None:
    projections, output, gates, down = (native_product(product) for product in layer.products)
    if projections is None or output is None or gates is None or down is None:
        return None
    attention_norm, mlp_norm = (norm.weight for norm in layer.norms)
    query_norm, key_norm = (
        (None, None) if layer.head_norms is None else (norm.weight for norm in layer.head_norms)
    )
    norms = (attention_norm, mlp_norm, query_norm, key_norm)
    return native.Layer(projections, output, gates, down, *norms)


def joint_product(layers: Sequence[Any]) -> native.Product | None:
    """Return the product of linear layers that are merged; ``None`` if they are not, or it is not native."""
    return native_product(layers[0].merged.layer) if _are_merged(layers) else None


def native_product(layer: Any) -> native.Product | None:
    """Return the product of a linear layer; ``None`` if it is not native."""
    panels = layer.panels if isinstance(layer, PackedLinear | QuantizedLinear) else None
    return None if panels is None else native.Product(panels, layer.bias)


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


def _scale_of(norm: Any) -> tuple[Tensor, Tensor]:
    """Return ``scale`` and ``least`` of a norm for ``_root_mean_square_norm``."""
    root = math.sqrt(norm.weight.numel())
    least = torch.tensor([norm.variance_epsilon], dtype=torch.float64).sqrt()  # of what is below 0 NaN
    return norm.weight.detach().float() * root, (root * least).float()


def _is_known(layer: Any) -> bool:
    """Return whether a layer consists of what ``FusedLayer`` expects, and none of its parts was wrapped."""
    kind = type(layer)
    if kind.__name__ not in _KINDS:
        return False
    try:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        gates, activation = [mlp.gate_proj, mlp.up_proj], mlp.act_fn
        rest = (attention.o_proj, mlp.down_proj)
        norms += [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    except AttributeError:
        return False
    return (
        kind.__module__.startswith("transformers.")
        and all(type(part).__module__ == kind.__module__ for part in (attention, mlp, *norms))
        and not any("forward" in vars(module) for module in layer.modules())
        and _are_merged(projections)
        and _are_merged(gates)
        and all(isinstance(each, PackedLinear | QuantizedLinear) for each in rest)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and isinstance(activation, nn.SiLU | type(_silu()))
    )


def _silu() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


def _are_merged(layers: Sequence[Any]) -> bool:
    return all(isinstance(layer, MergedLinear) and layer.merged is layers[0].merged for layer in layers) and [
        layer.index for layer in layers
    ] == list(range(len(layers[0].merged.sizes)))
