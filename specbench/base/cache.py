"""The cache folder: its place, its contents, and clearing it."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import platformdirs
from msgspec import Meta

from specbench.base.errors import UsageError
from specbench.base.files import file_errors, sha256, sync, write_text
from specbench.base.large_files import contents, crc32
from specbench.base.record import Record

if TYPE_CHECKING:
    from specbench.base.large_files import Content

CACHE_VARIABLE = "SPECBENCH_CACHE"

LAYERS_FOLDER = "layers"
SUITES_FOLDER = "suites"

KINDS = {
    "models": "prepared models: the built-in one, and GGUF files",
    LAYERS_FOLDER: "packed and quantized layers, for quicker starts",
    "texts": "what targets have written to train heads on",
    SUITES_FOLDER: "prompts of public benchmarks",
    "engines": "servers that were started, until they end",
}
MANIFEST = "manifest.json"


class _File(Record):
    size: int
    sha256: str | None = None
    crc32: str | None = None


class _Manifest(Record):
    format: int
    files: Annotated[dict[str, _File], Meta(min_length=1)]


def write_manifest(folder: Path, version: int, source: dict[str, str], *, derived: bool = False) -> None:
    """Complete a prepared folder with the sizes and hashes of its files.

    Args:
        derived: Whether the folder can be made again in seconds: its files then get checksums in place of hashes, and
            nothing waits for the disk.
    """
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(folder.iterdir()):
        if not derived:
            sync(path)
        proof = {"crc32": crc32(path)} if derived else {"sha256": sha256(path)}
        files[path.name] = {"size": path.stat().st_size, **proof}
    write_text(folder / MANIFEST, json.dumps({"format": version, "source": source, "files": files}) + "\n")


def is_intact(folder: Path, version: int, *, limit: float = math.inf) -> bool:
    """Return whether a folder has exactly the files of its manifest;
    files larger than ``limit`` bytes are not hashed.
    """
    try:
        files = _files_of(folder, version)
        return all(sha256(path) == known.sha256 for path, known in files.items() if known.size <= limit)
    except (OSError, ValueError, RecursionError):
        return False


def intact_content(folder: Path, version: int) -> Content | None:
    """Return the content of the only file of a derived folder; ``None`` if it is not that of the manifest."""
    try:
        ((path, known),) = _files_of(folder, version).items()
        content, found = contents(path)
    except (OSError, ValueError, RecursionError):
        return None
    return content if found == known.crc32 else None


def _files_of(folder: Path, version: int) -> dict[Path, _File]:
    """Return the files of a folder; raise ``ValueError`` if they have other names or sizes than in its manifest."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
    there = {path.name for path in folder.iterdir() if path.name != MANIFEST}
    if manifest.format != version or there != manifest.files.keys() or folder.is_symlink():
        raise ValueError("other files")
    files = {folder / name: known for name, known in manifest.files.items()}
    if any(path.is_symlink() or path.stat().st_size != known.size for path, known in files.items()):
        raise ValueError("files of other sizes")
    return files


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
    others = {path.name for path in _listed(folder)} - KINDS.keys()
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


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # there is none, or it is a file
        return []


def entries_in(folder: Path) -> list[Entry]:
    """Return the entries of a kind; if its folder is a file, this file is the only entry."""
    paths = _listed(folder) if folder.is_dir() and not folder.is_symlink() else [folder]
    sizes = {path: _size(path) for path in paths if os.path.lexists(path) and path.suffix != ".lock"}
    return [Entry(_name(path), path, size) for path, size in sizes.items()]


def _name(path: Path) -> str:
    """Return the name of an entry for users: the model that its manifest names."""
    if path.name.startswith("."):
        return f"{path.name} (half made)"
    try:
        return str(json.loads((path / MANIFEST).read_bytes())["source"]["name"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return path.name


def _size(path: Path) -> int:
    try:
        return folder_size(path) if path.is_dir() and not path.is_symlink() else path.lstat().st_size
    except OSError:  # removed meanwhile
        return 0


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder and its subfolders; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:  # removed meanwhile
                continue
    return total
