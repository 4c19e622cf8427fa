"""Batches of texts, and what the target computes on them: its hidden states and its distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbench.train.texts import Text


class Batch(NamedTuple):
    """Texts of different lengths, padded at their ends, where causal attention does not see the padding.

    Attributes:
        wanted: Bool [texts, longest]: positions before a token that the head must learn to draft. These are all tokens
            of an answer but the first.
    """

    ids: torch.Tensor
    wanted: torch.Tensor


def trainable_texts(texts: Sequence[Text], max_length: int, depth: int) -> list[Text]:
    """Return the texts that are long enough to learn from, cut to a length."""
    cut = [replace(text, tokens=text.tokens[:max_length]) for text in texts if text.start + 1 < max_length]
    return [text for text in cut if text.written > 1 and len(text.tokens) > depth + 1]


def make_batches(texts: Sequence[Text], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Return batches of indices of texts of similar lengths, in an order that follows from seed and epoch.

    Args:
        budget: Tokens of a batch, padding included; a longer text is a batch of its own.
    """
    random = Random(f"{seed} {epoch}")
    order = random.sample(range(len(texts)), len(texts))
    order.sort(key=lambda place: -len(texts[place].tokens))
    found: list[list[int]] = [[]]
    for place in order:
        longest = len(texts[found[-1][0]].tokens) if found[-1] else 0
        if found[-1] and longest * (len(found[-1]) + 1) > budget:
            found.append([])
        found[-1].append(place)
    random.shuffle(found)
    return found


def pad_batch(texts: Sequence[Text], device: torch.device) -> Batch:
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    wanted = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        wanted[row, text.start : len(text.tokens) - 1] = True
    return Batch(ids.to(device), wanted.to(device))


class TargetOutput(NamedTuple):
    """The part of the target's forward over a batch that training needs; small enough to store several.

    Attributes:
        states: Hidden states of the requested layers, [texts, longest, layers, width].
        places: Index of each position among the wanted ones, -1 for the others, [texts, longest].
        last: The values that the loss needs at the wanted positions: the inputs of the target's output head, [n,
            width], or, if that head is more than a matrix product, its logits over the draft vocabulary, [n, vocab].
    """

    ids: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor


class Lesson(NamedTuple):
    """The inputs and training targets of a head for a batch.

    Attributes:
        ids, states, places: See ``TargetOutput``.
        embedded: Embeddings of the ids, [texts, longest, width].
        p: The target's distributions over the draft vocabulary at the wanted positions, [n, vocab].
        choices: The most probable tokens of ``p``, [n].
    """

    ids: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    embedded: torch.Tensor
    p: torch.Tensor
    choices: torch.Tensor


class Teacher:
    """The target, which computes the training targets of texts.

    Args:
        draft_vocab: Token ids of the draft vocabulary, ascending; ``None`` for all tokens.

    Attributes:
        head: The rows of the target's output head for the draft vocabulary, [vocab, width], in its dtype.
    """

    def __init__(self, model: PreTrainedModel, draft_vocab: torch.Tensor | None = None) -> None:
        self._model: Any = model
        self.device = model.device
        self._last: int = model.config.get_text_config(decoder=True).num_hidden_layers
        whole = self._model.get_output_embeddings().weight.detach()
        self._vocab = torch.arange(len(whole)) if draft_vocab is None else draft_vocab
        self._vocab = self._vocab.to(self.device)
        self.head: torch.Tensor = whole[self._vocab].contiguous()
        self._draftable = torch.zeros(len(whole), dtype=torch.bool, device=self.device)
        self._draftable[self._vocab] = True
        self._plain = has_plain_head(model)

    @torch.no_grad()
    def read(self, batch: Batch, layers: Sequence[int] = ()) -> TargetOutput:
        """Run the target's forward over a batch.

        Args:
            layers: Layers whose hidden states are returned, see ``ForwardRequest``.
        """
        wanted = self._wanted(batch)
        output = self._forward(batch.ids, layers, 1 if self._plain else 0)
        last = output.hidden_states[self._last]
        found = last[wanted] if self._plain else output.logits[wanted][:, self._vocab]
        states = [output.hidden_states[layer] for layer in layers]
        return TargetOutput(
            batch.ids,
            torch.stack(states, dim=2) if states else last.new_empty(*batch.ids.shape, 0, last.shape[-1]),
            _places(wanted),
            found,
        )

    def _wanted(self, batch: Batch) -> torch.Tensor:
        """Return the wanted positions that are followed by a token of the draft vocabulary, bool [texts, longest]."""
        followed = torch.zeros_like(batch.wanted)
        followed[:, :-1] = self._draftable[batch.ids[:, 1:]]
        return batch.wanted & followed

    @torch.no_grad()
    def lesson(self, output: TargetOutput) -> Lesson:
        logits = (linear(output.last, self.head) if self._plain else output.last).float()
        embedded = self._model.get_input_embeddings()(output.ids).float()
        return Lesson(
            output.ids, output.states, output.places, embedded, logits.softmax(-1), logits.argmax(-1)
        )  # fmt: skip

    def _forward(self, ids: torch.Tensor, layers: Sequence[int], rows: int) -> Any:
        """Run a forward with logits of the last ``rows`` positions, 0 for all."""
        return self._model(
            input_ids=ids, use_cache=False, output_hidden_states=[*layers, self._last], logits_to_keep=rows
        )


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Return whether logits are just the last hidden states times the output head, without a scale or a cap."""
    untyped: Any = model
    output = untyped(
        input_ids=torch.zeros(1, 4, dtype=torch.long, device=model.device),
        use_cache=False,
        output_hidden_states=[last := model.config.get_text_config(decoder=True).num_hidden_layers],
    )
    expected = output.logits[0].float()
    found = linear(output.hidden_states[last][0], untyped.get_output_embeddings().weight).float()
    return bool((found - expected).abs().max() <= 0.02 * expected.abs().max())


def _places(wanted: torch.Tensor) -> torch.Tensor:
    places = torch.full(wanted.shape, -1, device=wanted.device)
    places[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
    return places
