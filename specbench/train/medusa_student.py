"""Medusa heads in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from specbench.backends.torch.heads import MedusaHeads
from specbench.base.record import Json
from specbench.train.students import Metrics, MetricsBuilder, Student

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.lessons import Lesson


class MedusaStudent(Student):
    """Medusa heads of one block each, on the target's own projection to the vocabulary (Cai et al. 2024)."""

    kind, algorithm = "medusa", None
    started_from = "the head of the target"

    def __init__(self, model: PreTrainedModel, head: torch.Tensor, depth: int) -> None:
        super().__init__(model, head, depth)
        self.heads = MedusaHeads(depth, 1, self._config.hidden_size, 1, shared=True)
        del self.heads.lm_heads
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    def forward(self, lesson: Lesson) -> Metrics:
        metrics = MetricsBuilder(lesson, self._rows)
        states = lesson.states[:, :-1, 0].float()
        for place in range(self.depth):
            rows = metrics.rows(place)
            metrics.add(self.heads.guess(states[rows], place), place, rows)
        return metrics.build()

    def settings(self) -> Json:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self._config.hidden_size,
            "vocab_size": self._config.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "original_lm_head": True,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.heads.named_parameters()}
