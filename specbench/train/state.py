"""Where a training stands: one file of safetensors, tensors and, in its header, JSON. It is the old one or the new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from specbench.base.errors import RunError
from specbench.base.files import file_errors, write_bytes
from specbench.base.record import Json
from specbench.base.textsafe import excerpt


def write_state(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write a state.

    Raises:
        RunError: The folder cannot be written.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with file_errors(
        f"The folder {str(path.parent)!r} cannot be written", "Free some space, and add --resume."
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(held, metadata={"facts": json.dumps(facts)}))


def read_state(path: Path) -> tuple[dict[str, torch.Tensor], Json]:
    """What ``write_state`` wrote.

    Raises:
        RunError: It is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            facts = json.loads(file.metadata()["facts"])
    except Exception as error:  # what parsers raise
        raise RunError(
            f"The state {str(path)!r} is damaged: {excerpt(error).rstrip('.')}.", "Train into another folder."
        ) from error
    return tensors, facts


def stored_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """An AdamW's averages, by the names of the parameters."""
    held = {}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            held[f"{key}/{name}"] = torch.as_tensor(value)
    return held


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Give an AdamW that has made no step its averages back."""
    for name, parameter in names.items():
        keys = [each.partition("/")[0] for each in tensors if each.partition("/")[2] == name]
        optimizer.state[parameter] = {
            key: tensors[f"{key}/{name}"].to("cpu" if key == "step" else parameter.device) for key in keys
        }
