"""Native forward passes of models of known families, and of EAGLE heads, over keys and values that the caller keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from specbench.kernels import native
from specbench.kernels.decoder_parts import family_name, joint_product, make_stack, native_product, read_parts
from specbench.kernels.hooks import Hooks
from specbench.kernels.instructions import has_bfloat16
from specbench.kernels.surgery import layers_of

_ROTARY_STEP = 512  # positions that are rotated in advance

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rows of a pass, [rotations, rows, rotated numbers of a head]."""


def describe() -> dict[str, str]:
    """Return whether passes are native on this machine, and in how many bits they take bfloat16, as text by name."""
    if (reason := native.why_not()) is not None:
        return {"native passes": f"no, {reason}"}
    found = native.loaded()
    bits = "16 bits: 12 need AVX-512 VNNI" if found.level < 3 else "12 bits"
    slow = "; without bfloat16 instructions, which are slow here" if found.level < found.highest else ""
    return {"native passes": f"yes, bfloat16 in {bits}{slow}"}


def why_not(model: Any = None) -> str | None:
    """Return why passes are not native here, as the end of a sentence; ``None`` if they are.

    With a model, also ``None`` if its passes could not be native anywhere.
    """
    if model is None or layers_of(model).quantized is not None:
        return native.why_not()
    is_known = family_name(model) is not None and model.dtype != torch.float16
    return native.why_not() if is_known else None


def reads_bfloat16() -> bool:
    """Return whether a pass on the CPU takes half as long in bfloat16 as in float32, as its weights are half as large:
    where the processor multiplies it, and where native products convert it as they read it.
    """
    return has_bfloat16() or native.is_available()


class _RotaryTable:
    """Cosines and sines by position, computed once by a model's module; ``names`` are the rotations that it knows, if
    it has several.
    """

    def __init__(self, module: Any, names: Sequence[str] = ("",)) -> None:
        self._module, self._names = module, names
        types: Any = getattr(module, "rope_type", "dynamic")
        # Others depend on the last position of a pass.
        changing = {*types.values()} if isinstance(types, dict) else {types}
        self._is_fixed = not changing & {"dynamic", "longrope"}
        self._cosines = self._sines = torch.empty(1, 0, 0)

    def of(self, positions: Tensor | range) -> Rotation:
        """Return cosines and sines of these positions, [tokens], in float32."""
        if not self._is_fixed:
            return self._compute(torch.as_tensor(positions))
        last = positions[-1] if isinstance(positions, range) else int(positions.max())
        if last >= self._cosines.shape[1]:
            self._cosines, self._sines = self._compute(torch.arange(last + 1 + _ROTARY_STEP))
        rows = slice(positions[0], last + 1) if isinstance(positions, range) else positions
        return self._cosines[:, rows], self._sines[:, rows]

    def size(self) -> int:
        """Return how many numbers of a head are rotated."""
        return self.of(range(1))[0].shape[-1]

    def _compute(self, positions: Tensor) -> Rotation:
        empty = torch.empty(0)  # gives the dtype alone
        made = [
            self._module(empty, positions[None], name) if name else self._module(empty, positions[None])
            for name in self._names
        ]
        cosines, sines = (torch.cat(each) for each in zip(*made, strict=True))
        return cosines, sines


class ModelPasses:
    """Native passes of a model, as it was when a context began.

    Attributes:
        places: Indices of its layers' keys and values in a cache.
        empty: Keys or values of no position, [1, heads, 0, head size], in the dtype that layers without buffers take.
        rounds_rows: Whether products round activations to bytes, so that a row's bits never depend on other rows.
    """

    def __init__(self, model: Any, context: object) -> None:
        self._model, self._context, self._hooks = model, ref(context), Hooks(model.modules())
        self._parts = parts = read_parts(model)
        self._stack: native.DecoderStack | None = None
        if parts is None:
            return
        self._rotary = _RotaryTable(model.model.rotary_emb, parts.rotations)
        self._stack = parts.stack(model.lm_head, self._rotary.size())
        self.places = [layer.place for layer in parts.layers]

    @cached_property
    def empty(self) -> Tensor:
        assert self._parts is not None
        config = self._parts.config
        return torch.empty(1, config.kv_heads, 0, config.head_size, dtype=self._parts.dtype)

    @property
    def rounds_rows(self) -> bool:
        return (
            self._stack is not None
            and self._stack.quantizes_rows
            and self.empty.dtype in native.Buffers.dtypes
        )

    def holds(self, context: object) -> bool:
        """Return whether they were looked up for this context."""
        return self._context() is context

    def are_possible(self) -> bool:
        """Return whether there are native passes, and no hooks, which would be skipped."""
        return self._stack is not None and not self._hooks.are_present()

    def takes(self, rows: int, *, masked: bool = False) -> bool:
        """Return whether a pass of ``rows`` rows is the fastest; never for masks together with windows."""
        return (
            self._stack is not None
            and self._parts is not None
            and rows <= self._stack.max_rows
            and not (masked and any(each.window for each in self._parts.layers))
        )

    def rotation(self, positions: Tensor | range) -> Rotation:
        """Return the rotation of rows at these positions, [rows]."""
        return self._rotary.of(positions)

    def run(
        self,
        ids: Tensor,
        rotation: Rotation,
        buffers: native.Buffers,
        requests: Sequence[native.Request],
        wanted: Sequence[int],
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass, and write its keys and values.

        Args:
            ids: Token ids, [1, rows].
            rotation: See ``rotation``.
            buffers, requests, wanted, layers: See ``DecoderStack``.

        Returns:
            Logits, [wanted, vocabulary], float32, and the hidden states of layers, [rows, layers, hidden size], in the
                model's dtype, or ``None``.
        """
        parts = self._parts
        assert self._stack is not None
        assert parts is not None
        embedded: Tensor = self._model.model.embed_tokens(ids)[0].float()
        if parts.embedding_multiplier != 1.0:
            embedded = embedded * parts.embedding_multiplier
        logits, states = self._stack(embedded, *rotation, buffers, requests, wanted, layers)
        return parts.finish(logits), None if states is None else states.to(parts.dtype)


def forward_for(model: Any) -> Callable[[object], ModelPasses | None]:
    """Return a function that looks up the native passes of a model of ``transformers``, which may change meanwhile.

    It is called with the context, any object that is new in each, and gives ``None`` where no pass is native now: the
    model is of another family, has other products, or hooks, which would be skipped.
    """
    last: ModelPasses | None = None

    def passes(context: object) -> ModelPasses | None:
        nonlocal last
        if last is None or not last.holds(context):
            last = ModelPasses(model, context)
        return last if last.are_possible() else None

    return passes


class HeadPasses:
    """Native passes of an EAGLE head, in float32 between products.

    Attributes:
        empty: Keys or values of no position, [1, heads, 0, head size].
    """

    def __init__(self, head: Any, stack: native.DecoderStack) -> None:
        config = head.shape.layer
        self._stack, self._rotary = stack, _RotaryTable(head.rotary_emb)
        self._layers = (len(head.layers),) if head.shape.norm_output else ()
        self.empty = torch.empty(1, config.num_key_value_heads, 0, config.head_dim)

    def run(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor | range,
        requests: Sequence[native.Request],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Run a pass over rows of several requests, each with its own keys and values.

        Args:
            embedded, features: [rows, hidden size]; ``features`` is overwritten.
            positions: [rows].
            wanted: Rows whose logits are wanted.

        Returns:
            The next features, [rows, hidden size], and logits, [wanted, vocabulary].
        """
        first = requests[0].buffers
        assert first is not None
        logits, normed = self._stack(
            features, *self._rotary.of(positions), first, requests, wanted, self._layers, embedded
        )
        return features if normed is None else normed[:, 0], logits


def forward_for_head(head: Any) -> HeadPasses | None:
    """Return the native passes of an EAGLE head; ``None`` if its products are not native, or do not round their inputs
    to bytes, or its sizes are not supported.
    """
    config, layers = head.shape.layer, list(head.layers)
    logits = native_product(head.lm_head)
    own = [each for layer in layers if (each := _layer_of_head(layer)) is not None]
    if logits is None or head.norm.eps is None or len(own) < len(layers):
        return None
    stack = make_stack(
        own,
        head.norm.weight,
        logits,
        native.StackConfig(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            head.norm.eps,
            scaling=config.head_dim**-0.5,
            embedding_norm=layers[0].input_layernorm.weight,
            adds_to_normed=head.shape.norm_before_residual,
        ),
    )
    return None if stack is None or not stack.quantizes_rows else HeadPasses(head, stack)


def _layer_of_head(layer: Any) -> native.Layer | None:
    attention, mlp = layer.self_attn, layer.mlp
    projections = joint_product([attention.q_proj, attention.k_proj, attention.v_proj])
    gates = joint_product([mlp.gate_proj, mlp.up_proj])
    output, down = native_product(attention.o_proj), native_product(mlp.down_proj)
    if projections is None or output is None or gates is None or down is None:
        return None
    before = layer.hidden_norm if hasattr(layer, "hidden_norm") else layer.input_layernorm
    head_norms = [
        norm.weight if isinstance(norm, nn.RMSNorm) else None for norm in (attention.q_norm, attention.k_norm)
    ]
    norms = (before.weight, layer.post_attention_layernorm.weight, *head_norms)
    return native.Layer(projections, output, gates, down, *norms)
