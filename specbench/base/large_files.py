"""Contents of large files: in large pages, with their checksums, and read ahead while torch is imported.

A forward pass reads all weights, which takes much longer from small pages. Where the system keeps files in large pages
they are mapped; elsewhere they are read into memory.
"""

from __future__ import annotations

import atexit
import mmap
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Content: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_PART, _READERS = 1 << 26, 2

_LARGE = 1 << 17
"""Bytes that each page fault maps on average, from which on pages are large: small ones are mapped by 64 KiB, and with
half of a file in huge pages products are as fast as with all of it.
"""

_ahead: dict[Path, Future[tuple[Content, str]]] = {}
_leaving = Event()


def read_ahead(paths: Iterable[Path]) -> None:
    """Begin to read files, one after another, in a thread, which ends before the interpreter does."""
    _ahead.update((path, Future()) for path in paths)
    thread = Thread(target=_read_all, args=([*_ahead.items()],), daemon=True)
    thread.start()
    atexit.register(_leave, thread)


def _leave(thread: Thread) -> None:
    _leaving.set()
    forget_ahead()
    thread.join(timeout=5.0)  # a part takes hundredths of a second, but from a network it may take for ever


def _read_all(coming: Iterable[tuple[Path, Future[tuple[Content, str]]]]) -> None:
    for path, future in coming:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(_read(path, map))
            except BaseException as error:
                future.set_exception(error)


def forget_ahead() -> None:
    """Free what has been read ahead for nobody."""
    for each in _ahead.values():
        each.cancel()
    _ahead.clear()


def contents(path: Path) -> tuple[Content, str]:
    """Return the bytes of a file that is not empty, and their ``crc32``."""
    coming = _ahead.pop(path, None)
    if coming is not None:
        return coming.result()
    with ThreadPoolExecutor(_READERS) as readers:
        return _read(path, readers.map)


def crc32(path: Path) -> str:
    """Return the CRC-32 of each part of a file that is not empty: shows damage in half the time of SHA-256."""
    content = _mapped(path)
    with ThreadPoolExecutor(_READERS) as readers:
        return "-".join(
            readers.map(lambda part: f"{zlib.crc32(content[part].data):08x}", _parts(len(content)))
        )


def _parts(size: int) -> Iterator[slice]:
    return (slice(begin, min(begin + _PART, size)) for begin in range(0, size, _PART))


def _mapped(path: Path) -> Content:
    import numpy as np

    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


def _read(path: Path, each: Callable[..., Iterable[str]]) -> tuple[Content, str]:
    """Return what ``contents`` returns; ``each`` maps a function over parts."""
    import numpy as np

    size, maps = path.stat().st_size, _lies_in_large_pages(path)
    if maps:
        content = _mapped(path)
    else:
        memory = np.empty(size + mmap.PAGESIZE, np.uint8)  # numpy asks for huge pages
        content = memory[-memory.ctypes.data % mmap.PAGESIZE :][:size]

    def read(part: slice) -> str:
        if _leaving.is_set():
            raise OSError("the program ends")
        if not maps:
            with path.open("rb", buffering=0) as file:
                file.seek(part.start)
                file.readinto(content[part].data)
        return f"{zlib.crc32(content[part].data):08x}"

    return content, "-".join(each(read, _parts(size)))


def _lies_in_large_pages(path: Path) -> bool:
    """Return whether a file is best mapped. The number of page faults that it takes to touch a part tells."""
    if not sys.platform.startswith("linux"):
        return True
    import resource

    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        part = slice(size // 2, min(size // 2 + _PART, size))
        file.seek(part.start)
        file.read(_PART)
    content = _mapped(path)[part]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    content[:: mmap.PAGESIZE].sum()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return faults * _LARGE <= len(content)
