"""The parts of a loaded model's decoder layers, as native forward passes read them.

``FAMILIES`` says where layers have their norms; everything else is read from the modules of ``transformers``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specbench.kernels import native
from specbench.kernels.linear import PackedLinear, QuantizedLinear
from specbench.kernels.surgery import MergedLinear


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


class ModelParts(NamedTuple):
    """A model of a known family.

    Attributes:
        norm: The final norm.
        dtype: Of queries, keys and values.
        rotations: Names of the rotations, to which the layers refer by number.
        embedding_multiplier: Factor of embeddings.
        logits_divisor: What logits are divided by.
        logits_cap: Largest logit that is possible: logits become ``cap`` · tanh(logits / ``cap``); ``None`` for any.
    """

    layers: tuple[native.Layer, ...]
    norm: Tensor
    config: native.StackConfig
    dtype: torch.dtype
    rotations: Sequence[str]
    embedding_multiplier: float
    logits_divisor: float
    logits_cap: float | None

    def finish(self, logits: Tensor) -> Tensor:
        """Divide and cap what the output head gives, in place."""
        if self.logits_divisor != 1.0:
            logits.div_(self.logits_divisor)
        if self.logits_cap is not None:
            logits.div_(self.logits_cap).tanh_().mul_(self.logits_cap)
        return logits

    def stack(self, output_head: Any, rotated: int) -> native.DecoderStack | None:
        """Return the native stack with the model's output head; ``None`` if it is not supported.

        Args:
            rotated: First numbers of a head that rotations turn.
        """
        head = None if "forward" in vars(output_head) else native_product(output_head)
        if head is None:
            return None
        return make_stack(self.layers, self.norm, head, self.config._replace(rotated=rotated))


def family_name(model: Any) -> str | None:
    """Return the name of a model's family among ``FAMILIES``; ``None`` for others."""
    names = [kind.__name__.removesuffix("ForCausalLM") for kind in type(model).__mro__]
    return next((name for name in names if name in FAMILIES), None)


def read_parts(model: Any) -> ModelParts | None:
    """Return the parts of a model; ``None`` for other families, products that are not native, changed modules, and
    layers that are not alike.
    """
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
    rotations = sorted({*inner.config.layer_types}) if by_type else [""]
    try:
        found = [read_layer(layer, index, family, rotations) for index, layer in enumerate(layers)]
        norm, epsilon = _read_norm(inner, "norm", family)
    except (AttributeError, IndexError, ValueError):
        return None
    if len({(config, dtype) for _, config, dtype in found}) != 1:
        return None
    _, config, dtype = found[0]
    if epsilon != config.epsilon:
        return None
    return ModelParts(
        tuple(layer for layer, _, _ in found),
        norm,
        config,
        dtype,
        rotations,
        float(getattr(inner, "embedding_multiplier", 1.0)),
        float(getattr(inner.config, "logits_scaling", 1.0)),
        getattr(inner.config, "final_logit_softcapping", None),
    )


def read_layer(
    layer: Any, index: int, family: Family, rotations: Sequence[str]
) -> tuple[native.Layer, native.StackConfig, torch.dtype]:
    """Read a layer of a model: what it has, the sizes and constants of its stack, and the dtype of keys and values.

    Args:
        index: Its index among the model's layers, by which the configuration states its type.
        rotations: Names of the model's rotations, which are types of layers; one without a name for all.

    Raises:
        AttributeError, ValueError: It is not what its family has.
    """
    from transformers.activations import ACT2FN

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
    output, size = _read_product(attention, "o_proj"), attention.head_dim
    heads = output.panels.inputs // size
    norms = {
        name: _read_norm(layer, own_name, family)
        for name in Family._fields[:4]
        if (own_name := getattr(family, name)) is not None
    }
    for name, own_name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
        if hasattr(attention, own_name):
            norms[name] = _read_norm(attention, own_name, family)
    (epsilon,) = {epsilon for _, epsilon in norms.values()}
    own_rotation = "" if rotations == [""] else config.layer_types[index]
    found = native.Layer(
        projections,
        output,
        gates=_read_product(mlp, "gate_up_proj", "gate_proj", "up_proj"),
        down=_read_product(mlp, "down_proj"),
        **{name: weight for name, (weight, _) in norms.items()},
        window=_window_of(config, index),
        rotation=rotations.index(own_rotation) if getattr(attention, "use_rope", True) else -1,
        place=attention.layer_idx,
    )
    stack = native.StackConfig(
        heads,
        (projections.panels.outputs // size - heads) // 2,
        size,
        epsilon,
        attention.scaling,
        joint_norms=family.joint_norms,
        gelu=gelu,
        residual_multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )
    return found, stack, layer.post_attention_layernorm.weight.dtype


def _window_of(config: Any, index: int) -> int:
    """Return the window of a layer; 0 without one. Where layers have no types, all are alike."""
    types = getattr(config, "layer_types", None)
    is_sliding = types is None or types[index] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if is_sliding else 0


def _read_norm(owner: Any, name: str, family: Family) -> tuple[Tensor, float]:
    """Return what an RMS norm multiplies by, and its epsilon."""
    module = getattr(owner, name)
    if type(module).__module__ != type(owner).__module__ or "forward" in vars(module):
        raise ValueError(f"{name} was replaced")
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    weight = module.weight.detach()
    return weight.float() + family.norm_offset if family.norm_offset else weight, epsilon


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
