"""The tables of docs/results-format.md, generated from the declarations of the records when the site is built.

A line ``<!-- NAME -->`` of the page stands for the table of the record NAME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from specbench.base.record import Record
from specbench.decoding.theory import PassCosts
from specbench.results import lines as _lines  # noqa: F401 - declares records
from specbench.rows import Row


def _records(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _records(each)


_ALL: list[type[msgspec.Struct]] = [*_records(Record), PassCosts]
_OTHERS = ("specbench.results.trace", "specbench.train", "specbench.serve")  # records of other files
RECORDS = {each.__name__: each for each in _ALL if not each.__module__.startswith(_OTHERS)}
"""By name."""

_JSON = {str: "text", bool: "true or false", int: "integer", float: "number", Any: "anything", list: "list"}


def table_of(record: type[msgspec.Struct]) -> str:
    """Return the fields of a record, without inherited ones, as a Markdown table."""
    inherited = {
        name for base in record.__bases__ if issubclass(base, Record) for name in base.__struct_fields__
    }
    rows = [
        f"| `{field.encode_name}` | {_type(field.type)} | {_meaning(field.type)} |"
        for field in msgspec.structs.fields(record)
        if field.name not in inherited
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _meaning(kind: Any) -> str:
    if get_origin(kind) is not Annotated:
        return ""
    found = [each.description for each in kind.__metadata__ if isinstance(each, msgspec.Meta)]
    return next((each for each in reversed(found) if each), "").replace("|", "\\|")


def _type(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " or ".join(f'`"{each}"`' for each in inner)
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is not None and inner and isinstance(origin, type) and hasattr(origin, "keys"):
        values = _type(inner[1])
        return "object" if values == "anything" else f"object of {values}"
    if inner:  # a union
        known = " or ".join(_type(each) for each in inner if each is not NoneType)
        return f"{known} or `null`" if NoneType in inner else known
    return _JSON.get(kind) or f"`{'StoredRow' if kind is Row else kind.__name__}`"


_PLACE = re.compile(r"^<!-- (\w+) -->$", re.MULTILINE)


def with_tables(text: str) -> str:
    """Return the page with the tables of its records."""
    return _PLACE.sub(lambda found: table_of(RECORDS[found[1]]), text)
