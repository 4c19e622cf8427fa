"""Quantized checkpoints: their weights are unpacked while they are read, with torch alone.

A weight is told as numbers (whole ones, or floating ones of 4 or 8 bits) and a scale for each block of them, in some
kinds a zero too. It is computed in float32, some rows at a time, and rounded once. What kind a tensor is of shows in
the names, dtypes and shapes beside it, so that a checkpoint may have layers of several kinds.
"""

from __future__ import annotations

import copy
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.linear import Int8Weight, QuantizedWeight, int8_weight, is_usable
from specbench.backends.torch.kernels.native import Panels
from specbench.backends.torch.kernels.surgery import KeptLayers
from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt
from specbench.options import QuantizedName

_CHUNK = 1 << 20
"""Numbers that are unpacked at a time."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats (E2M1) by their codes."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the outputs of a group of eight lie in AWQ's words."""

READ = ("compressed-tensors", "gptq", "auto-round", "awq", "bitsandbytes", "torchao", "modelopt")
FLOATING = ("fp8", "fbgemm_fp8", "mxfp8", "mxfp4")
_TORCHAO = ("Tensor", "Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor")
"""Kinds of tensors of torchao whose numbers lie in the order of the weight."""

_PARTS = (r"(\.weight)?\.[^.]*$", r"\.weight\..*$", "_(blocks|scales?|scale_inv|zero_point)$")
"""What follows the name of a layer, or of a weight of several experts, in the names of its tensors."""

_OTHERS = "Choose a copy of the model that is not quantized, or is in a form that docs/models.md lists."


def quantization_of(config: PreTrainedConfig, name: str) -> dict[str, Any] | None:
    """Return the settings of a quantized checkpoint, as its config.json has them; ``None`` if it is not quantized.

    Raises:
        UsageError: Its weights cannot be unpacked.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = _method(settings)
    if method not in READ + FLOATING:
        raise UsageError(
            f"The weights of {name} are quantized in a form that is not read: {excerpt(method)!r}.", _OTHERS
        )
    layout = _odd_layout(method, settings)
    if layout:
        raise UsageError(
            f"The weights of {name} ({method}) have a layout that is not read: {excerpt(layout)}.", _OTHERS
        )
    return settings


def unpacked_source(folder: Path, config: PreTrainedConfig, weights: dict[str, Any]) -> dict[str, Any]:
    """Return what tells `from_pretrained` of the model that a quantized checkpoint is unpacked to."""
    plain = copy.deepcopy(config)
    del plain.quantization_config
    source: dict[str, Any] = {"pretrained_model_name_or_path": None, "config": plain, "state_dict": weights}
    if (path := folder / GENERATION_CONFIG_NAME).is_file():
        source["generation_config"] = GenerationConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return source


def note_on_quantization(settings: Mapping[str, Any], name: str, into: str) -> str:
    """Return the sentence for the user about what becomes of a quantized checkpoint."""
    return f"The weights of {name} are quantized ({_method(settings)}); they were unpacked to {into}."


def _method(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    return str(settings.get("quant_method"))


def _odd_layout(method: str, settings: Mapping[str, Any]) -> str:
    """Return what in the settings says that weights are stored in another layout than the usual; else nothing."""
    if method == "compressed-tensors":
        sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
        rotated = "rotations" if settings.get("transform_config") else ""
        formats = {settings.get("format"), *(each.get("format") for each in _groups(settings))} - {None}
        known = r"(int|float|naive|pack|nvfp4-pack|mxfp4-pack|mxfp8)-quantized|dense|mixed-precision"
        odd = next((str(each) for each in formats if not re.fullmatch(known, str(each))), "")
        return odd or rotated or ("" if sparsity == "dense" else str(sparsity))
    if method == "auto-round":
        packing = _gptq_form(settings)
        known = r"auto_round(:(auto_gptq|gptqmodel|auto_awq))?"
        return "" if re.fullmatch(known, packing) else packing
    if method == "gptq":
        own = _gptq_form(settings)
        return "marlin" if settings.get("is_marlin_format") else "" if own in ("gptq", "gptq_v2") else own
    if method == "awq":
        own = str(settings.get("version") or settings.get("format") or "gemm").lower()
        return "" if own == "gemm" else own
    return ""


def _gptq_form(settings: Mapping[str, Any]) -> str:
    if _method(settings) == "auto-round":
        return str(settings.get("packing_format", "auto_round"))
    return str(settings.get("checkpoint_format") or settings.get("format") or "gptq")


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((settings.get("config_groups") or {}).values())


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """A weight as it is stored: ``(codes - zeros) * scales``.

    Attributes:
        codes: Returns rows of codes, [rows, columns].
        scales: [all rows, groups of columns], float32.
        zeros: The same shape; or one for all.
        shape: Of the weight; ``None`` for rows and columns. Codes beyond it are left out.
        groups: The group of each column; ``None`` if groups are equal and in order.
        turned: Whether the last two dimensions are exchanged once it is unpacked.
    """

    codes: Callable[[slice], Tensor]
    scales: Tensor
    columns: int
    zeros: Tensor | int = 0
    shape: Sequence[int] | None = None
    groups: Tensor | None = None
    turned: bool = False

    def unpack(self, dtype: torch.dtype) -> Tensor:
        shape = self.shape or (len(self.scales), self.columns)
        if shape[-1] != self.columns:  # the numbers follow each other in blocks
            made = torch.empty(len(self.scales), self.columns, dtype=dtype)
            self.fill(made)
            return made.view(-1)[: math.prod(shape)].view(*shape)
        made = torch.empty(*shape[:-2], *(shape[:-3:-1] if self.turned else shape[-2:]), dtype=dtype)
        parts = made.transpose(-1, -2) if self.turned else made
        for number, part in enumerate(parts.view(1, *shape) if len(shape) == 2 else parts):
            self.fill(part, number * shape[-2])
        return made

    def outline(self, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor for a matrix with only its first and last rows, by which models are told apart; the memory of
        the others is not touched. ``None`` if the weight is told otherwise than in rows and columns.
        """
        rows, shape = len(self.scales), self.shape or (len(self.scales), self.columns)
        if tuple(shape) != (rows, self.columns) or self.turned:
            return None
        made, count = torch.empty(rows, self.columns, dtype=dtype), max(1, -(-64 // self.columns)) + 31 & ~31
        last = max(0, rows - count) & ~31
        self.fill(made[:count])
        self.fill(made[last:], last)
        return made

    def int8(self) -> Int8Weight | None:
        """Return the weight with a scale for each row, as int8 layers take it; ``None`` if it is not told so."""
        if self.scales.shape[1] != 1 or self._odd_zeros():
            return None
        codes = self.codes(slice(0, len(self.scales)))
        if codes.dtype == torch.uint8:
            if self.zeros != 128:
                return None
            codes = (codes ^ 128).view(torch.int8)  # less 128
        elif codes.dtype != torch.int8 or (isinstance(self.zeros, int) and self.zeros):
            return None
        return Int8Weight(codes, self.scales[:, 0].contiguous())

    def int4(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the weight as int4 layers take it, see ``Panels.from_int4``; ``None`` if its scales are not of
        bfloat16, or it is told otherwise.
        """
        rows, groups = self.scales.shape
        width, rest = divmod(self.columns, groups)
        if width % 32 or rest or self.groups is not None:
            return None
        codes = self.codes(slice(0, rows))
        zeros = (
            self.zeros.float() if isinstance(self.zeros, Tensor) else torch.full((1, 1), float(self.zeros))
        )
        if codes.dtype == torch.int8:
            codes, zeros = codes + 8, zeros + 8
        least = -zeros * self.scales
        if codes.is_floating_point() or codes.min() < 0 or codes.max() > 15:
            return None
        if any(not torch.equal(each.bfloat16().float(), each) for each in (self.scales, least)):
            return None
        scales, least = (each.bfloat16().repeat_interleave(width // 32, 1) for each in (self.scales, least))
        return codes.view(torch.uint8), scales, least

    def _odd_zeros(self) -> bool:
        return isinstance(self.zeros, Tensor) and bool(self.zeros.any())

    def fill(self, part: Tensor, begin: int = 0) -> None:
        """Unpack rows into a part of the weight, from row number ``begin`` on."""
        step = max(32, _CHUNK // self.columns // 32 * 32)
        for first in range(0, len(part), step):
            last = min(first + step, len(part))
            chunk = slice(begin + first, begin + last)
            numbers = self.codes(chunk).float()
            if isinstance(self.zeros, Tensor):
                numbers = numbers - self._spread(self.zeros[chunk].float())
            elif self.zeros:
                numbers = numbers - self.zeros
            part[first:last] = numbers * self._spread(self.scales[chunk])

    def _spread(self, values: Tensor) -> Tensor:
        """Give each column the value of its group."""
        count = values.shape[1]
        if count == 1:
            return values
        if self.groups is not None:
            return values[:, self.groups]
        return values.repeat_interleave(-(-self.columns // count), 1)[:, : self.columns]


class StoredWeight:
    """A weight that is unpacked when it is read: for `from_pretrained` a slice of a safetensors file."""

    _turn = threading.Lock()  # each product of torch has threads of its own

    def __init__(self, grid: Callable[[], Grid], dtype: torch.dtype, *, packs: bool = False) -> None:
        self.grid, self._dtype, self._packs = grid, dtype, packs
        self.outline: Tensor | None = None

    def __getitem__(self, _: EllipsisType) -> Tensor:
        with self._turn:
            grid = self.grid()
            self.outline = grid.outline(self._dtype) if self._packs else None
            return grid.unpack(self._dtype) if self.outline is None else self.outline

    def fill(self) -> None:
        """Unpack what was read as an outline."""
        assert self.outline is not None
        self.outline.copy_(self.grid().unpack(self._dtype))


class StoredLayers:
    """Linear layers of a quantized checkpoint that are to be quantized again: they are packed out of it one by one.

    Where a layer can take the numbers of the checkpoint as they are, it does; others are rounded from float32.

    Args:
        layers: The weights by the layers' names; each layer has only an outline of it.

    Attributes:
        inner: The store of packed layers that is asked first, and is given what is packed.
        exact: Whether all that was packed has the numbers of the checkpoint; ``None`` if nothing was.
    """

    def __init__(self, layers: dict[str, StoredWeight], kind: QuantizedName) -> None:
        self._layers, self._kind = layers, kind
        self.inner: KeptLayers | None = None
        self.exact: bool | None = None

    @classmethod
    def of(cls, model: nn.Module, weights: Iterable[Any], kind: QuantizedName) -> StoredLayers | None:
        """Return the layers of a model just loaded whose weights are outlines.

        ``None`` if a weight was changed after it was read, such as joined with others: then outlines are of no use.
        """
        read = [each for each in weights if isinstance(each, StoredWeight) and each.outline is not None]
        held = {each.outline.data_ptr(): each for each in read if each.outline is not None}
        untyped: Any = model
        head, found = untyped.get_output_embeddings(), {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                weight = None if parameter is None else held.pop(parameter.data_ptr(), None)
                if (
                    weight is not None
                    and type(module) is nn.Linear
                    and name == "weight"
                    and module is not head
                ):
                    found[path] = weight
                elif weight is not None:
                    weight.fill()
        return None if held else cls(found, kind)

    def find(self, place: str) -> QuantizedWeight | None:
        path, _, names = place.rpartition(".")
        weights = [self._layers.pop(f"{path}.{name}".lstrip("."), None) for name in names.split("+")]
        told = [weight for weight in weights if weight is not None]
        outlines = [weight.outline for weight in told if weight.outline is not None]
        rows = [len(each) for each in outlines]
        found = None if self.inner is None else self.inner.find(place)
        if not told or (
            found is not None and is_usable(found, self._kind, (sum(rows), outlines[0].shape[1]), rows)
        ):
            return found
        if len(told) < len(weights) or (self._kind == "int4" and not native.is_available()):
            for weight in told:
                weight.fill()
            return None
        made = self._packed([weight.grid() for weight in told])
        self.save(place, made)
        return made

    def _packed(self, grids: Sequence[Grid]) -> QuantizedWeight:
        if self._kind == "int4":
            fours = [four for grid in grids if (four := grid.int4()) is not None]
            if len(fours) == len(grids):
                self.exact = self.exact is not False
                return Panels.from_int4(*(torch.cat(each) for each in zip(*fours, strict=True)))
        else:
            eights = [eight for grid in grids if (eight := grid.int8()) is not None]
            if len(eights) == len(grids):
                self.exact = self.exact is not False
                made = Int8Weight(*(torch.cat(each) for each in zip(*eights, strict=True)))
                return Panels.from_int8(*made) if native.is_available() else made
        self.exact = False
        whole = torch.empty(sum(len(grid.scales) for grid in grids), grids[0].columns)
        for grid, part in zip(grids, whole.split([len(grid.scales) for grid in grids]), strict=True):
            grid.fill(part)
        return Panels.quantize_int4(whole) if self._kind == "int4" else int8_weight(whole)

    def discard(self) -> None:
        if self.inner is not None:
            self.inner.discard()

    def save(self, place: str, weight: QuantizedWeight) -> None:
        if self.inner is not None:
            self.inner.save(place, weight)

    def finish(self) -> None:
        """Unpack what no layer asked for."""
        for weight in self._layers.values():
            weight.fill()
        self._layers = {}


def stored_weights(
    files: Sequence[Path],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    name: str,
    *,
    packs: bool = False,
) -> dict[str, Any]:
    """Return the tensors of a quantized checkpoint by name, as if it were not quantized; each is read when indexed.

    Args:
        packs: Whether linear layers are to be packed from the checkpoint; see ``StoredLayers``.

    Raises:
        UsageError: A tensor has a layout that is not read.
    """
    parts: dict[str, Any] = {}
    for path in files:
        if path.suffix != ".safetensors":
            raise UsageError(f"The weights of {name} are quantized and pickled, which is not read.", _OTHERS)
        file: Any = safe_open(path, "pt", backend="pread")  # so that what is read does not stay in memory
        parts |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
        _check_torchao(file.metadata() or {}, name)
    stored = _Stored(parts, settings)
    found = {
        weight: StoredWeight(grid, dtype, packs=packs)
        for weight, grid in map(stored.weight_at, parts)
        if grid
    }
    layers = {weight.removesuffix(".weight") for weight in found}
    kept = {key: part for key, part in parts.items() if key.endswith(".bias") or not _is_of(key, layers)}
    return kept | found


def _is_of(key: str, layers: set[str]) -> bool:
    """Return whether a tensor is a part of a quantized weight."""
    return any(re.sub(part, "", key) in layers for part in _PARTS)


def _check_torchao(metadata: Mapping[str, str], name: str) -> None:
    for told in metadata.values():
        kind = re.match(r'\{"_type": "(\w+)"', told)
        if kind and kind[1] not in _TORCHAO:
            raise UsageError(
                f"The weights of {name} (torchao) have a layout that is not read: {kind[1]}.", _OTHERS
            )


class _Stored:
    """The tensors of a quantized checkpoint, and the weights that are told by several of them."""

    def __init__(self, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._parts = parts
        self._method = _method(settings)
        own = _gptq_form(settings)
        self._is_awq = self._method == "awq" or own.endswith("awq")
        self._zeros_are_less = own in ("gptq", "auto_round:auto_gptq")
        weights = [each.get("weights") or {} for each in _groups(settings)]
        self._blocks = [
            settings.get("weight_block_size"),
            *(each.get("block_structure") or [1, each.get("group_size") or 1] for each in weights),
            [128, 128],
        ]
        self._bits = {each["num_bits"] for each in weights if each.get("num_bits")}

    def weight_at(self, key: str) -> tuple[str, Callable[[], Grid] | None]:
        """Return the weight that is told by this tensor and others, if this is the one that shows its kind."""
        for suffix, weight, read in (
            (".weight_packed", ".weight", self._packed),
            (".qweight", ".weight", self._awq if self._is_awq else self._gptq),
            (".weight.absmax", ".weight", self._bitsandbytes),
            (".SCB", ".weight", self._rows),
            ("._weight_qdata", ".weight", self._torchao),
            ("_blocks", "", self._mxfp4),
            ("_scale_inv", "", self._scaled),
            ("_scale", "", self._scaled),
        ):
            stem = key.removesuffix(suffix)
            if stem != key and (read != self._scaled or self._is_narrow(stem)):
                return stem + weight, partial(read, stem)
        return key, None

    def _is_narrow(self, key: str) -> bool:
        return key in self._parts and self._parts[key].get_dtype() in ("I8", "U8", "F8_E4M3", "F8_E5M2")

    def _read(self, *keys: str) -> Tensor:
        found: Tensor = self._parts["".join(keys)][...]
        return found

    def _find(self, *keys: str) -> Tensor | None:
        return self._read(*keys) if "".join(keys) in self._parts else None

    # Each returns the grid of the weight of a layer, or of a weight with this name.

    def _scaled(self, key: str) -> Grid:
        """Numbers in a byte each: FP8 of DeepSeek, compressed-tensors and others, whole ones, or two FP4 in NVFP4."""
        codes = self._read(key)
        scale = self._find(key, "_scale_inv")
        scale = self._read(key, "_scale") if scale is None else scale
        if codes.dtype == torch.uint8:
            grid = self._fp4(codes, scale)
            overall = self._find(key, "_scale_2")
            return grid if overall is None else replace(grid, scales=grid.scales * overall.float())
        zeros = self._find(key, "_zero_point")
        return self._grid(codes, scale, 0 if zeros is None else zeros)

    def _rows(self, layer: str) -> Grid:
        """bitsandbytes in 8 bits: a largest value for each row."""
        return self._grid(self._read(layer, ".weight"), self._read(layer, ".SCB")[:, None] / 127)

    def _torchao(self, layer: str) -> Grid:
        zeros = self._find(layer, "._weight_zero_point")
        return self._grid(
            self._read(layer, "._weight_qdata"),
            self._read(layer, "._weight_scale"),
            0 if zeros is None else zeros,
        )

    def _packed(self, layer: str) -> Grid:
        """compressed-tensors: whole numbers in words, or FP4 in bytes."""
        words, scale = self._read(layer, ".weight_packed"), self._read(layer, ".weight_scale")
        if words.dtype == torch.uint8:
            grid = self._fp4(words, scale)
            overall = self._find(layer, ".weight_global_scale")
            return grid if overall is None else replace(grid, scales=grid.scales / overall.float())
        rows, columns = self._read(layer, ".weight_shape").tolist()
        width = words.shape[1]
        bits = next((each for each in self._bits if -(-columns * each // 32) == width), 0)
        if not bits:
            raise ValueError(
                f"{layer}.weight_packed has another layout than these versions of compressed-tensors write"
            )
        scales = self._scales(scale, (rows, columns))
        zeros: Tensor | int = 1 << (bits - 1)
        stored = self._find(layer, ".weight_zero_point")
        if stored is not None:
            zeros = unpack_words(stored.t(), bits)[:, :rows].t()
        return Grid(
            lambda chunk: unpack_words(words[chunk], bits)[:, :columns],
            scales,
            columns,
            zeros,
            groups=self._find(layer, ".weight_g_idx"),
        )

    def _gptq(self, layer: str) -> Grid:
        words, scales, zeros = (self._read(layer, end) for end in (".qweight", ".scales", ".qzeros"))
        rows = scales.shape[1]
        bits = 32 * zeros.shape[1] // rows
        columns = 32 * words.shape[0] // bits
        least = unpack_words(zeros, bits)[:, :rows].t()
        if self._zeros_are_less:
            least = least + 1 & (1 << bits) - 1
        groups, size = self._find(layer, ".g_idx"), -(-columns // len(zeros))
        if groups is not None and torch.equal(groups, torch.arange(columns, dtype=groups.dtype) // size):
            groups = None
        return Grid(
            lambda chunk: unpack_words(words[:, chunk].t(), bits),
            scales.t().float(),
            columns,
            least,
            groups=None if groups is None else groups.long(),
        )

    def _awq(self, layer: str) -> Grid:
        words, scales, zeros = (self._read(layer, end) for end in (".qweight", ".scales", ".qzeros"))
        columns, rows = len(words), scales.shape[1]
        if 8 * words.shape[1] != rows:
            raise ValueError(f"{layer}.qweight is not in 4 bits, as AWQ's weights usually are")

        shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32)

        def unpacked(words: Tensor) -> Tensor:
            numbers = (words.t().contiguous()[:, None] >> shifts[:, None]).to(torch.uint8) & 15
            return numbers.flatten(0, 1)

        return Grid(
            lambda chunk: unpacked(words[:, chunk.start // 8 : -(-chunk.stop // 8)]),
            scales.t().float(),
            columns,
            unpacked(zeros),
        )

    def _bitsandbytes(self, layer: str) -> Grid:
        """bitsandbytes in 4 bits: places in a table, for blocks of the weight's numbers in one row."""
        key = f"{layer}.weight"
        state = next(name for name in self._parts if name.startswith(f"{key}.quant_state."))
        told = json.loads(bytes(self._read(state).tolist()))
        scales, table = self._read(key, ".absmax"), self._read(key, ".quant_map")
        if (nested := self._find(key, ".nested_absmax")) is not None:
            outer = nested.repeat_interleave(told["nested_blocksize"])[: len(scales)]
            scales = self._read(key, ".nested_quant_map")[scales.long()] * outer + told["nested_offset"]
        size = told["blocksize"]
        codes, shape = self._read(key).view(torch.uint8).view(-1), told["shape"]
        codes = torch.nn.functional.pad(codes, (0, len(scales) * size // 2 - len(codes))).view(-1, size // 2)
        pairs = _pairs(table, high_first=True)
        if shape[-1] % size == 0:  # blocks are groups of a row
            codes, scales, size = (
                codes.view(-1, shape[-1] // 2),
                scales.view(-1, shape[-1] // size),
                shape[-1],
            )
        else:
            scales = scales[:, None]
        return Grid(
            lambda chunk: pairs[codes[chunk].int()].flatten(1),
            scales.float(),
            size,
            shape=shape,
        )

    def _mxfp4(self, key: str) -> Grid:
        """Experts of gpt-oss: blocks of 32 numbers along the inputs, which come last there and first in the model."""
        codes, scale = self._read(key, "_blocks"), self._read(key, "_scales")
        return replace(self._fp4(codes.flatten(-2), scale), turned=True)

    def _fp4(self, codes: Tensor, scale: Tensor) -> Grid:
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        rows, pairs = codes.view(-1, codes.shape[-1]), _pairs(torch.tensor(_FP4))
        return Grid(
            lambda chunk: pairs[rows[chunk].int()].flatten(1),
            self._scales(scale, shape),
            shape[-1],
            shape=shape,
        )

    def _grid(self, codes: Tensor, scale: Tensor, zeros: Tensor | int = 0) -> Grid:
        """Return the grid of a weight whose codes lie as the weight does."""
        rows = codes.reshape(-1, codes.shape[-1])
        zeros = self._scales(zeros, codes.shape) if isinstance(zeros, Tensor) else zeros
        scales = self._scales(scale, codes.shape)
        return Grid(lambda chunk: rows[chunk], scales, codes.shape[-1], zeros, shape=codes.shape)

    def _scales(self, scale: Tensor, shape: Sequence[int]) -> Tensor:
        """Return scales or zeros of a weight as [all its rows, groups of columns], float32.

        Scales may be those of a tensor, of rows, of groups of columns, or of blocks; bytes are exponents.
        """
        scale = scale.float() if scale.dtype != torch.uint8 else torch.exp2(scale.float() - 127)
        if scale.numel() == 1:
            scale = scale.view(1, 1)
        elif scale.dim() == 1:  # of rows, or of experts
            scale = scale.view(-1, *[1] * (len(shape) - 1))
        (rows, columns), (down, across) = shape[-2:], scale.shape[-2:]
        high, wide = -(-rows // down), -(-columns // across)
        for block in self._blocks:
            if block and (-(-rows // block[0]), -(-columns // block[1])) == (down, across):
                high, wide = block
                break
        scale = scale.repeat_interleave(high, -2)[..., :rows, :]
        if wide * across != columns:  # the last group is smaller
            scale = scale.repeat_interleave(wide, -1)[..., :columns]
        return scale.expand(*shape[:-2], -1, -1).reshape(-1, scale.shape[-1])


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return whole numbers of 1 to 8 bits that follow each other in the rows of int32 words, lowest bits first."""
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (words.contiguous().view(torch.uint8)[..., None] >> shifts & mask).flatten(-2)
    filled = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits))
    wide = torch.nn.functional.pad(filled.long() & 0xFFFFFFFF, (0, 1))
    begin = torch.arange(32) * bits
    pairs = wide[..., begin // 32] | wide[..., begin // 32 + 1] << 32
    return (pairs >> begin % 32 & mask).to(torch.uint8).flatten(-2)


def _pairs(table: Tensor, *, high_first: bool = False) -> Tensor:
    """Return the two numbers that each byte tells by places in a table of 16: [256, 2], float32."""
    low, high = table.float().repeat(16), table.float().repeat_interleave(16)
    return torch.stack((high, low) if high_first else (low, high), 1)
