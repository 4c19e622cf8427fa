"""Recurrent layers (Mamba, gated delta rules and the like) that can be rolled back: a state is kept after every token.

A layer of this kind has no keys and values to cut. It holds the last inputs of a convolution and a state that every
token overwrites. ``RecurrentCache`` keeps the states after each token since the last rollback, so that a rollback
chooses among tensors: no weights are read and nothing is computed again.

``transformers`` runs a pass of several tokens in blocks (the chunked form), which gives one state at the end, other
roundings than its passes of one token, and for Mamba 1 no regard to the state before. ``keep_states`` replaces the
chunked functions in the modules of these models: a pass of up to ``LONGEST_FORWARD`` tokens on top of a state calls the
function for one token for each in turn. So there is a state after each, and a pass of n tokens has the recurrences of
n passes of one, to the bit. First passes, longer ones, and passes over other caches run as before.

On CPUs, gated delta rules take one native call for all tokens instead (``kernels/delta_rule.py``), if a trial gives the
results of the function for one token. The convolution before a recurrence takes a few operators over its last inputs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specbench.backends.torch.kernels.delta_rule import delta_rule, fits

LONGEST_FORWARD = 64
"""Tokens of a pass up to which the state after each is kept; of a longer one only the last state is."""

_MOST_SPARE = 8
"""Memory of states that is used again: drafts are rarely longer."""


@dataclass(slots=True)
class History:
    """The states of one recurrent layer since the last rollback.

    Attributes:
        length: Tokens read.
        base: Tokens after which the earliest state is kept.
        states: The recurrent states after ``base`` to ``length`` tokens; empty where there is only a convolution.
        columns: Inputs of the convolution, [batch, channels, kernel + length - base]; ``None`` before the first pass.
        kernel: Inputs of the convolution that one output reads.
        rows: Tokens of the pass that runs.
        state: What this pass was given as its state. A pass of one token may overwrite it.
        kept: For each group of heads that is computed by itself, the states after each token of this pass.
        overwrites: Whether a function for one token overwrites the state that it is given.
        spare: States that are no longer kept, whose memory is used again.
    """

    length: int = 0
    base: int = 0
    states: list[torch.Tensor] = field(default_factory=list)
    columns: torch.Tensor | None = None
    kernel: int = 0
    rows: int = 0
    state: torch.Tensor | None = None
    kept: list[list[torch.Tensor]] = field(default_factory=list)
    overwrites: bool = True
    spare: list[torch.Tensor] = field(default_factory=list)

    def begin(self) -> torch.Tensor | None:
        """Return the last state, or a copy that may be overwritten, for a pass; ``None`` before the first one."""
        self.end()
        self.state = self.states[-1] if self.states else None
        if self.overwrites and self.state is not None:
            self.state = self.state.clone()
        return self.state

    def memory(self, rows: int) -> list[torch.Tensor]:
        """Return memory for the states after each row of a pass."""
        like = self.states[-1]
        return [self.spare.pop() if self.spare else torch.empty_like(like) for _ in range(rows)]

    def convolve(self, inputs: torch.Tensor, kernel: int) -> torch.Tensor:
        """Add the convolution's inputs of a pass, [batch, channels, tokens]; return them after those it reads back."""
        rows = inputs.shape[-1]
        first, self.kernel, self.rows = self.columns is None, kernel, rows
        before = functional.pad(inputs[..., :0], (kernel, 0)) if self.columns is None else self.columns
        # Models make [batch, tokens, channels] in memory, which is joined fastest.
        columns = self.columns = torch.cat([before.mT, inputs.mT], dim=1).mT
        self.length += rows
        if first or rows > LONGEST_FORWARD:
            self.base, self.columns = self.length, columns[..., -kernel:]
        return inputs if first else columns[..., -(kernel + rows) :]

    def update(self, last: torch.Tensor) -> None:
        """Add the state after a pass, and those after each of its tokens where they were kept."""
        if self.base == self.length:
            self.states = [last.contiguous()]
        elif self.kept:
            groups = self.kept
            by_row = (
                groups[0]
                if len(groups) == 1
                else [torch.stack(row, dim=1) for row in zip(*groups, strict=True)]
            )
            self.states += by_row
        else:
            self.states.append(last)
        self.state, self.kept = None, []

    def end(self) -> None:
        """Take a state that was overwritten in place for the one after the pass's only token."""
        if self.state is not None and len(self.states) < self.length - self.base + 1:
            self.update(self.state)
        self.state = None

    def rollback(self, length: int) -> None:
        """Keep the state after this many tokens alone, at least ``base``."""
        self.state, self.kept = None, []  # of a pass that has failed
        surplus = max(self.length - length, 0)
        self.length -= surplus
        index = self.length - self.base
        if self.states:
            kept = self.states[index]
            if not self.overwrites:
                others = [state for state in self.states if state is not kept and state.is_contiguous()]
                self.spare = [*self.spare, *others][:_MOST_SPARE]
            self.states = [kept]
        if self.columns is not None:
            end = self.columns.shape[-1] - surplus
            self.columns = self.columns[..., end - self.kernel : end]
        self.base = self.length


class RecurrentCache(DynamicCache):
    """``transformers``' DynamicCache whose recurrent layers can be rolled back.

    Attributes:
        histories: By layer and state.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        _running.history = _running.columns = None
        overwrites = _overwrites(config)
        self.histories = {
            (index, state): History(overwrites=overwrites)
            for index, layer in enumerate(self.layers)
            if isinstance(layer, LinearAttentionCacheLayerMixin)
            for state in range(layer.number_of_states)
        }

    def get_seq_length(self, layer_idx: int = 0) -> int:
        history = self.histories.get((layer_idx, 0))
        return int(super().get_seq_length(layer_idx)) if history is None else history.length

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
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
        kernel = conv_kernel_size or conv_states.shape[-1]
        history = self.histories[layer_idx, state_idx]
        columns = history.convolve(conv_states, kernel)
        _running.columns = columns if history.base < history.length else None
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        _running.history = self.histories[layer_idx, state_idx]
        return _running.history.begin()

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.histories[layer_idx, state_idx].update(recurrent_states)
        return recurrent_states

    def end_forward(self) -> None:
        """To be called after every pass."""
        _running.history = _running.columns = None
        for history in self.histories.values():
            history.end()

    def can_roll_back(self, length: int) -> bool:
        """Whether the states after this many tokens are still there."""
        return all(history.base <= length for history in self.histories.values())

    def rollback(self, length: int) -> None:
        """Cut the recurrent layers to this many tokens, or what they hold of them."""
        _running.history = _running.columns = None
        for history in self.histories.values():
            history.rollback(length)


class _Running(threading.local):
    """The layer whose forward pass runs.

    Attributes:
        history: Its states; Mamba 1's function is not handed the state before.
        columns: Inputs of its convolution in a short pass, with those before.
    """

    history: History | None = None
    columns: torch.Tensor | None = None


_running = _Running()


# -- functions for several tokens ------------------------------------------------------------------

Function = Callable[..., Any]


def can_keep_states(model_class: type) -> bool:
    """Whether the recurrent layers of a class of models can be rolled back."""
    module = sys.modules[model_class.__module__]
    return any(hasattr(module, chunked) for chunked, _ in _FUNCTIONS)


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Whether models of this configuration have recurrent layers that can be rolled back."""
    return any(can_keep_states(each) for each in _classes(config))


def cache_argument(config: PreTrainedConfig) -> str:
    """Return how the forward of models without attention names its cache: `transformers` 5.24 has renamed it."""
    names = [inspect.signature(each.forward).parameters for each in _classes(config)]  # type: ignore[attr-defined]
    return "cache" if any("cache" in each for each in names) else "cache_params"


def _classes(config: PreTrainedConfig) -> list[type]:
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    kinds = {type(config), type(config.get_text_config(decoder=True))}
    return [mapping[kind] for kind in kinds if kind in mapping]


def _overwrites(config: PreTrainedConfig) -> bool:
    """Whether the functions for one token of models of this configuration overwrite the state they are given."""
    modules = [sys.modules[each.__module__] for each in _classes(config)]
    return any(
        hasattr(module, single)
        for (_, single), by_token in _FUNCTIONS.items()
        if by_token is not _delta_by_token
        for module in modules
    )


def keep_states(model: Any) -> bool:
    """Replace the chunked functions in the module of a model's class; return whether it has any."""
    module: Any = sys.modules[type(model).__module__]
    for (chunked, single), by_token in _FUNCTIONS.items():
        if hasattr(module, chunked):
            one = getattr(module, single)
            _replace(module, chunked, by_token, one)
            if by_token is _delta_by_token:
                _replace(module, single, by_token, one)
    if can_keep_states(type(model)) and hasattr(module, _CONVOLUTION):
        _replace(module, _CONVOLUTION, _convolve_short)
    return can_keep_states(type(model))


def _replace(module: Any, name: str, by: Function, *more: Function) -> None:
    """Replace a function of a module by one that is given it first; only once."""
    function = getattr(module, name)
    if not hasattr(function, "by_token"):
        replaced: Any = functools.wraps(function)(functools.partial(by, function, *more))
        replaced.by_token = True
        setattr(module, name, replaced)


_CONVOLUTION = "causal_conv1d_fn"


def _convolve_short(
    function: Function,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The convolution of a short pass, [batch, channels, columns] -> [batch, channels, new columns], in float32."""
    if inputs is not _running.columns:
        found: torch.Tensor = function(inputs, weight, bias, activation, **kwargs)
        return found
    _running.columns = None
    size = weight.shape[-1]
    columns, weights = inputs.mT.float(), weight.float().mT.contiguous()
    rows = columns.shape[1] - size
    total = columns[:, 1 : 1 + rows] * weights[0]
    for place in range(1, size):
        total.addcmul_(columns[:, 1 + place : 1 + place + rows], weights[place])
    if bias is not None:
        total += bias.float()
    if activation is not None:
        total = ACT2FN[activation](total)
    made: torch.Tensor = total.to(inputs.dtype).mT
    return made


def _short(rows: int, state: torch.Tensor | None) -> History | None:
    """The layer that runs, if a pass of this many tokens begins from a state of its own and is short."""
    history = _running.history
    if history is None or history.state is None or history.rows != rows:
        return None
    return history if state is None or state is history.state else None


def _delta_by_token(function: Function, single: Function, *args: Any, **kwargs: Any) -> Any:
    """Gated delta rules: query, key, value, g and beta are [batch, tokens, ...]."""
    given = {**dict(zip(_DELTA, args, strict=False)), **kwargs}
    state, rows = given.get("initial_state"), given["query"].shape[1]
    history = None if state is None else _short(rows, state)
    if history is None or state is None or rows > LONGEST_FORWARD:
        return function(*args, **kwargs)
    if fits(given["value"], state) and _native_is_right(single):
        states = history.memory(rows)
        query, key, value, g, beta = (given[name] for name in _DELTA)
        normalize = bool(given.get("use_qk_l2norm_in_kernel", False))
        output = delta_rule(query, key, value, g, beta, state, states, normalize=normalize)
        history.kept = [states]
        return output, states[-1]
    outputs, states = [], []
    for row in range(rows):
        one = {name: given[name][:, row : row + 1] for name in _DELTA}
        output, state = single(**{**given, **one, "initial_state": state, "output_final_state": True})
        outputs.append(output)
        states.append(state)
    history.kept = [states]
    return torch.cat(outputs, dim=1), state


_DELTA = ("query", "key", "value", "g", "beta")


@functools.cache
def _native_is_right(single: Function) -> bool:
    """Whether the native call gives what a function of `transformers` for one token does, in two random rows."""
    source = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=source)

    for decays in ((2,), (2, 24)):  # one for each head, or for each of its keys
        query, key, value = drawn(1, 2, 2, 24), drawn(1, 2, 2, 24), drawn(1, 2, 2, 40)
        g, beta, before = -drawn(1, 2, *decays).abs(), drawn(1, 2, 2).sigmoid(), drawn(1, 2, 24, 40)
        rows, expected, state = (query, key, value, g, beta), [], before
        try:
            for row in range(2):
                one = dict(zip(_DELTA, (each[:, row : row + 1] for each in rows), strict=True))
                output, state = single(
                    **one, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
                )
                expected.append(output)
        except (RuntimeError, TypeError, ValueError):
            continue  # it has the other kind of decays
        after = [torch.empty_like(before) for _ in range(2)]
        found = delta_rule(query, key, value, g, beta, before, after, normalize=True)
        pairs = ((found, torch.cat(expected, dim=1)), (after[-1], state))
        return all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs)
    return False


def _mamba2_by_token(
    chunked: Function,
    single: Function,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Mamba 2: x [batch, tokens, heads, size], dt [batch, tokens, heads], b and c [batch, tokens, groups, states]."""
    state, rows = kwargs.get("initial_states"), x.shape[1]
    history = None if state is None else _short(rows, state)
    if history is None or state is None or rows > LONGEST_FORWARD:
        return chunked(x, dt, a, b, c, **kwargs)
    size, width = x.shape[-1], b.shape[-1]
    outputs, states = [], []
    for row in range(rows):
        state = state.clone()
        output = single(
            state,
            x[:, row],
            dt[:, row, :, None].expand(-1, -1, size),
            a[:, None, None].expand(-1, size, width).float(),
            b[:, row],
            c[:, row],
            kwargs["D"][:, None].expand(-1, size),
            z=None,
            dt_bias=kwargs["dt_bias"][:, None].expand(-1, size),
            dt_softplus=kwargs["dt_softplus"],
        )
        outputs.append(output)
        states.append(state)
    history.kept = [states]
    return torch.stack(outputs, dim=1), state


def _mamba_by_token(
    chunked: Function,
    single: Function,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Mamba 1: x and dt [batch, channels, tokens], b and c [batch, state size, tokens]."""
    rows = x.shape[-1]
    history = _short(rows, None)
    if history is None or history.state is None:
        return chunked(x, dt, a, b, c, **kwargs)
    state = history.state
    if state.dim() == 4:  # a scan for each group of heads
        state = state[:, len(history.kept)]
    outputs, states = [], []
    for row in range(rows):
        state = state.clone()
        output = single(
            state,
            x[..., row],
            dt[..., row],
            a,
            b[..., row],
            c[..., row],
            kwargs["D"],
            z=kwargs["z"][..., row],
            dt_bias=kwargs["delta_bias"],
            dt_softplus=kwargs["delta_softplus"],
        )
        outputs.append(output)
        states.append(state)
    history.kept.append(states)
    return torch.stack(outputs, dim=-1), state


_FUNCTIONS: dict[tuple[str, str], Function] = {
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"): _delta_by_token,
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"): _delta_by_token,
    ("mamba2_chunk_scan", "mamba2_selective_state_update"): _mamba2_by_token,
    ("mamba_selective_scan", "mamba_selective_state_update"): _mamba_by_token,
}
"""The functions for several tokens and for one, and what runs the second in place of the first."""
