"""Files of packed layers: reading them with checksums, and ahead of their use, while torch is imported.

A file is a line of JSON (its model's name, and where each array is), then the arrays. It is read into memory and not
mapped: a forward pass reads all weights, which takes longer from the small pages of files (docs/tried.md).
"""

from __future__ import annotations

import atexit
import json
import mmap
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil

from specbench.base.cache import LAYERS_FOLDER, cache_folder, entries_in
from specbench.options import quantized
from specbench.specs.drafters import SelfForm, SmallModel

if TYPE_CHECKING:
    import numpy as np

    from specbench.recipe import Recipe

    Arrays: TypeAlias = Mapping[str, np.ndarray[Any, Any]]

_ALIGNED = 64
"""Every array begins with a cache line, as products read it fastest."""
_THREADS = 2

_ahead: dict[Path, Future[Arrays]] = {}
_leaving = Event()


def entry_name(model: str, kind: str) -> str:
    """Return the name of an entry for a model's packed layers, or those in int8 or int4."""
    return f"{model}, {kind}" if kind == "packed" else f"{model} in {kind}"


def write_layers(path: Path, name: str, arrays: Arrays) -> None:
    """Write a file of arrays; raise ``OSError`` if that fails."""
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(lambda array: zlib.crc32(array.data), arrays.values())
    places, end = {}, 0
    for (key, array), crc in zip(arrays.items(), sums, strict=True):
        places[key] = (array.dtype.str, array.shape, end, crc)
        end += array.nbytes + -array.nbytes % _ALIGNED
    header = json.dumps({"source": {"name": name}, "arrays": places}).encode()
    with path.open("wb") as file:
        begin = file.write(header + b"\n")
        for (*_, place, _), array in zip(places.values(), arrays.values(), strict=True):
            file.seek(begin + place)
            file.write(array.data)


def read_layers(path: Path) -> Arrays | None:
    """Return the arrays of a file; ``None`` if there is none, or it is damaged."""
    coming = _ahead.pop(path, None)
    try:
        if coming is not None:
            return coming.result()
        with ThreadPoolExecutor(_THREADS) as threads:
            return _read(path, threads.map)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _read(path: Path, each: Callable[..., Iterable[Any]]) -> Arrays:
    """Read arrays; ``each`` maps a function over them."""
    import numpy as np

    with path.open("rb") as file:
        line = file.readline()
    places = json.loads(line)["arrays"]
    memory = np.empty(path.stat().st_size + mmap.PAGESIZE, np.uint8)  # numpy asks for huge pages
    memory = memory[-memory.ctypes.data % mmap.PAGESIZE :]

    def read(place: tuple[str, list[int], int, int]) -> np.ndarray[Any, Any]:
        dtype, shape, begin, crc = place
        if _leaving.is_set():
            raise OSError("the program ends")
        part = memory[begin : begin + np.dtype(dtype).itemsize * prod(shape)]
        with path.open("rb", buffering=0) as file:
            file.seek(len(line) + begin)
            file.readinto(part.data)
        if zlib.crc32(part.data) != crc:
            raise ValueError("damaged")
        return part.view(dtype).reshape(shape)

    return dict(zip(places, each(read, places.values()), strict=True))


# -- ahead -----------------------------------------------------------------------------------------


def read_layers_ahead(recipe: Recipe) -> None:
    """Begin to read the layers that were last used under the names of a recipe's models, as far as memory allows."""
    if recipe.models.device not in ("auto", "cpu"):
        return
    target = recipe.target.name
    names = {entry_name(target, quantized(recipe.models.dtype) or "packed")}
    for part in recipe.drafter.all_parts():
        if isinstance(part, SmallModel):
            kind = "int8" if part.dtype == "auto" else quantized(part.dtype) or "packed"
            names.add(entry_name(part.model.name, kind))
        elif isinstance(part, SelfForm):
            names.add(entry_name(target, "int8" if part.int8 else "int4"))
    with suppress(OSError):  # an entry that is removed meanwhile
        named = [each for each in entries_in(cache_folder() / LAYERS_FOLDER) if each.name in names]
        named.sort(key=lambda each: each.path.stat().st_mtime)
        last = {each.name: each for each in named}.values()
        if sum(each.size for each in last) <= psutil.virtual_memory().available // 4:
            _ahead.update((each.path, Future()) for each in last)
            thread = Thread(target=_read_all, args=([*_ahead.items()],), daemon=True)
            thread.start()
            atexit.register(_leave, thread)


def _read_all(coming: Iterable[tuple[Path, Future[Arrays]]]) -> None:
    for path, future in coming:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_read(path, map))
            except BaseException as error:
                future.set_exception(error)


def _leave(thread: Thread) -> None:
    """End a thread before the interpreter does."""
    _leaving.set()
    forget_ahead()
    thread.join(timeout=5.0)  # an array takes hundredths of a second, but from a network it may take for ever


def forget_ahead() -> None:
    """Free what has been read ahead for nobody."""
    for each in _ahead.values():
        each.cancel()
    _ahead.clear()
