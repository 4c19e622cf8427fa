"""What a start packs is remembered, so that the next one begins to pack it before it knows anything else.

Importing ``transformers``, making a model's modules and its tokenizer keep one core busy for some seconds. Meanwhile
another one packs what the last start of the same target packed, with the same options and versions, if its files are
still what they were: by path, size, time and inode when packing begins, and by their headers when its layers are taken.
Nothing is kept but names. Whatever does not fit is packed as if there were no such thing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from specbench._version import __version__
from specbench.backends.torch.kernels.ahead import PackedAhead
from specbench.backends.torch.kernels.instructions import circumstances
from specbench.backends.torch.kernels.linear import onednn_packs
from specbench.errors import SpecbenchError
from specbench.models.memory import available_memory
from specbench.models.shelf import Shelf

if TYPE_CHECKING:
    from specbench.backends.torch.kernels.surgery import PackedLayers
    from specbench.models.load import LanguageModel
    from specbench.options import LoadOptions
    from specbench.specs.models import ModelSpec

__all__ = ["Ahead", "Start"]

_WORTH_IT = 1 << 26
"""Numbers of a model below which packing takes no time."""

_ROOM = 3
"""So many times the memory that is packed has to be free: whether the model fits is looked at while that goes on."""


@dataclass(frozen=True)
class Start:
    """What a start has packed.

    Attributes:
        place, digest: Of its files, see ``WeightFiles``.
        files: Of each its path, size in bytes, time of its last change in nanoseconds, and inode.
        nbytes: Of all that was packed.
        places: Of layers, whose weights lie in the files by their own names.
    """

    place: str
    digest: str
    files: tuple[tuple[str, int, int, int], ...]
    nbytes: int
    places: tuple[str, ...]

    def is_as_it_was(self) -> bool:
        """Whether nobody has changed the files since."""
        with suppress(OSError, ValueError):
            return all(_state(path) == (path, *state) for path, *state in self.files)
        return False


def _state(path: str | Path) -> tuple[str, int, int, int]:
    found = os.stat(path)  # noqa: PTH116 - of a string as well
    return str(path), found.st_size, found.st_mtime_ns, found.st_ino


def _parse(data: Mapping[str, Any]) -> Start | None:
    place, digest, files, nbytes, places = (
        data.get(name) for name in ("place", "digest", "files", "nbytes", "places")
    )
    if not (isinstance(place, str) and isinstance(digest, str) and type(nbytes) is int and nbytes >= 0):
        return None
    if not (isinstance(files, list) and isinstance(places, list) and {*map(type, places)} <= {str}):
        return None
    if not all(isinstance(each, list) and [*map(type, each)] == [str, int, int, int] for each in files):
        return None
    return Start(
        place, digest, tuple((each[0], each[1], each[2], each[3]) for each in files), nbytes, tuple(places)
    )


def _names(place: str) -> list[str]:
    """Of the weights of a place, in a model that was saved as it is."""
    path, _, layers = place.rpartition(".")
    return [f"{path}.{layer}.weight".lstrip(".") for layer in layers.split("+")]


_SHELF = Shelf("starts", "The stored start is", "It is made anew.", _parse)


class Ahead(AbstractContextManager["Ahead"]):
    """Packs a target's weights from now on, if its last start is known; at its end nothing of that goes on.

    Args:
        spec: The target.
        options: How its weights will be loaded.
    """

    def __init__(self, spec: ModelSpec, options: LoadOptions) -> None:
        self._name, self._chooses = _name(spec, options), options.dtype == "auto"
        self._known: Start | None = None
        self._packer: PackedAhead | None = None
        with suppress(SpecbenchError):
            self._known = _SHELF.read(self._name)
        known = self._known
        if known is not None and known.is_as_it_was() and available_memory() >= _ROOM * known.nbytes:
            self._packer = PackedAhead(
                [Path(path) for path, *_ in known.files], {place: _names(place) for place in known.places}
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._packer is not None:
            self._packer.stop()
            self._packer = None

    @contextmanager
    def layers(self, model: LanguageModel) -> Iterator[PackedLayers | None]:
        """Where packing finds a model's weights; behind it nobody packs any more, and what was packed is remembered.

        Args:
            model: As it was loaded.
        """
        files, known = model.files, self._known and (self._known.place, self._known.digest)
        if files is None or files.numbers < _WORTH_IT or model.model.device.type != "cpu":
            self._stop()
            yield None
        elif self._packer is not None and known == (files.place, files.digest):
            yield _Found(self._packer)
            self._stop()
        else:
            self._stop()
            with ExitStack() as stack:
                noted = _Noted(files.paths, stack)
                yield noted
            # A dtype that is still to be measured has to be measured while nobody packs.
            if noted.places and (model.dtype_choice is not None or not self._chooses):
                with suppress(SpecbenchError, OSError):
                    states = tuple(map(_state, files.paths))
                    start = Start(files.place, files.digest, states, noted.nbytes, tuple(noted.places))
                    _SHELF.write(self._name, start)


def _name(spec: ModelSpec, options: LoadOptions) -> str:
    """Of the file that tells of a target's last start."""
    source = spec.source if spec.kind in ("hub", "builtin") else os.path.realpath(spec.source)
    asked = spec.kind, source, spec.revision, options.dtype, options.device, options.device_map
    versions = __version__, torch.__version__, metadata.version("transformers")
    facts = [*asked, *circumstances(), *versions]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


class _Found:
    """What was packed ahead of a model."""

    def __init__(self, packer: PackedAhead) -> None:
        self._packer = packer

    def find(self, place: str, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        packed, (dtype, width) = self._packer.take(place), (weights[0].dtype, weights[0].shape[1])
        shape = (sum(len(weight) for weight in weights), width)
        return (
            packed if packed is not None and (packed.dtype, tuple(packed.shape)) == (dtype, shape) else None
        )


class _Noted:
    """Notes what is packed of a model, as far as its files hold that by the same names.

    Args:
        paths: The files.
        stack: Closes them.

    Attributes:
        places, nbytes: See ``Start``.
    """

    def __init__(self, paths: Sequence[Path], stack: ExitStack) -> None:
        self.places: list[str] = []
        self.nbytes = 0
        self._holder: dict[str, Any] = {}
        with suppress(SafetensorError, OSError):
            for path in paths:
                file = stack.enter_context(safe_open(path, "pt"))
                self._holder.update(dict.fromkeys(file.keys(), file))

    def find(self, place: str, weights: Sequence[torch.Tensor]) -> None:
        if onednn_packs(weights[0].dtype) and all(map(self._holds, _names(place), weights)):
            self.places.append(place)
            self.nbytes += sum(weight.nbytes for weight in weights)

    def _holds(self, name: str, weight: torch.Tensor) -> bool:
        """Whether a weight lies in the files as it was loaded; its first and last row will do."""
        if name not in self._holder:
            return False
        try:
            stored = self._holder[name].get_tensor(name)
        except (SafetensorError, RuntimeError, OSError):
            return False
        same = stored.dtype == weight.dtype and stored.shape == weight.shape
        return same and torch.equal(stored[:1], weight[:1]) and torch.equal(stored[-1:], weight[-1:])
