"""Decoder layers that take short passes in few operators.

A pass over a token or two streams all weights through the caches of the processor. What comes between two products
then finds its code and data gone, and takes several times as long as in a loop of its own: what counts is how many
operators, modules and lines of Python there are. The layers of the Llama family get a second way through, for passes of
drafting and verifying: the same formulas, with the joined products read in one piece, one rotation for queries and keys
together, norms by the length of the vector, and no modules in between. All of it is done row by row, so that a row's
bits do not depend on the pass. Long passes go the way of ``transformers``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.functional import silu
from transformers.cache_utils import DynamicCache

from specbench.backends.torch.kernels.attention import LONGEST_PASS, OncePerPass, folded_attention, is_folded
from specbench.backends.torch.kernels.linear import Int8Linear, PackedLinear
from specbench.backends.torch.kernels.surgery import Hooks, JoinedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["has_short_layers", "quicken_layers", "shorten_layers"]

_KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Decoder layers of ``transformers`` that compute what ``_ShortPasses`` computes."""

_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Largest deviation of the trial, as a share of the largest element."""


_CLOSE_IN_INT8 = 0.05
"""The same where activations are rounded to a byte: what differs in the last bit may fall to the other side."""


class _Parts(NamedTuple):
    """What a layer is made of, looked up once for every cache: whoever changes a model does so between contexts."""

    cache: ReferenceType[Any]
    hooks: Hooks
    query: nn.Module
    projections: PackedLinear | Int8Linear
    output: nn.Module
    gates: PackedLinear | Int8Linear
    down: nn.Module
    head_norms: tuple[nn.Module, nn.Module] | None
    heads: int
    shared_heads: int
    head_size: int
    dtype: torch.dtype
    attention_scale: tuple[torch.Tensor, torch.Tensor]
    mlp_scale: tuple[torch.Tensor, torch.Tensor]


class _ShortPasses:
    """The second way through a decoder layer; comes before the layer's own class."""

    _parts: _Parts | None = None
    _in_float32 = False
    """Whether short passes are float32 but for attention, and give that whatever they are given."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """As the layer's own, which takes what is no short pass over one sequence, [1, tokens, hidden size]."""
        batch, length, _ = hidden_states.shape
        short = batch == 1 and length <= LONGEST_PASS and position_embeddings is not None
        parts = self._parts_for(past_key_values) if short and past_key_values is not None else None
        if parts is None:
            layer: Any = self
            own = getattr(layer.input_layernorm, "weight", hidden_states).dtype
            whole: torch.Tensor = super().forward(  # type: ignore[misc]
                hidden_states.to(own),
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **arguments,
            )
            return whole
        assert position_embeddings is not None
        attention: Any = self._modules["self_attn"]  # type: ignore[attr-defined]
        carried = torch.float32 if self._in_float32 else parts.dtype
        heads, shared, size = parts.heads, parts.shared_heads, parts.head_size
        turned = heads + shared

        residual = hidden_states.to(carried)
        x = _root_mean_square_norm(residual.float(), *parts.attention_scale).to(carried)
        x = parts.projections.forward(x).to(parts.dtype).view(1, length, turned + shared, size)
        rotated = x[:, :, :turned]
        if parts.head_norms is not None:
            query_norm, key_norm = parts.head_norms
            rotated = torch.cat((query_norm(rotated[:, :, :heads]), key_norm(rotated[:, :, heads:])), dim=2)
        cosines, sines = _rotation(position_embeddings)
        rotated = (rotated * cosines).addcmul_(rotated.roll(size // 2, -1), sines).transpose(1, 2)
        keys, values = past_key_values.update(
            rotated[:, heads:], x[:, :, turned:].transpose(1, 2), attention.layer_idx
        )
        x, _ = folded_attention(
            attention, rotated[:, :heads], keys, values, attention_mask, scaling=attention.scaling
        )
        residual = parts.output.forward(x.reshape(1, length, heads * size).to(carried)).add_(residual)

        x = _root_mean_square_norm(residual.float(), *parts.mlp_scale).to(carried)
        x = parts.gates.forward(x)
        middle = x.shape[-1] // 2
        x = silu(x[..., :middle]).mul_(x[..., middle:])
        out: torch.Tensor = parts.down.forward(x).add_(residual)
        return out

    def _parts_for(self, cache: Any) -> _Parts | None:
        """What the layer is made of; ``None`` where it has hooks, or is not what it was when it was shortened."""
        parts = self._parts
        query = self._modules["self_attn"]._modules["q_proj"]  # type: ignore[attr-defined]
        # A copy of the layer has other products.
        if parts is None or parts.cache() is not cache or parts.query is not query:
            parts = self._parts = _parts_of(self, cache) if _is_known(self) else None
        return None if parts is None or parts.hooks.there() else parts


class _DraftingPasses(_ShortPasses):
    """A third way, for drafters in int8 whose products take and give float32, so that nothing is converted in between.

    Queries, keys and values are in the model's own dtype all the same, for the cache may be the target's.
    """

    _in_float32 = True


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


def _parts_of(layer: Any, cache: Any) -> _Parts:
    attention, mlp = layer.self_attn, layer.mlp
    query = attention.q_proj
    head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    return _Parts(
        cache=ref(cache),
        hooks=Hooks(layer.modules()),
        query=query,
        projections=query.join.layer,
        output=attention.o_proj,
        gates=mlp.gate_proj.join.layer,
        down=mlp.down_proj,
        head_norms=head_norms,
        heads=query.out_features // attention.head_dim,
        shared_heads=attention.k_proj.out_features // attention.head_dim,
        head_size=attention.head_dim,
        dtype=layer.input_layernorm.weight.dtype,
        attention_scale=_scale_of(layer.input_layernorm),
        mlp_scale=_scale_of(layer.post_attention_layernorm),
    )


def _scale_of(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_root_mean_square_norm`` needs of a norm."""
    root = math.sqrt(norm.weight.numel())
    least = torch.tensor([norm.variance_epsilon], dtype=torch.float64).sqrt()  # of what is below 0 NaN
    return norm.weight.detach().float() * root, (root * least).float()


_rotation_of_pass = OncePerPass()


def _rotation(embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for all heads, [1, tokens, 1, head size], the sines of the first half negative.

    All layers of a pass share them.
    """
    cosines, sines = embeddings

    def spread() -> tuple[torch.Tensor, torch.Tensor]:
        half = sines.shape[-1] // 2
        signed = torch.cat((-sines[..., :half], sines[..., half:]), dim=-1)
        return cosines.unsqueeze(2), signed.unsqueeze(2)

    return _rotation_of_pass(cosines, None, spread)


@cache
def _shortened(kind: Any) -> Any:
    return type(kind.__name__, (_ShortPasses, kind), {"__module__": __name__, "own_kind": kind})


@cache
def _quickened(kind: Any) -> Any:
    return type(kind.__name__, (_DraftingPasses, kind), {"__module__": __name__, "own_kind": kind})


def shorten_layers(model: PreTrainedModel) -> bool:
    """Give the decoder layers of a model their second way, in place, where they are of a kind that is known.

    Args:
        model: With packed or int8 layers and folded attention; others are left as they are.

    Returns:
        Whether it was done. It is undone if a trial of the first layer comes out differently.
    """
    if model.device.type != "cpu" or not is_folded(model.config) or Hooks(model.modules()).there():
        return False  # a trial with hooks would show nothing
    layers = [module for module in model.modules() if type(module).__name__ in _KINDS]
    layers = [layer for layer in layers if not isinstance(layer, _ShortPasses)]
    if not layers or not all(_is_known(layer) for layer in layers):
        return False
    own: list[Any] = [type(layer) for layer in layers]
    expected = _trial(layers[0], model)
    for layer, kind in zip(layers, own, strict=True):
        layer.__class__ = _shortened(kind)
    found = _trial(layers[0], model)
    limit = _CLOSE.get(expected.dtype, 0.0) * float(expected.abs().max())
    if not float((found - expected).abs().max()) <= limit:
        for layer, kind in zip(layers, own, strict=True):
            layer.__class__ = kind
        return False
    return True


def quicken_layers(model: PreTrainedModel) -> bool:
    """Give the layers of a drafter that ``shorten_layers`` has changed their third way, in place.

    Returns:
        Whether it was done: all their products have to be int8 ones that take and give float32. It is undone if a trial
        of the first layer comes out differently.
    """
    layers = [module for module in model.modules() if isinstance(module, _ShortPasses)]
    if not layers or any(isinstance(layer, _DraftingPasses) for layer in layers):
        return False
    if Hooks(model.modules()).there() or not all(_is_known(layer) for layer in layers):
        return False
    for layer in layers:
        parts = _parts_of(layer, model)
        products = (parts.projections, parts.output, parts.gates, parts.down)
        if not all(isinstance(product, Int8Linear) and product.quick for product in products):
            return False
    own: list[Any] = [type(layer) for layer in layers]
    expected = _trial(layers[0], model).float()
    for layer, kind in zip(layers, own, strict=True):
        layer.__class__ = _quickened(kind.own_kind)
    found = _trial(layers[0], model)
    if not float((found - expected).abs().max()) <= _CLOSE_IN_INT8 * float(expected.abs().max()):
        for layer, kind in zip(layers, own, strict=True):
            layer.__class__ = kind
        return False
    return True


def _is_known(layer: Any) -> bool:
    """Whether the layer is built of what ``_ShortPasses`` expects, and nothing was wrapped around its parts."""
    kind = getattr(type(layer), "own_kind", type(layer))
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
        and all(isinstance(each, PackedLinear | Int8Linear) for each in rest)
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and isinstance(activation, nn.SiLU | type(_silu()))
    )


def _silu() -> Any:
    from transformers.activations import ACT2FN

    return ACT2FN["silu"]


def _joined(layers: list[Any]) -> bool:
    return all(isinstance(layer, JoinedLinear) and layer.join is layers[0].join for layer in layers) and [
        layer.index for layer in layers
    ] == list(range(len(layers[0].join.sizes)))


@torch.inference_mode()
def _trial(layer: Any, model: PreTrainedModel) -> torch.Tensor:
    """What the layer makes of three tokens behind one another, with rotations of their own. [3, hidden size]."""
    weight = layer.input_layernorm.weight
    random = torch.Generator().manual_seed(0)
    cached = DynamicCache(config=model.config.get_text_config(decoder=True))
    found = []
    for _ in range(3):
        x = torch.randn(1, 1, len(weight), generator=random).to(weight.dtype)
        half = torch.randn(1, 1, layer.self_attn.head_dim // 2, generator=random)
        angles = torch.cat((half, half), dim=-1)
        rotation = (angles.cos().to(weight.dtype), angles.sin().to(weight.dtype))
        out = layer(
            x, attention_mask=None, past_key_values=cached, position_embeddings=rotation, use_cache=True
        )
        found.append(out[0, 0])
    return torch.stack(found)


def has_short_layers(model: Any) -> bool:
    """Whether all decoder layers of a model have their second way."""
    return all(isinstance(layer, _ShortPasses) for layer in model.model.layers)
