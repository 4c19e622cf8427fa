"""Stored runs as JSON has them, for tests of what is written and of damaged files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specbench.results.lines import STEP_FIGURES, Measurement, StepLists, parse_line
from specbench.results.run import Run
from specbench.results.store import RunStore


def run_json(folder: Path) -> dict[str, Any]:
    """``run.json`` of a folder."""
    found: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return found


def run_of(fields: Mapping[str, Any]) -> Run:
    """A run with these fields."""
    return msgspec.convert(dict(fields), Run, strict=True)


def measurement(row: Mapping[str, Any]) -> Measurement:
    """A line of ``generations.jsonl``."""
    found = parse_line(json.dumps(row).encode())
    assert found is not None
    return found


def rows_of(store: RunStore) -> list[dict[str, Any]]:
    """The lines of a store."""
    return [json.loads(each.to_json()) for each in store.measurements()]


def step_lists(drafted: Sequence[int], **lists: Any) -> StepLists:
    """Steps that took no time, with these lists."""
    count = len(drafted)
    usual = {name: [0 if kind is int else 0.0] * count for name, kind in STEP_FIGURES.items()}
    fields = (
        usual
        | {"drafted": list(drafted), "nodes": list(drafted), "expected_acceptance": [[] for _ in drafted]}
        | lists
    )
    return StepLists(**fields)
