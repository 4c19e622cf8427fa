"""What a training may begin with: its folder, and the head that it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.models.heads import TrainedHead
from specbench.models.training_metadata import TRAINING_FILE
from specbench.train.settings import TrainingSettings
from specbench.train.students import KINDS

if TYPE_CHECKING:
    from specbench.models.target import Target


STATE = "state"
"""Folder of a training that has not ended, within its result's."""

BEGUN = "begun.json"
"""What a training was begun with, in there; without it there is none to go on with."""


def check_folder(out: Path, *, resume: bool) -> None:
    """Refuse a folder to train into, before anything is loaded.

    Raises:
        UsageError: There is something in it, or nothing to go on with.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{str(out)!r} is no folder.", "Name another one with --out.")
    under_way = (out / STATE / BEGUN).is_file()
    if resume and not under_way:
        ended = (out / TRAINING_FILE).is_file()
        raise UsageError(
            f"The training in {str(out)!r} has ended."
            if ended
            else f"There is no training in {str(out)!r} to go on with.",
            "Leave --resume out, and name another folder with --out." if ended else "Leave --resume out.",
        )
    if under_way and not resume:
        raise UsageError(
            f"The training in {str(out)!r} has not ended.", "Add --resume, or name another folder with --out."
        )
    if not resume and out.is_dir() and any(path.name != STATE for path in out.iterdir()):
        raise UsageError(f"The folder {str(out)!r} is not empty.", "Name another one with --out.")


def check_head(start: TrainedHead, settings: TrainingSettings, target: Target) -> None:
    """Refuse a head to go on from that is of another kind, or another target's."""
    kind = "eagle" if start.files.kind == "eagle3" else start.files.kind
    if kind != settings.kind:
        raise UsageError(
            f"The head {start.name} is of the kind {kind}, and what is trained is of the kind {settings.kind}.",
            f"Give --kind {kind}." if kind in KINDS else "Name another one with --start.",
        )
    start.files.check(target.language_model.model.config, target.name)
    if (
        start.files.settings.get("target_fingerprint", target.language_model.identity)
        != target.language_model.identity
    ):
        raise UsageError(
            f"The head {start.name} was trained for other weights than those of {target.name}.",
            "Name another one with --start.",
        )
