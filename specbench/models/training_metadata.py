"""The training metadata of heads: the ``training.json`` next to a head, which ``specbench train`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from specbench.base.record import Count, Json, Record, doc

TRAINING_FILE = "training.json"


class TrainingMetadata(Record):
    """How a head was trained; for a head trained by other programs, only its kind and form."""

    kind: str
    form: Annotated[str | None, doc("`speculators` if it is written as that library writes heads")] = None
    tokens: Annotated[Count | None, doc("of text trained on")] = None


def read_metadata(folder: Path) -> TrainingMetadata | None:
    """Read how the head in a folder was trained; ``None`` if that is not known."""
    try:
        found = msgspec.json.decode((folder / TRAINING_FILE).read_bytes(), type=Json)
        facts = {"kind": found["kind"], "tokens": found["data"]["tokens"]}
        return msgspec.convert(facts, TrainingMetadata)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):  # missing, damaged, or of another tool
        return None
