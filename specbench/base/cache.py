"""The cache folder: its place, its contents, and clearing it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import platformdirs

from specbench.base.errors import UsageError
from specbench.base.files import file_errors

CACHE_VARIABLE = "SPECBENCH_CACHE"

LAYERS_FOLDER = "layers"

KINDS = {
    "models": "prepared models: the built-in one, and GGUF files",
    LAYERS_FOLDER: "packed and quantized layers, for quicker starts",
    "texts": "what targets have written to train heads on",
}
MANIFEST = "manifest.json"
_LONGEST = 1 << 24  # bytes of a header


def cache_folder() -> Path:
    """Return the cache folder: `SPECBENCH_CACHE`, or the one in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("specbench", appauthor=False)


class Entry(NamedTuple):
    """One entry of the cache.

    Attributes:
        name: Name of the model or GGUF file that it was made for, or else its own file name.
    """

    name: str
    path: Path
    size: int


def cached() -> dict[str, list[Entry]]:
    """Return the contents of the cache folder by kind; those of no ``KINDS`` come last."""
    folder = cache_folder()
    others = {path.name for path in folder.glob("*")} - KINDS.keys()
    return {name: entries_in(folder / name) for name in [*KINDS, *sorted(others)]}


def remove_cached(name: str) -> int:
    """Remove the kind whose folder has this name, or else all entries with this name; return the bytes freed.

    Raises:
        UsageError: There is nothing of that name. RunError: The cache folder cannot be written.
    """
    entries = [
        entry
        for kind, found in cached().items()
        for entry in found
        if name in (kind, entry.name, entry.path.name)
    ]
    if not entries:
        raise UsageError(
            f"The cache folder holds nothing called {name!r}.", "`specbench cache` lists the entries."
        )
    with file_errors(f"The cache folder {str(cache_folder())!r} cannot be cleared"):
        for entry in entries:
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
    return sum(entry.size for entry in entries)


def entries_in(folder: Path) -> list[Entry]:
    """Return the entries of a kind; if its folder is a file, this file is the only entry."""
    paths = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else [folder]
    sizes = {path: folder_size(path) for path in paths if os.path.lexists(path) and path.suffix != ".lock"}
    return [Entry(_name(path), path, size) for path, size in sizes.items()]


def _name(path: Path) -> str:
    """Return the name of an entry for users: the model that its manifest or its safetensors file names."""
    if path.name.startswith("."):
        return f"{path.name} (half made)"
    try:
        if path.is_dir():
            return str(json.loads((path / MANIFEST).read_bytes())["source"]["name"])
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _LONGEST))
            return str(json.loads(header)["__metadata__"]["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return path.name


def folder_size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder and its subfolders; 0 if there is none."""
    total = 0
    for each in path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]:
        with suppress(OSError):  # removed meanwhile
            total += 0 if each.is_dir() and not each.is_symlink() else each.lstat().st_size
    return total
