"""Which form of itself a target drafts with best, as `specbench calibrate` found out: kept in the cache folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specbench.errors import RunError, UsageError
from specbench.files import explained, reason, write_text
from specbench.models.builtin import CACHE_VARIABLE, cache_folder
from specbench.specs.drafters import SelfForm

__all__ = ["Choice", "ChoiceKey", "any_choice", "read_choice", "write_choice"]

_FORMAT = 1
"""Version of the files. 1: first release."""


@dataclass(frozen=True)
class ChoiceKey:
    """What a choice holds for: a target by its fingerprint, in one dtype, on one kind of device."""

    fingerprint: str
    dtype: str
    device: str

    @property
    def path(self) -> Path:
        return _folder() / f"{self.fingerprint}-{self.dtype}-{self.device}.json"


@dataclass(frozen=True)
class Choice:
    """A form of the target, and the figures it was chosen for.

    Attributes:
        target: The target's name.
        layers: How many decoder layers the target has.
        int8: Whether the drafter's linear layers are quantised.
        skip: The layers it leaves out, counted from 0, ascending.
        accepted: Share of one-token drafts that were the target's greedy choice, on prompts that had no part in the
            choice.
        tested: Number of those drafts.
        cost: c, the time of a drafter's pass over that of a target's pass with one token.
        gamma: The draft length with the highest predicted speedup.
        speedup: That speedup, over plain decoding.
    """

    target: str
    layers: int
    int8: bool
    skip: tuple[int, ...]
    accepted: float
    tested: int
    cost: float
    gamma: int
    speedup: float

    @property
    def form(self) -> SelfForm:
        """As ``--drafter`` takes it."""
        return SelfForm(int8=self.int8, skip=self.skip)


def _folder() -> Path:
    return cache_folder() / "calibrations"


def any_choice() -> bool:
    """Whether anything was ever calibrated here."""
    return any(_folder().glob("*.json"))


def read_choice(key: ChoiceKey) -> Choice:
    """What was chosen for a target.

    Raises:
        UsageError: Nothing was, or the file is damaged.
    """
    hint = "Run `specbench calibrate` with this target, dtype and device."
    try:
        data = json.loads(key.path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"No calibration is stored for this target in {key.dtype} on {key.device}.", hint
        ) from None
    except OSError as error:
        raise RunError(f"The stored calibration cannot be read ({reason(error)}).") from error
    except (ValueError, RecursionError):
        raise UsageError("The stored calibration is damaged.", hint) from None
    choice = _parse(data)
    if choice is None:
        raise UsageError("The stored calibration is damaged, or of another version of specbench.", hint)
    return choice


def _parse(data: Any) -> Choice | None:
    """The choice in a file's JSON; ``None`` if it is none."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        return None
    values: dict[str, Any] = {field.name: data.get(field.name) for field in fields(Choice)}
    whole = [values["layers"], values["tested"], values["gamma"]]
    figures = [values["accepted"], values["cost"], values["speedup"]]
    if not (
        isinstance(values["target"], str)
        and isinstance(values["int8"], bool)
        and isinstance(values["skip"], list)
        and all(type(number) is int for number in (*whole, *values["skip"]))
        and all(type(figure) in (int, float) for figure in figures)
    ):
        return None
    values["skip"] = tuple(sorted(set(values["skip"])))
    choice = Choice(**values)
    useless = not choice.int8 and not choice.skip
    if useless or any(not 0 < layer < choice.layers for layer in choice.skip):
        return None
    return choice


def write_choice(key: ChoiceKey, choice: Choice) -> None:
    """Store a choice, in the place of an earlier one; a crash leaves either the old or the new one.

    Raises:
        RunError: The cache folder cannot be written. UsageError: A link stands in the file's place.
    """
    text = json.dumps({"format": _FORMAT, **asdict(choice)}, indent=1) + "\n"
    with explained(
        f"The cache folder {str(cache_folder())!r} cannot be written",
        f"Set {CACHE_VARIABLE} to a folder that can.",
    ):
        _folder().mkdir(parents=True, exist_ok=True)
        write_text(key.path, text)
