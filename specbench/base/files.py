"""Files: atomic writes, locks, hashes, and file-system errors as messages.

A folder of results can come from somebody else and contain symbolic links with the names of files that specbench
writes. So nothing is written through a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import RunError, SpecbenchError, UsageError

if TYPE_CHECKING:
    from filelock import BaseFileLock


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8, see ``write_bytes``."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file atomically, even if the power fails; raise ``UsageError`` for a symbolic link, or ``OSError``."""
    path = Path(path)
    refuse_link(path)
    # An unpredictable name, and "x" follows no link; unlike mkstemp it leaves the permissions to the umask.
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
    """Raise ``UsageError`` if a path is a symbolic link."""
    if path.is_symlink():
        raise UsageError(
            f"{str(path)!r} is a symbolic link, and nothing is written through it.",
            "Remove it, or write elsewhere.",
        )


def sync(path: Path) -> None:
    """Write a file or folder through to the disk. Folders on Windows need no synchronizing and are skipped."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- locks and hashes ------------------------------------------------------------------------------


def try_lock(path: Path) -> BaseFileLock | None:
    """Return a file with the operating system's lock, which ends with the process; ``None`` if another has it."""
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock for the ``with`` block; if another process has it, call ``waiting`` and wait."""
    import filelock

    if lock := try_lock(path):
        lock.release()
    else:
        waiting()
    with filelock.FileLock(path):
        yield


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- errors ----------------------------------------------------------------------------------------


@contextmanager
def file_errors(
    problem: str,
    hint: str | None = None,
    *,
    kind: type[SpecbenchError] = RunError,
    full: SpecbenchError | None = None,
) -> Iterator[None]:
    """Turn file-system errors into errors for the user.

    Args:
        problem: What does not work, such as "The file 'x' cannot be read"; the system's reason is appended.
        hint: What to change.
        kind: Class of the error.
        full: Error to raise instead if the disk is full.
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
    """Return the operating system's text for an error."""
    code = getattr(error, "errno", None)
    return os.strerror(code) if code is not None else str(error)


def is_full(error: Exception) -> bool:
    """Return whether an error means that the disk is full, also for errors of libraries."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
