"""What was found out once is kept in the cache folder: a file of JSON for everything it was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, reason, write_text
from specbench.models.cache import CACHE_VARIABLE, cache_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FORMAT = 1
"""Version of the files. 1: first release."""

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class JsonStore(Generic[T]):
    """Entries of one kind, by name.

    Attributes:
        folder: Of the cache folder.
        entry: Their class, a dataclass of texts, flags, numbers and tuples of these. A file is checked against it.
        subject: What messages call one of them, with a verb behind it: "The stored counts are".
        hint: How to make one.
        valid: Whether the values of an entry go together.
    """

    folder: str
    entry: type[T]
    subject: str
    hint: str
    valid: Callable[[T], bool] = lambda _: True

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
            found = self._parsed(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = self.subject.rpartition(" ")[0]
            raise RunError(f"{what} cannot be read ({reason(error)}).") from error
        except (ValueError, RecursionError):
            raise UsageError(
                f"{self.subject} damaged, or of another version of specbench.", self.hint
            ) from None
        return found

    def require(self, name: str, missing: str) -> T:
        """What is kept by that name.

        Raises:
            UsageError: Nothing is, which ``missing`` says, or the file is damaged. RunError: It cannot be read.
        """
        found = self.read(name)
        if found is None:
            raise UsageError(missing, self.hint)
        return found

    def _parsed(self, data: Any) -> T:
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError("of another format")
        kinds = get_type_hints(self.entry)
        found = self.entry(**{name: _value(data.get(name), kind) for name, kind in kinds.items()})
        if not self.valid(found):
            raise ValueError("of no use")
        return found

    def write(self, name: str, value: T) -> None:
        """Keep it, in the place of an earlier one; a crash leaves either the old or the new one.

        Raises:
            RunError: The cache folder cannot be written. UsageError: A link stands in the file's place.
        """
        text = json.dumps({"format": _FORMAT, **asdict(value)}) + "\n"
        with file_errors(
            f"The cache folder {str(cache_folder())!r} cannot be written",
            f"Set {CACHE_VARIABLE} to a folder that can.",
        ):
            self._path.mkdir(parents=True, exist_ok=True)
            write_text(self._path / f"{name}.json", text)


def _value(value: Any, kind: Any) -> Any:
    """A value of JSON as a field of this type has it.

    Raises:
        ValueError: It is of another type.
    """
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_value(each, get_args(kind)[0]) for each in value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{value!r} is no {kind}")
