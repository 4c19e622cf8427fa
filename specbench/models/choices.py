"""Which form of itself a target drafts with best, as `specbench calibrate` found out: kept in the cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specbench.errors import UsageError
from specbench.models.shelf import Shelf
from specbench.specs.drafters import SelfForm


@dataclass(frozen=True)
class ChoiceKey:
    """What a choice holds for: a target by its fingerprint, in one dtype, on one kind of device."""

    fingerprint: str
    dtype: str
    device: str

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.fingerprint}-{self.dtype}-{self.device}"


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


def _parse(data: Mapping[str, Any]) -> Choice | None:
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


_HINT = "Run `specbench calibrate` with this target, dtype and device."
_SHELF = Shelf("calibrations", "The stored calibration is", _HINT, _parse)


def any_choice() -> bool:
    """Whether anything was ever calibrated here."""
    return bool(_SHELF.names())


def read_choice(key: ChoiceKey) -> Choice:
    """What was chosen for a target.

    Raises:
        UsageError: Nothing was, or the file is damaged. RunError: It cannot be read.
    """
    choice = _SHELF.read(key.name)
    if choice is None:
        raise UsageError(f"No calibration is stored for this target in {key.dtype} on {key.device}.", _HINT)
    return choice


def write_choice(key: ChoiceKey, choice: Choice) -> None:
    """Store a choice, see ``Shelf.write``."""
    _SHELF.write(key.name, choice)
