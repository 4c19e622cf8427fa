"""Medusa heads in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specbench.backends.torch.heads import MedusaHeads
from specbench.base.record import Json
from specbench.train.batches import Batch
from specbench.train.eagle_student import EagleStudent, join_losses, loss_of, wanted_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MedusaStudent(EagleStudent):
    """Medusa heads of one block each, on the target's own projection to the vocabulary (Cai et al. 2024).

    Each begins as the target's own output. None reads what another has drafted, so all learn from every position.
    """

    algorithm = None

    @property
    def rate(self) -> float:
        return 1e-3

    def read_layers(self, total: int) -> tuple[int, ...]:
        return (total,)

    def make_head(self, model: PreTrainedModel) -> Any:  # noqa: ARG002 - nothing of the target is in it
        heads = MedusaHeads(self.depth, 1, self.config.hidden_size, 1, shared=True)
        del heads.lm_heads
        for parameter in heads.parameters():
            nn.init.zeros_(parameter)
        return heads

    def forward(self, **batch: torch.Tensor) -> Batch:
        p, states = batch["logits"].float().softmax(-1), batch["states"][:, :-1, 0].float()
        losses, reached = [], torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        for place in range(self.depth):
            wanted = wanted_rows(batch["places"], place)
            reached = reached & (wanted >= 0)
            losses.append(loss_of(self.logits(self.head.guess(states[reached], place)), p[wanted[reached]]))
        return join_losses(losses)

    def settings(self) -> Json:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": 1,
            "original_lm_head": True,
        }
