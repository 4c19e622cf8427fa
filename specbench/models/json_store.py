"""Results that take long to compute, stored as JSON files in the cache folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import msgspec

from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, reason, write_text
from specbench.base.record import Record, wrong_field
from specbench.models.cache import CACHE_VARIABLE, cache_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class _Versioned(Record):
    format: Literal[1]  # 1: first release


@dataclass(frozen=True)
class JsonStore(Generic[T]):
    """Entries of one kind, by name.

    Attributes:
        folder: Subfolder of the cache folder.
        entry: Class of the entries, a dataclass; files are checked against its annotations.
        subject: Beginning of error messages, such as "The stored counts are".
        hint: Hint of error messages: how to make an entry.
    """

    folder: str
    entry: type[T]
    subject: str
    hint: str

    @property
    def _path(self) -> Path:
        return cache_folder() / self.folder

    def names(self, prefix: str = "") -> list[str]:
        return sorted(path.stem for path in self._path.glob("*.json") if path.name.startswith(prefix))

    def read(self, name: str) -> T | None:
        """Return an entry, or ``None`` if there is none.

        Raises:
            UsageError: The file is damaged. RunError: It cannot be read.
        """
        try:
            data = (self._path / f"{name}.json").read_bytes()
            msgspec.json.decode(data, type=_Versioned)
            return msgspec.json.decode(data, type=self.entry)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = self.subject.rpartition(" ")[0]
            raise RunError(f"{what} cannot be read ({reason(error)}).") from error
        except (ValueError, RecursionError):
            raise UsageError(
                f"{self.subject} damaged, or of another version of specbench.", self.hint
            ) from None

    def require(self, name: str, missing: str) -> T:
        """Return an entry; if there is none,
        raise ``UsageError`` with the message ``missing``. For other errors see ``read``.
        """
        found = self.read(name)
        if found is None:
            raise UsageError(missing, self.hint)
        return found

    def write(self, name: str, value: T) -> None:
        """Store an entry atomically; raise ``RunError`` if the cache cannot be written or the entry could not be read
        back, ``UsageError`` for a link.
        """
        text = json.dumps({"format": 1, **asdict(value)}) + "\n"
        try:
            msgspec.json.decode(text, type=self.entry)
        except ValueError as error:
            raise RunError(
                f"{self.subject} not kept: {wrong_field(error) or 'a number'} is invalid."
            ) from None
        with file_errors(
            f"The cache folder {str(cache_folder())!r} cannot be written",
            f"Set {CACHE_VARIABLE} to a folder that can be written.",
        ):
            self._path.mkdir(parents=True, exist_ok=True)
            write_text(self._path / f"{name}.json", text)
