"""Quantized checkpoints: their weights are unpacked while they are read, with torch alone.

What form a weight has shows in the names, dtypes and shapes of its tensors, so that a checkpoint may have several. A
weight is told as numbers (whole ones, or floating ones of 4 or 8 bits) and a scale for each block of them, in some
forms a zero too. It is computed in float32, some rows at a time, and rounded once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of 4-bit floats (E2M1) by their codes."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the outputs of a group of eight lie in AWQ's words."""

_METHODS = {
    "awq": "gemm",
    "gptq": "gptq|gptq_v2",
    "compressed-tensors": "((int|float|naive|pack|nvfp4-pack|mxfp4-pack|mxfp8)-quantized|dense|mixed-precision)",
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp4"), ".*"),
}
"""Methods whose weights are read, and the layouts that are."""

_PARTS = (r"(\.weight)?\.[^.]*$", "_(blocks|scales?|scale_inv|zero_point)$")
"""What follows the name of a layer, or of a weight of several experts, in the names of its tensors."""

_OTHERS = "Choose a copy of the model that is not quantized, or is in a form that docs/models.md lists."


def quantization_of(config: PreTrainedConfig, name: str) -> dict[str, Any] | None:
    """Return the settings of a quantized checkpoint, as its config.json has them; ``None`` if it is not quantized.

    Raises:
        UsageError: Its weights cannot be unpacked.
    """
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise UsageError(
            f"The weights of {name} are quantized in a form that is not read: {excerpt(method)!r}.", _OTHERS
        )
    odd = [each for each in _layouts(method, settings) if not re.fullmatch(_METHODS[method], each)]
    bits = [
        settings.get("bits"),
        *((each.get("weights") or {}).get("num_bits") for each in _groups(settings)),
    ]
    odd += [f"{each} bits" for each in bits if each in (3, 5, 6, 7)]
    if odd:
        raise UsageError(
            f"The weights of {name} ({method}) have a layout that is not read: {excerpt(odd[0])}.", _OTHERS
        )
    return settings


def unpacked_source(folder: Path, config: PreTrainedConfig, weights: dict[str, Any]) -> dict[str, Any]:
    """Return what tells `from_pretrained` of the model that a quantized checkpoint is unpacked to."""
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    source: dict[str, Any] = {"pretrained_model_name_or_path": None, "config": plain, "state_dict": weights}
    if (path := folder / GENERATION_CONFIG_NAME).is_file():
        source["generation_config"] = GenerationConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    return source


def _layouts(method: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the layouts that weights are stored in, as far as a method has several."""
    if method == "compressed-tensors":
        told = [settings, *_groups(settings), settings.get("sparsity_config") or {}]
        rotated = ["rotations"] if settings.get("transform_config") else []
        return rotated + [str(each.get("format") or "dense") for each in told]
    if method == "awq":
        return [str(settings.get("version") or settings.get("format") or "gemm").lower()]
    own = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    return ["marlin"] if settings.get("is_marlin_format") else [str(own)]


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((settings.get("config_groups") or {}).values())


# -- weights ---------------------------------------------------------------------------------------

_CHUNK = 1 << 20
"""Numbers that are unpacked at a time."""


@dataclass(frozen=True)
class Grid:
    """A weight as it is stored: ``(codes - zeros) * scales``.

    Attributes:
        codes: Returns rows of codes, [rows, columns].
        scales: [all rows, groups of columns], float32.
        zeros: The same shape; or one for all.
        shape: Of the weight; ``None`` for rows and columns.
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
        made = torch.empty(*(self.shape or (len(self.scales), self.columns)), dtype=dtype)
        rows, step = made.view(-1, self.columns), max(32, _CHUNK // self.columns // 32 * 32)
        for first in range(0, len(rows), step):
            chunk = slice(first, min(first + step, len(rows)))
            zeros = self.zeros
            if isinstance(zeros, Tensor):
                zeros = self._spread(zeros[chunk].float())
            rows[chunk] = (self.codes(chunk).float() - zeros) * self._spread(self.scales[chunk])
        return made.mT.contiguous() if self.turned else made

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

    def __init__(self, grid: Callable[[], Grid], dtype: torch.dtype) -> None:
        self._grid, self._dtype = grid, dtype

    def __getitem__(self, _: EllipsisType) -> Tensor:
        return self._grid().unpack(self._dtype)


# -- reading ---------------------------------------------------------------------------------------


def stored_weights(files: Sequence[Path], settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the tensors of a quantized checkpoint by name, as if it were not quantized; each is read when indexed."""
    parts: dict[str, Any] = {}
    for path in files:
        file: Any = safe_open(path, "pt", backend="pread")  # so that what is read does not stay in memory
        parts |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    stored = _Stored(parts, settings)
    found = {weight: StoredWeight(grid, dtype) for weight, grid in map(stored.weight_at, parts) if grid}
    layers = {weight.removesuffix(".weight") for weight in found}
    kept = {key: part for key, part in parts.items() if key.endswith(".bias") or not _is_of(key, layers)}
    return kept | found


def _is_of(key: str, layers: set[str]) -> bool:
    """Return whether a tensor is a part of a quantized weight."""
    return any(re.sub(part, "", key) in layers for part in _PARTS)


class _Stored:
    """The tensors of a quantized checkpoint, and the weights that are told by several of them."""

    def __init__(self, parts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._parts, method = parts, str(settings.get("quant_method"))
        self._is_awq = method == "awq"
        self._zeros_are_less = _layouts(method, settings)[0] == "gptq"
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
            ("_blocks", "", self._mxfp4),
            ("_scale_inv", "", self._bytes),
            ("_scale", "", self._bytes),
        ):
            stem = key.removesuffix(suffix)
            if stem != key and (read != self._bytes or self._is_narrow(stem)):
                return stem + weight, partial(read, stem)
        return key, None

    def _is_narrow(self, key: str) -> bool:
        return key in self._parts and self._parts[key].get_dtype() in ("I8", "F8_E4M3", "F8_E5M2")

    def _read(self, *keys: str) -> Tensor:
        found: Tensor = self._parts["".join(keys)][...]
        return found

    def _find(self, *keys: str) -> Tensor | None:
        return self._read(*keys) if "".join(keys) in self._parts else None

    # Each returns the grid of the weight of a layer, or of a weight with this name.

    def _bytes(self, key: str) -> Grid:
        """FP8 of DeepSeek, compressed-tensors and others, or whole numbers of 8 bits."""
        scale = self._find(key, "_scale_inv")
        scale = self._read(key, "_scale") if scale is None else scale
        codes, zeros = self._read(key), self._find(key, "_zero_point")
        rows = codes.reshape(-1, codes.shape[-1])
        least = 0 if zeros is None else self._scales(zeros, codes.shape)
        scales = self._scales(scale, codes.shape)
        return Grid(lambda chunk: rows[chunk], scales, codes.shape[-1], least, shape=codes.shape)

    def _packed(self, layer: str) -> Grid:
        """compressed-tensors: whole numbers in words, or FP4 in bytes."""
        words, scale = self._read(layer, ".weight_packed"), self._read(layer, ".weight_scale")
        if words.dtype == torch.uint8:
            grid, overall = self._fp4(words, scale), self._find(layer, ".weight_global_scale")
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

    def _mxfp4(self, key: str) -> Grid:
        """Experts of gpt-oss: blocks of 32 numbers along the inputs, which come last there and first in the model."""
        codes, scale = self._read(key, "_blocks"), self._read(key, "_scales")
        return replace(self._fp4(codes.flatten(-2), scale), turned=True)

    def _fp4(self, codes: Tensor, scale: Tensor) -> Grid:
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        rows, pairs = codes.view(-1, codes.shape[-1]), _pairs()
        scales = self._scales(scale, shape)
        return Grid(lambda chunk: pairs[rows[chunk].int()].flatten(1), scales, shape[-1], shape=shape)

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
    """Return whole numbers of 2, 4 or 8 bits that follow each other in rows of int32 words, lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (words.contiguous().view(torch.uint8)[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _pairs() -> Tensor:
    """Return the two numbers that each byte tells by places in ``_FP4``: [256, 2], float32."""
    table = torch.tensor(_FP4)
    return torch.stack((table.repeat(16), table.repeat_interleave(16)), 1)
