"""Files: written whole, locked, hashed, and what the system refuses as a sentence.

A folder of results may have come from somebody else. A symbolic link there, in the place of a file or folder that
specbench writes, would lead what is written to wherever it points: nothing is written through a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, SpecbenchError, UsageError

if TYPE_CHECKING:
    from filelock import BaseFileLock

SMALL_FILE = 16 << 20
"""Bytes up to which a model's file has its hash checked on every load."""

_BLOCK = 1 << 22


def require_writable(folder: Path) -> None:
    """Find out that nothing can be written to a folder before what is to be written has taken its time.

    Raises:
        OSError: It is not there, or nothing can be written to it.
    """
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_text(path: str | Path, text: str) -> None:
    """``write_bytes`` of a text in UTF-8, its line breaks as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file so that it holds the old or the new content at every moment, also after a power cut.

    Raises:
        UsageError: A symbolic link stands there. OSError: It cannot be written; it is as it was.
    """
    path = Path(path)
    refuse_link(path)
    # A name that nobody can have prepared, and "x" follows no link; unlike mkstemp it leaves the rights to the umask.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync(path.parent)


def refuse_link(path: Path) -> None:
    """Refuse to write to what is a symbolic link.

    Raises:
        UsageError: It is one.
    """
    if path.is_symlink():
        raise UsageError(
            f"{str(path)!r} is a symbolic link, and nothing is written through it.",
            "Remove it, or write elsewhere.",
        )


def sync(path: Path) -> None:
    """Make a file or folder survive a power cut. Windows opens no folders and needs none synchronized."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- locks and hashes ------------------------------------------------------------------------------


def try_lock(path: Path) -> BaseFileLock | None:
    """The operating system's own lock, which ends with the process that holds it; ``None`` if another one does."""
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; ``waiting`` is called if another process has to be waited for."""
    import filelock

    lock = try_lock(path)
    if lock is None:
        waiting()
        lock = filelock.FileLock(path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def sha256(path: Path, report: Callable[[int, int], None] | None = None) -> str:
    """The sha256 of a file; ``report`` is told the bytes read and those there are."""
    digest = hashlib.sha256()
    feed(path, [digest], report)
    return digest.hexdigest()


def feed(path: Path, digests: list[Any], report: Callable[[int, int], None] | None = None) -> None:
    """Read a file into several hashes at once."""
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            for digest in digests:
                digest.update(block)
            done += len(block)
            if report is not None:
                report(done, total)


# -- what the system refuses -------------------------------------------------------------------------


@contextmanager
def file_errors(
    problem: str,
    hint: str | None = None,
    *,
    kind: type[SpecbenchError] = RunError,
    full: SpecbenchError | None = None,
) -> Iterator[None]:
    """Turn what a file system refuses into one sentence.

    Args:
        problem: What does not work, such as "The file 'x' cannot be read"; the system's reason is put behind it.
        hint: What to change.
        kind: Of the error.
        full: What to raise instead if the disk is full, in the words of whatever library met that.
    """
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:
        if full is not None and is_full(error):
            raise full from error
        if isinstance(error, OSError) and error.errno is not None:
            raise kind(f"{problem} ({reason(error)}).", hint) from error
        raise


def reason(error: Exception) -> str:
    """Why something was refused, in the system's words."""
    code = getattr(error, "errno", None)
    return os.strerror(code) if code is not None else str(error)


def is_full(error: Exception) -> bool:
    """Whether no space is left, also where a library has made an error of its own of it."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
