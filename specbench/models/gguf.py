"""GGUF files: reading their headers, and converting them into ordinary model folders."""

from __future__ import annotations

import math
import mmap
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoModelForCausalLM, GgufConfig

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.files import file_errors
from specbench.base.progress import Progress, announce, quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_config, check_memory
from specbench.models.gguf_blocks import keep_places
from specbench.models.gguf_facts import read_config
from specbench.models.gguf_tokenizers import SAFETENSORS, build_tokenizer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # of a tensor; ggml's GGML_MAX_DIMS
_FLOATS = {0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2)}


class Tensor(NamedTuple):
    """Shape (as in torch), ggml's type, and place in the file."""

    shape: tuple[int, ...]
    kind: int
    begin: int


@dataclass(frozen=True)
class GgufHeader:
    """Facts from a GGUF file's header.

    Attributes:
        keys: What the file says of the model and its tokenizer.
        elements: Total number of weights.
        dtype: Dtype of the converted copy: the file's own, or bfloat16 for quantized files.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    elements: int
    dtype: str

    @property
    def stored_itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's metadata and tensor table, and check that the file contains all tensors.

    Raises:
        RunError: The file cannot be read, is not a GGUF, or is damaged or truncated.
        UsageError: The file is one part of several.
    """
    try:
        with file_errors(f"The file {str(path)!r} cannot be read"), path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise RunError(
                    f"The file {str(path)!r} is no GGUF file, or is damaged: it does not start with GGUF."
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_gguf(path, data)
    except (struct.error, ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RunError(f"The GGUF file {str(path)!r} is damaged or truncated.", "Fetch it again.") from error


def _parse_gguf(path: Path, data: mmap.mmap) -> GgufHeader:
    at = 4

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def take_bytes() -> bytes:
        nonlocal at
        length: int = take("Q")
        if at + length > len(data):
            raise ValueError("a string reaches beyond the end")
        at += length
        return data[at - length : at]

    def take_value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return take_bytes().decode("utf-8", "replace")
        if kind != _ARRAY:
            return take(_SCALARS[kind])
        element, count = take("I"), take("Q")
        if element not in _SCALARS:
            return [take_value(element) for _ in range(count)]
        begin, at = at, at + count * struct.calcsize(f"<{_SCALARS[element]}")
        if at > len(data):
            raise ValueError("an array reaches beyond the end")
        return list(struct.unpack(f"<{count}{_SCALARS[element]}", data[begin:at]))

    version, tensor_count, key_count = take("I"), take("Q"), take("Q")
    if version not in (2, 3):
        raise UsageError(
            f"The GGUF file {str(path)!r} is of version {version}; versions 2 and 3 can be read."
        )
    keys: dict[str, Any] = {}
    for _ in range(key_count):
        key = take_bytes().decode("utf-8")
        keys[key] = take_value(take("I"))
    if keys.get("split.count", 0) > 1:
        raise UsageError(f"The GGUF file {str(path)!r} is one part of several.", "Merge the parts first.")

    tensors: dict[str, Tensor] = {}
    elements, end = 0, 0
    for _ in range(tensor_count):
        tensor, dimensions = take_bytes().decode("utf-8"), take("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError("a tensor has more dimensions than there can be")
        shape = tuple(take("Q") for _ in range(dimensions))[::-1]
        kind, offset = GGMLQuantizationType(take("I")), take("Q")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements += math.prod(shape)
        end = max(end, offset + math.prod(shape) // block * block_bytes)
        tensors[tensor] = Tensor(shape, int(kind), offset)
    alignment = keys.get("general.alignment", 32)
    start = -(-at // alignment) * alignment
    if start + end > len(data):
        raise ValueError("tensors reach beyond the end")
    tensors = {name: tensor._replace(begin=start + tensor.begin) for name, tensor in tensors.items()}
    kinds = {tensor.kind for tensor in tensors.values()}

    architecture = str(keys["general.architecture"])
    if keys.get(f"{architecture}.block_count", 0) > tensor_count:  # modules would be made for all of them
        raise ValueError("there are more layers than tensors")

    floats = [_FLOATS[kind] for kind in kinds if kind in _FLOATS]
    # Half-precision files keep their norms in float32: the narrower dtype is the model's.
    dtype = min(floats, key=lambda known: known[1])[0] if len(floats) == len(kinds) else "bfloat16"
    return GgufHeader(architecture, keys, tensors, elements, dtype)


def convert_gguf(gguf: Path, folder: Path, *, name: str, progress: Progress | None = None) -> None:
    """Convert a GGUF file into an ordinary model folder: config, safetensors, tokenizer, generation config.

    Quantized weights become bfloat16: its rounding is small compared with that of 4 to 8 bits, and the copy needs half
    the space of an exact copy in float32.

    Args:
        folder: An empty folder to fill.
        name: The model's name in messages and in its configuration.

    Raises:
        RunError: The file is damaged, or does not fit into memory.
        UsageError: The model cannot be decoded speculatively, or `transformers` cannot read its kind of GGUF.
    """
    header = read_gguf_header(gguf)
    announce(progress, f"converting {name} (the result is kept)")
    # An empty folder as the model's, so that other files beside the GGUF are not read.
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as empty,
        quiet_transformers(progress, f"filling the layers of {name}", f"dequantizing {name}"),
    ):
        place: dict[str, Any] = {
            "pretrained_model_name_or_path": empty,
            "gguf_file": str(gguf.resolve()),
            "trust_remote_code": False,
            "local_files_only": True,
        }
        try:
            config, tensors = read_config(
                header.architecture,
                header.keys,
                {tensor: each.shape for tensor, each in header.tensors.items()},
                lambda tensor: _floats(gguf, header.tensors[tensor]),
                name,
            )
            check_config(config, name)
            # the weights as they are read, in float32, and the model they go into
            check_memory(header.elements * (4 + header.stored_itemsize), name=name)
            tokenizer = build_tokenizer(header.keys, name)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                config=config,
                dtype=getattr(torch, header.dtype),
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                **place,
            )
            model, loaded = answer
            if missing := sorted(loaded["missing_keys"]):
                raise UsageError(f"The GGUF file {name!r} has no tensor for {missing[0]!r}.", SAFETENSORS)
            if unread := _unread(header, tensors, model):
                raise UsageError(
                    f"The GGUF file {name!r} has {unread} numbers for which its model has no place.",
                    SAFETENSORS,
                )
        except SpecbenchError:
            raise
        except Exception as error:  # of many kinds: unknown architectures, vocabularies, tensor names
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise UsageError(
                f"The GGUF file {name!r} (architecture {header.architecture!r}) cannot be converted:"
                f" {excerpt(error).rstrip('.')}.",
                SAFETENSORS,
            ) from error
        for trace in ("_model_name_or_path", "quantization_config"):  # of the file, and of how it was read
            if hasattr(model.config, trace):
                delattr(model.config, trace)
        model.config.name_or_path = tokenizer.name_or_path = name
        keep_places(gguf, header.tensors.values(), model, folder)
        announce(progress, f"writing the copy of {name}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # the weights are written for their owner only, which a shared cache is not
        shutil.copymode(folder / "config.json", path)


def _floats(gguf: Path, tensor: Tensor) -> list[float]:
    """Read a small tensor of float32."""
    count = math.prod(tensor.shape)
    if _FLOATS.get(tensor.kind) != ("float32", 4):
        raise UsageError(
            f"The GGUF file {gguf.name!r} has rotation factors that are not float32.", SAFETENSORS
        )
    with gguf.open("rb") as file:
        file.seek(tensor.begin)
        return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def _unread(header: GgufHeader, tensors: list[str], model: Any) -> int:
    """How many numbers of the tensors are not in the model."""
    stored = sum(math.prod(header.tensors[name].shape) for name in tensors)
    held: dict[int, int] = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    return stored - sum(held.values())
