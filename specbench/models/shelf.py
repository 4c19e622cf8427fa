"""What `specbench calibrate` found out is kept in the cache folder: a file of JSON for everything it was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from specbench.errors import RunError, UsageError
from specbench.files import explained, reason, write_text
from specbench.models.cache import CACHE_VARIABLE, cache_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FORMAT = 1
"""Version of the files. 1: first release."""

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class Shelf(Generic[T]):
    """Things of one kind, by name.

    Attributes:
        folder: Of the cache folder.
        subject: What messages call one of them, with a verb behind it: "The stored counts are".
        hint: How to make one.
        parse: From the fields of a file; ``None`` if they are not what they should be.
    """

    folder: str
    subject: str
    hint: str
    parse: Callable[[Mapping[str, Any]], T | None]

    @property
    def _path(self) -> Path:
        return cache_folder() / self.folder

    def names(self, beginning: str = "") -> list[str]:
        """Of all there are, in their order."""
        return sorted(path.stem for path in self._path.glob("*.json") if path.name.startswith(beginning))

    def read(self, name: str) -> T | None:
        """What is kept by that name; ``None`` for nothing.

        Raises:
            UsageError: The file is damaged. RunError: It cannot be read.
        """
        try:
            data = json.loads((self._path / f"{name}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            what = self.subject.rpartition(" ")[0]
            raise RunError(f"{what} cannot be read ({reason(error)}).") from error
        except (ValueError, RecursionError):
            data = None
        known = isinstance(data, dict) and data.get("format") == _FORMAT
        found = self.parse(data) if known else None
        if found is None:
            raise UsageError(f"{self.subject} damaged, or of another version of specbench.", self.hint)
        return found

    def write(self, name: str, value: T) -> None:
        """Keep it, in the place of an earlier one; a crash leaves either the old or the new one.

        Raises:
            RunError: The cache folder cannot be written. UsageError: A link stands in the file's place.
        """
        text = json.dumps({"format": _FORMAT, **asdict(value)}) + "\n"
        with explained(
            f"The cache folder {str(cache_folder())!r} cannot be written",
            f"Set {CACHE_VARIABLE} to a folder that can.",
        ):
            self._path.mkdir(parents=True, exist_ok=True)
            write_text(self._path / f"{name}.json", text)
