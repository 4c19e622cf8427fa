"""A trained head as files: safetensors and a ``config.json`` in the form of ``speculators``, and how it came about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from specbench.base.files import file_errors, sha256, write_bytes, write_text
from specbench.base.record import Json
from specbench.models.training_metadata import TRAINING_FILE, WEIGHTS
from specbench.train.students import Student

if TYPE_CHECKING:
    from specbench.models.target import Target

FORMAT = 1
"""Version of it. 1: first release."""


def write_head(
    folder: Path,
    student: Student,
    target: Target,
    head: torch.Tensor,
    drafted: torch.Tensor | None,
    *,
    compact: bool,
) -> None:
    """Write a head, each file whole.

    Args:
        folder: Where to; made if need be.
        student: What it has learnt.
        target: What it was trained for.
        head: The rows of the target's head that it drafts with, [vocab, width].
        drafted: The tokens they belong to, ascending; ``None`` for all.
        compact: Leave these rows out, which a target has, and round weights to bytes. What serves elsewhere needs them.

    Raises:
        RunError: The folder cannot be written.
    """
    tensors = student.tensors()
    if student.kind == "eagle":
        tensors |= {} if compact else {"lm_head.weight": head}
        tensors |= {} if drafted is None else _eagle_maps(drafted, target.vocab_size)
    elif student.kind == "medusa":
        tensors |= {} if compact else {"lm_heads.0.weight": head}
        tensors |= {} if drafted is None else {"token_map": drafted}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found |= _narrowed(name, tensor.cpu(), compact=compact)
    with file_errors(f"The folder {str(folder)!r} cannot be written", "Free some space, and add --resume."):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / WEIGHTS, save(found, metadata={"format": "pt"}))
        write_text(folder / "config.json", _as_json(_settings(student, target, head)))


def write_training_file(folder: Path, training: Mapping[str, Any]) -> None:
    """Write how a head came about beside it, and the sha256 of its weights.

    Raises:
        RunError: The folder cannot be written.
    """
    with file_errors(f"The folder {str(folder)!r} cannot be written", "Free some space, and add --resume."):
        weights = sha256(folder / WEIGHTS)
        write_text(folder / TRAINING_FILE, _as_json({"format": FORMAT, "sha256": weights, **training}))


def _settings(student: Student, target: Target, head: torch.Tensor) -> Json:
    """The ``config.json``."""
    settings = student.settings()
    if student.kind == "medusa":
        settings["truncated_vocab_size"] = len(head)
    if student.kind == "eagle":
        settings["draft_vocab_size"] = len(head)
        settings["speculators_config"] = {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": student.depth}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.language_model.model.config.architectures or [],
            },
        }
    return settings | {
        "dtype": "bfloat16",
        "target": target.name,
        "target_fingerprint": target.language_model.identity,
    }


def _eagle_maps(drafted: torch.Tensor, vocab: int) -> dict[str, torch.Tensor]:
    """Target token = d + d2t[d], and t2d marks these."""
    drafted = drafted.cpu()
    marks = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, drafted, True)
    return {"d2t": drafted - torch.arange(len(drafted)), "t2d": marks}


def _narrowed(name: str, tensor: torch.Tensor, *, compact: bool) -> dict[str, torch.Tensor]:
    """A tensor as it is stored: whole numbers as they are, matrices of a compact head in bytes, all else bfloat16."""
    if not tensor.is_floating_point():
        return {name: tensor.contiguous()}
    if not compact or tensor.dim() != 2 or name == "ahead":
        return {name: tensor.to(torch.bfloat16).contiguous()}
    scales = tensor.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return {
        name: (tensor.float() / scales[:, None]).round().to(torch.int8),
        f"{name}_scale": scales,
    }


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
