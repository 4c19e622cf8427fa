"""How a trained head came about: the ``training.json`` beside it, which ``specbench train`` writes.

It is told in results, and says which weights belong to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbench.errors import RunError, UsageError
from specbench.files import explained, sha256
from specbench.shapes import count, misfit, not_json, number, size

TRAINING_FILE = "training.json"
WEIGHTS = "model.safetensors"

STORY_SHAPE = {
    "kind": str,
    "form?": str,
    "compact?": bool,
    "tokens?": count,
    "seconds?": size,
    "measured?": [
        {"tokens": count, "tokens_per_step": number, "accepted": [number], "categories": {str: number}}
    ],
}
"""What results keep of it: whether it was written small, the ``tokens`` that were trained on, once each, and what was
measured meanwhile: ``tokens`` trained on so far, tokens per step, of all held-out prompts and by category, and of the
drafts tested the share kept, by place. Of a head that was trained elsewhere there is its kind alone, and its ``form``
if that is the one of ``speculators``."""

_FILE_SHAPE = {
    "kind": str,
    "settings?": {"compact?": bool},
    "data": {"tokens": count},
    "seconds": size,
    "measured": STORY_SHAPE["measured?"],
}

_PACKAGED = Path(__file__).with_name("packaged")
_SAY = "Install specbench anew, or name another drafter."


def _read(folder: Path) -> Mapping[str, Any] | None:
    """The file; ``None`` if there is none, or another tool's or a damaged one, which is told by nobody."""
    try:
        found = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"), parse_constant=not_json)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def story_of(folder: Path) -> dict[str, Any] | None:
    """What results keep of how the head in a folder was trained; ``None`` where nothing tells of it."""
    found = _read(folder)
    if found is None or misfit(found, _FILE_SHAPE) is not None:
        return None
    names = STORY_SHAPE["measured?"][0]  # type: ignore[index]
    return {
        "kind": found["kind"],
        **({"compact": True} if found.get("settings", {}).get("compact") else {}),
        "tokens": found["data"]["tokens"],
        "seconds": found["seconds"],
        "measured": [{name: each[name] for name in names} for each in found["measured"]],
    }


def check_weights(folder: Path, name: str) -> None:
    """Refuse weights that are not those that the ``training.json`` beside them tells of, where it does.

    Raises:
        RunError: They are others, or cannot be read.
    """
    told = (_read(folder) or {}).get("sha256")
    if not isinstance(told, str):
        return
    with explained(f"The weights of {name} cannot be read"):
        found = sha256(folder / WEIGHTS)
    if found != told:
        raise RunError(
            f"The weights of {name} are not those that its {TRAINING_FILE} tells of.",
            "Copy the whole folder again, or go on with its training.",
        )


def is_packaged(alias: str) -> bool:
    """Whether a head is there that may come with specbench."""
    return (_PACKAGED / alias / TRAINING_FILE).is_file()


def packaged_folder(alias: str) -> Path:
    """Where a head lies that comes with specbench: as ``specbench train --compact`` wrote it.

    Raises:
        UsageError: It is not there. RunError: Its weights are not those that were put there.
    """
    if not is_packaged(alias):
        raise UsageError(
            f"The head {alias} does not come with this specbench.",
            "Name another drafter, or train one with `specbench train`.",
        )
    folder = _PACKAGED / alias
    if not isinstance((_read(folder) or {}).get("sha256"), str):
        raise RunError(f"The {TRAINING_FILE} of {alias} is damaged.", _SAY)
    return folder
