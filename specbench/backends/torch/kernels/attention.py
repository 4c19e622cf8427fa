"""Attention for short passes over a long cache: no expanded key/value heads, and rows that do not depend on the pass.

With grouped-query attention (Ainslie et al. 2023) several query heads share one key/value head. On a CPU,
``transformers`` copies the shared heads out to full width for every pass of more than one token, which costs more than
the attention itself. Folding the query heads of a group into the query length needs no copy and computes the same sums.

A pass may read several requests side by side (``RaggedKV``): to every other part of a model their rows are those of one
sequence, and only here each request attends to its own keys.

The sums come out *bitwise* the same for a position, whatever the length of the pass, if the kernel cuts keys and rows
up in the same way every time: with keys padded to whole blocks (and masked), and rows to a multiple of a few. The
preallocated cache hands out such blocks. Measured: docs/log.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specbench.backends.torch.kernels.native import Attention, NativeRequest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Made = TypeVar("Made")

FOLDED = "specbench_folded"
"""Name under which ``transformers`` knows this attention."""

RAGGED = "specbench_ragged"
"""The same for ``transformers``' own scaled dot-product attention, but for passes of several requests."""

LONGEST_PASS = 32
"""Tokens up to which a pass is one of drafting or verifying: longer ones go the way of a prefill, and linear layers on
more rows compute their sums in another order."""

KEY_BLOCK = 512
"""Number of keys of which a padded length has to be a multiple, so that sums do not depend on it: what the kernel takes
at a time. (Some processors do with fewer in bfloat16.)"""

_ROWS = 8  # a multiple of it, for the kernel takes 32 at a time and may sum a rest of 1 to 5 in another order
_MOST_ROWS = 160  # from 192 on, the kernel cuts rows up differently


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | RaggedKV,
    value: torch.Tensor | RaggedKV,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention with the query groups folded into the query length.

    Args:
        module: The attention layer.
        query: [1, query heads, queries, head size].
        key, value: [1, key/value heads, positions, head size], or those of several requests.
        attention_mask: [1, 1, queries, positions], or ``None`` where every query sees every position.
        arguments: As ``transformers`` passes them to an attention function.

    Returns:
        [1, queries, query heads, head size] and ``None`` for the weights. Whatever does not fit this shape (long or
        batched queries, biases, dropout) goes the way of ``transformers``' own function.
    """
    if isinstance(key, RaggedKV):
        return ragged_attention(module, query, key, value, attention_mask, **arguments)
    assert not isinstance(value, RaggedKV)
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if (
        batch != 1
        or length > LONGEST_PASS
        or not (masked or (attention_mask is None and length == 1))
        or arguments.get("dropout")
        or arguments.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    masks = None if attention_mask is None else _masks_of_pass(attention_mask, groups, query.dtype)
    return attend(query, key, value, masks, arguments.get("scaling")), None


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | RaggedKV,
    value: torch.Tensor | RaggedKV,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """``transformers``' scaled dot-product attention, or that of several requests, each under its own mask.

    Arguments and result are those of ``folded_attention``.

    Raises:
        ValueError: Several requests' scores are to be changed in ways that there are no means for here.
    """
    if not isinstance(key, RaggedKV):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)  # type: ignore[arg-type]
    if any(arguments.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        raise ValueError("scores are changed before the softmax")
    return key.attend(query, arguments.get("scaling")), None


class Span:
    """Neighboring rows of a pass that attend in one call: those of one request, or as many of each of several.

    Args:
        rows: Where they are among all rows of the pass.
        requests: Whose they are.
        mask: Bool [requests, 1, queries, positions], true where a query attends; ``None`` for single ones that see
            all, and for a chain of one request that begins with its first position.
        places: Where the rows of requests that bring fewer than ``queries`` are among [requests · queries]; ``None``
            where all bring as many.
    """

    def __init__(
        self, rows: slice, requests: int, mask: torch.Tensor | None, places: torch.Tensor | None = None
    ) -> None:
        self._rows, self._requests, self._mask, self._places = rows, requests, mask, places
        self._folded: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of these rows.

        Args:
            query: Of the whole pass, [1, query heads, rows, head size].
            key, value: Of these requests, [requests, key/value heads, positions, head size].
            scale: See ``attend``.

        Returns:
            [1, these rows, query heads, head size].
        """
        _, heads, _, size = query.shape
        query = query[:, :, self._rows]
        groups = heads // key.shape[1]
        if self._mask is None:
            if query.shape[2] == 1:
                return attend(query, key, value, None, scale)
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
            return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(
                1, 2
            )
        if self._places is not None:
            padded = query.new_zeros(1, heads, self._requests * self._mask.shape[2], size)
            query = padded.index_copy_(2, self._places.to(query.device), query)
        query = query.view(heads, self._requests, -1, size).transpose(0, 1)
        kind = (groups, query.dtype, query.device)
        if kind not in self._folded:
            self._folded[kind] = fold_mask(self._mask.to(query.device), groups, query.dtype)
        out = attend(query, key, value, self._folded[kind], scale)
        out = out.view(1, -1, heads, out.shape[-1])
        return out if self._places is None else out[:, self._places.to(out.device)]


class NativeSpan:
    """Neighboring rows of a pass, of any requests, that attend in one native call.

    Args:
        rows: Where they are among all rows of the pass.
        requests: Whose they are.
    """

    def __init__(self, rows: slice, requests: Sequence[NativeRequest]) -> None:
        self._rows, self._attention = rows, Attention(requests)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Attention of these rows; see ``Span.attend``, but keys and values are all of the pool's."""
        own = query[0, :, self._rows].transpose(0, 1).float()
        return self._attention(own, key, value, scale).to(query.dtype)[None]


class RaggedKV:
    """The keys and values of several requests, which take the place of one request's in a pass.

    Args:
        spans: Of all rows of the pass, in their order.
        keys, values: Of each span, as it takes them.
    """

    def __init__(
        self, spans: Sequence[Span | NativeSpan], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self._spans, self._keys, self._values = spans, keys, values

    def attend(self, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Every request's rows attend to its own positions: [1, query heads, rows, size] -> [1, rows, heads, size]."""
        parts = [
            span.attend(query, keys, values, scale)
            for span, keys, values in zip(self._spans, self._keys, self._values, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor | RaggedKV,
    value: torch.Tensor | RaggedKV,
    masks: Sequence[torch.Tensor] | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of a short pass.

    Args:
        query: [batch, query heads, queries, head size].
        key, value: [batch, key/value heads, positions, head size], or those of several requests.
        masks: What ``fold_mask`` made; ``None`` for a single query that sees every position, and several requests.
        scale: What scores are multiplied by; ``None`` for 1/√(head size).

    Returns:
        [batch, queries, query heads, head size].
    """
    if isinstance(key, RaggedKV):
        return key.attend(query, scale)
    assert not isinstance(value, RaggedKV)
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    if masks is None and key.shape[2] % KEY_BLOCK == 0:
        # The last token of a block sees all of it, as no token beside others does: these have a mask.
        masks = fold_mask(query.new_zeros(1, 1, 1, key.shape[2]), groups, query.dtype)
    if masks is None:
        folded = query.reshape(batch, shared, groups, size)
        out = scaled_dot_product_attention(folded, key, value, scale=scale)
        return out.view(batch, heads, 1, value.shape[-1]).transpose(1, 2).contiguous()
    if len(masks) == 1:
        return _folded_rows(query, key, value, masks[0], scale).transpose(1, 2).contiguous()
    most = _most_queries(groups)
    parts = [
        _folded_rows(query[:, :, first : first + most], key, value, rows, scale)
        for first, rows in zip(range(0, length, most), masks, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _most_queries(groups: int) -> int:
    return max(1, _MOST_ROWS // groups)


def _folded_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of a few queries; the mask is [batch, 1, folded and padded rows, positions]."""
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    rows = heads // shared * length
    # Heads of one group stand side by side: [.., shared, groups, length, size] -> [.., shared, groups * length, size].
    folded = query.reshape(batch, shared, rows, size)
    padding = mask.shape[-2] - rows
    if padding > 0:
        folded = pad(folded, (0, 0, 0, padding))
    out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    if padding > 0:
        out = out[:, :, :rows]
    return out.reshape(batch, heads, length, value.shape[-1])


class OncePerPass(threading.local):
    """Makes something of a tensor that all layers of a pass are handed, once for all of them.

    Every thread has the last one of its own, for passes of several models may run side by side.
    """

    _last: tuple[torch.Tensor, object, Any] | None = None

    def __call__(self, given: torch.Tensor, key: object, make: Callable[[], Made]) -> Made:
        """What ``make()`` gives, or gave for the same tensor object and an equal key just before."""
        last = self._last
        if last is None or last[0] is not given or last[1] != key:
            last = self._last = (given, key, make())
        made: Made = last[2]
        return made


_last_masks = OncePerPass()


def _masks_of_pass(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What ``fold_mask`` makes, once for all layers of a pass, which are handed the same mask."""
    return _last_masks(mask, (groups, dtype), lambda: fold_mask(mask, groups, dtype))


def fold_mask(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What is added to the scores of the folded rows, for every few queries.

    Args:
        mask: [batch, 1, queries, positions], true where a query attends, or what is added to its scores.
        groups: Query heads to a key/value head.
        dtype: Of the queries.
    """
    most = _most_queries(groups)
    added = mask
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
    parts = []
    for first in range(0, mask.shape[-2], most):
        rows = added[:, :, first : first + most].repeat(1, 1, groups, 1)
        parts.append(pad(rows, (0, 0, 0, -rows.shape[-2] % _ROWS)))
    return parts


def folded_mask(
    q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **arguments: Any
) -> Any:
    """The mask for ``folded_attention``; arguments and result as of ``transformers``' ``sdpa_mask``.

    ``transformers`` leaves the mask of a single query out, as it sees all keys; here it must not see the padding.
    """
    if kv_offset + kv_length > q_offset + q_length:
        arguments["allow_is_causal_skip"] = False
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, **arguments
    )


def fold_attention(model: PreTrainedModel) -> bool:
    """Switch a CPU model to folded attention.

    Returns:
        Whether it was switched; False where the model does not use ``sdpa`` or is elsewhere.
    """
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return False
    # The mask goes by the same name: a name without one would silently get no mask.
    AttentionMaskInterface.register(FOLDED, folded_mask)
    AttentionInterface.register(FOLDED, folded_attention)
    model.set_attn_implementation(FOLDED)
    return is_folded(model.config)


def takes_ragged(model: PreTrainedModel) -> bool:
    """Let a model's attention take several requests in a pass.

    Returns:
        Whether it does; False where it is no scaled dot-product attention.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa":
        AttentionMaskInterface.register(RAGGED, sdpa_mask)
        AttentionInterface.register(RAGGED, ragged_attention)
        model.set_attn_implementation(RAGGED)
    return config._attn_implementation in (FOLDED, RAGGED)


def is_folded(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration uses folded attention throughout."""
    return bool(config.get_text_config(decoder=True)._attn_implementation == FOLDED)
