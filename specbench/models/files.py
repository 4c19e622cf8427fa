"""The files of a model folder: which hold its settings and weights, and their headers. Nothing here needs torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from safetensors import SafetensorError, safe_open

from specbench.base.errors import RunError, UsageError
from specbench.base.files import reason

ADAPTER = "adapter_config.json"


def read_settings(folder: Path, name: str) -> dict[str, Any]:
    """Return the contents of a folder's config.json.

    Raises:
        UsageError: The folder is not a model, or holds an adapter.
        RunError: Its config.json is damaged.
    """
    path = folder / "config.json"
    if (folder / ADAPTER).is_file():  # transformers would apply it only where peft is installed
        raise UsageError(
            f"{name} holds an adapter ({ADAPTER}).",
            "Merge it into its base model with peft, and name the result.",
        )
    if not path.is_file():
        hint = "A model folder holds config.json, safetensors weights and a tokenizer."
        if any(folder.glob("*.gguf")):
            hint = "To use a GGUF file, name the file itself."
        raise UsageError(f"The folder {name!r} is no model: it has no config.json.", hint)
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise ``RunError`` if it is damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"The file {str(path)!r} is damaged: it is not a JSON object.") from error
    return raw


PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(folder: Path, name: str) -> list[Path]:
    """Find the safetensors files of the weights, in the order of `transformers`, without opening them."""
    for candidate in weight_candidates(folder):
        path = folder / plain_name(candidate, name)
        if not path.is_file():
            continue
        if path.suffix != ".json":
            return [path]
        shards = [folder / shard for shard in shard_names(path, name)]
        for shard in shards:
            if not shard.is_file():
                raise RunError(
                    f"The weights of {name} are incomplete: {path.name} names a missing {shard.name!r}."
                )
        return shards
    if any(path.suffix in PICKLE_SUFFIXES for path in folder.iterdir()):
        raise UsageError(
            f"The weights of {name} are pickled, and loading a pickle can run code that is hidden in it.",
            "Use a safetensors copy, or make one with torch.load(..., weights_only=True) and safetensors.",
        )
    raise UsageError(f"The folder {name!r} is no model: it holds no model.safetensors.")


def weight_candidates(folder: Path) -> list[str]:
    own = read_json(folder / "config.json").get("transformers_weights")
    return [own] if isinstance(own, str) else ["model.safetensors", "model.safetensors.index.json"]


def shard_names(index: Path, name: str) -> list[str]:
    """Return the files that an index of weights names, sorted."""
    try:
        shards = msgspec.convert(
            read_json(index).get("weight_map"), Annotated[dict[str, str], Meta(min_length=1)]
        )
    except ValueError as error:
        raise RunError(f"The file {str(index)!r} is damaged: it is no index of weights.") from error
    return sorted({plain_name(shard, name) for shard in shards.values()})


def plain_name(file: str, name: str) -> str:
    """Return the file name ``file``; raise ``UsageError`` if it leads out of the model's folder."""
    path = PurePosixPath(file.replace("\\", "/"))
    if not file or path.is_absolute() or ".." in path.parts or ":" in file or "\0" in file:
        raise UsageError(f"The model {name} is refused: it names weights outside its own folder ({file!r}).")
    return file


class Header(NamedTuple):
    """What the header of a safetensors file says of a tensor: its file, dtype as the format names it, and shape."""

    path: Path
    dtype: str
    shape: Sequence[int]


def read_header(path: Path) -> dict[str, Header]:
    """Return the facts of each tensor in a safetensors file.

    Raises:
        RunError: The file cannot be read, or is damaged.
    """
    try:
        with safe_open(path, "np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
            return {key: Header(path, each.get_dtype(), each.get_shape()) for key, each in slices.items()}
    except OSError as error:
        raise RunError(f"The file {str(path)!r} cannot be read ({reason(error)}).") from error
    except SafetensorError as error:
        raise RunError(
            f"The file {str(path)!r} is damaged or truncated.", "Remove it, and fetch it again."
        ) from error


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the facts of each tensor in a folder, without files that are damaged: loading the model reports them."""
    found: dict[str, Header] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(RunError):
            found |= read_header(path)
    return found


LEAST_SHARED = 0.03
"""Smallest share of the target's tokens that a drafter must have."""


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the tokens of a folder's tokenizer.json by their texts; ``None`` if there is none, or it is damaged."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = tokenizer["model"]["vocab"]
        if isinstance(tokens, list):  # of Unigram, with their scores
            tokens = {str(piece[0]): number for number, piece in enumerate(tokens)}
        return {
            **tokens,
            **{str(each["content"]): each["id"] for each in tokenizer.get("added_tokens") or ()},
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def headers_digest(folder: Path, files: Sequence[Path]) -> str:
    """Hash a model's configuration, and the names, sizes, times and headers of its safetensors files.

    A file that cannot be read raises ``OSError``.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
    return digest.hexdigest()
