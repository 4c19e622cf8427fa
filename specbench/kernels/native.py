"""Native matrix products, and whole forward passes of decoders like Llama, in C (native.c).

With torch operators, half of the time of a small model's forward is spent on starting products, while memory is idle;
here a forward is one call. Weights in 4 and 8 bits have their own layout. Weights in bfloat16 and float32 are used in
the memory where oneDNN has packed them, without a copy. The library is built with the package if there is a C compiler,
for x86-64 with AVX2; elsewhere other forwards are used. It uses the threads of torch's OpenMP, so that two thread pools
never wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench.kernels.instructions import is_allowed
from specbench.kernels.onednn_layout import PackedLayout, layout_of

LIBRARY = "_native.so"
"""The file next to this one that the build makes."""

PANEL = 32
"""Outputs in a panel of our own."""

WIDE_PANEL = 64
"""Outputs in a panel of bfloat16 in 12 bits."""

STEP = 16
"""Sizes of heads and hidden states must be multiples of this: numbers that are processed at a time between products."""

MOST_HEAD_SIZE = 256

_CHUNK_ROWS = 128 * PANEL  # rows of a weight that are converted to float32 at a time
_VERSION = 16  # of the interface; the library's must be the same

LAYOUT = 4
"""Version of the layout of our own panels, with which they are stored."""

_LEVELS = {"default": 0, "avx2": 2}
"""Highest level of instructions by ``ATEN_CPU_CAPABILITY``, which limits torch: none, AVX2 with VNNI; otherwise as the
processor.
"""


def _fields(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    """Return fields of one type."""
    return ((name, kind) for name in names.split())


class CMatrix(Structure):
    _fields_ = (
        *_fields(c_void_p, "panels bias exceptions"),
        *_fields(c_int32, "outputs inputs bits width depth"),
    )


class CLayer(Structure):
    _fields_ = (
        *_fields(CMatrix, "projections output gates down"),
        *_fields(c_void_p, "attention_norm mlp_norm query_norm key_norm attention_out_norm mlp_out_norm"),
        *_fields(c_int32, "window rotation"),
    )


class CModel(Structure):
    _fields_ = (
        ("layers", POINTER(CLayer)),
        ("head", CMatrix),
        *_fields(c_void_p, "norm embedding_norm"),
        *_fields(c_int32, "count hidden heads shared size middle"),
        *_fields(c_float, "epsilon scaling"),
        *_fields(c_int32, "adds_to_normed turned joint_norms gelu"),
        ("added", c_float),
        ("unused", c_int32),
    )


class CRequest(Structure):
    _fields_ = (
        *_fields(c_void_p, "places mask"),
        ("mask_stride", c_int64),
        *_fields(c_int32, "first past"),
        *_fields(POINTER(c_void_p), "keys values"),
        ("strides", POINTER(c_int64)),
    )


class CPass(Structure):
    _fields_ = (
        ("model", POINTER(CModel)),
        *_fields(c_void_p, "x embedded cosines sines"),
        *_fields(POINTER(c_void_p), "keys values"),
        ("strides", POINTER(c_int64)),
        ("dropped", POINTER(c_int32)),
        ("requests", POINTER(CRequest)),
        *_fields(c_void_p, "which logits"),
        ("states", POINTER(c_void_p)),
        ("states_stride", c_int64),
        *_fields(c_int32, "rows wanted count is_bfloat16"),
        ("parallel", c_void_p),
        *_fields(c_int32, "threads level"),
    )


class CPrompt(Structure):
    _fields_ = (
        *_fields(c_void_p, "query keys values out"),
        *_fields(c_int64, "query_head_stride query_row_stride keys_stride values_stride"),
        ("scaling", c_float),
        *_fields(c_int32, "rows count heads shared size is_bfloat16 window unused"),
    )


class CPacking(Structure):
    _fields_ = (
        *_fields(c_void_p, "bytes scales weight halves panels exceptions found"),
        *_fields(c_int32, "rows columns bits width capacity unused"),
    )


@cache
def array(kind: Any, count: int) -> Any:
    """Return the type of an array; cached, since ctypes leaves unused types to the garbage collector."""
    return kind * count


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class _Native(NamedTuple):
    """The library, and what it needs of this process."""

    library: ctypes.CDLL
    parallel: int  # GOMP_parallel of torch's OpenMP
    level: int  # of instructions, see native.c
    highest: int  # level that can be used

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library with torch's threads; raise ``MemoryError`` if there is no memory for it."""
        threads = (self.parallel, torch.get_num_threads(), self.level)
        check(getattr(self.library, f"specbench_{name}")(*arguments, *threads))


@cache
def _load(name: str = LIBRARY) -> _Native | str:
    """Load the library, or return why there is none."""
    path = Path(__file__).parent / name
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "they need Linux on x86-64"
    if not path.exists():
        return "there was no C compiler when specbench was installed"
    try:
        library = ctypes.CDLL(str(path))
        if library.specbench_version() != _VERSION:
            return "the library has another version: install specbench again"
    except (OSError, AttributeError):
        return "the library cannot be loaded"
    limit = _LEVELS.get(os.environ.get("ATEN_CPU_CAPABILITY", "").lower(), 4)
    highest = 4 if is_allowed("bfloat16") else 3 if is_allowed("avx512") else 2
    highest = highest if is_allowed("vnni") else 1
    level = highest = min(int(library.specbench_level()), limit, highest)
    if level > 3 and library.specbench_halves_are_slow():
        level = 3
    if level < 1:
        return "this processor has no AVX2, or it is switched off"
    try:
        # What torch has loaded counts as this program's own.
        parallel = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (OSError, AttributeError):
        parallel = None
    if parallel is None:
        return "this torch does not use GCC's OpenMP"
    threads = (c_void_p, c_int, c_int)
    library.specbench_packed_bytes.restype = c_int64
    library.specbench_product.argtypes = (POINTER(CMatrix), c_void_p, c_int64, c_void_p, c_int, *threads)
    library.specbench_unpack.argtypes = (POINTER(CMatrix), c_void_p, *threads)
    library.specbench_pack.argtypes = (POINTER(CPacking), *threads)
    library.specbench_prompt.argtypes = (POINTER(CPrompt), *threads)
    library.specbench_delta_rule.argtypes = (c_void_p, *threads)
    library.specbench_pass.argtypes = library.specbench_attend.argtypes = (POINTER(CPass),)
    return _Native(library, parallel, level, highest)


def why_not() -> str | None:
    """Return why native products are not available, as the end of a sentence; ``None`` if they are."""
    found = _load()
    return found if isinstance(found, str) else None


def is_available() -> bool:
    return why_not() is None


def loaded() -> _Native:
    found = _load()
    assert not isinstance(found, str), found
    return found


def check(status: int) -> None:
    if status:
        raise MemoryError("no memory for a pass")


_GROUP = 32  # inputs of our own panels are padded with zeros to a multiple of this
_BITS = {torch.bfloat16: 16, torch.float32: 32}  # of weights that products read as they are
_EXCEPTIONS = 64  # numbers of which one may be an exception in 12 bits
_BLOCK_BYTES = 64 + 64 * 192
"""Bytes of a block of weights in 12 bits, which begins with the number of its first exception."""
_MAX_ROWS = {1: 48, 2: 48, 3: 128, 4: 128}
"""Rows up to which a native forward is faster than torch's products, by level of instructions."""


def most_rows(dtype: torch.dtype) -> float:
    """Return the number of rows up to which native products in this dtype are faster than torch's."""
    level = loaded().level
    return math.inf if dtype == torch.bfloat16 and level < 4 else _MAX_ROWS[level]


class Panels:
    """A weight in the layout of native products; only if ``is_available()``.

    Attributes:
        bits: 32 and 16 for float32 and bfloat16, 12 for bfloat16 with exponents in 4 bits, 8 with a scale per output, 4
            with a scale and an offset per 32 inputs.
        width: Outputs in a panel.
        depth: Inputs, with the zeros behind them.
        data: All panels: uint8 in our own layout.
        exceptions: Of 12 bits, int32: numbers whose exponents do not fit, in the order of their blocks.
    """

    def __init__(
        self,
        bits: int,
        outputs: int,
        inputs: int,
        laid: PackedLayout | None = None,
        width: int = PANEL,
        data: Tensor | None = None,
    ) -> None:
        """Allocate panels of our own, or take those that are given or that oneDNN has made."""
        self.bits, self.outputs, self.inputs, self.width = bits, outputs, inputs, width
        self._onednn_address: int | None = None
        if laid is None:
            self.data = torch.empty(self._bytes_of(outputs), dtype=torch.uint8) if data is None else data
            self.depth = -(-inputs // _GROUP) * _GROUP
        else:
            self.data, self._onednn_address, self.width, self.depth = laid
        self.exceptions: Tensor | None = None

    @property
    def _address(self) -> int:
        return self.data.data_ptr() if self._onednn_address is None else self._onednn_address

    def _bytes_of(self, outputs: int) -> int:
        return int(loaded().library.specbench_packed_bytes(outputs, self.inputs, self.bits, self.width))

    def _pack(self, first: int, packing: CPacking) -> None:
        """Pack rows from ``first`` on, which begins a panel."""
        packing.panels = self._address + self._bytes_of(first)
        packing.columns, packing.bits, packing.width = self.inputs, self.bits, self.width
        loaded().call("pack", byref(packing))

    @property
    def is_own(self) -> bool:
        """Whether they are in our own layout, and can be stored."""
        return self._onednn_address is None

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors to save; ``from_stored`` reads them back."""
        sizes = torch.tensor([self.bits, self.outputs, self.inputs, self.width])
        exceptions = {} if self.exceptions is None else {"exceptions": self.exceptions}
        return {"sizes": sizes, **exceptions, "panels": self.data}

    @classmethod
    def from_stored(cls, tensors: Mapping[str, Tensor]) -> Panels:
        """Use stored panels where they lie; raise ``ValueError`` if they are of another size or kind than here."""
        (bits, outputs, inputs, width), data = tensors["sizes"].tolist(), tensors["panels"]
        if width != (WIDE_PANEL if bits == 12 else PANEL) or (bits == 12 and loaded().level < 3):
            raise ValueError("panels of another kind")
        made = cls(bits, outputs, inputs, width=width, data=data)
        if data.shape != (made._bytes_of(outputs),) or data.dtype != torch.uint8:
            raise ValueError("panels of another size")
        made.exceptions = tensors.get("exceptions")
        return made

    @classmethod
    def from_int8(cls, quantized: Tensor, scales: Tensor) -> Panels:
        """Pack an int8 weight, [out, in], with float32 scales, [out]."""
        quantized, scales = quantized.contiguous(), scales.float().contiguous()
        made = cls(8, *quantized.shape)
        made._pack(0, CPacking(bytes=quantized.data_ptr(), scales=scales.data_ptr(), rows=len(quantized)))
        return made

    @classmethod
    def quantize_int4(cls, weight: Tensor) -> Panels:
        """Quantize a weight [out, in] of any floating dtype to 4 bits, some rows at a time."""
        made = cls(4, *weight.shape)
        for first in range(0, len(weight), _CHUNK_ROWS):
            rows = weight.detach()[first : first + _CHUNK_ROWS].float().contiguous()
            made._pack(first, CPacking(weight=rows.data_ptr(), rows=len(rows)))
        return made

    @classmethod
    def from_bfloat16(cls, weight: Tensor) -> Panels:
        """Pack a bfloat16 weight [out, in]."""
        weight = weight.detach().contiguous()
        made = cls(16, *weight.shape)
        made._pack(0, CPacking(halves=weight.data_ptr(), rows=len(weight)))
        return made

    @classmethod
    def shorten_bfloat16(cls, weight: Tensor) -> Panels | None:
        """Pack a bfloat16 weight [out, in] in 12 bits, without loss; ``None`` without AVX-512, or if its numbers are
        of too many sizes.
        """
        if loaded().level < 3:
            return None
        outputs, inputs = weight.shape
        made = cls(12, outputs, inputs, width=WIDE_PANEL)
        panels, capacity = -(-outputs // made.width), made.width * made.depth // _EXCEPTIONS
        weight, lists = weight.detach().contiguous(), torch.empty(panels, capacity, dtype=torch.int32)
        found = torch.empty(panels, dtype=torch.int32)
        packing = CPacking(halves=weight.data_ptr(), rows=outputs, capacity=capacity)
        packing.exceptions, packing.found = lists.data_ptr(), found.data_ptr()
        made._pack(0, packing)
        if int(found.max()) > capacity:
            return None
        heads = made.data.view(torch.int32).view(panels, -1)[:, :: _BLOCK_BYTES // 4]
        heads += (found.cumsum(0, dtype=torch.int32) - found)[:, None]
        made.exceptions = lists[torch.arange(capacity) < found[:, None]]
        return made

    @classmethod
    def from_onednn(cls, packed: Tensor, weight: Tensor) -> Panels | None:
        """Read a weight, [out, in], where oneDNN has packed it; ``None`` if its layout is not known."""
        found = layout_of(packed, weight, loaded().level) if weight.dtype in _BITS else None
        outputs, inputs = weight.shape
        return None if found is None else cls(_BITS[weight.dtype], outputs, inputs, found)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that products multiply."""
        return torch.int8 if self.bits <= 8 else torch.bfloat16 if self.bits <= 16 else torch.float32

    def dense(self) -> Tensor:
        """Return the weight of panels in bfloat16 of our own, [out, in]."""
        data, count = self.data, -(-self.outputs // self.width)
        if self.bits == 12:
            data = torch.empty(count * self.width * self.depth * 2, dtype=torch.uint8)
            loaded().call("unpack", byref(self.matrix(None)), data.data_ptr())
        panels = data.view(torch.bfloat16).view(count, self.depth // 2, self.width, 2)
        padded = panels.permute(0, 2, 1, 3).reshape(-1, self.depth)
        return padded[: self.outputs, : self.inputs].contiguous()

    def matrix(self, bias: Tensor | None) -> CMatrix:
        """Return its C structure; valid as long as the panels and the bias, float32, exist."""
        sizes = (self.outputs, self.inputs, self.bits, self.width, self.depth)
        return CMatrix(self._address, address(bias), address(self.exceptions), *sizes)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[rows, in] -> [rows, out]; a row's bits do not depend on the others.

        Args:
            x: With weights in bfloat16 it may be in it too: then the result is rounded to it once. Else in float32.
            bias: [out], float32.
        """
        is_bfloat16 = x.dtype == torch.bfloat16 == self.dtype
        x = (x if is_bfloat16 else x.float()).contiguous()
        out = x.new_empty(len(x), self.outputs)
        arguments = (x.data_ptr(), len(x), out.data_ptr(), is_bfloat16)
        loaded().call("product", byref(self.matrix(bias)), *arguments)
        return out


class Product(NamedTuple):
    """A linear layer."""

    panels: Panels
    bias: Tensor | None  # [out] or None


class Layer(NamedTuple):
    """A decoder layer. Norms are weights, [hidden size] unless stated otherwise; ``None`` without."""

    projections: Product  # queries, keys and values, in this order
    output: Product  # of attention
    gates: Product  # gate and up projections, in this order
    down: Product
    # of the inputs of attention and of the MLP
    attention_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    # of every head, [head size], or of all heads together, [heads · head size]
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    # of the outputs of attention and of the MLP
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    window: int = 0  # positions that a token attends to, with its own; 0 for all
    rotation: int = 0  # index of the rotation of its queries and keys; -1 without
    place: int = 0  # index of its keys and values among the layers of a cache

    @property
    def products(self) -> tuple[Product, ...]:
        """All of its products."""
        return (self.projections, self.output, self.gates, self.down)


class Request(NamedTuple):
    """Rows of a forward pass that attend to the keys and values of one request."""

    rows: int
    past: int  # positions cached before them
    # bool [rows, past + rows or more], true where a row attends; None: causal
    mask: Tensor | None = None
    # int32 [past + rows], of the positions in the buffers; None if they are consecutive from 0
    indices: Tensor | None = None
    # its own keys and values, of the same dtype as all; None for those of the forward pass
    buffers: Buffers | None = None


class Buffers:
    """Keys and values of each layer, as native.c finds them; valid as long as this object.

    They are [1, heads, positions, head size], all bfloat16 or all float32, with contiguous positions of each head.
    ``dropped`` is the number of positions of each layer before the first one that they hold; ``None`` for 0.
    """

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], dropped: Sequence[int] | None = None) -> None:
        self._referenced = layers
        self.keys = array(c_void_p, len(layers))(*(keys.data_ptr() for keys, _ in layers))
        self.values = array(c_void_p, len(layers))(*(values.data_ptr() for _, values in layers))
        self.strides = array(c_int64, 2 * len(layers))(
            *(each.stride(1) for entries in layers for each in entries)
        )
        self.dropped = None if dropped is None else array(c_int32, len(layers))(*dropped)
        self.is_bfloat16 = layers[0][0].dtype == torch.bfloat16


class StackConfig(NamedTuple):
    """Sizes and constants of a ``DecoderStack``."""

    # number of query heads, and of key/value heads
    heads: int
    kv_heads: int
    head_size: int  # a multiple of 16, at most MOST_HEAD_SIZE
    epsilon: float  # of all norms
    scaling: float  # factor of attention scores
    # of an EAGLE head, whose first layer reads embeddings and features: the norm of embeddings, [hidden size]
    embedding_norm: Tensor | None = None
    adds_to_normed: bool = False  # whether that layer adds to the normalized features
    rotated: int = 0  # first numbers of a head that are rotated; 0 for all
    joint_norms: bool = False  # whether queries and keys have one norm for all heads
    gelu: bool = False  # GELU in its tanh form in place of SiLU
    residual_multiplier: float = 1.0  # of the outputs of attention and MLP


class DecoderStack:
    """Decoder layers with their final norm and head, for forward passes of few rows.

    Attributes:
        quantizes_rows: Whether products round their inputs to bytes.
        max_rows: Rows up to which it is faster than torch operators; any number where rows are quantized, since the
            products are the same ones, and in bfloat16 without instructions for it.
    """

    def __init__(self, layers: Sequence[Layer], norm: Tensor, head: Product, config: StackConfig) -> None:
        self._referenced: list[Tensor | Panels] = []  # what the structures point to
        self._layers = (CLayer * len(layers))(*(self._layer(layer) for layer in layers))
        hidden, middle = head.panels.inputs, layers[0].down.panels.inputs
        self._model = CModel(
            layers=self._layers,
            head=self._matrix(head),
            norm=self._vector(norm),
            embedding_norm=self._vector(config.embedding_norm),
            count=len(layers),
            hidden=hidden,
            heads=config.heads,
            shared=config.kv_heads,
            size=config.head_size,
            middle=middle,
            epsilon=config.epsilon,
            scaling=config.scaling,
            adds_to_normed=config.adds_to_normed,
            turned=config.rotated or config.head_size,
            joint_norms=config.joint_norms,
            gelu=config.gelu,
            added=config.residual_multiplier,
        )
        self._vocabulary = head.panels.outputs
        self.quantizes_rows = head.panels.dtype == torch.int8
        self.max_rows = math.inf if self.quantizes_rows else most_rows(head.panels.dtype)

    def _vector(self, tensor: Tensor | None) -> int | None:
        """Return a pointer to its numbers in float32."""
        if tensor is None:
            return None
        numbers = tensor.detach().float().contiguous()
        self._referenced.append(numbers)
        return numbers.data_ptr()

    def _matrix(self, product: Product) -> CMatrix:
        bias = None if product.bias is None else product.bias.detach().float().contiguous()
        self._referenced += [product.panels] if bias is None else [product.panels, bias]
        return product.panels.matrix(bias)

    def _layer(self, layer: Layer) -> CLayer:
        before = (layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm)
        norms = map(self._vector, (*before, layer.attention_out_norm, layer.mlp_out_norm))
        return CLayer(*map(self._matrix, layer.products), *norms, layer.window, layer.rotation)

    def __call__(
        self,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        pointers: Buffers,
        requests: Sequence[Request],
        wanted: Sequence[int],
        layers: Sequence[int] = (),
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a forward pass.

        Args:
            x: Embeddings, or a head's features, [rows, hidden size], float32, contiguous; overwritten by the last
                layer's output.
            cosines, sines: Rotations of the rows' positions, [rotations, rows, ``rotated``], float32; without the
                first dimension if there is one.
            pointers: Keys and values of each layer, with space for those of the rows.
            requests: The requests that the rows belong to, in the order of the rows.
            wanted: Rows whose logits are wanted.
            layers: Indices of layers, perhaps repeated. The hidden states that enter these layers are returned for all
                rows; an index equal to the number of layers stands for the states after the final norm.
            embedded: Embeddings that an EAGLE head reads, in the shape of ``x``.

        Returns:
            Logits, [wanted, vocabulary], and hidden states, [rows, layers, hidden size], or ``None``; float32.
        """
        embedded, cosines, sines = contiguous(embedded), cosines.contiguous(), sines.contiguous()
        c_requests = _c_requests(requests)
        which = array(c_int32, len(wanted))(*wanted)
        logits = torch.empty(len(wanted), self._vocabulary)
        once = [*dict.fromkeys(layers)]
        states = torch.empty(len(x), len(once), x.shape[1])
        state_pointers = array(c_void_p, self._model.count + 1)()
        for place, layer in enumerate(once):
            state_pointers[layer] = states[:, place].data_ptr()
        c_pass = CPass(
            model=ctypes.pointer(self._model),
            x=x.data_ptr(),
            embedded=address(embedded),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            keys=pointers.keys,
            values=pointers.values,
            strides=pointers.strides,
            dropped=pointers.dropped,
            requests=c_requests,
            which=ctypes.addressof(which),
            logits=logits.data_ptr(),
            states=state_pointers if layers else None,
            states_stride=states.stride(0),
            rows=len(x),
            wanted=len(wanted),
            count=len(requests),
            is_bfloat16=pointers.is_bfloat16,
        )
        _run(loaded().library.specbench_pass, c_pass)
        if len(once) < len(layers):
            states = states[:, [once.index(layer) for layer in layers]]
        return logits, states if layers else None


def _run(function: Any, c_pass: CPass) -> None:
    native = loaded()
    c_pass.parallel, c_pass.threads, c_pass.level = native.parallel, torch.get_num_threads(), native.level
    check(function(byref(c_pass)))


def _c_requests(requests: Sequence[Request]) -> Any:
    """Return requests as an array of C structures, which keeps what they point to."""
    found, referenced, first = array(CRequest, len(requests))(), [], 0
    for i, request in enumerate(requests):
        mask, indices, own = contiguous(request.mask), contiguous(request.indices), request.buffers
        referenced += [mask, indices, own]
        stride = 0 if mask is None else mask.stride(0)
        buffers = () if own is None else (own.keys, own.values, own.strides)
        found[i] = CRequest(address(indices), address(mask), stride, first, request.past, *buffers)
        first += request.rows
    found.referenced = referenced
    return found


def can_attend(keys: Tensor, values: Tensor) -> bool:
    """Return whether rows can attend natively to keys and values like these, [1, heads, positions, head size]."""
    size = keys.shape[-1]
    return (
        keys.device.type == "cpu"
        and keys.dtype in Buffers.dtypes
        and keys.shape == values.shape
        and size % STEP == 0
        and size <= MOST_HEAD_SIZE
        and is_available()
    )


class Attention:
    """Native attention of rows of several requests, when the rest of a forward pass is not native."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = _c_requests(requests)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None) -> Tensor:
        """Compute the attention of these rows in a layer.

        Args:
            query: Rotated, [rows, heads, head size], float32.
            keys, values: See ``can_attend``; they include those of the rows.
            scaling: Factor of scores; ``None`` for 1/√(head size).

        Returns:
            [rows, heads, head size], float32.
        """
        query = query.contiguous()
        rows, heads, size = query.shape
        out = torch.empty_like(query)
        scaling = size**-0.5 if scaling is None else scaling
        model = CModel(heads=heads, shared=keys.shape[1], size=size, scaling=scaling)
        c_pass = CPass(
            model=ctypes.pointer(model),
            x=query.data_ptr(),
            keys=array(c_void_p, 1)(keys.data_ptr()),
            values=array(c_void_p, 1)(values.data_ptr()),
            strides=array(c_int64, 2)(keys.stride(1), values.stride(1)),
            requests=self._requests,
            logits=out.data_ptr(),
            rows=rows,
            count=len(self._requests),
            is_bfloat16=keys.dtype == torch.bfloat16,
        )
        _run(loaded().library.specbench_attend, c_pass)
        return out


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float | None = None, window: int = 0
) -> Tensor:
    """Compute the causal attention of the last positions of one request: many, as when a prompt is read.

    In bfloat16, queries and softmax weights are multiplied in bfloat16 where the processor has instructions for it;
    scores and sums are float32. The bits of a row do not depend on the other rows.

    Args:
        query: [1, heads, rows, head size], of the dtype of the keys.
        keys, values: See ``can_attend``; [1, key/value heads, positions, head size], with those of the rows.
        scaling: Factor of scores; ``None`` for 1/√(head size).
        window: Positions that a row attends to, with its own; 0 for all.

    Returns:
        [1, rows, heads, head size], of the same dtype.
    """
    keys, values = (
        each if each.stride()[2:] == (each.shape[3], 1) else each.contiguous() for each in (keys, values)
    )
    query = query if query.stride(3) == 1 else query.contiguous()
    _, heads, rows, size = query.shape
    out = query.new_empty(1, rows, heads, size)
    prompt = CPrompt(
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        query_head_stride=query.stride(1),
        query_row_stride=query.stride(2),
        keys_stride=keys.stride(1),
        values_stride=values.stride(1),
        scaling=size**-0.5 if scaling is None else scaling,
        rows=rows,
        count=keys.shape[2],
        heads=heads,
        shared=keys.shape[1],
        size=size,
        is_bfloat16=query.dtype == torch.bfloat16,
        window=window,
    )
    loaded().call("prompt", byref(prompt))
    return out
