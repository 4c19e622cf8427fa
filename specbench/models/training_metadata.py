"""The training metadata of heads: the ``training.json`` next to a head, which ``specbench train`` writes.

Results show it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from specbench.base.record import Count, Json, Number, Record, doc

TRAINING_FILE = "training.json"


class TrainingMeasurement(Record):
    """A measurement of a head during its training."""

    tokens: Annotated[Count, doc("trained on so far")]
    tokens_per_step: Number
    accepted: Annotated[list[Number], doc("share of those tested, by place in the draft")]
    categories: Annotated[dict[str, Number], doc("tokens per step")]


class TrainingMetadata(Record):
    """How a head was trained; for a head trained by other programs, only its kind and form."""

    kind: str
    form: Annotated[str | None, doc("`speculators` if it is written as that library writes heads")] = None
    tokens: Annotated[Count | None, doc("of text trained on")] = None
    measured: list[TrainingMeasurement] = []


def read_metadata(folder: Path) -> TrainingMetadata | None:
    """Read how the head in a folder was trained; ``None`` if that is not known."""
    try:
        found = msgspec.json.decode((folder / TRAINING_FILE).read_bytes(), type=Json)
        facts = {"kind": found["kind"], "tokens": found["data"]["tokens"]}
        return msgspec.convert(facts, TrainingMetadata)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):  # missing, damaged, or of another tool
        return None
