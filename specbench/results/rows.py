"""The lines of ``generations.jsonl``: their fields, each declared once, and what a table of them holds.

A line is a generation, or a group of them that were decoded side by side (``requests``).

The writer, the check on reading and the columns of the table follow from what is declared here;
docs/results-format.md describes the fields, and a test holds it against this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from sys import intern
from typing import Any

from specbench.decoding.records import Step
from specbench.shapes import count, misfit, number, size

Key = tuple[str, str, int, int, bool]
"""What is measured at most once: configuration, prompt or group, turn, repeat, and whether it is a warm-up."""

OTHER_ANSWERS = ("beam",)
"""Kinds of configurations whose answers are not meant to be plain decoding's."""

FOREIGN = ("transformers", "assisted", *OTHER_ANSWERS)
"""Kinds of configurations that another library decodes."""

PLAIN = "plain decoding"
"""What speedups are over, in words, where it is no server."""

RIVALS = ("speculative", "server")
"""Kinds of configurations among which the fastest is looked for; one that is its own baseline is none of them."""

_MAYBE_TEXT, _MAYBE_NUMBER = (str, None), (number, None)

LINE = {
    "schema": count, "run_id?": str, "config": str, "prompt": str, "category?": str, "turn": count, "repeat": count,
    "order?": count, "warmup": bool, "seed?": count, "started?": _MAYBE_NUMBER, "status": str, "error?": _MAYBE_TEXT,
    "load_average?": _MAYBE_NUMBER, "steal_share?": _MAYBE_NUMBER, "busy_elsewhere?": _MAYBE_NUMBER, "warnings?": [str],
}  # fmt: skip
"""Shape of every line."""

SERVER = {
    "text": str, "counted_by": str, "problem": _MAYBE_TEXT, "pieces": count, "bursts": count, "attempts": count,
    "cached_tokens": (count, None), "drafted": (count, None), "accepted": (count, None), "drafts?": (count, None),
    "kept_at?": ([count], None),
}  # fmt: skip
"""What a line of a generation holds as ``server`` if a server made it."""

MEASURED = {
    "prompt_tokens": count, "new_tokens": count, "token_ids": list, "finish_reason?": _MAYBE_TEXT,
    "first_tokens?": count, "ttft_s": size, "prefill_s": size, "decode_s": size, "total_s": size,
    "peak_memory_bytes?": (count, None), "log_probability?": _MAYBE_NUMBER, "steps": dict,
    "server?": (SERVER, None),
}  # fmt: skip
"""What a line of a generation that has not failed holds beside that."""

REQUEST = {"prompt": str, "category?": str, "arrived_s": size, "queued_s": size} | {
    name: shape for name, shape in MEASURED.items() if name != "peak_memory_bytes?"
}
"""What a generation within a group holds."""

GROUP = {
    "requests": [REQUEST], "clients": (count, None), "seconds": size, "tokens": count,
    "peak_memory_bytes?": (count, None),
    "speculation?": (None, {"drafted": count, "accepted": count, "drafts?": count, "kept_at?": [count]}),
    "pool?": (None, {"block": count, "blocks": count, "peak": count, "bytes": count}),
}  # fmt: skip
"""What a line of a group that has not failed holds beside ``LINE``, whose ``prompt`` is the group's name."""


@dataclass(frozen=True, slots=True)
class StepField:
    """A number of every step; a line holds a list of them.

    Attributes:
        name: Of the list, and of the column behind ``steps_``.
        kind: ``int`` for tokens and passes, ``float`` for seconds.
        of: Takes it from a step.
        before: What it was where a line is older than the field, from the list ``drafted``; ``None``: all have it.
    """

    name: str
    kind: type
    of: Callable[[Step], float]
    before: Callable[[Sequence[int]], Sequence[int]] | None = None


STEP_FIELDS = (
    StepField("drafted", int, lambda step: step.gamma),
    StepField("tested", int, lambda step: step.tested),
    StepField("accepted", int, lambda step: step.accepted),
    StepField("emitted", int, lambda step: len(step.tokens)),
    *(
        StepField(name, float, attrgetter(f"times.{name}"))
        for name in ("draft_s", "draft_prefill_s", "verify_s", "accept_s", "rollback_s", "other_s")
    ),
    StepField("nodes", int, lambda step: len(step.drafted), lambda drafted: drafted),
    StepField("siblings", int, lambda step: len(step.siblings), lambda drafted: [0] * len(drafted)),
    StepField(
        "passes",
        int,
        lambda step: step.gamma if step.passes is None else step.passes,
        lambda drafted: drafted,
    ),
)

STEP_OTHERS = ("expected_acceptance", "closing", "policy", "widths", "ranks", "parents")
"""Beside the numbers: a list over the tested positions, a word or ``None``; for each note of the rule a list; and where
there are trees, lists over the tested positions, over the accepted nodes, and over all nodes, see ``Step``."""

_OF_TREES = ("widths", "ranks")


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a line."""
    return row["config"], row["prompt"], row["turn"], row["repeat"], row["warmup"]


def generations(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The generations of a line: itself, or those of its group with all that the line says of them.

    Each has ``group``: the name of its group, empty for one that was decoded alone.
    """
    if "requests" not in row:
        return [{**row, "group": ""}]
    of_all = {name: value for name, value in row.items() if name != "requests"}
    return [{**of_all, **request, "group": row["prompt"]} for request in row["requests"]]


# -- writing ---------------------------------------------------------------------------------------


def step_lists(steps: Sequence[Step]) -> dict[str, Any]:
    """The field ``steps`` of a line."""
    notes = dict.fromkeys(name for step in steps for name in step.policy)
    trees = any(step.parents is not None for step in steps)
    return {
        **{
            field.name: [field.of(step) if field.kind is int else rounded(field.of(step)) for step in steps]
            for field in STEP_FIELDS
        },
        "expected_acceptance": [[rounded(value) for value in step.expected_acceptance] for step in steps],
        "closing": [step.closing for step in steps],
        "policy": {name: [rounded(step.policy.get(name)) for step in steps] for name in notes},
        **({name: [list(getattr(step, name)) for step in steps] for name in _OF_TREES} if trees else {}),
        **({"parents": [[node + 1 for node in step.parents or ()] for step in steps]} if trees else {}),
    }


def rounded(value: float | None, digits: int = 9) -> float | None:
    """To the nanosecond: what lies behind is noise, and half of the file. ``None`` for what JSON has no number for."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


# -- reading ---------------------------------------------------------------------------------------


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line as a row, or ``None`` if it is not a whole one; the numbers in its lists are not looked at."""
    row = parse_json(line)
    return row if isinstance(row, dict) and _is_row(row) else None


def parse_json(line: bytes) -> Any:
    """What a line holds; ``None`` if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_row(row: dict[str, Any]) -> bool:
    if misfit(row, LINE) is not None:
        return False
    if row["status"] == "failed":
        return True
    if row["status"] != "ok":
        return False
    if "requests" in row:
        return misfit(row, GROUP) is None and all(map(_is_generation, row["requests"]))
    return misfit(row, MEASURED) is None and _is_generation(row)


def _is_generation(row: dict[str, Any]) -> bool:
    """Whether the lists of a generation belong together."""
    steps = row["steps"]
    names = [field.name for field in STEP_FIELDS if field.before is None or field.name in steps]
    lists = [steps.get(name) for name in (*names, "expected_acceptance")]
    return (
        set(map(type, row["token_ids"])) <= {int}
        and all(isinstance(each, list) for each in lists)
        and len(set(map(len, lists))) == 1
        and isinstance(steps.get("policy", {}), dict)
        and isinstance(steps.get("closing", []), list)
    )


def step_columns(steps: Mapping[str, Any]) -> dict[str, Any]:
    """The field ``steps`` of a line as cells of a table: ``STEP_FIELDS`` and the notes as arrays of shape [steps].

    Raises:
        ValueError, TypeError, AttributeError, KeyError, OverflowError: They hold something else than numbers.
    """
    drafted = steps.get("drafted", ())
    cells: dict[str, Any] = {
        field.name: numbers(
            field.before(drafted) if field.before and field.name not in steps else steps.get(field.name, ()),
            field.kind,
        )
        for field in STEP_FIELDS
    }
    cells["expected_acceptance"] = steps.get("expected_acceptance", [])
    cells["closing"] = [None if each is None else intern(each) for each in steps.get("closing", ())]
    cells["policy"] = {name: _with_gaps(values) for name, values in steps.get("policy", {}).items()}
    if any(len(values) != len(drafted) for values in (cells["closing"], *cells["policy"].values()) if steps):
        raise ValueError("lists of other lengths")
    trees = any(name in steps for name in _OF_TREES)
    for name in (*_OF_TREES, "parents"):
        there = name in steps or (trees and name in _OF_TREES)
        cells[name] = steps[name] if there else []
        numbers([value for each in cells[name] for value in each], int)
        if there and len(cells[name]) != len(drafted):
            raise ValueError("lists of other lengths")
    if any(parent > node for each in cells["parents"] for node, parent in enumerate(each)):
        raise ValueError("a node before the one it stands behind")
    return cells


def numbers(values: Sequence[Any], kind: type) -> Any:
    """Whole numbers from 0 (``int``) as int32, or finite ones (``float``) as float64; shape [values].

    Raises:
        ValueError: They are something else.
    """
    import numpy as np

    found = np.array(values, dtype=None if values else kind)
    whole = found.dtype.kind == "i"
    if found.ndim != 1 or not (whole or (kind is float and found.dtype.kind == "f")):
        raise ValueError("no list of numbers")
    low, high = (0, 2**31) if kind is int else (-1e18, 1e18)
    if not np.all((found >= low) & (found < high)):
        raise ValueError("a number is out of range")
    return found.astype(np.int32 if kind is int else np.float64)


def _with_gaps(values: Sequence[Any]) -> Any:
    """Numbers, NaN for ``None``."""
    gaps = [value is None for value in values]
    known = numbers([0.0 if gap else value for value, gap in zip(values, gaps, strict=True)], float)
    known[gaps] = math.nan
    return known
