"""The state of a training in its folder: its settings, its progress, and its checkpoint.

A checkpoint is one safetensors file, with tensors and, in its header, JSON. It is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import safe_open
from safetensors.torch import save

from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, write_bytes
from specbench.base.record import Json
from specbench.base.textsafe import excerpt
from specbench.models.training_metadata import TRAINING_FILE
from specbench.train.settings import Measured

STATE = "state"
"""Folder of an unfinished training, within that of the result."""

BEGUN = "begun.json"
"""File in it with what the training was begun with; without it there is nothing to resume."""

_CURVE_POINTS = 200


class TrainerState(Struct):
    """The progress of a training, stored in each checkpoint.

    Attributes:
        step, tokens: Number of steps made, and of tokens trained on.
        steps: Number of steps to make; 0 before it is decided.
        next_measurement: Step after which the head is measured again.
        since: Losses and shares of right tokens by position, for each step since the last point of the curve.
        measurements: The measurements, that of the untrained head first.
        stale: Number of measurements since the best one.
        measure_s, first_measure_s: Durations of the last and first measurement.
        measured_tokens: Tokens decoded for each held-out prompt: those of the first measurement.
    """

    step: int = 0
    tokens: int = 0
    steps: int = 0
    next_measurement: int = 0
    since: list[list[float]] = []
    curve: list[Json] = []
    measurements: list[Measured] = []
    stale: int = 0
    ended: bool = False
    measure_s: float = 0.0
    first_measure_s: float = 0.0
    measured_tokens: list[int] = []
    step_cost: float | None = None
    seconds: float = 0.0

    @property
    def loss(self) -> float | None:
        """Loss at the first position, at the last point of the curve; ``None`` before it."""
        return float(self.curve[-1]["loss"][0]) if self.curve else None

    def measurements_left(self, measures: int) -> int:
        """Return how many of ``measures`` measurements are left, not counting that of the untrained head."""
        return max(0, measures + 1 - len(self.measurements))

    def plan(self, steps: int, measures: int) -> None:
        """Set the total steps, and spread the remaining measurements over them."""
        self.steps = steps
        rest = max(1, self.measurements_left(measures))
        self.next_measurement = self.step + -(-(steps - self.step) // rest)

    def record_step(self, tokens: int, losses: Sequence[float], right: Sequence[float]) -> None:
        """Record a step, see ``Learner.step``, and add a point to the curve when one is due."""
        self.step += 1
        self.tokens += tokens
        self.since.append([*losses, *right])
        if len(self.since) < -(-self.steps // _CURVE_POINTS) and self.step < self.steps:
            return
        means = [sum(column) / len(self.since) for column in zip(*self.since, strict=True)]
        depth = len(means) // 2
        self.curve.append(
            {"step": self.step, "tokens": self.tokens, "loss": means[:depth], "right": means[depth:]}
        )
        self.since = []

    def record_measurement(self, measured: Measured, patience: int) -> bool:
        """Add a measurement, and return whether it is the best so far."""
        best = all(measured.tokens_per_step > each.tokens_per_step for each in self.measurements)
        self.stale = 0 if best else self.stale + 1
        self.ended = self.stale >= patience
        self.measurements.append(measured)
        return best


# -- files -----------------------------------------------------------------------------------------


def check_folder(out: Path, *, resume: bool) -> None:
    """Check the folder to train into, before anything is loaded."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{str(out)!r} is no folder.", "Choose another --out.")
    unfinished = (out / STATE / BEGUN).is_file()
    if resume and not unfinished:
        if (out / TRAINING_FILE).is_file():
            raise UsageError(
                f"The training in {str(out)!r} has ended.", "Leave --resume out, and choose another --out."
            )
        raise UsageError(f"There is no training in {str(out)!r} to resume.", "Leave --resume out.")
    if unfinished and not resume:
        raise UsageError(
            f"The training in {str(out)!r} has not ended.", "Add --resume, or choose another --out."
        )
    if not resume and out.is_dir() and any(path.name != STATE for path in out.iterdir()):
        raise UsageError(f"The folder {str(out)!r} is not empty.", "Choose another --out.")


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> None:
    """Write a checkpoint."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with file_errors(
        f"The folder {str(path.parent)!r} cannot be written", "Free some space, and add --resume."
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(stored, metadata={"facts": json.dumps(fields)}))


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], Json]:
    """Read what ``write_state`` wrote."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            fields = json.loads(file.metadata()["facts"])
    except Exception as error:  # parsers raise all kinds
        raise RunError(
            f"The state {str(path)!r} is damaged: {excerpt(error).rstrip('.')}.", "Train into another folder."
        ) from error
    return tensors, fields


def stored_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return an AdamW's averages, by the names of the parameters."""
    return {
        f"{key}/{name}": torch.as_tensor(value)
        for name, parameter in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Restore the averages of a new AdamW optimizer."""
    for name, parameter in names.items():
        keys = [each.partition("/")[0] for each in tensors if each.partition("/")[2] == name]
        optimizer.state[parameter] = {
            key: tensors[f"{key}/{name}"].to("cpu" if key == "step" else parameter.device) for key in keys
        }
