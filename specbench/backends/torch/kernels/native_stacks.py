"""Native stacks of decoder layers, made from the parts of a loaded model or head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.decoder_parts import LayerParts, ModelParts, are_merged
from specbench.backends.torch.kernels.linear import PackedLinear, QuantizedLinear


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
        or "forward" in vars(parts.norm.module)
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
    rotations = parts.rotations
    return make_stack(
        [_native_layer(layer, rotations) for layer in parts.layers], parts.norm.weight, head, config
    )


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
        or len({product.panels.dtype for product in products}) > 1
        or hidden % native.STEP
        or config.head_size % native.STEP
        or config.rotated % native.STEP
        or config.head_size > native.MOST_HEAD_SIZE
        or any(own.down.panels.inputs % own.gates.panels.width for own in found)
    ):
        return None
    return native.DecoderStack(found, norm, head, config)


def _native_layer(layer: LayerParts, rotations: Sequence[str]) -> native.Layer | None:
    projections, output, gates, down = (native_product(product) for product in layer.products)
    if projections is None or output is None or gates is None or down is None:
        return None
    norms = {name: norm.weight for name, norm in layer.norms.items()}
    rotation = -1 if layer.rotation is None else rotations.index(layer.rotation)
    return native.Layer(projections, output, gates, down, **norms, window=layer.window, rotation=rotation)


def joint_product(layers: Sequence[Any]) -> native.Product | None:
    """Return the product of linear layers that are merged; ``None`` if they are not, or it is not native."""
    return native_product(layers[0].merged.layer) if are_merged([*layers]) else None


def native_product(layer: Any) -> native.Product | None:
    """Return the product of a linear layer; ``None`` if it is not native."""
    panels = layer.panels if isinstance(layer, PackedLinear | QuantizedLinear) else None
    return None if panels is None else native.Product(panels, layer.bias)
