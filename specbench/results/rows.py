"""Data frames made of rows: dataclasses whose fields are figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pandas as pd

from specbench.base.record import Estimate
from specbench.results.run import RunConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CONFIG_FIELDS = (
    "label", "kind", "drafter", "gamma", "draft_policy", "temperature", "baseline", "batch", "arrivals",
)  # fmt: skip


def to_frame(rows: Sequence[DataclassInstance], kind: type[DataclassInstance]) -> pd.DataFrame:
    """Return rows of one class as a data frame with a column per field; an empty one has the fields as columns.

    An ``Estimate`` becomes ``<name>``, ``<name>_low`` and ``<name>_high``, one named ``speedup`` also
    ``speedup_basis``; a configuration its id as ``config`` and its fields; a mapping a column ``<name>_<key>`` each.
    """
    names = [field.name for field in fields(kind)]
    cells = [dict(cell for name in names for cell in _cells(name, getattr(row, name))) for row in rows]
    return pd.DataFrame(cells, columns=None if cells else names)


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, RunConfig):
        yield name, value.id
        for field in _CONFIG_FIELDS:
            found = getattr(value, field)
            yield field, math.nan if found is None and field in ("gamma", "batch") else found
    elif isinstance(value, Estimate):
        if name == "speedup":
            yield "speedup_basis", value.basis
        yield name, value.value
        yield f"{name}_low", math.nan if value.low is None else value.low
        yield f"{name}_high", math.nan if value.high is None else value.high
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _cells(f"{name}_{key}", each)
    else:
        yield name, value
