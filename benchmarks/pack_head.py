"""Pack a head of ``specbench train --compact`` for the package: weights of fewer bits, compressed.

    python benchmarks/pack_head.py FOLDER specbench/models/packaged/NAME
    specbench sweep --drafter FOLDER --drafter NAME --draft-policy fixed --gamma 4    # compare tokens per step

Int8 weights are rounded to a coarser step, which is read as any other; a matrix most of whose weights are only a few
steps keeps its own. Almost nothing in weights repeats, so only Huffman codes are used: they come within 1% of the
entropy, and unpack at some 200 MB/s. Works for every kind of head. The hash in ``training.json`` is renewed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from specbench.base.files import sha256
from specbench.models.training_metadata import PACKED_WEIGHTS, TRAINING_FILE, WEIGHTS

LEAST_STEPS = 2
"""Steps that half of a matrix's weights must have left, so that it is rounded."""


def rounded(tensors: Mapping[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Return tensors of a compact head with matrices in ``bits`` bits, still stored as int8."""
    found, coarser = dict(tensors), 2 ** (8 - bits)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8 and tensor.abs().median() >= LEAST_STEPS * coarser:
            found[name] = (tensor.float() / coarser).round().to(torch.int8)
            found[f"{name}_scale"] = tensors[f"{name}_scale"] * coarser
    return found


def packed(content: bytes) -> bytes:
    """Return a gzip file of Huffman codes; the same bytes each time."""
    coder = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(content) + coder.flush()


def pack(folder: Path, out: Path, bits: int) -> None:
    """Write the packed head of a folder to another one."""
    tensors = load_file(folder / WEIGHTS)
    assert any(each.dtype == torch.int8 for each in tensors.values()), "train it with --compact"
    out.mkdir(parents=True, exist_ok=True)
    if out.resolve() != folder.resolve():
        shutil.copyfile(folder / "config.json", out / "config.json")
    (out / PACKED_WEIGHTS).write_bytes(packed(save(rounded(tensors, bits), metadata={"format": "pt"})))
    training = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))
    training |= {"sha256": sha256(out / PACKED_WEIGHTS), "packed_bits": bits}
    text = json.dumps(training, indent=1, ensure_ascii=False)
    (out / TRAINING_FILE).write_text(f"{text}\n", encoding="utf-8")
    (out / WEIGHTS).unlink(missing_ok=True)  # packed in place


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=5, choices=range(3, 9), help="8 loses nothing")
    given = parser.parse_args()
    before = (given.folder / WEIGHTS).stat().st_size
    pack(given.folder, given.out, given.bits)
    print(f"{before:,} bytes became {(given.out / PACKED_WEIGHTS).stat().st_size:,}")


if __name__ == "__main__":
    main()
