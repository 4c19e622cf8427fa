"""Products of weights, and whole passes of the Llama family over them, in C (native.c).

A pass in torch's operators spends half of a small model's time on starting products, and in the gaps between them
memory rests. Here a pass is one call. Weights in 4 and 8 bits are laid in an order of their own; those in bfloat16 and
float32 are read where oneDNN has packed them, so that they are there once. The library is built with the package where
there is a C compiler; without it, and on other processors than x86-64 with AVX2, everything goes its usual way. Its
threads are those of torch's own OpenMP, so that nobody waits for two pools in turn.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from specbench.backends.torch.kernels.instructions import is_allowed
from specbench.backends.torch.kernels.onednn_layout import Laid, layout_of
from specbench.backends.torch.kernels.structures import (
    CLayer,
    CMatrix,
    CModel,
    CPacking,
    CPass,
    CRequest,
    address,
    array,
    whole,
)

LIBRARY = "_native.so"
"""The file beside this one that the build makes."""

PANEL = 32
"""Outputs that lie together in panels of our own."""

STEP = 16
"""Numbers that are taken at a time between the products: sizes of a head and of hidden states have to be multiples."""

MOST_HEAD_SIZE = 256

_ROUNDED_AT_ONCE = 128 * PANEL
"""Rows of a weight that are made float32 at once."""

_VERSION = 7
"""Of what is handed over; the library's own has to be the same."""

LAYOUT = 2
"""Version of the order in which panels hold their numbers: what is kept of them is for this one."""

_LEVELS = {"default": 0, "avx2": 1}
"""How far ``ATEN_CPU_CAPABILITY``, which limits torch, limits this too: none, AVX2; else as far as the processor."""


class _Native(NamedTuple):
    """The library, with what it needs of this process.

    Attributes:
        library: Loaded.
        parallel: ``GOMP_parallel`` of the OpenMP that torch uses.
        level: Of instructions, see native.c.
    """

    library: ctypes.CDLL
    parallel: int
    level: int


@cache
def _found() -> _Native | str:
    """The library, or why there is none."""
    path = Path(__file__).with_name(LIBRARY)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "they are written for Linux on x86-64 alone"
    if not path.exists():
        return "there was no C compiler when specbench was installed"
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.specbench_version())
    except (OSError, AttributeError):
        return "the library that was built cannot be loaded here"
    if version != _VERSION:
        return "the library is of another version: install specbench again"
    limit = _LEVELS.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), 3)
    highest = 1 if not is_allowed("vnni") else 3 if is_allowed("bfloat16") else 2
    level = min(int(library.specbench_level()), limit, highest)
    if level < 1:
        return "this processor has no AVX2, or may not use it"
    try:
        # What torch has loaded counts as this program's own.
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        parallel = None
    if parallel is None:
        return "this torch does not use the OpenMP of GCC"
    library.specbench_packed_bytes.restype = c_int64
    library.specbench_product.argtypes = (
        POINTER(CMatrix), c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int
    )  # fmt: skip
    library.specbench_pack.argtypes = (POINTER(CPacking), c_void_p, c_int, c_int)
    library.specbench_pass.argtypes = library.specbench_attend.argtypes = (POINTER(CPass),)
    return _Native(library, parallel, level)


def why_unavailable() -> str | None:
    """Why there are no native products here, as the end of a sentence; ``None`` where there are."""
    found = _found()
    return found if isinstance(found, str) else None


def is_available() -> bool:
    """Whether there are native products here."""
    return why_unavailable() is None


def _native() -> _Native:
    found = _found()
    assert not isinstance(found, str), found
    return found


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for a pass")


_GROUP = 32
"""Inputs of panels of our own, in which oneDNN has no say, are filled up with zeros to a multiple."""

_BITS = {torch.bfloat16: 16, torch.float32: 32}
"""Of numbers that products take as they are."""

_WIDEST = {1: 48, 2: 128, 3: 128}
"""Rows up to which one call is quicker than torch's products, by the level of instructions (docs/log.md)."""


class Panels:
    """A weight in the order in which the products read it; where ``is_available()``.

    Attributes:
        bits: 32 and 16 for float32 and bfloat16, 8 with a scale for each output, 4 with two numbers for 32 inputs each.
        outputs, inputs: As of the weight.
        width: Outputs that lie together.
        data: All of it: uint8 in panels of our own.
    """

    def __init__(self, bits: int, outputs: int, inputs: int, laid: Laid | None = None) -> None:
        """Panels of their own, still to be filled, or those that oneDNN has made."""
        self.bits, self.outputs, self.inputs = bits, outputs, inputs
        if laid is None:
            data = torch.empty(self._bytes_of(outputs), dtype=torch.uint8)
            laid = Laid(data, data.data_ptr(), PANEL, -(-inputs // _GROUP) * _GROUP)
        self.data, self._address, self.width, self._depth = laid

    def _bytes_of(self, outputs: int) -> int:
        return int(_native().library.specbench_packed_bytes(outputs, self.inputs, self.bits))

    def _pack(self, first: int, packing: CPacking) -> None:
        """Lay rows from ``first`` on, which begins a panel."""
        native = _native()
        packing.panels = self._address + self._bytes_of(first)
        packing.columns, packing.bits = self.inputs, self.bits
        threads = torch.get_num_threads()
        _check(native.library.specbench_pack(byref(packing), native.parallel, threads, native.level))

    @classmethod
    def from_data(cls, bits: int, outputs: int, inputs: int, data: torch.Tensor) -> Panels:
        """Those that hold a copy of what others have held.

        Raises:
            ValueError: That is not of this size.
        """
        made = cls(bits, outputs, inputs)
        if data.shape != made.data.shape or data.dtype != torch.uint8:
            raise ValueError("panels of another size")
        made.data.copy_(data)
        return made

    @classmethod
    def from_int8(cls, quantized: torch.Tensor, scales: torch.Tensor) -> Panels:
        """Those of a weight in bytes.

        Args:
            quantized: int8 [out, in], from -127 to 127.
            scales: float32 [out].
        """
        quantized, scales = quantized.contiguous(), scales.float().contiguous()
        made = cls(8, *quantized.shape)
        made._pack(0, CPacking(bytes=quantized.data_ptr(), scales=scales.data_ptr(), rows=len(quantized)))
        return made

    @classmethod
    def quantize_int4(cls, weight: torch.Tensor) -> Panels:
        """Those of a weight [out, in] of any floating dtype, rounded to 4 bits, some rows after the others."""
        made = cls(4, *weight.shape)
        for first in range(0, len(weight), _ROUNDED_AT_ONCE):
            rows = weight.detach()[first : first + _ROUNDED_AT_ONCE].float().contiguous()
            made._pack(first, CPacking(weight=rows.data_ptr(), rows=len(rows)))
        return made

    @classmethod
    def from_bfloat16(cls, weight: torch.Tensor) -> Panels:
        """Those of a weight [out, in] in bfloat16."""
        weight = weight.detach().contiguous()
        made = cls(16, *weight.shape)
        made._pack(0, CPacking(halves=weight.data_ptr(), rows=len(weight)))
        return made

    @classmethod
    def from_onednn(cls, packed: torch.Tensor, weight: torch.Tensor) -> Panels | None:
        """Those that oneDNN has laid a weight in, read where they are.

        Args:
            packed: By oneDNN.
            weight: [out, in], what was packed.

        Returns:
            ``None`` where it lies in another order.
        """
        found = layout_of(packed, weight, _native().level) if weight.dtype in _BITS else None
        outputs, inputs = weight.shape
        return None if found is None else cls(_BITS[weight.dtype], outputs, inputs, found)

    @property
    def nbytes(self) -> int:
        """What a product reads, less what fills panels up."""
        return self.outputs * self.inputs * self.bits // 8

    def dense(self) -> torch.Tensor:
        """The weight of panels that ``from_bfloat16`` made, [out, in]."""
        panels = self.data.view(torch.bfloat16).view(-1, self._depth // 2, self.width, 2)
        whole = panels.permute(0, 2, 1, 3).reshape(-1, self._depth)
        return whole[: self.outputs, : self.inputs].contiguous()

    def matrix(self, bias: torch.Tensor | None) -> CMatrix:
        """What native.c knows of it; holds as long as the panels and the bias, float32, do."""
        return CMatrix(
            panels=self._address,
            bias=None if bias is None else bias.data_ptr(),
            outputs=self.outputs,
            inputs=self.inputs,
            bits=self.bits,
            width=self.width,
            depth=self._depth,
        )

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in], float32 -> [rows, out], float32; a row's bits do not depend on the others."""
        native, x = _native(), x.contiguous()
        out = torch.empty(len(x), self.outputs)
        matrix = self.matrix(None)
        _check(
            native.library.specbench_product(
                byref(matrix),
                x.data_ptr(),
                len(x),
                out.data_ptr(),
                native.parallel,
                torch.get_num_threads(),
                native.level,
            )
        )
        return out


class Product(NamedTuple):
    """A linear layer.

    Attributes:
        panels: Its weight.
        bias: [out] or ``None``.
    """

    panels: Panels
    bias: torch.Tensor | None


class Layer(NamedTuple):
    """What a decoder layer of the Llama family is made of.

    Attributes:
        projections: Queries, keys and values, one behind the other.
        output: Of attention.
        gates: Gates and what they let through, one behind the other.
        down: Back to the hidden size.
        attention_norm, mlp_norm: Weights of the norms before attention and before the gates, [hidden size].
        query_norm, key_norm: Of heads, [head size]; ``None`` where there are none.
    """

    projections: Product
    output: Product
    gates: Product
    down: Product
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    @property
    def products(self) -> tuple[Product, ...]:
        """All that it multiplies by."""
        return (self.projections, self.output, self.gates, self.down)


class NativeRequest(NamedTuple):
    """Rows of a pass that attend to what one request holds.

    Attributes:
        rows: How many they are.
        past: How many positions are held before them.
        mask: Bool [rows, past + rows or more], true where a row attends; ``None`` for all that come before it, and
            itself.
        places: int32 [past + rows], where the positions are among keys and values; ``None`` for one behind the other,
            from the first on.
        entries: Its own keys and values of each layer, of the dtype of all; ``None`` for those of the pass.
    """

    rows: int
    past: int
    mask: torch.Tensor | None = None
    places: torch.Tensor | None = None
    entries: KVPointers | None = None


class KVPointers:
    """Keys and values of layers as native.c knows them; they hold as long as this does.

    Args:
        held: Of each layer, [1, heads, positions, head size], all in bfloat16 or all in float32, in memory where the
            positions of a head stand one behind the other.
    """

    def __init__(self, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._held = held
        self.keys = array(c_void_p, len(held))(*(keys.data_ptr() for keys, _ in held))
        self.values = array(c_void_p, len(held))(*(values.data_ptr() for _, values in held))
        self.strides = array(c_int64, 2 * len(held))(
            *(each.stride(1) for entries in held for each in entries)
        )
        self.is_bfloat16 = held[0][0].dtype == torch.bfloat16


class DecoderStack:
    """Decoder layers with their final norm and head, for passes of few rows.

    Args:
        layers: In their order.
        norm: Weight of the final norm, [hidden size].
        head: The product that gives logits.
        heads, shared: How many query heads there are, and heads of keys and values.
        size: Of a head: a multiple of 16, at most ``MOST_HEAD_SIZE``.
        epsilon: Of all norms.
        scaling: What scores of attention are multiplied by.
        embedding_norm: Of a trained head, whose first layer reads embeddings beside its features: the weight of their
            norm, [hidden size].
        adds_to_normed: Whether that layer adds to features behind their norm.

    Attributes:
        sizes: Of all that a pass is made of: what stacks of the same sizes share is how long their passes take.
        rounds_rows: Whether products round what they are given to bytes.
        widest: Rows of a pass up to which it is quicker than one in torch's operators; any number where rows are
            rounded, since products are the same ones, and where bfloat16 is multiplied without instructions for it.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Product,
        *,
        heads: int,
        shared: int,
        size: int,
        epsilon: float,
        scaling: float,
        embedding_norm: torch.Tensor | None = None,
        adds_to_normed: bool = False,
    ) -> None:
        self._held: list[torch.Tensor | Panels] = []  # what the structures point to
        self._own = (CLayer * len(layers))(*(self._layer(layer) for layer in layers))
        hidden, middle = head.panels.inputs, layers[0].down.panels.inputs
        self._model = CModel(
            layers=self._own,
            head=self._matrix(head),
            norm=self._vector(norm),
            embedding_norm=self._vector(embedding_norm),
            count=len(layers),
            hidden=hidden,
            heads=heads,
            shared=shared,
            size=size,
            middle=middle,
            epsilon=epsilon,
            scaling=scaling,
            adds_to_normed=adds_to_normed,
        )
        self._vocabulary = head.panels.outputs
        self._nbytes = [sum(product.panels.nbytes for product in layer.products) for layer in layers]
        self._head_nbytes = head.panels.nbytes
        self.sizes = (len(layers), hidden, heads, shared, size, middle, self._vocabulary, head.panels.bits)
        bits, level = head.panels.bits, _native().level
        self.quantizes_rows = bits <= 8
        self.widest = math.inf if self.quantizes_rows or (bits == 16 and level < 3) else _WIDEST[level]

    def layers_of(self, nbytes: int) -> int:
        """How many of the first layers hold so many bytes of weights, with the head; all where there are fewer."""
        held = accumulate(self._nbytes, initial=self._head_nbytes)
        return next((max(1, count) for count, sum_ in enumerate(held) if sum_ >= nbytes), len(self._nbytes))

    def _vector(self, tensor: torch.Tensor | None) -> int | None:
        """Where its numbers lie as float32."""
        if tensor is None:
            return None
        held = tensor.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def _matrix(self, product: Product) -> CMatrix:
        bias = None if product.bias is None else product.bias.detach().float().contiguous()
        self._held += [product.panels] if bias is None else [product.panels, bias]
        return product.panels.matrix(bias)

    def _layer(self, layer: Layer) -> CLayer:
        return CLayer(
            projections=self._matrix(layer.projections),
            output=self._matrix(layer.output),
            gates=self._matrix(layer.gates),
            down=self._matrix(layer.down),
            attention_norm=self._vector(layer.attention_norm),
            mlp_norm=self._vector(layer.mlp_norm),
            query_norm=self._vector(layer.query_norm),
            key_norm=self._vector(layer.key_norm),
        )

    def __call__(
        self,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        entries: KVPointers,
        requests: Sequence[NativeRequest],
        wanted: Sequence[int],
        layers: Sequence[int] = (),
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make a pass.

        Args:
            x: Embeddings, or a head's features, [rows, hidden size], float32, without gaps; overwritten by what the
                last layer puts out.
            cosines, sines: Of the rows' positions, [rows, head size], float32.
            entries: Keys and values of each layer, with room for the rows' own.
            requests: Whose the rows are, one behind the other.
            wanted: Of which rows logits are.
            layers: In front of which hidden states are wanted, of all rows; their number stands for those behind the
                final norm.
            embedded: Embeddings that a head reads beside them, in the same shape.

        Returns:
            Logits, [wanted, vocabulary], and hidden states, [rows, layers, hidden size], or ``None``; float32.
        """
        native, embedded = _native(), whole(embedded)
        cosines, sines = cosines.contiguous(), sines.contiguous()
        asked = _Told(requests)
        which = array(c_int32, len(wanted))(*wanted)
        logits = torch.empty(len(wanted), self._vocabulary)
        states = torch.empty(len(x), len(layers), x.shape[1])
        told = array(c_void_p, self._model.count + 1)()
        for place, layer in enumerate(layers):
            told[layer] = states[:, place].data_ptr()
        _check(
            native.library.specbench_pass(
                byref(
                    CPass(
                        model=ctypes.pointer(self._model),
                        x=x.data_ptr(),
                        embedded=address(embedded),
                        cosines=cosines.data_ptr(),
                        sines=sines.data_ptr(),
                        keys=entries.keys,
                        values=entries.values,
                        strides=entries.strides,
                        requests=asked.given,
                        which=ctypes.addressof(which),
                        logits=logits.data_ptr(),
                        states=told if layers else None,
                        states_stride=states.stride(0),
                        rows=len(x),
                        wanted=len(wanted),
                        count=len(requests),
                        is_bfloat16=entries.is_bfloat16,
                        parallel=native.parallel,
                        threads=torch.get_num_threads(),
                        level=native.level,
                    )
                )
            )
        )
        return logits, states if layers else None


class _Told:
    """Requests as native.c knows them; they hold as long as this does.

    Attributes:
        given: One behind the other.
        rows: How many they have in all.
    """

    def __init__(self, requests: Sequence[NativeRequest]) -> None:
        self._kept: list[torch.Tensor | KVPointers | None] = []
        self.given, self.rows = array(CRequest, len(requests))(), 0
        for place, request in enumerate(requests):
            mask, places = whole(request.mask), whole(request.places)
            self._kept += [mask, places, request.entries]
            stride, own = 0 if mask is None else mask.stride(0), request.entries
            self.given[place] = CRequest(
                address(places),
                address(mask),
                stride,
                self.rows,
                request.past,
                *(() if own is None else (own.keys, own.values, own.strides)),
            )
            self.rows += request.rows


def supports_attention(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether rows can attend natively to keys and values like these, [1, heads, positions, head size]."""
    size = keys.shape[-1]
    return (
        keys.device.type == "cpu"
        and keys.dtype in (torch.bfloat16, torch.float32)
        and keys.shape == values.shape
        and size % STEP == 0
        and size <= MOST_HEAD_SIZE
        and is_available()
    )


class Attention:
    """Rows of several requests attend in one call, where something else makes the rest of a pass.

    Args:
        requests: Whose the rows are, one behind the other.
    """

    def __init__(self, requests: Sequence[NativeRequest]) -> None:
        self._requests = _Told(requests)

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None = None
    ) -> torch.Tensor:
        """Attention of these rows in a layer.

        Args:
            query: Rotated, [rows, heads, head size], float32.
            keys, values: See ``supports_attention``; those of the rows themselves are among them.
            scaling: What scores are multiplied by; ``None`` for 1/√(head size).

        Returns:
            [rows, heads, head size], float32.
        """
        native, query = _native(), query.contiguous()
        rows, heads, size = query.shape
        out = torch.empty_like(query)
        model = CModel(
            heads=heads, shared=keys.shape[1], size=size, scaling=size**-0.5 if scaling is None else scaling
        )
        _check(
            native.library.specbench_attend(
                byref(
                    CPass(
                        model=ctypes.pointer(model),
                        x=query.data_ptr(),
                        keys=array(c_void_p, 1)(keys.data_ptr()),
                        values=array(c_void_p, 1)(values.data_ptr()),
                        strides=array(c_int64, 2)(keys.stride(1), values.stride(1)),
                        requests=self._requests.given,
                        logits=out.data_ptr(),
                        rows=rows,
                        count=len(self._requests.given),
                        is_bfloat16=keys.dtype == torch.bfloat16,
                        parallel=native.parallel,
                        threads=torch.get_num_threads(),
                        level=native.level,
                    )
                )
            )
        )
        return out
