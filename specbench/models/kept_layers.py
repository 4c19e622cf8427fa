"""Packed and quantized layers of models, kept in the cache folder so that these start sooner.

They are stored in the layout that this machine's kernels use: panels for native kernels, otherwise rows of bytes (int8
only). A model has one file for each kind, layout, dtype and trimmed head. A file is valid for one state of the
checkpoint's files (names, sizes, times and headers) and this processor. It is used if all of it has its checksums. A
damaged or outdated file is replaced; versions of specbench leave each other's alone, but share one budget.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specbench import kernels
from specbench._version import __version__
from specbench.base.cache import LAYERS_FOLDER, cache_folder
from specbench.base.files import reason
from specbench.base.machine import give_back_free_memory, processor_name
from specbench.base.progress import Progress, announce
from specbench.kernels import weights
from specbench.kernels.weights import KeptLayers, QuantizedWeight
from specbench.models.layer_files import entry_name, read_layers, write_layers

if TYPE_CHECKING:
    from specbench.models.load import LanguageModel, WeightFiles

Kind = Literal["int8", "int4", "packed"]

MOST_BYTES = 8 << 30
"""Budget of all files; the least recently used are removed first."""

_WORTH_KEEPING = 1 << 25
"""Smallest number of weights that is worth keeping."""

_FORMAT = 6
_PARTS = ("sizes", "exceptions", "panels", "scales", "quantized")
_ABANDONED_S = 86_400
"""Age from which an unfinished file is removed."""


@contextmanager
def kept_layers(
    model: LanguageModel, kind: Kind, progress: Progress | None = None
) -> Iterator[KeptLayers | None]:
    """Yield the store of a model's weights of a kind, existing or new; ``None`` if they cannot be stored.

    Layers of a quantized checkpoint that are not in it are packed out of the checkpoint. If a file is replaced, or
    cannot be written, a note about it is added to the model.
    """
    with _kept(model, kind, progress) as layers:
        if model.stored is None:
            yield layers
            return
        model.stored.inner = layers
        yield model.stored
        model.stored.finish()
    model.notes += filter(None, [model.stored.note])
    model.stored = None
    give_back_free_memory()


@contextmanager
def _kept(model: LanguageModel, kind: Kind, progress: Progress | None) -> Iterator[_Layers | None]:
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

    def note(why: str) -> None:
        model.notes.append(f"The {kind} layers stored for {model.name} {why}, so they are made again.")

    def report(layer: int) -> None:
        if progress is not None:
            progress.update(f"{making} (the result is kept)", layer, model.layers)

    in_groups = kind == "int8" and model.stored is not None and model.stored.by_groups
    form = f"{kind} in {'rows' if not panels else 'groups' if in_groups else 'panels'}"
    parent, place = cache_folder() / LAYERS_FOLDER, _place(model, files, form)
    path = parent / f"{place}-{files.digest[:24]}"
    announce(progress, f"reading the {kind} layers of {model.name}")
    outdated, found = [*parent.glob(f"{place}-*")], read_layers(path)
    if found is not None:
        with suppress(OSError):
            os.utime(path)  # used just now
        layers = _Layers({name: torch.from_numpy(array) for name, array in found.items()}, report)
        yield layers
        if not layers.fit:
            note("are of no use here")
            path.unlink(missing_ok=True)  # so that the next start makes another
        return
    if outdated:
        note("are damaged" if path in outdated else "are from other model files")
    announce(progress, making)
    made = _Layers(None, report)
    yield made
    for each in outdated:
        each.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if 2 * sum(each.nbytes for each in made.tensors.values()) > shutil.disk_usage(parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        arrays = {name: tensor.contiguous().numpy() for name, tensor in made.tensors.items()}
        write_layers(partial, entry_name(model.name, kind), arrays)
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


class _Layers:
    """Layers that were read, or those that are made now.

    Args:
        found: What was read; ``None`` if they are made now.
        report: Is called with each layer of the model that is made.

    Attributes:
        tensors: Their tensors by name.
        fit: Whether what was read is of use.
    """

    def __init__(self, found: dict[str, Tensor] | None, report: Callable[[int], None]) -> None:
        self._made, self.tensors, self.fit, self._report = found is None, found or {}, True, report

    def find(self, place: str) -> QuantizedWeight | None:
        if self._made:  # nothing is there yet, and a layer is made next
            if layer := re.search(r"\.(\d+)\.", place):
                self._report(int(layer[1]))
            return None
        names = {part: f"{place} {part}" for part in _PARTS}
        tensors = {part: self.tensors[name] for part, name in names.items() if name in self.tensors}
        try:
            return weights.from_stored(tensors) if tensors else None
        except (KeyError, ValueError):
            self.discard()
            return None

    def discard(self) -> None:
        if not self._made:
            self.tensors, self.fit = {}, False

    def save(self, place: str, weight: QuantizedWeight) -> None:
        if self._made:  # what was read is not extended
            parts = weights.stored(weight)
            self.tensors |= {f"{place} {part}": tensor for part, tensor in parts.items()}


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
