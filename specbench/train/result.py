"""Write a trained head: safetensors, a ``config.json`` in the ``speculators`` format, and its training metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from specbench.base.files import file_errors, write_bytes, write_text
from specbench.base.record import Json, finite
from specbench.models.training_metadata import TRAINING_FILE
from specbench.train.students import Student

if TYPE_CHECKING:
    from specbench.models.target import Target

FORMAT = 1
"""Version of the training metadata."""


def write_head(
    folder: Path,
    student: Student,
    target: Target,
    head: torch.Tensor,
    draft_vocab: torch.Tensor | None,
) -> None:
    """Write a head's files, each of them atomically.

    Args:
        head: The rows of the target's output head that it drafts with, [vocab, width].
        draft_vocab: The tokens of these rows, ascending; ``None`` for all.
    """
    tensors = student.tensors()
    if student.algorithm is None:
        tensors["lm_heads.0.weight"] = head
        tensors |= {} if draft_vocab is None else {"token_map": draft_vocab}
    else:
        tensors["lm_head.weight"] = head
        tensors |= {} if draft_vocab is None else _vocabulary_maps(draft_vocab, target.vocab_size)
    found = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    with file_errors(f"The folder {str(folder)!r} cannot be written", "Free some space, and add --resume."):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / "model.safetensors", save(found, metadata={"format": "pt"}))
        write_text(folder / "config.json", _as_json(_config(student, target, head)))


def write_training_file(folder: Path, training: Mapping[str, Any]) -> None:
    """Write the training metadata of a head next to it."""
    with file_errors(f"The folder {str(folder)!r} cannot be written", "Free some space, and add --resume."):
        write_text(folder / TRAINING_FILE, _as_json(finite({"format": FORMAT, **training})))


def _config(student: Student, target: Target, head: torch.Tensor) -> Json:
    """Return the ``config.json``."""
    settings = student.settings()
    if student.algorithm is None:
        settings["truncated_vocab_size"] = len(head)
    else:
        settings["draft_vocab_size"] = len(head)
        settings["speculators_config"] = {
            "algorithm": student.algorithm,
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


def _vocabulary_maps(draft_vocab: torch.Tensor, vocab: int) -> dict[str, torch.Tensor]:
    """Return the maps of ``speculators``: the target's token is d + d2t[d], and t2d marks the draft vocabulary."""
    draft_vocab = draft_vocab.cpu()
    mask = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, draft_vocab, True)
    return {"d2t": draft_vocab - torch.arange(len(draft_vocab)), "t2d": mask}


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
