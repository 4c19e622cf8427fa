"""Medusa heads in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from specbench.backends.torch.heads import MedusaHeads
from specbench.base.record import Json
from specbench.train.students import Batch, Drafts, Student

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MedusaStudent(Student):
    """Medusa heads of one block each, on the target's own projection to the vocabulary (Cai et al. 2024)."""

    rate = 1e-3

    def __init__(self, model: PreTrainedModel, draft_vocab: torch.Tensor, depth: int) -> None:
        super().__init__(model, draft_vocab, depth)
        self.heads = MedusaHeads(depth, 1, self.config.hidden_size, 1, shared=True)
        del self.heads.lm_heads
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    def draft(self, batch: Batch, drafts: Drafts) -> None:
        states = batch["states"][:, :-1, 0].float()
        reached = drafts.wanted(0) >= 0
        for place in range(self.depth):
            wanted = drafts.wanted(place)
            reached = reached & (wanted >= 0)
            drafts.add(self.heads.guess(states[reached], place), wanted[reached])

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

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.heads.named_parameters()}
