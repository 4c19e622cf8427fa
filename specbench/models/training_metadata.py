"""The training metadata of heads: the ``training.json`` next to a head, which ``specbench train`` writes.

Results show it, and it contains the hash of the head's weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from specbench.base.errors import RunError
from specbench.base.files import file_errors, sha256
from specbench.base.record import Count, Json, Number, Record, Seconds, doc

TRAINING_FILE = "training.json"
WEIGHTS = "model.safetensors"


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
    seconds: Annotated[Seconds | None, doc("that took")] = None
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
    found = _training_file(folder)
    try:
        facts = {name: found[name] for name in ("kind", "seconds", "measured")}
        return msgspec.convert(facts | {"tokens": found["data"]["tokens"]}, TrainingMetadata)
    except (KeyError, TypeError, ValueError):  # missing, damaged, or written by another tool
        return None


def _training_file(folder: Path) -> Json:
    """Return what a folder's ``training.json`` says; nothing if it cannot be read."""
    try:
        return msgspec.json.decode((folder / TRAINING_FILE).read_bytes(), type=Json)
    except (OSError, ValueError, RecursionError):
        return {}


def check_weights(folder: Path, name: str) -> None:
    """Raise ``RunError`` for weights whose hash is not the one in their ``training.json``, if it has one."""
    expected = _training_file(folder).get("sha256")
    if not isinstance(expected, str):
        return
    with file_errors(f"The weights of {name} cannot be read"):
        found = sha256(folder / WEIGHTS)
    if found != expected:
        raise RunError(
            f"The weights of {name} are not those that its {TRAINING_FILE} describes.",
            "Copy the whole folder again, or continue its training.",
        )
