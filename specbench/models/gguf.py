"""GGUF files: reading their headers, and converting them into ordinary model folders."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from transformers import AutoModelForCausalLM, GgufConfig

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.files import file_errors
from specbench.base.progress import Progress, announce, quiet_transformers
from specbench.base.textsafe import excerpt
from specbench.models.checkpoints import check_config, check_memory
from specbench.models.gguf_facts import read_config
from specbench.models.gguf_tokenizers import SAFETENSORS, build_tokenizer, end_ids

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class GgufHeader:
    """Facts from a GGUF file's header.

    Attributes:
        keys: What the file says of the model and its tokenizer.
        tensors: As the file has them, in place.
        shapes: Those of the tensors, as in torch.
        elements: Total number of weights.
        dtype: Dtype of the converted copy: the file's own, or bfloat16 for quantized files.
    """

    architecture: str
    keys: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    shapes: Mapping[str, tuple[int, ...]]
    elements: int
    dtype: torch.dtype


class _Reader(GGUFReader):
    """The package's reader takes what lies beyond the end of a file for nothing, however often.

    It cuts an array for each value, which takes three times as long of a ``np.memmap``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError("it reaches beyond its end")
        return found


def read_gguf_header(path: Path) -> GgufHeader:
    """Read a GGUF file's metadata and tensor table, and check that the file contains all tensors.

    Raises:
        RunError: The file cannot be read, is not a GGUF, or is damaged or truncated.
        UsageError: The file is one part of several.
    """
    with file_errors(f"The file {str(path)!r} cannot be read"):
        try:
            read = _Reader(path)
            keys = {name: field.contents() for name, field in read.fields.items()}
            if (keys.get("split.count") or 0) > 1:
                raise UsageError(
                    f"The GGUF file {str(path)!r} is one part of several.", "Merge the parts first."
                )
            architecture = str(keys["general.architecture"])
            if keys.get(f"{architecture}.block_count", 0) > len(
                read.tensors
            ):  # modules would be made for all of them
                raise ValueError("there are more layers than tensors")
            if not read.tensors:
                raise ValueError("there are no tensors")
        except (ArithmeticError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
            why = excerpt(error).rstrip(".")
            raise RunError(
                f"The file {str(path)!r} is no GGUF file, or is damaged or truncated: {why}.",
                "Fetch it again.",
            ) from error
    tensors = {each.name: each for each in read.tensors}
    shapes = {each.name: tuple(each.shape.tolist()[::-1]) for each in read.tensors}
    kinds = {tensor.tensor_type for tensor in read.tensors}
    floats = [_FLOATS[kind] for kind in kinds if kind in _FLOATS]
    # Half-precision files keep their norms in float32: the narrower dtype is the model's.
    dtype = min(floats, key=lambda each: each.itemsize) if len(floats) == len(kinds) else torch.bfloat16
    return GgufHeader(architecture, keys, tensors, shapes, sum(map(math.prod, shapes.values())), dtype)


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
        quiet_transformers(progress, f"converting {name}"),
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
                header.shapes,
                lambda tensor: _floats(gguf, header.tensors[tensor]),
                name,
            )
            check_config(config, name)
            # the weights as they are read, in float32, and the model they go into
            check_memory(header.elements * (4 + header.dtype.itemsize), name=name)
            tokenizer = build_tokenizer(header.keys, name)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                config=config,
                dtype=header.dtype,
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
        model.generation_config.eos_token_id = end_ids(header.keys) or None
        announce(progress, f"writing the copy of {name}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():  # the weights are written for their owner only, which a shared cache is not
        shutil.copymode(folder / "config.json", path)


def _floats(gguf: Path, tensor: ReaderTensor) -> list[float]:
    """Read a small tensor of float32."""
    if tensor.tensor_type != GGMLQuantizationType.F32:
        raise UsageError(
            f"The GGUF file {gguf.name!r} has rotation factors that are not float32.", SAFETENSORS
        )
    numbers: list[float] = tensor.data.tolist()
    return numbers


def _unread(header: GgufHeader, tensors: list[str], model: Any) -> int:
    """How many numbers of the tensors are not in the model."""
    stored = sum(math.prod(header.shapes[name]) for name in tensors)
    held: dict[int, int] = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    return stored - sum(held.values())
