"""Blocks of GGUF files: where the layers of a converted copy have theirs, and packing int8 and int4 layers of them.

Blocks of Q4_0, Q5_0 and Q8_0 are 32 whole numbers with a scale in float16, as groups of our layers are. Others do not
fit: a scale of Q4_K to Q6_K is the product of a number in float16 and one of 6 or 8 bits, and has more than the 11 bits
of float16; Q4_1 and Q5_1 have minima. Their layers are rounded from the copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from specbench.models.quantized import Grid, StoredWeight

_BYTES, _ZEROS = {2: 18, 6: 22, 8: 34}, {2: 8, 6: 16, 8: 0}
"""Of Q4_0, Q5_0 and Q8_0, by ggml's numbers: bytes of a block, and the code that stands for zero."""

_FILE = "blocks.json"


class _Blocks(NamedTuple):
    """Where the blocks of a weight are.

    Attributes:
        kind: ggml's number.
        begin: Their place in the file.
        heads: Heads whose rows the file has in another order: pairs that rotate together one behind the other; or 0.
    """

    kind: int
    begin: int
    heads: int

    def grid(self, gguf: Path, shape: tuple[int, int]) -> Grid:
        """Return the weight, whose rows have the order of the model."""
        rows, columns = shape
        width, size = columns // 32, _BYTES[self.kind]
        data = np.fromfile(gguf, np.uint8, rows * width * size, offset=self.begin)
        blocks = torch.from_numpy(data).view(rows, width, size)
        if self.heads:
            blocks = blocks.view(self.heads, -1, 2, width, size).transpose(1, 2).reshape(rows, width, size)
        scales = blocks[..., :2].contiguous().view(torch.float16).float().view(rows, width)
        return Grid(lambda chunk: _codes(blocks[chunk, :, 2:]), scales, columns, _ZEROS[self.kind])


def _codes(blocks: Tensor) -> Tensor:
    """Return rows of codes, from blocks without their scales, [rows, blocks, bytes]."""
    if blocks.shape[2] == 32:
        return blocks.contiguous().view(torch.int8).flatten(1)
    pairs = blocks[..., -16:]
    codes = torch.cat((pairs & 15, pairs >> 4), 2)
    if blocks.shape[2] > 16:
        bits = blocks[..., :4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes |= bits.flatten(2) << 4
    return codes.flatten(1)


@torch.no_grad()
def keep_places(
    gguf: Path, tensors: Iterable[tuple[tuple[int, ...], int, int]], model: Any, folder: Path
) -> None:
    """Find where the linear layers of a model that was just converted have their blocks, and note it in its folder.

    These layers get the numbers of the blocks, rounded once; `transformers` rounds those of some files twice.

    Args:
        tensors: Shapes, ggml's numbers of kinds, and places in the file.
    """
    text = model.config.get_text_config(decoder=True)
    left = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    places: dict[str, _Blocks] = {}
    for shape, kind, begin in tensors:
        if kind not in _BYTES or len(shape) != 2:
            continue
        rows, columns = shape
        for heads in (0, text.num_attention_heads, getattr(text, "num_key_value_heads", 0)):
            if rows % max(1, 2 * heads):
                continue
            blocks = _Blocks(kind, begin, heads)
            numbers = blocks.grid(gguf, (rows, columns)).unpack(model.dtype)
            path = next((path for path, each in left.items() if _are_alike(each.weight, numbers)), None)
            if path is not None:
                left.pop(path).weight.copy_(numbers)
                places[path] = blocks
                break
    (folder / _FILE).write_text(json.dumps(places), encoding="utf-8")


def _are_alike(weight: Tensor, numbers: Tensor) -> bool:
    """Return whether numbers differ by no more than roundings."""
    alike = weight.shape == numbers.shape
    return alike and all(
        torch.allclose(weight[:rows], numbers[:rows], rtol=0.02, atol=0) for rows in (1, len(weight))
    )


def stored_blocks(gguf: Path, folder: Path, model: nn.Module) -> dict[str, StoredWeight]:
    """Return the weights of a converted model that its file has in blocks."""
    path = folder / _FILE
    places: Mapping[str, list[int]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = {}
    for name, place in places.items():
        weight: Any = model.get_submodule(name).weight
        found[name] = StoredWeight(partial(_Blocks(*place).grid, gguf, weight.shape), weight.dtype)
        found[name].outline = weight
    return found
