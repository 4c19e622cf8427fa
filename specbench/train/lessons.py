"""Texts in batches, and what the target says about them: its hidden states and what it would write next."""

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
    """Texts side by side, filled up at their ends: what is attended to causally never looks there.

    Attributes:
        ids: [texts, longest].
        wanted: Bool [texts, longest]: positions behind which a token of an answer stands that has to be drafted, which
            the first one never has to be.
    """

    ids: torch.Tensor
    wanted: torch.Tensor


def fitting(texts: Sequence[Text], longest: int, depth: int) -> list[Text]:
    """Texts that teach something, cut to a length."""
    cut = [replace(text, tokens=text.tokens[:longest]) for text in texts if text.start + 1 < longest]
    return [text for text in cut if text.written > 1 and len(text.tokens) > depth + 1]


def batches(texts: Sequence[Text], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """The places of texts, those of about one length together, in an order that seed and epoch decide.

    Args:
        texts: At least one.
        budget: Tokens of a batch, padding included; a longer text is one by itself.
        seed, epoch: Of the order.
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


def padded(texts: Sequence[Text], device: torch.device) -> Batch:
    """Texts side by side."""
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    wanted = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        wanted[row, text.start : len(text.tokens) - 1] = True
    return Batch(ids.to(device), wanted.to(device))


class Reading(NamedTuple):
    """What the target's pass over a batch is kept as, small enough to keep that of several.

    Attributes:
        ids: See ``Batch``.
        states: Of the target's layers that were asked for, [texts, longest, layers, width].
        places: Where each position is among those that are wanted, -1 for one that is not, [texts, longest].
        last: At these positions, what is multiplied by the head, [n, width]; or, where more than that makes logits of
            it, the logits over the draft vocabulary, [n, vocab].
        cache: The target's keys and values, where they were asked for; whoever reads on with them changes them.
    """

    ids: torch.Tensor
    states: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    cache: Any = None


class Lesson(NamedTuple):
    """What is learnt from a batch.

    Attributes:
        ids: See ``Batch``.
        embedded: Their embeddings, [texts, longest, width].
        states: Of the target's layers that were asked for, [texts, longest, layers, width].
        p: What the target would write next, over the draft vocabulary, at the positions that are wanted: [n, vocab].
        choices: The likeliest of these, [n].
        places: Where each position is among these, -1 for one that is not wanted, [texts, longest].
        cache: The target's keys and values, where they were asked for.
    """

    ids: torch.Tensor
    embedded: torch.Tensor
    states: torch.Tensor
    p: torch.Tensor
    choices: torch.Tensor
    places: torch.Tensor
    cache: Any = None


class Teacher:
    """The target, reading texts.

    Args:
        model: A causal language model of ``transformers``.
        drafted: The draft vocabulary, ascending; ``None`` for all tokens.

    Attributes:
        head: The rows of its head for the draft vocabulary, [vocab, width], in its dtype.
        device: Where it is.
    """

    def __init__(self, model: PreTrainedModel, drafted: torch.Tensor | None = None) -> None:
        self._model: Any = model
        self.device = model.device
        self._last: int = model.config.get_text_config(decoder=True).num_hidden_layers
        whole = self._model.get_output_embeddings().weight.detach()
        self._drafted = torch.arange(len(whole)) if drafted is None else drafted
        self._drafted = self._drafted.to(self.device)
        self.head: torch.Tensor = whole[self._drafted].contiguous()
        self._draftable = torch.zeros(len(whole), dtype=torch.bool, device=self.device)
        self._draftable[self._drafted] = True
        self._plain = has_plain_head(model)

    @torch.no_grad()
    def read(self, batch: Batch, layers: Sequence[int] = (), *, keeps_cache: bool = False) -> Reading:
        """Read texts, which takes a pass of the target.

        Args:
            batch: The texts.
            layers: Whose hidden states are wanted, see ``ForwardRequest``.
            keeps_cache: Whether keys and values are wanted.
        """
        wanted = self._wanted(batch)
        output = self._read(batch.ids, layers, 1 if self._plain else 0, cached=keeps_cache)
        last = output.hidden_states[self._last]
        found = last[wanted] if self._plain else output.logits[wanted][:, self._drafted]
        states = [output.hidden_states[layer] for layer in layers]
        return Reading(
            batch.ids,
            torch.stack(states, dim=2) if states else last.new_empty(*batch.ids.shape, 0, last.shape[-1]),
            _places(wanted),
            found,
            output.past_key_values if keeps_cache else None,
        )

    @torch.no_grad()
    def states(self, tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """The states of some layers at a text, [tokens, layers, width], which takes a pass of the target."""
        output = self._read(torch.tensor([tokens], device=self.device), layers, 1)
        return torch.stack([output.hidden_states[layer][0] for layer in layers], dim=1)

    def recalled(self, batch: Batch, states: Sequence[torch.Tensor]) -> Reading:
        """What ``read`` gives where the head is plain, from states that are known.

        Args:
            batch: The texts.
            states: Of each text, the last layer's behind those that were asked for, [positions, layers + 1, width]; no
                position that matters may be missing.
        """
        ids, (_, layers, width) = batch.ids, states[0].shape
        known = torch.zeros(*ids.shape, layers, width, dtype=states[0].dtype, device=self.device)
        for row, each in enumerate(states):
            known[row, : len(each)] = each
        wanted = self._wanted(batch)
        return Reading(ids, known[:, :, :-1], _places(wanted), known[:, :, -1][wanted])

    def _wanted(self, batch: Batch) -> torch.Tensor:
        """Those of the positions behind which a token stands that can be drafted, bool [texts, longest]."""
        followed = torch.zeros_like(batch.wanted)
        followed[:, :-1] = self._draftable[batch.ids[:, 1:]]
        return batch.wanted & followed

    @torch.no_grad()
    def lesson(self, reading: Reading) -> Lesson:
        """What is learnt from texts that were read."""
        logits = (linear(reading.last, self.head) if self._plain else reading.last).float()
        return Lesson(
            reading.ids,
            self._model.get_input_embeddings()(reading.ids).float(),
            reading.states,
            logits.softmax(-1),
            logits.argmax(-1),
            reading.places,
            reading.cache,
        )

    def _read(self, ids: torch.Tensor, layers: Sequence[int], rows: int, *, cached: bool = False) -> Any:
        """``rows``: of how many of the last positions logits are wanted, 0 for all."""
        return self._model(
            input_ids=ids,
            use_cache=cached,
            output_hidden_states=[*layers, self._last],
            logits_to_keep=rows,
        )


@torch.no_grad()
def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the last hidden states times the head, without a scale or a cap: then few are computed."""
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
    """See ``Reading``."""
    places = torch.full(wanted.shape, -1, device=wanted.device)
    places[wanted] = torch.arange(int(wanted.sum()), device=wanted.device)
    return places
