"""Quantized layers of models, kept in the cache folder so that int8 and int4 models start sooner.

They are stored in the layout that this machine's kernels use: panels for native kernels, otherwise rows of bytes (int4
in panels only). A model has one entry for each kind, layout, dtype and trimmed head. An entry is valid for one state of
the checkpoint's files (names, sizes, times and headers), this processor and these versions. All of its files are
checked against their hashes before any is used. A damaged or outdated entry is replaced.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specbench._version import __version__
from specbench.backends.torch.kernels import native
from specbench.backends.torch.kernels.instructions import has_vnni, processor_name
from specbench.backends.torch.kernels.linear import Int8Weight, QuantizedWeight
from specbench.base.files import sync
from specbench.base.progress import Progress, announce
from specbench.models.cache import (
    LAYERS_FOLDER,
    MANIFEST,
    cache_folder,
    folder_size,
    is_intact,
    write_manifest,
)

if TYPE_CHECKING:
    from specbench.backends.torch.kernels.surgery import KeptLayers
    from specbench.models.load import LanguageModel, WeightFiles
    from specbench.options import QuantizedName

MOST_BYTES = 8 << 30
"""Budget of all entries; the least recently used are removed first."""

_WORTH_KEEPING = 1 << 25
"""Smallest number of weights that is worth keeping."""

_FORMAT = 4
"""Version of an entry. 1: bytes in rows alone; 2: tensors under other names; 3: no sizes of files."""
_ABANDONED_S = 86_400
"""Age from which an unfinished entry is removed."""


@contextmanager
def kept_layers(
    model: LanguageModel, kind: QuantizedName, progress: Progress | None = None
) -> Iterator[KeptLayers | None]:
    """Yield the store of a model's quantized weights, existing or new; ``None`` if they cannot be stored.

    If an entry is replaced, a note about it is added to the model.
    """
    files, panels = model.files, native.is_available()
    if (
        files is None
        or files.numbers < _WORTH_KEEPING
        or model.model.device.type != "cpu"
        or (kind == "int4" and not panels)
    ):
        announce(progress, f"quantizing {model.name} to {kind}")
        yield None
        return
    parent = cache_folder() / LAYERS_FOLDER
    place, content = _names(model, files, f"{kind} in {'panels' if panels else 'rows'}")
    entry = parent / f"{place}-{content}"
    others = [path for path in parent.glob(f"{place}-*") if path != entry]
    announce(progress, f"reading the {kind} layers of {model.name}")
    if is_intact(entry, _FORMAT):
        with suppress(OSError):
            os.utime(entry / MANIFEST)  # used just now
        yield _Found(entry)
        return
    if entry.exists() or others:
        reason = (
            "are damaged" if entry.exists() else "are from other model files or another version of specbench"
        )
        model.notes.append(f"The {kind} layers stored for {model.name} {reason}, so they are made again.")
    for path in (entry, *others):
        shutil.rmtree(path, ignore_errors=True)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError:  # read-only, or full: it starts as it would without a cache
        announce(progress, f"quantizing {model.name} to {kind}")
        yield None
        return
    try:
        announce(progress, f"quantizing {model.name} to {kind} (the result is kept)")
        made = _Made(work, parent, f"{model.name} in {kind}")
        yield made
        made.finish(entry)
        _evict(parent, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _names(model: LanguageModel, files: WeightFiles, form: str) -> tuple[str, str]:
    """Return two digests: of model and layout, and of the circumstances that the entry is valid for."""
    cut = None if model.head_rows is None else hashlib.sha256(repr(model.head_rows).encode()).hexdigest()
    versions = [_FORMAT, native.LAYOUT, __version__, torch.__version__, processor_name(), has_vnni()]
    named = [files.place, model.dtype, cut, form], [files.digest, *versions]
    first, second = (hashlib.sha256(repr(facts).encode()).hexdigest()[:24] for facts in named)
    return first, second


def _file(place: str) -> str:
    """Return the file name for a layer, whose path can contain characters that are not allowed in file names."""
    return hashlib.sha256(place.encode()).hexdigest()[:32] + ".safetensors"


def _tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    if isinstance(weight, native.Panels):
        return {"panels": weight.data, "sizes": torch.tensor([weight.bits, weight.outputs, weight.inputs])}
    return {"quantized": weight.quantized, "scales": weight.scales}


class _Found:
    """An existing, valid entry."""

    def __init__(self, entry: Path) -> None:
        self.entry = entry

    def find(self, place: str) -> QuantizedWeight | None:
        path = self.entry / _file(place)
        if not path.exists():
            return None
        tensors = load_file(path)
        if "panels" not in tensors:
            return Int8Weight(tensors["quantized"], tensors["scales"])
        bits, outputs, inputs = tensors["sizes"].tolist()
        return native.Panels.from_data(bits, outputs, inputs, tensors["panels"])

    def save(self, place: str, weight: QuantizedWeight) -> None:
        """Do nothing: an existing entry is not extended."""


class _Made:
    """An entry that is being written, file by file; writing is abandoned if the disk is too small."""

    def __init__(self, work: Path, parent: Path, name: str) -> None:
        self.work, self.parent, self.name = work, parent, name
        self.failed = False

    def find(self, place: str) -> QuantizedWeight | None:  # noqa: ARG002 - nothing is there yet
        return None

    def save(self, place: str, weight: QuantizedWeight) -> None:
        tensors = _tensors(weight)
        try:
            if 2 * sum(each.nbytes for each in tensors.values()) > shutil.disk_usage(self.parent).free:
                raise OSError("no space")
            if not self.failed:
                save_file(tensors, self.work / _file(place))
        except (OSError, SafetensorError):
            self.failed = True

    def finish(self, entry: Path) -> None:
        if self.failed or not any(self.work.iterdir()):
            return
        with suppress(OSError):  # such as another process that was quicker
            write_manifest(self.work, _FORMAT, {"name": self.name})
            self.work.rename(entry)
            sync(self.parent)


def _evict(parent: Path, newest: Path) -> None:
    """Remove abandoned unfinished entries, and the least recently used ones until the rest is within the limit."""
    now, entries = time.time(), []
    for path in parent.iterdir():
        with suppress(OSError):
            if path.name.startswith("."):
                if now - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            used = (path / MANIFEST).stat().st_mtime if path != newest else math.inf  # whatever the clock
            entries.append((used, folder_size(path), path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            return
        shutil.rmtree(path, ignore_errors=True)
        total -= size
