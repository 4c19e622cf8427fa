"""The kinds of heads that can be trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench.train.eagle_student import EagleStudent
from specbench.train.medusa_student import MedusaStudent
from specbench.train.mtp_student import MtpStudent
from specbench.train.students import Student

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("eagle", "mtp", "medusa")


def make_student(
    kind: str, model: PreTrainedModel, head: torch.Tensor, depth: int, seed: int, layers: int = 1
) -> Student:
    """Return a new head; for the arguments see ``EagleStudent``."""
    if kind == "medusa":
        return MedusaStudent(model, head, depth).to(head.device)
    student = MtpStudent if kind == "mtp" else EagleStudent
    return student(model, head, depth, seed, layers).to(head.device)
