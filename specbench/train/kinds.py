"""The kinds of heads that can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench.train.block_students import DFlashStudent, DSparkStudent
from specbench.train.eagle_student import EagleStudent
from specbench.train.medusa_student import MedusaStudent
from specbench.train.mtp_student import MtpStudent
from specbench.train.students import Student

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("eagle", "mtp", "dflash", "dspark", "medusa")

_BLOCKS = {"dflash": DFlashStudent, "dspark": DSparkStudent}


def make_student(
    kind: str,
    model: PreTrainedModel,
    head: torch.Tensor,
    depth: int,
    seed: int,
    layers: int = 1,
    mask: int = 0,
) -> Student:
    """Return a new head; for the arguments see ``EagleStudent`` and ``DFlashStudent``."""
    if kind == "medusa":
        return MedusaStudent(model, head, depth).to(head.device)
    if kind in _BLOCKS:
        return _BLOCKS[kind](model, head, depth, seed, layers, mask).to(head.device)
    student = MtpStudent if kind == "mtp" else EagleStudent
    return student(model, head, depth, seed, layers).to(head.device)
