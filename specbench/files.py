"""Files written whole: they hold the old or the new content at every moment, and nothing is written through a link.

A folder of results may have come from somebody else. A symbolic link there, in the place of a file or folder that
specbench writes, would lead what is written to wherever it points.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from specbench.errors import UsageError

__all__ = ["refuse_link", "sync", "write_bytes", "write_text"]


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
    """Make a file or folder survive a power cut. Windows opens no folders and needs none synchronised."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
