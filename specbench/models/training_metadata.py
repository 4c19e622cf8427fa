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

    @property
    def acceptance(self) -> float | None:
        """The share of first draft tokens that were accepted in the best measurement, the one whose weights were kept.

        ``None`` if nothing was measured, or all or no tokens were accepted.
        """
        best = max(self.measured, key=lambda each: each.tokens_per_step, default=None)
        share = best.accepted[0] if best and best.accepted else 0.0
        return share if 0.0 < share < 1.0 else None


def read_metadata(folder: Path) -> TrainingMetadata | None:
    """Read how the head in a folder was trained; ``None`` if that is not known."""
    try:
        found = msgspec.json.decode((folder / TRAINING_FILE).read_bytes(), type=Json)
        facts = {name: found[name] for name in ("kind", "measured")}
        return msgspec.convert(facts | {"tokens": found["data"]["tokens"]}, TrainingMetadata)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):  # missing, damaged, or of another tool
        return None
