"""Caches whose recurrent layers can be rolled back: a state is kept after every token since the last rollback.

A recurrent layer (Mamba, gated delta rules and the like) has no keys and values to cut. It holds the last inputs of a
convolution and a state, which every token changes. ``History`` keeps the states after each token since the last
rollback, so that a rollback chooses among tensors: no weights are read and nothing is computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

LONGEST_FORWARD = 64
"""Tokens of a pass up to which the state after each is kept; of a longer one only the last state is."""

MOST_SPARE = 8
"""Memory of states that is used again: drafts are rarely longer."""


@dataclass(slots=True)
class History:
    """The states of one recurrent layer since the last rollback."""

    length: int = 0  # tokens read
    base: int = 0  # tokens after which the earliest state is kept
    # After ``base`` to ``length`` tokens; none without a recurrence.
    states: list[torch.Tensor] = field(default_factory=list)
    # Inputs of the convolution, [batch, channels, kernel + length - base]; ``None`` before the first pass.
    columns: torch.Tensor | None = None
    kernel: int = 0  # inputs of the convolution that one output reads
    rows: int = 0  # tokens of the pass that runs
    prompt: int | None = None  # how many of the first tokens are the prompt; ``None`` for all
    kept: list[torch.Tensor] = field(default_factory=list)  # the states of this pass
    spare: list[torch.Tensor] | None = None  # no longer kept; memory that is used again, if anything asks

    @property
    def begins(self) -> bool:
        """Whether the pass keeps its last state alone, being the first one or a long one."""
        return self.base == self.length

    def memory(self, like: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """Return memory for the states after each row of a pass."""
        spare = self.spare = [] if self.spare is None else self.spare
        return [spare.pop() if spare else torch.empty_like(like) for _ in range(rows)]

    def convolve(self, inputs: torch.Tensor, kernel: int) -> torch.Tensor:
        """Add the convolution's inputs of a pass, [batch, channels, tokens]; return them after those it reads back."""
        rows = inputs.shape[-1]
        first, self.kernel, self.rows, self.kept = self.columns is None, kernel, rows, []
        before = functional.pad(inputs[..., :0], (kernel, 0)) if self.columns is None else self.columns
        # Models make [batch, tokens, channels] in memory, which is joined fastest.
        columns = self.columns = torch.cat([before.mT, inputs.mT], dim=1).mT
        self.length += rows
        if first or rows > LONGEST_FORWARD:
            self.base, self.columns = self.length, columns[..., -kernel:]
        return inputs if first else columns[..., -(kernel + rows) :]

    def update(self) -> None:
        """Take over the states of this pass."""
        made = self.kept
        self.states = [made[-1].contiguous()] if self.begins else [*self.states, *made]
        self.kept = []

    def has(self, length: int) -> bool:
        """Return whether the state after this many tokens is kept."""
        return self.base <= length <= self.length

    def rollback(self, length: int) -> None:
        """Go back to the state after this many tokens, which ``has`` must know; a longer length changes nothing."""
        self.kept = []
        surplus = max(self.length - length, 0)
        self.length -= surplus
        if self.states:
            kept = self.states[self.length - self.base]
            if self.spare is not None:
                others = [state for state in self.states if state is not kept and state.is_contiguous()]
                self.spare = [*self.spare, *others][:MOST_SPARE]
            self.states = [kept]
        if self.columns is not None:
            end = self.columns.shape[-1] - surplus
            self.columns = self.columns[..., end - self.kernel : end]
        self.base = self.length

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that takes memory."""
        kept = [*self.states, *(self.spare or ()), self.columns]
        return [tensor for tensor in kept if tensor is not None]


class _Running(threading.local):
    """The layer whose pass runs, since the functions of `transformers` are not handed its cache.

    Attributes:
        histories: Its states, of each request.
        inputs: What the convolution is given.
        columns: Of each request, the inputs of its convolution, with those before.
        convolved: The histories of the convolution.
        prompt: In a pass without a cache, how many of its tokens are the prompt; ``None`` for all.
    """

    histories: Sequence[History] = ()
    inputs: torch.Tensor | None = None
    columns: Sequence[torch.Tensor] = ()
    convolved: Sequence[History] = ()
    prompt: int | None = None

    def clear(self) -> None:
        self.histories = self.columns = self.convolved = ()
        self.inputs = self.prompt = None


running = _Running()


class RecurrentLayers(Cache):
    """What `transformers` asks of a cache's recurrent layers in a pass over one request, or several in a row."""

    def _histories(self, layer_idx: int, state_idx: int) -> Sequence[History]:
        """Return the states of a layer, of each request."""
        raise NotImplementedError

    def _split(self, inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split inputs, [1, channels, rows], by requests."""
        return [inputs]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return none, so that a pass of one token calls ``update_conv_state`` as well."""
        return

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        histories, parts = self._histories(layer_idx, state_idx), self._split(conv_states)
        kernel = conv_kernel_size or conv_states.shape[-1]
        columns = [history.convolve(part, kernel) for history, part in zip(histories, parts, strict=True)]
        running.convolved, running.columns = histories, columns
        running.inputs = columns[0] if len(columns) == 1 else conv_states
        return running.inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return none: the functions that replace those of `transformers` find the states themselves."""
        running.histories = self._histories(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        for history in self._histories(layer_idx, state_idx):
            history.update()
        running.histories = ()
        return recurrent_states


class RecurrentCache(RecurrentLayers, DynamicCache):
    """``transformers``' DynamicCache whose recurrent layers can be rolled back.

    Attributes:
        histories: By layer and state.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        running.clear()
        self._is_unfinished = False
        self.histories = {
            (index, state): History()
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for state in range(layer.number_of_states)
        }

    def _histories(self, layer_idx: int, state_idx: int) -> Sequence[History]:
        self._is_unfinished = True
        return (self.histories[layer_idx, state_idx],)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        history = self.histories.get((layer_idx, 0))
        return int(super().get_seq_length(layer_idx)) if history is None else history.length

    def set_prompt(self, tokens: int) -> None:
        """Note how many of the first tokens are the prompt."""
        for history in self.histories.values():
            history.prompt = tokens

    @property
    def length(self) -> int:
        """Tokens read."""
        return next(iter(self.histories.values())).length

    def end_forward(self) -> None:
        """End a pass, and forget what its layers left for one another."""
        self._is_unfinished = False
        running.clear()

    def most_kept(self, length: int) -> int:
        """Return how many tokens, up to this many, stay: as many as were read, or 0 where a state is not kept."""
        histories = self.histories.values()
        if self._is_unfinished and any(history.begins for history in histories):
            return 0  # the pass has failed, and some layers have no state after it
        length = min(length, *(history.length for history in histories))
        return length if all(history.has(length) for history in histories) else 0

    def rollback(self, length: int) -> None:
        """Cut the recurrent layers to this many tokens, or what they hold of them; the states there must be kept."""
        self.end_forward()
        for history in self.histories.values():
            history.rollback(length)

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that is kept."""
        return [tensor for history in self.histories.values() for tensor in history.tensors()]


class JointRecurrentCache(RecurrentLayers):
    """The caches of several requests in one pass over their rows, one request after the other."""

    def __init__(self, layers: list[Any], caches: Sequence[RecurrentCache], rows: Sequence[int]) -> None:
        super().__init__(layers=layers)
        self._caches, self._rows = caches, list(rows)

    def _histories(self, layer_idx: int, state_idx: int) -> Sequence[History]:
        return [history for cache in self._caches for history in cache._histories(layer_idx, state_idx)]

    def _split(self, inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return inputs.split(self._rows, dim=-1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def end_forward(self) -> None:
        """End the pass of every request."""
        for cache in self._caches:
            cache.end_forward()
