"""Recurrent layers (Mamba, gated delta rules and the like) of ``transformers`` over caches that can be rolled back.

``transformers`` reads several tokens in blocks (the chunked form). That gives one state, the last, and rounds otherwise
than its passes of one token. ``keep_states`` gives the layers of a model a class whose forward calls functions of this
module instead. Over our caches, a pass of up to ``LONGEST_FORWARD`` tokens on top of a state calls the function for one
token for each in turn: so there is a state after each, and a pass of n tokens equals n passes of one, to the bit. First
passes and longer ones call the chunked function, and passes over other caches run as before. In a batch each request is
computed by itself. A model that bounds its time steps does so in the prompt and not in outputs, as in ``generate``.

On CPUs, gated delta rules and Mamba 2 take one native call for all tokens (``kernels.delta_rule``), if a trial gives
the results of the function for one token. The convolution before a recurrence takes a few operators over its last
inputs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, cast

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from specbench.backends.torch.recurrent_cache import LONGEST_FORWARD, History, running
from specbench.kernels import delta_rule, takes_keys

Function = Callable[..., Any]
_MAMBA_1 = "mamba_selective_scan"
"""A function without a state before: its layers cannot be rolled back."""
_UNBOUNDED = (0.0, float("inf"))


def can_keep_states(model_class: type) -> bool:
    """Return whether the recurrent layers of a class of models can be rolled back."""
    known = vars(sys.modules[model_class.__module__])
    names = {_CONVOLUTION, *(recurrence.several for recurrence in _RECURRENCES)}
    return not names.isdisjoint(known) and _MAMBA_1 not in known


def is_recurrent(config: PreTrainedConfig) -> bool:
    """Return whether models of this configuration have recurrent layers that can be rolled back."""
    return any(can_keep_states(model_class) for model_class in _classes(config)) and any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers
    )


def cache_argument(config: PreTrainedConfig) -> str:
    """Return how the forward of models without attention names its cache: `transformers` 5.24 has renamed it."""
    names = [inspect.signature(model_class.forward).parameters for model_class in _classes(config)]  # type: ignore[attr-defined]
    return "cache" if any("cache" in arguments for arguments in names) else "cache_params"


def _classes(config: PreTrainedConfig) -> list[type]:
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kinds = {type(config), type(config.get_text_config(decoder=True))}
    return [mapping[kind] for mapping in mappings for kind in kinds if kind in mapping]


def keep_states(model: Any) -> bool:
    """Have the recurrent layers of a model, and of no other, keep states; return whether it has any."""
    if not can_keep_states(type(model)):
        return False
    for layer in model.modules():
        kind = _keeping(cast("Any", type(layer)))
        if kind is not type(layer):
            layer.__class__ = kind
            if "_old_forward" in vars(layer):  # `accelerate` calls it within its hooks
                layer._old_forward = kind.forward.__get__(layer)
    return True


@functools.cache
def _keeping(kind: Any) -> Any:
    """Return a subclass whose layers keep states; the class itself if its forward calls no recurrence."""
    if hasattr(kind, "keeps_states"):
        return kind
    functions = _functions_in(inspect.unwrap(kind.forward))
    if not functions:
        return kind
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "keeps_states": True}
    return type(kind.__name__, (kind,), names | {"forward": _calling(functions, kind.forward)})


def _functions_in(forward: Any) -> dict[str, Function]:
    """Return what replaces the functions that a forward of `transformers` calls, by their names."""
    if not isinstance(forward, FunctionType):
        return {}
    known, called = forward.__globals__, forward.__code__.co_names
    replaced: dict[str, Function] = {
        recurrence.several: functools.partial(
            _run, known[recurrence.several], recurrence, known[recurrence.one]
        )
        for recurrence in _RECURRENCES
        if recurrence.several in called
    }
    if _CONVOLUTION in called:
        replaced[_CONVOLUTION] = functools.partial(_convolve, known[_CONVOLUTION])
    return replaced


def _calling(functions: Mapping[str, Function], function: FunctionType) -> FunctionType:
    """Return a copy of a function, and of those that its decorators hold, in which these names are other functions."""
    closure = [
        CellType(_calling(functions, held)) if isinstance(held := cell.cell_contents, FunctionType) else cell
        for cell in function.__closure__ or ()
    ]
    known = {**function.__globals__, **functions}
    made = FunctionType(function.__code__, known, function.__name__, function.__defaults__, tuple(closure))
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


# -- convolutions ----------------------------------------------------------------------------------

_CONVOLUTION = "causal_conv1d_fn"


def _convolve(function: Function, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a pass's convolution, [batch, channels, columns] -> [batch, channels, new columns] over our caches."""
    if inputs is not running.inputs:
        return function(inputs, *args, **kwargs)
    requests = list(zip(running.columns, running.convolved, strict=True))
    running.inputs = None
    outputs = [
        function(columns, *args, **kwargs)[..., -history.rows :]
        if history.begins
        else _convolve_short(columns, *args, **kwargs)
        for columns, history in requests
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _convolve_short(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute the convolution of a few columns in float32; the first ``kernel`` columns are only read."""
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
    return total.to(inputs.dtype).mT


# -- recurrences -----------------------------------------------------------------------------------

Arguments = Mapping[str, Any]
Step = Callable[[Function, Arguments, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class _Recurrence:
    """A recurrence of `transformers`, and the native call that runs several tokens like its function for one.

    Attributes:
        several, one: The names of its functions for several tokens and for one.
        names: The first arguments of the former.
        by_token: The arguments, [batch, tokens, ...], that have something for each token, as the output has.
        state: Which argument is the state before.
        step: Calls the function for one token: (function, arguments, state) -> (output, state after).
        native: Makes the native call: (arguments, state, memory for the states after each token) -> output.
        key: The argument that holds the keys.
        samples: Makes random arguments of two tokens, and a state.
        turns: Whether the native call takes the last two dimensions of states in the other order.
        prepare: Computes arguments in advance that depend on whether a row is of the prompt: (arguments, rows that
            are) -> arguments.
    """

    several: str
    one: str
    names: tuple[str, ...]
    by_token: tuple[str, ...]
    state: str
    step: Step
    native: Callable[[Arguments, torch.Tensor, list[torch.Tensor]], torch.Tensor]
    key: str
    samples: Callable[[], list[tuple[Arguments, torch.Tensor]]]
    turns: bool = False
    prepare: Callable[[Arguments, int], Arguments] = lambda given, _: given

    def of_rows(self, given: Arguments, first: int, count: int) -> dict[str, Any]:
        """Return the arguments of some rows."""
        return {**given, **{name: given[name].narrow(1, first, count) for name in self.by_token}}


def _run(several: Function, recurrence: _Recurrence, single: Function, *args: Any, **kwargs: Any) -> Any:
    """Replace the function for several tokens."""
    given = {**dict(zip(recurrence.names, args, strict=False)), **kwargs}
    rows = given[recurrence.names[0]].shape[1]
    histories = running.histories
    if sum(history.rows for history in histories) != rows:  # there are none if the cache is not ours
        if running.prompt is None:
            return several(*args, **kwargs)
        return several(**recurrence.prepare(given, running.prompt))
    if len(histories) == 1:
        return _run_request(several, recurrence, single, given, histories[0])
    outputs, first = [], 0
    for history in histories:
        part = recurrence.of_rows(given, first, history.rows)
        output, state = _run_request(several, recurrence, single, part, history)
        outputs.append(output)
        first += history.rows
    return torch.cat(outputs, dim=1), state


def _run_request(
    several: Function, recurrence: _Recurrence, single: Function, given: Arguments, history: History
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rows of one request; return their output and the last state."""
    natively = takes_keys(given[recurrence.key]) and _native_is_right(recurrence, single)
    turns = natively and recurrence.turns
    state = history.states[-1] if history.states else None
    rows = history.rows
    given = recurrence.prepare(
        given, rows if history.prompt is None else history.prompt - (history.length - rows)
    )
    if state is None or rows > LONGEST_FORWARD:
        before = state.mT if turns and state is not None else state
        output, last = several(**{**given, recurrence.state: before})
        state = (last.mT if turns else last).contiguous()
        states = [state.float() if natively else state]
    elif natively:
        states = history.memory(state, rows)
        output = recurrence.native(given, state, states)
    else:
        output, states = _run_steps(recurrence, single, given, state, rows, keeps=not history.begins)
    history.kept = states
    return output, states[-1]


def _run_steps(
    recurrence: _Recurrence,
    single: Function,
    given: Arguments,
    state: torch.Tensor,
    rows: int,
    *,
    keeps: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run a few rows token by token; return their output and the state after each, or the last one alone."""
    outputs, states = [], [state]
    for row in range(rows):
        output, state = recurrence.step(single, recurrence.of_rows(given, row, 1), state)
        outputs.append(output)
        states = [*states, state] if keeps else [state]
    return torch.cat(outputs, dim=1), states[1:] if keeps else states


@functools.cache
def _native_is_right(recurrence: _Recurrence, single: Function) -> bool:
    """Return whether the native call equals a function of `transformers` for one token, in two random rows."""
    for rows, before in recurrence.samples():
        try:
            expected, states = _run_steps(recurrence, single, rows, before, 2, keeps=True)
        except (RuntimeError, TypeError, ValueError):
            continue  # it has decays of another kind
        turned = before.mT.contiguous() if recurrence.turns else before
        after = [torch.empty_like(turned) for _ in range(2)]
        output = recurrence.native(rows, turned, after)
        last = after[-1].mT if recurrence.turns else after[-1]
        return torch.allclose(output, expected, rtol=1e-4, atol=1e-4) and torch.allclose(
            last, states[-1], rtol=1e-4, atol=1e-4
        )
    return False


_DELTA = ("query", "key", "value", "g", "beta")


def _delta_step(single: Function, given: Arguments, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a gated delta rule for one token; query, key, value, g and beta are [batch, tokens, ...]."""
    output, after = single(**{**given, "initial_state": state, "output_final_state": True})
    return output, after


def _delta_native(given: Arguments, state: torch.Tensor, after: list[torch.Tensor]) -> torch.Tensor:
    query, key, value, g, beta = (given[name] for name in _DELTA)
    normalize = bool(given.get("use_qk_l2norm_in_kernel", False))
    return delta_rule(query, key, value, g, beta, state, after, normalize=normalize)


def _delta_samples() -> list[tuple[Arguments, torch.Tensor]]:
    """Return two rows with a decay for each head, and two with one for each of its keys."""
    made: list[tuple[Arguments, torch.Tensor]] = []
    for decays in ((2,), (2, 24)):
        rows = _drawn((1, 2, 2, 24), (1, 2, 2, 24), (1, 2, 2, 40), (1, 2, *decays), (1, 2, 2), (1, 2, 24, 40))
        query, key, value, g, beta, before = rows
        given = dict(zip(_DELTA, (query, key, value, -g.abs(), beta.sigmoid()), strict=True))
        made.append(({**given, "use_qk_l2norm_in_kernel": True}, before))
    return made


def _drawn(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=source) for size in sizes]


_MAMBA = ("hidden_states", "dt", "A", "B", "C")


def _mamba2_time_steps(given: Arguments, prompt: int) -> Arguments:
    """Compute dt, [batch, tokens, heads], bounded in the first ``prompt`` rows."""
    dt, bias = given["dt"], given.get("dt_bias")
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = functional.softplus(dt) if given.get("dt_softplus") else dt
    limit = tuple(given.get("dt_limit", _UNBOUNDED))
    if prompt > 0 and limit != _UNBOUNDED:
        dt = torch.cat([dt[:, :prompt].clamp(*limit), dt[:, prompt:]], dim=1)
    return {**given, "dt": dt, "dt_bias": None, "dt_softplus": False, "dt_limit": _UNBOUNDED}


def _mamba2_step(
    single: Function, given: Arguments, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Mamba 2 for one token.

    Hidden states are [batch, tokens, heads, size], dt [batch, tokens, heads], B and C [batch, tokens, groups, states].
    """
    x, dt, a, b, c = (given[name] for name in _MAMBA)
    size, width, state = x.shape[-1], b.shape[-1], state.clone()
    output = single(
        state,
        x[:, 0],
        dt[:, 0, :, None].expand(-1, -1, size),
        a[:, None, None].expand(-1, size, width).float(),
        b[:, 0],
        c[:, 0],
        given["D"][:, None].expand(-1, size),
    )
    return output[:, None], state


def _mamba2_native(given: Arguments, state: torch.Tensor, after: list[torch.Tensor]) -> torch.Tensor:
    """Run Mamba 2 as a gated delta rule that only adds: its keys are B, its queries C, the time step weighs values."""
    x, dt, a, b, c = (given[name] for name in _MAMBA)
    dt = dt.float()
    read = delta_rule(c, b, x, dt * a.float(), dt, state, after, normalize=False, adds=True)
    return read + x * given["D"][:, None]


def _mamba2_samples() -> list[tuple[Arguments, torch.Tensor]]:
    x, dt, a, b, c, skip, before = _drawn(
        (1, 2, 4, 40), (1, 2, 4), (4,), (1, 2, 2, 24), (1, 2, 2, 24), (4,), (1, 4, 40, 24)
    )
    given = dict(zip(_MAMBA, (x, dt.abs(), -a.abs(), b, c), strict=True))
    return [({**given, "D": skip}, before)]


_RECURRENCES = (
    *(
        _Recurrence(*names, _DELTA, _DELTA, "initial_state", _delta_step, _delta_native, "key", _delta_samples)
        for names in (
            ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
            ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        )
    ),
    _Recurrence(
        "mamba2_chunk_scan", "mamba2_selective_state_update", _MAMBA, ("hidden_states", "dt", "B", "C"),
        "initial_states", _mamba2_step, _mamba2_native, "B", _mamba2_samples, True, _mamba2_time_steps,
    ),
)  # fmt: skip
