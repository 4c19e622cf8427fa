"""The int8 or int4 layers of a model are rounded once, and kept in the cache folder: such a model then starts sooner.

They are kept as products read them here: in panels where there are native products, in rows of bytes elsewhere (int4
layers in panels alone). Of a model there is one entry for each kind and form, each dtype and each cut of its head. It
holds for the files as they were (their names, sizes, times and headers), this processor and these versions; every one
of its files is held against its hash before any is used. What is damaged, or of files that have changed since, is made
anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from specbench.base.files import sha256, sync, write_text
from specbench.base.progress import Progress, announce
from specbench.models.cache import LAYERS_FOLDER, cache_folder, folder_size

if TYPE_CHECKING:
    from specbench.backends.torch.kernels.surgery import RoundedLayers
    from specbench.models.load import LanguageModel, WeightFiles
    from specbench.options import QuantizedName

MOST_BYTES = 8 << 30
"""What all entries may take; those that were not used for longest go first."""

_WORTH_KEEPING = 1 << 25
"""Numbers of a model below which rounding them takes no time."""

_FORMAT = 3
"""Version of an entry. 1: bytes in rows alone; 2: tensors under other names."""
_MANIFEST = "manifest.json"
_HASHERS = 2
_ABANDONED_S = 86_400
"""Age from which a half-made entry is nobody's any more."""


@contextmanager
def rounded_layers(
    model: LanguageModel, kind: QuantizedName, progress: Progress | None = None
) -> Iterator[RoundedLayers | None]:
    """Where quantizing finds and keeps a model's rounded weights; ``None`` where they cannot be kept.

    Args:
        model: Its files are known, and it is on a CPU. It is told of an entry that had to be made anew.
        kind: To what they are rounded.
        progress: Told what is being done.
    """
    files, panels = model.files, native.is_available()
    if (
        files is None
        or files.numbers < _WORTH_KEEPING
        or model.model.device.type != "cpu"
        or (kind == "int4" and not panels)
    ):
        announce(progress, f"rounding {model.name} to {kind}")
        yield None
        return
    parent = cache_folder() / LAYERS_FOLDER
    place, content = _names(model, files, f"{kind} in {'panels' if panels else 'rows'}")
    entry = parent / f"{place}-{content}"
    others = [path for path in parent.glob(f"{place}-*") if path != entry]
    announce(progress, f"reading the {kind} layers of {model.name}")
    if _is_sound(entry):
        with suppress(OSError):
            os.utime(entry / _MANIFEST)  # used just now
        yield _Found(entry)
        return
    if entry.exists() or others:
        reason = "are damaged" if entry.exists() else "were of other files or another version"
        model.notes.append(f"The {kind} layers kept of {model.name} {reason}: they are made anew.")
    for path in (entry, *others):
        shutil.rmtree(path, ignore_errors=True)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError:  # read-only, or full: it starts as it would without a cache
        announce(progress, f"rounding {model.name} to {kind}")
        yield None
        return
    try:
        announce(progress, f"rounding {model.name} to {kind}, which later starts need not")
        made = _Made(work, parent, f"{model.name} in {kind}")
        yield made
        made.finish(entry)
        _make_room(parent, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _names(model: LanguageModel, files: WeightFiles, form: str) -> tuple[str, str]:
    """Digests of whose layers they are in which form, and of what they hold for."""
    cut = None if model.head_rows is None else hashlib.sha256(repr(model.head_rows).encode()).hexdigest()
    versions = [_FORMAT, native.LAYOUT, __version__, torch.__version__, processor_name(), has_vnni()]
    named = [files.place, model.dtype, cut, form], [files.digest, *versions]
    first, second = (hashlib.sha256(repr(facts).encode()).hexdigest()[:24] for facts in named)
    return first, second


def _is_sound(entry: Path) -> bool:
    """Whether an entry holds exactly what its manifest tells, byte for byte."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        there = {path.name for path in entry.iterdir()} - {_MANIFEST}
        if manifest["format"] != _FORMAT or not files or there != files.keys():
            return False
        paths = [entry / name for name in files]
        if any(path.is_symlink() for path in (entry, *paths)):
            return False
        with ThreadPoolExecutor(_HASHERS) as hashers:
            return list(hashers.map(sha256, paths)) == list(files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _file(place: str) -> str:
    """Of a layer; its place may hold what no file's name may."""
    return hashlib.sha256(place.encode()).hexdigest()[:32] + ".safetensors"


def _tensors(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """What a file holds of a weight."""
    if isinstance(weight, native.Panels):
        return {"panels": weight.data, "sizes": torch.tensor([weight.bits, weight.outputs, weight.inputs])}
    return {"quantized": weight.quantized, "scales": weight.scales}


class _Found:
    """What is kept of a model, sound."""

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
        """A layer that the entry lacks stays out of it."""


class _Made:
    """What is made of a model now, file by file; given up where it does not fit."""

    def __init__(self, work: Path, parent: Path, name: str) -> None:
        self.work, self.parent, self.name = work, parent, name
        self.hashes: dict[str, str] | None = {}

    def find(self, place: str) -> QuantizedWeight | None:  # noqa: ARG002 - nothing is there yet
        return None

    def save(self, place: str, weight: QuantizedWeight) -> None:
        if self.hashes is None:
            return
        path, tensors = self.work / _file(place), _tensors(weight)
        try:
            if 2 * sum(each.nbytes for each in tensors.values()) > shutil.disk_usage(self.parent).free:
                raise OSError("no space")
            save_file(tensors, path)
            self.hashes[path.name] = sha256(path)
            sync(path)
        except (OSError, SafetensorError):
            self.hashes = None

    def finish(self, entry: Path) -> None:
        """Give it its name, complete."""
        if not self.hashes:
            return
        manifest = {"format": _FORMAT, "source": {"name": self.name}, "files": self.hashes}
        with suppress(OSError):  # such as another process that was quicker
            write_text(self.work / _MANIFEST, json.dumps(manifest) + "\n")
            self.work.rename(entry)
            sync(self.parent)


def _make_room(parent: Path, newest: Path) -> None:
    """Remove what was not used for longest until the rest fits, and what other processes have left half made."""
    now, entries = time.time(), []
    for path in parent.iterdir():
        with suppress(OSError):
            if path.name.startswith("."):
                if now - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
                continue
            used = (path / _MANIFEST).stat().st_mtime if path != newest else math.inf  # whatever the clock
            entries.append((used, folder_size(path), path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            return
        shutil.rmtree(path, ignore_errors=True)
        total -= size
