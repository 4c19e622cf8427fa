"""Packed and quantized layers of models, kept in the cache folder so that these start sooner.

They are stored in the layout that this machine's kernels use: panels for native kernels, otherwise rows of bytes (int8
only). A model has one entry for each kind, layout, dtype and trimmed head. An entry is valid for one state of the
checkpoint's files (names, sizes, times and headers) and this processor. All of its files are checked against their
checksums before any is used. A damaged or outdated entry is replaced; versions leave each other's alone.

Weights are used where the file is read to, or in its own pages (``large_files``).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch

from specbench import kernels
from specbench._version import __version__
from specbench.base.cache import (
    LAYERS_FOLDER,
    MANIFEST,
    cache_folder,
    folder_size,
    intact_content,
    write_manifest,
)
from specbench.base.files import reason, sync
from specbench.base.machine import processor_name
from specbench.base.progress import Progress, announce
from specbench.kernels import weights
from specbench.kernels.weights import QuantizedWeight
from specbench.models.ahead import LAYERS_FILE, entry_name

if TYPE_CHECKING:
    from specbench.base.large_files import Content
    from specbench.kernels.weights import KeptLayers
    from specbench.models.load import LanguageModel, WeightFiles

Kind = Literal["int8", "int4", "packed"]

MOST_BYTES = 8 << 30
"""Budget of all entries; the least recently used are removed first."""

_WORTH_KEEPING = 1 << 25
"""Smallest number of weights that is worth keeping."""

_FORMAT = 5
"""Version of an entry. 1: bytes in rows alone; 2: tensors under other names; 3: no sizes of files; 4: a file for each
layer."""

_PARTS = ("sizes", "exceptions", "panels", "scales", "quantized")
_DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}
_DATA_AT = 1 << 21  # bytes before the first tensor: a huge page
_ALIGNED = 64  # bytes: a cache line

_ABANDONED_S = 86_400
"""Age from which an unfinished entry is removed."""


@contextmanager
def kept_layers(
    model: LanguageModel, kind: Kind, progress: Progress | None = None
) -> Iterator[KeptLayers | None]:
    """Yield the store of a model's weights of a kind, existing or new; ``None`` if they cannot be stored.

    If an entry is replaced, a note about it is added to the model.
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
    parent = cache_folder() / LAYERS_FOLDER
    in_groups = kind == "int8" and model.stored is not None and model.stored.by_groups
    form = "rows" if not panels else "groups" if in_groups else "panels"
    place, content = _names(model, files, f"{kind} in {form}")
    entry = parent / f"{place}-{content}"
    others = [path for path in parent.glob(f"{place}-*") if path != entry]
    announce(progress, f"reading the {kind} layers of {model.name}")
    found = intact_content(entry, _FORMAT)
    if found is not None:
        with suppress(OSError):
            os.utime(entry / MANIFEST)  # used just now
        yield _Found(entry, found, partial(_note, model, kind, "are of no use here"))
        return
    if entry.exists() or others:
        _note(model, kind, "are damaged" if entry.exists() else "are from other model files")
    for path in (entry, *others):
        shutil.rmtree(path, ignore_errors=True)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    except OSError as error:  # read-only, or full: it starts as it would without a cache
        announce(progress, making)
        yield None
        _note_unkept(model, kind, error)
        return
    try:
        announce(progress, making)

        def report(layer: int, kept: bool) -> None:
            if progress is not None:
                progress.update(making + " (the result is kept)" * kept, layer, model.layers)

        made = _Made(work, parent, entry_name(model.name, kind), report)
        yield made
        made.finish(entry)
        if made.failed is not None:
            _note_unkept(model, kind, made.failed)
        _evict(parent, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _note(model: LanguageModel, kind: Kind, why: str) -> None:
    model.notes.append(f"The {kind} layers stored for {model.name} {why}, so they are made again.")


def _note_unkept(model: LanguageModel, kind: Kind, error: OSError) -> None:
    model.notes.append(
        f"The {kind} layers of {model.name} could not be kept in the cache folder ({reason(error)}), so that each"
        " start makes them again."
    )


def _packs_for_long(model: LanguageModel, numbers: int) -> bool:
    """Return whether packing takes longer than reading what was packed, and leaves room for other entries."""
    fits = numbers <= MOST_BYTES // 3  # at 12 bits each, half of the budget
    return fits and model.dtype == "bfloat16" and weights.takes_12_bits()


def _names(model: LanguageModel, files: WeightFiles, form: str) -> tuple[str, str]:
    """Return two digests: of model, layout, versions and processor, and of the files' contents."""
    cut = None if model.head_rows is None else hashlib.sha256(repr(model.head_rows).encode()).hexdigest()
    makers = [_FORMAT, __version__, torch.__version__, processor_name(), *weights.layout()]
    named = [files.place, model.dtype, cut, form, *makers], [files.digest]
    first, second = (hashlib.sha256(repr(facts).encode()).hexdigest()[:24] for facts in named)
    return first, second


class _Found:
    """An existing, intact entry; ``note`` is called once if it is of no use."""

    def __init__(self, entry: Path, content: Content, note: Callable[[], None]) -> None:
        self._entry, self._note = entry, note
        begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header, data = json.loads(content[8:begin].tobytes()), torch.from_numpy(content[begin:])
        dtypes = {name: dtype for dtype, name in _DTYPES.items()}
        self._tensors = {
            name: data[slice(*facts["data_offsets"])].view(dtypes[facts["dtype"]]).view(facts["shape"])
            for name, facts in header.items()
        }

    def find(self, place: str) -> QuantizedWeight | None:
        parts = {part: self._tensors.get(f"{place} {part}") for part in _PARTS}
        tensors = {part: tensor for part, tensor in parts.items() if tensor is not None}
        if not tensors:
            return None
        try:
            return weights.from_stored(tensors)
        except (KeyError, ValueError):
            self.discard()
            return None

    def discard(self) -> None:
        """Remove the entry, so that the next start makes another."""
        if self._tensors:
            self._note()
            self._tensors = {}
            shutil.rmtree(self._entry, ignore_errors=True)

    def save(self, place: str, weight: QuantizedWeight) -> None:
        """Do nothing: an existing entry is not extended."""


class _Made:
    """An entry that is being written: a safetensors file, whose header is written last, into space left for it.

    Every tensor begins with a cache line, as products read it fastest. Writing is abandoned if the disk is too small.
    ``report`` is called with each layer of the model that is made, and whether any was written.
    """

    def __init__(self, work: Path, parent: Path, name: str, report: Callable[[int, bool], None]) -> None:
        self.work, self.parent, self.name, self._report = work, parent, name, report
        self.failed: OSError | None = None
        self._header: dict[str, dict[str, Any]] = {}
        self._end = 0

    def find(self, place: str) -> QuantizedWeight | None:
        """Return nothing, for nothing is there yet; a layer is made next."""
        if layer := re.search(r"\.(\d+)\.", place):
            self._report(int(layer[1]), bool(self._header))
        return None

    def discard(self) -> None:
        """Do nothing: what is made now is of use."""

    def save(self, place: str, weight: QuantizedWeight) -> None:
        if self.failed is not None:
            return
        tensors = {f"{place} {part}": tensor for part, tensor in weights.stored(weight).items()}
        try:
            if 2 * sum(each.nbytes for each in tensors.values()) > shutil.disk_usage(self.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with (self.work / LAYERS_FILE).open("ab") as file:
                if not self._header:
                    file.write(b" " * _DATA_AT)
                for name, tensor in tensors.items():
                    if gap := -self._end % _ALIGNED:
                        self._append(file, f"padding {self._end}", torch.zeros(gap, dtype=torch.uint8))
                    self._append(file, name, tensor)
        except OSError as error:
            self.failed = error

    def _append(self, file: BinaryIO, name: str, tensor: torch.Tensor) -> None:
        begin, self._end = self._end, self._end + tensor.nbytes
        self._header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, self._end]
        }  # fmt: skip
        file.write(tensor.contiguous().numpy().data)

    def finish(self, entry: Path) -> None:
        header = json.dumps(self._header).encode()
        if self.failed is not None or not self._header or len(header) > _DATA_AT - 8:
            return
        with suppress(OSError):  # such as another process that was quicker
            with (self.work / LAYERS_FILE).open("r+b") as file:
                file.write((_DATA_AT - 8).to_bytes(8, "little") + header)
            write_manifest(self.work, _FORMAT, {"name": self.name}, derived=True)
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
