"""Declaration, reading and writing of stored records.

The annotations of a record's class declare its fields: type, limits and meaning. Reading, checks, JSON and the tables
of docs/results-format.md are derived from them. A field with a default can be missing, and undeclared fields are
ignored.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import msgspec
from msgspec import Meta, Struct

from specbench.base.textsafe import encodable


def doc(text: str) -> Meta:
    """Return an annotation with the description of a field in docs/results-format.md."""
    return Meta(description=text)


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Seconds = Annotated[float, Meta(ge=0, lt=1e18)]
Size = Annotated[float, Meta(ge=0, lt=1e18)]
Length = Annotated[int, Meta(ge=0, lt=2**20)]
Small = Annotated[int, Meta(ge=0, lt=2**31)]
Figure = Annotated[float, Meta(ge=-1e18, lt=1e18)]
Json = dict[str, Any]
"""A JSON object that is no record: another program's, one to print, or options."""


class _Frozen(msgspec.StructMeta):
    """Metaclass that makes records frozen, with keyword-only fields."""

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: Any
    ) -> _Frozen:
        return super().__new__(mcls, name, bases, namespace, **{"frozen": True, "kw_only": True, **options})


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record(Struct, metaclass=_Frozen, frozen=True):
    """A stored JSON object."""


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Estimate(Record, kw_only=False):
    """A figure with its 95% confidence interval."""

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

    def overlaps(self, value: float) -> bool | None:
        """Return whether ``value`` lies in the interval; ``None`` without an interval."""
        return None if self.low is None or self.high is None else self.low <= value <= self.high


NO_FIGURE = Estimate(math.nan, None, None, 0)
BASELINE = Estimate(1.0, None, None, 0)
"""The speedup of a baseline over itself."""


def to_dict(record: Struct) -> Json:
    """Return a record as a JSON object; what is no record in it has ``to_json``."""
    found: Json = msgspec.to_builtins(record, str_keys=True, enc_hook=lambda value: value.to_json())
    return found


def from_dict(data: Any, kind: type[AnyRecord]) -> AnyRecord:
    """Return the record of a JSON object; what is no record in it has ``from_json``, which raises ``ValueError``."""
    return msgspec.convert(data, kind, str_keys=True, dec_hook=lambda part, value: part.from_json(value))


def to_json(*records: Struct, indent: int | None = None) -> bytes:
    """Encode data and records as JSON in ASCII; a lone surrogate becomes U+FFFD.

    Raises:
        ValueError: A number is not finite.
    """
    whole = {name: value for record in records for name, value in to_dict(record).items()}
    separators = (",", ":") if indent is None else None
    text = json.dumps(whole, allow_nan=False, separators=separators, indent=indent)
    if "\\ud" in text:
        clean = json.loads(encodable(json.dumps(whole, ensure_ascii=False)))
        text = json.dumps(clean, separators=separators, indent=indent)
    return text.encode("ascii")


def wrong_field(error: Exception) -> str:
    """Return the field that msgspec's error names (``configs[0].gamma``); empty if it names none."""
    text = str(error)
    place = text.rpartition("`$")[2].rstrip("`").removeprefix(".") if "`$" in text else ""
    if "missing required field" in text:
        name = text.split("`")[1]
        return f"{place}.{name}" if place else name
    return place


def finite(data: Any) -> Any:
    """Return JSON data with ``null`` in place of numbers that are not finite."""
    return json.loads(json.dumps(data), parse_constant=lambda _: None)


def finite_or_none(value: float | None) -> float | None:
    """Return ``None`` for NaN and infinities, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None


def ratio(numerator: float, denominator: float) -> float:
    """Return the ratio, or NaN if the denominator is 0."""
    return numerator / denominator if denominator else math.nan


def rounded(value: float | None, digits: int = 9) -> float | None:
    """Round to 9 digits (nanoseconds; further digits are noise); return ``None`` for a number that is not finite."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def not_json(constant: str) -> None:
    """Raise an error for NaN and infinities: ``json.loads(..., parse_constant=not_json)``."""
    raise ValueError(f"{constant} is no JSON.")
