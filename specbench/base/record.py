"""How the records of a stored run are declared, read and written.

A record is a class whose annotations say everything about its fields: type, limits and meaning. Readers, their checks,
the JSON and the tables of docs/results-format.md follow from them. A field with a default may be missing in older runs;
fields that are not declared are ignored.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, dataclass_transform

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr


def doc(text: str) -> Meta:
    """The meaning of a field, as docs/results-format.md has it."""
    return Meta(description=text)


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Seconds = Annotated[float, Meta(ge=0, lt=1e18)]
Size = Annotated[float, Meta(ge=0, lt=1e18)]
Length = Annotated[int, Meta(ge=0, lt=2**20)]
Small = Annotated[int, Meta(ge=0, lt=2**31)]
Figure = Annotated[float, Meta(ge=-1e18, lt=1e18)]
Json = dict[str, Any]
"""A JSON object that is no record: of another program, put together to be printed, or of options."""


class _Frozen(msgspec.StructMeta):
    """Makes records frozen, with fields given by name."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: Any
    ) -> _Frozen:
        return super().__new__(mcls, name, bases, namespace, **{"frozen": True, "kw_only": True, **options})


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record(Struct, metaclass=_Frozen, frozen=True):
    """An object of a stored file."""


class Estimate(Record, kw_only=False):
    """A figure and how sure it is."""

    value: Annotated[Size, doc("the figure")]
    low: Annotated[
        Size | None,
        doc("lower end of its interval; `null` where there is too little for one, or it is too wide"),
    ]
    high: Annotated[Size | None, doc("upper end")]
    prompts: Annotated[Count, doc("how many it rests on")]
    basis: Annotated[
        Literal["prompts", "repeats"] | None,
        doc(
            "what varies in the interval: `prompts`; `repeats`, with a single prompt, so that it says nothing about"
            " others; `null` without an interval"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.basis is None and self.low is not None:  # of an older run
            force_setattr(self, "basis", "prompts" if self.prompts > 1 else "repeats")

    def overlaps(self, value: float) -> bool | None:
        """Whether ``value`` lies in the interval; ``None`` without one."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


NO_FIGURE = Estimate(math.nan, None, None, 0)


def to_dict(record: Struct) -> Json:
    """A record as objects that JSON has."""
    found: Json = msgspec.to_builtins(record, str_keys=True)
    return found


def to_json(*records: Struct, indent: int | None = None) -> bytes:
    """Records as one JSON object in ASCII; half a surrogate pair, which JSON cannot hold, becomes U+FFFD.

    Raises:
        ValueError: A number is not finite.
    """
    whole = {name: value for record in records for name, value in to_dict(record).items()}
    separators = (",", ":") if indent is None else None
    text = json.dumps(whole, allow_nan=False, separators=separators, indent=indent)
    if "\\ud" in text:
        clean = (
            json.dumps(whole, ensure_ascii=False)
            .encode("utf-16", "surrogatepass")
            .decode("utf-16", "replace")
        )
        text = json.dumps(json.loads(clean), separators=separators, indent=indent)
    return text.encode("ascii")


def wrong_field(error: ValueError) -> str:
    """Which field of a record an error of msgspec is about (``configs[0].gamma``); empty if it names none."""
    text = str(error)
    place = text.rpartition("`$")[2].rstrip("`").removeprefix(".") if "`$" in text else ""
    if "missing required field" in text:
        name = text.split("`")[1]
        return f"{place}.{name}" if place else name
    return place


def ratio(numerator: float, denominator: float) -> float:
    """NaN where there is nothing to divide by."""
    return numerator / denominator if denominator else math.nan


def rounded(value: float | None, digits: int = 9) -> float | None:
    """To the nanosecond: the rest is noise, and half of the file. ``None`` for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def not_json(constant: str) -> None:
    """For ``json.loads(..., parse_constant=not_json)``: NaN and the infinities, which Python takes, are no JSON."""
    raise ValueError(f"{constant} is no JSON.")
