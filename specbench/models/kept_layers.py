"""Packed and quantized layers of models, kept in the cache folder so that these start sooner.

A model has a safetensors file for each kind, layout of the kernels, dtype and trimmed head. It is valid for one state
of the checkpoint's files (names, sizes, times and headers), this processor and this version. A damaged or outdated file
is replaced; versions of specbench leave each other's alone, but share one budget. Files are read into memory and not
mapped: a forward pass reads all weights, which takes longer from the small pages of files (docs/tried.md).
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specbench import kernels
from specbench._version import __version__
from specbench.base.cache import cache_folder
from specbench.base.files import reason, sync
from specbench.base.machine import processor_name
from specbench.base.progress import Progress, announce
from specbench.kernels import weights
from specbench.kernels.weights import KeptLayers

if TYPE_CHECKING:
    from specbench.models.load import LanguageModel, WeightFiles

Kind = Literal["int8", "int4", "packed"]

MOST_BYTES = 8 << 30
"""Budget of all files; the least recently used are removed first."""

_WORTH_KEEPING = 1 << 25
"""Smallest number of weights that is worth keeping."""

_FORMAT = 7
_ABANDONED_S = 86_400
"""Age from which an unfinished file is removed."""


@contextmanager
def kept_layers(
    model: LanguageModel, kind: Kind, progress: Progress | None = None
) -> Iterator[KeptLayers | None]:
    """Yield the store of a model's weights of a kind, existing or new; ``None`` if they cannot be stored.

    If a file is replaced, or cannot be written, a note about it is added to the model.
    """
    files, panels = model.files, kernels.is_available()
    making = f"packing {model.name}" if kind == "packed" else f"quantizing {model.name} to {kind}"
    if (
        files is None
        or files.numbers < _WORTH_KEEPING
        or model.model.device.type != "cpu"
        or (kind != "int8" and not panels)
        or (kind == "packed" and not _packs_for_long(model, files.numbers))
    ):
        announce(progress, making)
        yield None
        return

    def report(layer: int) -> None:
        if progress is not None:
            progress.update(f"{making} (the result is kept)", layer, model.layers)

    parent = cache_folder() / "layers"
    place = _place(model, files, f"{kind} in {'panels' if panels else 'rows'}")
    path = parent / f"{place}-{files.digest[:24]}"
    announce(progress, f"reading the {kind} layers of {model.name}")
    outdated, found = [*parent.glob(f"{place}-*")], _read(path)
    if found is not None:
        with suppress(OSError):
            os.utime(path)  # used just now
        layers = KeptLayers(found, report)
        yield layers
        if layers.fit:
            return
        path.unlink(missing_ok=True)  # so that the next start makes another
    if outdated:
        model.notes.append(
            f"The {kind} layers stored for {model.name} are damaged or of other model files, so they are made again."
        )
    if found is not None:
        return
    announce(progress, making)
    made = KeptLayers(None, report)
    yield made
    for each in outdated:
        each.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if 2 * sum(each.nbytes for each in made.tensors.values()) > shutil.disk_usage(parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        name = model.name if kind == "packed" else f"{model.name} in {kind}"
        save_file({key: each.contiguous() for key, each in made.tensors.items()}, partial, {"name": name})
        sync(partial)
        partial.replace(path)
        _evict(parent, path)
    except OSError as error:  # read-only, or full: each start is as it would be without a cache
        with suppress(OSError):
            partial.unlink()
        model.notes.append(
            f"The {kind} layers of {model.name} could not be kept in the cache folder ({reason(error)}), so that"
            " each start makes them again."
        )


def _packs_for_long(model: LanguageModel, numbers: int) -> bool:
    """Return whether packing takes longer than reading what was packed, and leaves room for other files."""
    fits = numbers <= MOST_BYTES // 3  # at 12 bits each, half of the budget
    return fits and model.dtype == "bfloat16" and weights.takes_12_bits()


def _place(model: LanguageModel, files: WeightFiles, form: str) -> str:
    """Return a digest of a model's place, the form of its layers, versions and processor."""
    makers = [_FORMAT, __version__, torch.__version__, processor_name(), *weights.layout()]
    facts = [files.place, model.dtype, model.head_rows, form, *makers]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file; ``None`` if there is none, or it is damaged."""
    try:
        file: Any = safe_open(path, "pt", backend="pread")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError):
        return None


def _evict(parent: Path, newest: Path) -> None:
    """Remove abandoned unfinished files, and the least recently used ones until the rest is within the limit.

    This takes files of other versions too, since nobody else would.
    """
    now, entries = time.time(), []
    for path in parent.iterdir():
        with suppress(OSError):
            state = path.stat()
            if path.name.startswith(".") and now - state.st_mtime > _ABANDONED_S:
                path.unlink()
            elif not path.name.startswith("."):
                entries.append((math.inf if path == newest else state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            return
        with suppress(OSError):
            path.unlink()
        total -= size
