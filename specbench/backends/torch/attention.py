"""Attention for short forwards over a long cache: no expanded key/value heads, and rows independent of the forward.

With grouped-query attention (Ainslie et al. 2023) several query heads share a key/value head. On a CPU,
``transformers`` copies the shared heads to full width in every forward of more than one token, which costs more than
the attention itself. Folding the query heads of a group into the query length needs no copy and computes the same sums.

A forward can run several requests together (``RaggedKV``): for the rest of the model their tokens are one sequence;
only here each request attends to its own keys.

The sums of a position are *bitwise* the same in forwards of any length if the kernel always splits keys and rows in the
same way: with keys padded to whole blocks (and masked), and rows to a multiple of 8. The preallocated cache returns
such blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specbench.kernels import Attention, Request, can_attend
from specbench.kernels import attend as attend_natively

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FOLDED = "specbench_folded"
"""Name of this attention in ``transformers``."""

RAGGED = "specbench_ragged"
"""Name of ``transformers``' own scaled dot-product attention, extended to several requests."""

LONGEST_PASS = 32
"""Tokens up to which a forward drafts or verifies. Longer ones are prefills, where linear layers sum in another order.
"""

KEY_BLOCK = 512
"""Padded lengths are multiples of this number of keys, which the kernel takes at a time: sums do not depend on them.
(Some processors need fewer in bfloat16.)
"""

_ROWS = 8  # a multiple of it, for the kernel takes 32 at a time and may sum a rest of 1 to 5 in another order
_MOST_ROWS = 160  # from 192 on, the kernel cuts rows up differently


def folded_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | RaggedKV,
    value: Tensor | RaggedKV,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute scaled dot-product attention with the query groups folded into the query length.

    Args:
        query: [1, query heads, queries, head size].
        key, value: [1, key/value heads, positions, head size], or those of several requests.
        attention_mask: [1, 1, queries, positions]; ``None`` if every query sees every position.
        module, arguments: As ``transformers`` passes them to an attention function.

    Returns:
        [1, queries, query heads, head size], and ``None`` for the weights. Other cases (long or batched queries,
            biases, dropout) are computed by ``transformers``' own function.
    """
    if isinstance(key, RaggedKV):
        return ragged_attention(module, query, key, value, attention_mask, **arguments)
    assert not isinstance(value, RaggedKV)
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    unusual = any(arguments.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
    if length > LONGEST_PASS and attention_mask is None and not (unusual or arguments.get("dropout")):
        is_causal = arguments.get("is_causal")
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            return causal_attention(query, key, value, arguments.get("scaling")), None
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


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, window: int = 0
) -> Tensor:
    """Compute the attention of many queries, which are the last positions: [batch, queries, query heads, head size].

    Args:
        query: [batch, query heads, queries, head size].
        key, value: [batch, key/value heads, positions, head size].
        scale: Factor of scores; ``None`` for 1/√(head size).
        window: Positions that a query attends to, with its own; 0 for all.
    """
    learns = query.requires_grad or key.requires_grad or value.requires_grad
    if len(query) == 1 and query.dtype == key.dtype and not learns and can_attend(key, value):
        return attend_natively(query, key, value, scale, window)
    queries, keys = query.shape[2], key.shape[2]
    # Repeated, for torch's own way with groups is not among its fast ones on every device.
    key, value = (kv.repeat_interleave(query.shape[1] // kv.shape[1], 1) for kv in (key, value))
    mask = None
    if queries < keys or 0 < window < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(keys - queries)
        mask = mask.triu_(keys - queries - window + 1) if window else mask
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out.transpose(1, 2)


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | RaggedKV,
    value: Tensor | RaggedKV,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute ``transformers``' scaled dot-product attention, or that of several requests, each under its own mask.

    Raises:
        ValueError: Scores of several requests are to be changed in ways that are not supported.
    """
    if not isinstance(key, RaggedKV):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)  # type: ignore[arg-type]
    if any(arguments.get(name) is not None for name in ("position_bias", "softcap", "s_aux")):
        raise ValueError("scores are changed before the softmax")
    return key.attend(query, arguments.get("scaling")), None


class Span:
    """The rows of one request in a forward.

    Args:
        mask: Bool [1, 1, queries, positions], true where a query attends; ``None`` for a single row that sees all, and
            for more than ``LONGEST_PASS`` rows, see ``causal_attention``.
        window: See ``causal_attention``.
    """

    def __init__(self, rows: slice, mask: Tensor | None, window: int = 0) -> None:
        self.rows, self.mask, self.window = rows, mask, window
        self._folded: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of these rows, [1, these rows, query heads, head size].

        Args:
            query: Of the whole forward, [1, query heads, rows, head size].
            key, value: Of this request, [1, key/value heads, positions, head size].
        """
        query = query[:, :, self.rows]
        if self.mask is None:
            if query.shape[2] == 1:
                return attend(query, key, value, None, scale)
            return causal_attention(query, key, value, scale, self.window)
        kind = (query.shape[1] // key.shape[1], query.dtype, query.device)
        if kind not in self._folded:
            self._folded[kind] = fold_mask(self.mask.to(query.device), *kind[:2])
        return attend(query, key, value, self._folded[kind], scale)


class NativeSpan:
    """Neighboring rows of a forward, of any requests, that attend in one native call."""

    def __init__(self, rows: slice, requests: Sequence[Request]) -> None:
        self._rows, self._attention = rows, Attention(requests)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Compute the attention of these rows; see ``Span.attend``, but keys and values are the whole pool's."""
        own = query[0, :, self._rows].transpose(0, 1).float()
        return self._attention(own, key, value, scale).to(query.dtype)[None]


class RaggedKV:
    """The keys and values of several requests by span, in place of one request's in a forward."""

    def __init__(
        self, spans: Sequence[Span | NativeSpan], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        self._spans, self._keys, self._values = spans, keys, values

    def attend(self, query: Tensor, scale: float | None) -> Tensor:
        """Let every request attend to its own positions: [1, query heads, rows, size] -> [1, rows, heads, size]."""
        parts = [
            span.attend(query, keys, values, scale)
            for span, keys, values in zip(self._spans, self._keys, self._values, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor] | None, scale: float | None
) -> Tensor:
    """Compute the attention of a short forward, [batch, queries, query heads, head size].

    Args:
        query: [batch, query heads, queries, head size].
        key, value: [batch, key/value heads, positions, head size].
        masks: From ``fold_mask``; ``None`` for a single query that sees every position.
        scale: Factor of scores; ``None`` for 1/√(head size).
    """
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    if masks is None and key.shape[2] % KEY_BLOCK == 0:
        # The last token of a block sees all of it, as no token among others does: these have a mask.
        masks = fold_mask(query.new_zeros(1, 1, 1, key.shape[2]), groups, query.dtype)
    if masks is None:
        folded = query.reshape(batch, shared, groups, size)
        out = scaled_dot_product_attention(folded, key, value, scale=scale)
        return out.view(batch, heads, 1, value.shape[-1]).transpose(1, 2).contiguous()
    if len(masks) == 1:
        return _folded_rows(query, key, value, masks[0], scale).transpose(1, 2).contiguous()
    most = max(1, _MOST_ROWS // groups)
    parts = [
        _folded_rows(query[:, :, first : first + most], key, value, rows, scale)
        for first, rows in zip(range(0, length, most), masks, strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _folded_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Compute the attention of a few queries; the mask is [batch, 1, folded and padded rows, positions]."""
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


_last_masks = threading.local()  # by thread, since several models may run at a time


def _masks_of_pass(mask: Tensor, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Return ``fold_mask``'s result, computed once for all layers of a forward, which get the same mask."""
    last = getattr(_last_masks, "value", None)
    if last is None or last[0] is not mask or last[1:3] != (groups, dtype):
        last = _last_masks.value = (mask, groups, dtype, fold_mask(mask, groups, dtype))
    return last[3]


def fold_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what to add to the scores of the folded rows, for every few queries.

    Args:
        mask: [batch, 1, queries, positions], true where a query attends, or what to add to its scores.
        groups: Query heads per key/value head.
        dtype: Of the queries.
    """
    most = max(1, _MOST_ROWS // groups)
    added = mask
    if mask.dtype == torch.bool:
        added = mask.new_zeros(mask.shape, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
    parts = []
    for first in range(0, mask.shape[-2], most):
        rows = added[:, :, first : first + most].repeat(1, 1, groups, 1)
        parts.append(pad(rows, (0, 0, 0, -rows.shape[-2] % _ROWS)))
    return parts


def folded_mask(
    q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **arguments: Any
) -> Any:
    """Return the mask for ``folded_attention``; arguments and result as of ``transformers``' ``sdpa_mask``.

    ``transformers`` omits the mask of a single query, which sees all keys; here it must not see the padding. For many
    queries ``None`` stands for ``causal_attention``, with cached positions before them, too.
    """
    if kv_offset + kv_length > q_offset + q_length:
        arguments["allow_is_causal_skip"] = False
    window, padding = arguments.get("local_size"), arguments.get("attention_mask")
    if (
        q_length > LONGEST_PASS
        and kv_offset == 0
        and arguments.get("allow_is_causal_skip", True)
        and not arguments.get("allow_is_bidirectional_skip")
        and (window is None or kv_length < window)
        and (padding is None or bool(padding.all()))
    ):
        return None
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, **arguments
    )


def fold_attention(model: PreTrainedModel) -> bool:
    """Switch a model to folded attention if it is on a CPU and uses ``sdpa``; return whether it was switched."""
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return False
    # The mask goes by the same name: a name without one would silently get no mask.
    AttentionMaskInterface.register(FOLDED, folded_mask)
    AttentionInterface.register(FOLDED, folded_attention)
    model.set_attn_implementation(FOLDED)
    return is_folded(model.config)


def enable_ragged(model: PreTrainedModel) -> bool:
    """Make scaled dot-product attention accept several requests in a forward; return whether a model has it."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa":
        AttentionMaskInterface.register(RAGGED, sdpa_mask)
        AttentionInterface.register(RAGGED, ragged_attention)
        model.set_attn_implementation(RAGGED)
    return config._attn_implementation in (FOLDED, RAGGED)


def is_folded(config: PretrainedConfig) -> bool:
    """Return whether a model of this configuration uses folded attention throughout."""
    return bool(config.get_text_config(decoder=True)._attn_implementation == FOLDED)
