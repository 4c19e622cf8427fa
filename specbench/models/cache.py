"""The cache folder: where it is, what is in it, and what of it can go."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from specbench.files import explained

__all__ = [
    "CACHE_VARIABLE",
    "LAYERS_FOLDER",
    "Kind",
    "cache_folder",
    "cached",
    "clear_derived",
    "folder_size",
]

CACHE_VARIABLE = "SPECBENCH_CACHE"

LAYERS_FOLDER = "layers"

_KINDS = {
    "models": "prepared models: the built-in one, and GGUF files",
    LAYERS_FOLDER: "int8 and int4 layers of models, so that these start sooner",
    "dtypes": "which dtype models decode quickest in",
    "calibrations": "forms in which targets draft for themselves",
    "trees": "the best trees of drafters",
    "vocabularies": "how often targets write each token",
    "texts": "what targets have written to train heads on",
}
_DERIVED = (LAYERS_FOLDER, "dtypes")
"""What is made anew in seconds where it is missing."""


def cache_folder() -> Path:
    """Where prepared models are kept: `SPECBENCH_CACHE`, or the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("specbench", appauthor=False)


@dataclass(frozen=True)
class Kind:
    """What is kept of one kind.

    Attributes:
        folder: Its name within the cache folder.
        meaning: In words.
        entries: How many there are.
        size: Of all files, in bytes.
        derived: Whether clearing removes it.
    """

    folder: str
    meaning: str
    entries: int
    size: int
    derived: bool


def cached() -> list[Kind]:
    """What the cache folder holds, by kind."""
    return [
        Kind(
            name,
            meaning,
            _entries(cache_folder() / name),
            folder_size(cache_folder() / name),
            name in _DERIVED,
        )
        for name, meaning in _KINDS.items()
    ]


def clear_derived() -> int:
    """Remove what is made anew in seconds.

    Returns:
        The bytes that are free then.

    Raises:
        RunError: The cache folder cannot be written.
    """
    freed = 0
    for name in _DERIVED:
        folder = cache_folder() / name
        if folder.is_dir() and not folder.is_symlink():
            freed += folder_size(folder)
            with explained(f"The cache folder {str(cache_folder())!r} cannot be cleared"):
                shutil.rmtree(folder)
    return freed


def _entries(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(not path.name.startswith(".") and path.suffix != ".lock" for path in folder.iterdir())


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder and in those below it; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_size
            except OSError:  # removed meanwhile
                continue
    return total
