"""Attention for short passes over a long cache, without expanding grouped key/value heads.

With grouped-query attention (Ainslie et al. 2023) several query heads share one key/value head. On a CPU,
``transformers`` copies the shared heads out to full width for every pass of more than one token, which costs more than
the attention itself. Folding the query heads of a group into the query length needs no copy and computes the same sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FOLDED", "fold_attention", "folded_attention"]

FOLDED = "specbench_folded"
"""Name under which ``transformers`` knows this attention."""

_LONGEST_FOLD = 32
"""Query length from which a pass counts as a prefill, whose folded mask would be larger than what it saves."""


def folded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention with the query groups folded into the query length.

    Args:
        module: The attention layer.
        query: [1, query heads, queries, head size].
        key, value: [1, key/value heads, positions, head size].
        attention_mask: [1, 1, queries, positions], or ``None`` where every query sees every position.
        arguments: As ``transformers`` passes them to an attention function.

    Returns:
        [1, queries, query heads, head size] and ``None`` for the weights. Whatever does not fit this shape (long or
        batched queries, biases, dropout) goes the way of ``transformers``' own function.
    """
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    groups = heads // shared
    masked = attention_mask is not None and attention_mask.shape[1] == 1
    if (
        batch != 1
        or groups == 1
        or length > _LONGEST_FOLD
        or not (masked or (attention_mask is None and length == 1))
        or arguments.get("dropout")
        or arguments.get("position_bias") is not None
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    # Heads of one group stand side by side: [1, shared, groups, length, size] -> [1, shared, groups * length, size].
    folded = query.reshape(1, shared, groups * length, size)
    if attention_mask is not None and length > 1:
        attention_mask = attention_mask[..., : key.shape[-2]].repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=arguments.get("scaling")
    )
    return out.view(1, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None


def fold_attention(model: PreTrainedModel) -> bool:
    """Switch a CPU model with grouped key/value heads to folded attention.

    Returns:
        Whether it was switched; False where the model does not use ``sdpa``, shares no heads, or is elsewhere.
    """
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", heads)
    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa" or shared == heads:
        return False
    # The mask goes by the same name: a name without one would silently get no mask.
    AttentionMaskInterface.register(FOLDED, sdpa_mask)
    AttentionInterface.register(FOLDED, folded_attention)
    model.set_attn_implementation(FOLDED)
    return bool(model.config._attn_implementation == FOLDED)
