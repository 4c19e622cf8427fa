"""Decoder layers that take short passes in few operators.

A pass over a token or two streams all weights through the caches of the processor. What comes between two products
then finds its code and data gone, and takes several times as long as in a loop of its own: what counts is how many
operators, modules and lines of Python there are. The layers of the Llama family have a second way through, for passes
of drafting and verifying: the same formulas, with the joined products read in one piece, one rotation for queries and
keys together, norms by the length of the vector, and no modules in between. All of it is done row by row, so that a
row's bits do not depend on the pass. Long passes go the way of ``transformers``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.attention import attend
from specbench.backends.torch.kernels.linear import PackedLinear, QuantizedLinear
from specbench.backends.torch.kernels.surgery import MergedLinear

_KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Decoder layers of ``transformers`` that compute what ``FusedLayer`` computes."""


class FusedLayer:
    """The second way through a decoder layer, by what that is made of now: who changes it makes another one.

    Where all products are int8 ones that take and give float32, so is everything but attention, and nothing is
    converted in between. Queries, keys and values are in the model's own dtype all the same, for the cache may be the
    target's.

    Args:
        layer: One of those that ``fused_layers`` takes.

    Attributes:
        products: Queries, keys and values; output; gates and what they let through; down.
        norms: Before attention and before the gates.
        head_norms: Of queries and keys; ``None`` where there are none.
        heads, size, scaling: Query heads, the size of one, and what scores are multiplied by.
        groups: Query heads to a key/value head.
        place: Of its keys and values, among the layers of a cache.
        dtype: Of its queries, keys and values.
    """

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        products = (attention.q_proj.join.layer, attention.o_proj, mlp.gate_proj.join.layer, mlp.down_proj)
        self.products: tuple[Any, Any, Any, Any] = products
        self._projections, self._output, self._gates, self._down = products
        self.norms: tuple[Any, Any] = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms: tuple[Any, Any] | None = (
            (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        )
        self.size: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.heads: int = attention.q_proj.out_features // self.size
        self._turned = self.heads + attention.k_proj.out_features // self.size
        self._attention_scale = _scale_of(layer.input_layernorm)
        self._mlp_scale = _scale_of(layer.post_attention_layernorm)
        self.groups = self.heads // (self._turned - self.heads)
        self.place: int = attention.layer_idx
        self.dtype: torch.dtype = layer.input_layernorm.weight.dtype
        float32_io = all(isinstance(product, QuantizedLinear) and product.float32_io for product in products)
        self._carried = torch.float32 if float32_io else self.dtype

    def __call__(
        self,
        residual: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        masks: Sequence[torch.Tensor] | None,
        held: Any,
    ) -> torch.Tensor:
        """A short pass over one sequence.

        Args:
            residual: [1, tokens, hidden size].
            rotation: What ``spread_rotation`` made.
            masks: What ``attention.fold_mask`` made; ``None`` for a single token that sees all keys, and for several
                requests, whose layer of the cache has their masks.
            held: The layer of the cache at ``place``.
        """
        length, carried, heads, turned = residual.shape[1], self._carried, self.heads, self._turned
        residual = residual.to(carried)
        x = _root_mean_square_norm(residual.float(), *self._attention_scale).to(carried)
        x = self._projections.forward(x).to(self.dtype).view(1, length, -1, self.size)
        rotated = x[:, :, :turned]
        if self.head_norms is not None:
            query_norm, key_norm = self.head_norms
            rotated = torch.cat((query_norm(rotated[:, :, :heads]), key_norm(rotated[:, :, heads:])), dim=2)
        cosines, sines = rotation
        rotated = (rotated * cosines).addcmul_(rotated.roll(self.size // 2, -1), sines).transpose(1, 2)
        keys, values = held.update(rotated[:, heads:], x[:, :, turned:].transpose(1, 2))
        x = attend(rotated[:, :heads], keys, values, masks, self.scaling)
        residual = self._output.forward(x.view(1, length, heads * self.size).to(carried)).add_(residual)

        x = _root_mean_square_norm(residual.float(), *self._mlp_scale).to(carried)
        x = self._gates.forward(x)
        middle = x.shape[-1] // 2
        x = silu(x[..., :middle]).mul_(x[..., middle:])
        out: torch.Tensor = self._down.forward(x).add_(residual)
        return out


def fused_layers(model: Any) -> tuple[FusedLayer, ...] | None:
    """The second way through the layers of ``model.model.layers``.

    Returns:
        ``None`` where some of them are of kinds that are not known, or not packed or in int8.
    """
    own = list(getattr(model.model, "layers", ()))
    if not all(_is_known(layer) for layer in own):
        return None
    layers = tuple(FusedLayer(layer) for layer in own)
    alike = {(layer.groups, layer.dtype) for layer in layers}
    return layers if len(alike) == 1 else None


def native_stack(model: Any, layers: Sequence[FusedLayer]) -> native.DecoderStack | None:
    """A whole pass through a model, but for its embeddings and the rotation, in one call.

    Args:
        model: One whose layers these are; nothing around them was changed.
        layers: The second way through.

    Returns:
        ``None`` where its products are no native ones, or its sizes are none that these passes are written for.
    """
    final, first = model.model.norm, layers[0]
    head, made = native_product(model.lm_head), [_native_layer(layer) for layer in layers]
    norms = [final, *(norm for layer in layers for norm in (*layer.norms, *(layer.head_norms or ())))]
    if (
        head is None
        or type(final) is not type(first.norms[0])
        or len({(layer.heads, layer.groups, layer.size, layer.scaling) for layer in layers}) > 1
        or len({norm.variance_epsilon for norm in norms}) > 1
        or any("forward" in vars(module) for module in (model.lm_head, final))
    ):
        return None
    return stack_of(
        made,
        final.weight,
        head,
        heads=first.heads,
        shared=first.heads // first.groups,
        size=first.size,
        epsilon=final.variance_epsilon,
        scaling=first.scaling,
    )


def stack_of(
    layers: Sequence[native.Layer | None],
    norm: torch.Tensor,
    head: native.Product,
    *,
    heads: int,
    shared: int,
    size: int,
    epsilon: float,
    scaling: float,
    embedding_norm: torch.Tensor | None = None,
    adds_to_normed: bool = False,
) -> native.DecoderStack | None:
    """A native stack; for the arguments see ``native.DecoderStack``.

    Returns:
        ``None`` where a layer is missing, they round otherwise, or their sizes are none that native passes are written
        for.
    """
    made = [layer for layer in layers if layer is not None]
    products = [head, *(product for layer in made for product in layer.products)]
    hidden = head.panels.inputs
    if (
        len(made) < len(layers)
        or {(own.output.panels.outputs, own.down.panels.inputs) for own in made}
        != {(hidden, made[0].down.panels.inputs)}
        or len({max(8, product.panels.bits) for product in products}) > 1
        or hidden % native.STEP
        or size % native.STEP
        or size > native.MOST_HEAD_SIZE
        or any(own.down.panels.inputs % own.gates.panels.width for own in made)
    ):
        return None
    return native.DecoderStack(
        made,
        norm,
        head,
        heads=heads,
        shared=shared,
        size=size,
        epsilon=epsilon,
        scaling=scaling,
        embedding_norm=embedding_norm,
        adds_to_normed=adds_to_normed,
    )


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


def joined_product(layers: Sequence[Any]) -> native.Product | None:
    """Of linear layers that are joined, as one; ``None`` where they are not, or it is no native one."""
    return native_product(layers[0].join.layer) if _joined(layers) else None


def native_product(layer: Any) -> native.Product | None:
    """Of a linear layer; ``None`` where it is no native one."""
    panels = layer.panels if isinstance(layer, PackedLinear | QuantizedLinear) else None
    return None if panels is None else native.Product(panels, layer.bias)


def spread_rotation(cosines: torch.Tensor, sines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for all heads, [1, tokens, 1, head size], the sines of the first half negative.

    Args:
        cosines, sines: As models make them, [1, tokens, head size].
    """
    half = sines.shape[-1] // 2
    signed = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
    return cosines.unsqueeze(2), signed.unsqueeze(2)


def _root_mean_square_norm(x: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """RMS norm (Zhang and Sennrich 2019) in few operators, in float32.

    x·w / sqrt(mean(x²) + ε) = x·(w·√n) / hypot(‖x‖, √(n·ε)) over n elements.

    Args:
        x: [..., n].
        scale: w·√n, [n].
        least: √(n·ε), [1].
    """
    length = torch.linalg.vector_norm(x, 2, -1, True)
    return (x * scale).div_(length.hypot_(least))


def _scale_of(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_root_mean_square_norm`` needs of a norm."""
    root = math.sqrt(norm.weight.numel())
    least = torch.tensor([norm.variance_epsilon], dtype=torch.float64).sqrt()  # of what is below 0 NaN
    return norm.weight.detach().float() * root, (root * least).float()


def _is_known(layer: Any) -> bool:
    """Whether the layer is built of what ``FusedLayer`` expects, and nothing was wrapped around its parts."""
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
        and _joined(projections)
        and _joined(gates)
        and all(isinstance(each, PackedLinear | QuantizedLinear) for each in rest)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and isinstance(activation, nn.SiLU | type(_silu()))
    )


def _silu() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


def _joined(layers: Sequence[Any]) -> bool:
    return all(isinstance(layer, MergedLinear) and layer.join is layers[0].join for layer in layers) and [
        layer.index for layer in layers
    ] == list(range(len(layers[0].join.sizes)))
