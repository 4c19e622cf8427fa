"""Batches of texts, with what the target computes on them: its hidden states and its logits."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train import TrainingSettings
    from specbench.train.texts import Text

Batch = dict[str, torch.Tensor]

_KEPT_BYTES = 512 << 20
"""Size of the target's outputs that are kept."""


def make_batches(texts: Sequence[Text], budget: int, seed: int) -> list[list[Text]]:
    """Return batches of texts of similar lengths, in random order.

    Args:
        budget: Tokens of a batch, padding included; a longer text is a batch of its own.
    """
    batches: list[list[Text]] = []
    for text in sorted(texts, key=lambda text: -len(text.tokens)):
        if not batches or len(batches[-1][0].tokens) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(text)
    Random(seed).shuffle(batches)
    return batches


class Batches(Dataset[Batch]):
    """The batches of a training: item i is that of step i.

    The target's forward over a batch takes longer than a training step. So its outputs for as many batches as fit into
    the memory set aside are kept, and these are trained on ``repeats`` times before the next ones.

    An item has these tensors:

    - ``ids``: token ids of the texts, padded at their ends, [texts, longest]
    - ``states``: the target's hidden states, [texts, longest, layers, width]
    - ``embedded``: its embeddings of the ids, [texts, longest, width]
    - ``logits``: its logits over the draft vocabulary at the positions to learn from, [n, vocab]
    - ``places``: index of each position among these, -1 for the others, [texts, longest]

    Positions to learn from come before tokens of the answers, but the first of each, that are in the draft vocabulary.

    Attributes:
        written: Tokens of all answers.
    """

    def __init__(
        self, model: PreTrainedModel, texts: Sequence[Text], student: Any, settings: TrainingSettings
    ) -> None:
        self._model: Any = model
        self._student, self.written = student, sum(text.written for text in texts)
        self._batches = make_batches(texts, settings.batch_tokens, settings.seed)
        vocab, width = student.rows.shape
        self._draftable = torch.zeros(student.config.vocab_size, dtype=torch.bool, device=model.device)
        self._draftable[student.draft_vocab] = True
        batch_bytes = settings.batch_tokens * (vocab + len(student.layers) * width) * model.dtype.itemsize
        self._chunk = max(1, _KEPT_BYTES // batch_bytes)
        self._order: list[int] = []
        for first in range(0, len(self._batches), self._chunk):
            chunk = range(first, min(first + self._chunk, len(self._batches)))
            self._order += [*chunk] * settings.repeats
        self._kept: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._order)

    @torch.no_grad()
    def __getitem__(self, step: int) -> Batch:
        place = self._order[step]
        if place not in self._kept:
            if place % self._chunk == 0:
                self._kept.clear()
            self._kept[place] = self._read(self._batches[place])
        batch = self._kept[place]
        return {**batch, "embedded": self._model.get_input_embeddings()(batch["ids"]).float()}

    def _read(self, texts: Sequence[Text]) -> Batch:
        """Run the target over a batch."""
        ids = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)
        starts, ends = torch.tensor([(text.start, len(text.tokens) - 1) for text in texts]).T[:, :, None]
        at = torch.arange(ids.shape[1])
        ids, learned = ids.to(self._model.device), ((at >= starts) & (at < ends)).to(self._model.device)
        learned[:, :-1] &= self._draftable[ids[:, 1:]]
        output = self._model(input_ids=ids, use_cache=False, output_hidden_states=[*self._student.layers])
        places = torch.full_like(ids, -1)
        places[learned] = torch.arange(int(learned.sum()), device=ids.device)
        return {
            "ids": ids,
            "states": torch.stack([output.hidden_states[layer] for layer in self._student.layers], dim=2),
            "logits": output.logits[learned][:, self._student.draft_vocab],
            "places": places,
        }
