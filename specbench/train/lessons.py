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


def pad_batch(texts: Sequence[Text], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of texts, and bool the positions before a token that the head must learn to draft, both
    [texts, longest].

    These are all tokens of an answer but the first. Texts are padded at their ends, where causal attention does not see
    the padding.
    """
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    wanted = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        wanted[row, text.start : len(text.tokens) - 1] = True
    return ids.to(device), wanted.to(device)


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
    def read(self, ids: torch.Tensor, wanted: torch.Tensor, layers: Sequence[int]) -> TargetOutput:
        """Run the target's forward over a batch.

        Args:
            ids, wanted: See ``pad_batch``. Of the wanted positions those are used that are followed by a token of the
                draft vocabulary.
            layers: Layers whose hidden states are returned, see ``ForwardRequest``; at least one.
        """
        followed = torch.zeros_like(wanted)
        followed[:, :-1] = self._draftable[ids[:, 1:]]
        wanted = wanted & followed
        output = self._model(
            input_ids=ids,
            use_cache=False,
            output_hidden_states=[*layers, self._last],
            logits_to_keep=1 if self._plain else 0,
        )
        last = output.hidden_states[self._last]
        found = last[wanted] if self._plain else output.logits[wanted][:, self._vocab]
        states = torch.stack([output.hidden_states[layer] for layer in layers], dim=2)
        places = torch.full(wanted.shape, -1, device=ids.device)
        places[wanted] = torch.arange(int(wanted.sum()), device=ids.device)
        return TargetOutput(ids, states, places, found)

    @torch.no_grad()
    def lesson(self, output: TargetOutput) -> Lesson:
        logits = (linear(output.last, self.head) if self._plain else output.last).float()
        embedded = self._model.get_input_embeddings()(output.ids).float()
        return Lesson(
            output.ids, output.states, output.places, embedded, logits.softmax(-1), logits.argmax(-1)
        )  # fmt: skip


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
