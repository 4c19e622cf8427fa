"""The parts of a loaded model's decoder layers, as native forward passes read them.

``FAMILIES`` says where layers have their norms; everything else is read from the modules of ``transformers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.linear import PackedLinear, QuantizedLinear
from specbench.backends.torch.kernels.surgery import MergedLinear


class Family(NamedTuple):
    """What decoder layers have: the names of their norms, before and after attention and MLP; ``None`` without."""

    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    norm_offset: float = 0.0  # added to the weights of norms
    joint_norms: bool = False  # whether queries and keys have one norm for all heads


_LLAMA = Family()
_OLMO = Family(None, "post_attention_layernorm", None, "post_feedforward_layernorm", joint_norms=True)
FAMILIES = {
    "Llama": _LLAMA,
    "Mistral": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": _LLAMA,
    "Gemma": Family(norm_offset=1.0),
    "Gemma3": Family(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        norm_offset=1.0,
    ),
    "Granite": _LLAMA,
    "Olmo2": _OLMO,
    "Olmo3": _OLMO,
    "Phi3": _LLAMA,
    "SmolLM3": _LLAMA,
}
"""By the first part of the names of classes in ``transformers``."""

_GATES = {"silu": False, "gelu_pytorch_tanh": True}
"""Names of activations in ``transformers``, and whether they are GELU."""


class Norm(NamedTuple):
    """An RMS norm."""

    weight: Tensor  # what it multiplies by
    epsilon: float


class LayerParts(NamedTuple):
    """A decoder layer: its matrix products, and what is between them."""

    # of queries, keys and values; of attention's output; of gate and up projections; of the down projection
    products: tuple[native.Product, native.Product, native.Product, native.Product]
    norms: Mapping[str, Norm]  # by the names of the fields of native.Layer
    heads: int
    kv_heads: int
    head_size: int
    scaling: float  # factor of attention scores
    place: int  # index of its keys and values among the layers of a cache
    window: int  # positions that a token attends to, with its own; 0 for all
    rotation: str | None  # name of the rotation of its queries and keys; None without
    gelu: bool  # GELU in its tanh form in place of SiLU
    residual_multiplier: float  # of the outputs of attention and MLP
    dtype: torch.dtype  # of queries, keys and values


class ModelParts(NamedTuple):
    """A model of a known family.

    Attributes:
        embedding_multiplier: Factor of embeddings.
        logits_divisor: What logits are divided by.
        logits_cap: Largest logit that is possible: logits become ``cap`` · tanh(logits / ``cap``); ``None`` for any.
    """

    family: Family
    layers: tuple[LayerParts, ...]
    norm: Norm
    embedding_multiplier: float
    logits_divisor: float
    logits_cap: float | None

    @property
    def rotations(self) -> list[str]:
        """Names of the rotations of its layers, in order."""
        return sorted({layer.rotation for layer in self.layers if layer.rotation is not None})

    def finish(self, logits: Tensor) -> Tensor:
        """Divide and cap what the output head gives, in place."""
        if self.logits_divisor != 1.0:
            logits.div_(self.logits_divisor)
        if self.logits_cap is not None:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits


def family_name(model: Any) -> str | None:
    """Return the name of a model's family among ``FAMILIES``; ``None`` for others."""
    names = [kind.__name__.removesuffix("ForCausalLM") for kind in type(model).__mro__]
    return next((name for name in names if name in FAMILIES), None)


def read_parts(model: Any) -> ModelParts | None:
    """Return the parts of a model; ``None`` for other families, products that are not native, and changed modules."""
    name = family_name(model)
    if name is None or not all(hasattr(model, part) for part in ("model", "lm_head")):
        return None
    inner, family = model.model, FAMILIES[name]
    layers = list(getattr(inner, "layers", ()))
    if any("forward" in vars(module) for module in (model, inner)) or not all(
        type(layer).__name__ == f"{name}DecoderLayer" for layer in layers
    ):
        return None
    by_type = "layer_type" in inspect.signature(inner.rotary_emb.forward).parameters
    try:
        found = tuple(read_layer(layer, index, family, by_type=by_type) for index, layer in enumerate(layers))
        norm = _read_norm(inner, "norm", family)
    except (AttributeError, IndexError, ValueError):
        return None
    assert norm is not None
    return ModelParts(
        family,
        found,
        norm,
        float(getattr(inner, "embedding_multiplier", 1.0)),
        float(getattr(inner.config, "logits_scaling", 1.0)),
        getattr(inner.config, "final_logit_softcapping", None),
    )


def read_layer(layer: Any, index: int, family: Family, *, by_type: bool) -> LayerParts:
    """Read a layer of a model.

    Args:
        index: Its index among the model's layers, by which the configuration states its type.
        by_type: Whether rotations depend on the type.

    Raises:
        AttributeError, ValueError: It is not what its family has.
    """
    attention, mlp, config = layer.self_attn, layer.mlp, layer.self_attn.config
    own = type(layer).__module__
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    gelu = next(
        (gelu for kind, gelu in _GATES.items() if isinstance(activation, type(ACT2FN[kind]))),
        False if isinstance(activation, nn.SiLU) else None,
    )
    if (
        gelu is None
        or not own.startswith("transformers.")
        or any(type(part).__module__ != own for part in (attention, mlp))
        or any("forward" in vars(module) for module in layer.modules())
        or layer.training
        or not attention.is_causal
    ):
        raise ValueError("a layer computes something else")
    projections = _read_product(attention, "qkv_proj", "q_proj", "k_proj", "v_proj")
    output, size, place = _read_product(attention, "o_proj"), attention.head_dim, attention.layer_idx
    heads = output.panels.inputs // size
    rotation = config.layer_types[index] if by_type else ""
    names = {name: getattr(family, name) for name in Family._fields[:4]}
    for name, own_name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        names[name] = own_name if hasattr(attention, own_name) else None
    norms = {
        name: _read_norm(attention if name in ("query_norm", "key_norm") else layer, own_name, family)
        for name, own_name in names.items()
    }
    return LayerParts(
        products=(
            projections,
            output,
            _read_product(mlp, "gate_up_proj", "gate_proj", "up_proj"),
            _read_product(mlp, "down_proj"),
        ),
        norms={name: norm for name, norm in norms.items() if norm is not None},
        heads=heads,
        kv_heads=(projections.panels.outputs // size - heads) // 2,
        head_size=size,
        scaling=attention.scaling,
        place=place,
        window=_window_of(config, index),
        rotation=rotation if getattr(attention, "use_rope", True) else None,
        gelu=gelu,
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
        dtype=layer.post_attention_layernorm.weight.dtype,
    )


def _window_of(config: Any, index: int) -> int:
    """Return the window of a layer; 0 without one. Where layers have no types, all are alike."""
    types = getattr(config, "layer_types", None)
    is_sliding = types is None or types[index] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if is_sliding else 0


def _read_norm(owner: Any, name: str | None, family: Family) -> Norm | None:
    """Return a norm; ``None`` without a name."""
    if name is None:
        return None
    module = getattr(owner, name)
    if type(module).__module__ != type(owner).__module__ or "forward" in vars(module):
        raise ValueError(f"{name} was replaced")
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    weight = module.weight.detach()
    return Norm(weight.float() + family.norm_offset if family.norm_offset else weight, epsilon)


def _read_product(owner: Any, name: str, *parts: str) -> native.Product:
    """Return the product of the layer of this name, or of those of other names that are merged."""
    product = (
        native_product(getattr(owner, name))
        if hasattr(owner, name)
        else joint_product([getattr(owner, part) for part in parts])
    )
    if product is None:
        raise ValueError(f"{name} is not native")
    return product


def joint_product(layers: Sequence[Any]) -> native.Product | None:
    """Return the product of linear layers that are merged, in order; ``None`` if they are not, or it is not native."""
    first = layers[0]
    if not all(isinstance(layer, MergedLinear) and layer.merged is first.merged for layer in layers):
        return None
    if [layer.index for layer in layers] != list(range(len(first.merged.sizes))):
        return None
    return native_product(first.merged.layer)


def native_product(layer: Any) -> native.Product | None:
    """Return the product of a linear layer; ``None`` if it is not native."""
    panels = layer.panels if isinstance(layer, PackedLinear | QuantizedLinear) else None
    return None if panels is None else native.Product(panels, layer.bias)


def native_stack(parts: ModelParts, output_head: Any, rotated: int) -> native.DecoderStack | None:
    """Return the native stack of a model; ``None`` if it is not supported.

    Args:
        output_head: The model's.
        rotated: First numbers of a head that rotations turn.
    """
    first, head = parts.layers[0], native_product(output_head)
    norms = [parts.norm, *(norm for layer in parts.layers for norm in layer.norms.values())]
    alike = ("heads", "kv_heads", "head_size", "scaling", "gelu", "residual_multiplier", "dtype")
    if (
        head is None
        or "forward" in vars(output_head)
        or any(len({getattr(layer, name) for layer in parts.layers}) > 1 for name in alike)
        or len({norm.epsilon for norm in norms}) > 1
    ):
        return None
    config = native.StackConfig(
        first.heads,
        first.kv_heads,
        first.head_size,
        parts.norm.epsilon,
        first.scaling,
        rotated=rotated,
        joint_norms=parts.family.joint_norms,
        gelu=first.gelu,
        residual_multiplier=first.residual_multiplier,
    )
    layers = [
        native.Layer(
            *layer.products,
            **{name: norm.weight for name, norm in layer.norms.items()},
            window=layer.window,
            rotation=-1 if layer.rotation is None else parts.rotations.index(layer.rotation),
        )
        for layer in parts.layers
    ]
    return make_stack(layers, parts.norm.weight, head, config)


def make_stack(
    layers: Sequence[native.Layer], norm: Tensor, head: native.Product, config: native.StackConfig
) -> native.DecoderStack | None:
    """Make a native stack; ``None`` if layers round differently, or sizes are not supported."""
    products = [head, *(product for layer in layers for product in layer.products)]
    hidden = head.panels.inputs
    if (
        {(own.output.panels.outputs, own.down.panels.inputs) for own in layers}
        != {(hidden, layers[0].down.panels.inputs)}
        or len({product.panels.dtype for product in products}) > 1
        or hidden % native.STEP
        or config.head_size % native.STEP
        or config.rotated % native.STEP
        or config.head_size > native.MOST_HEAD_SIZE
        or any(own.down.panels.inputs % own.gates.panels.width for own in layers)
    ):
        return None
    return native.DecoderStack(layers, norm, head, config)
