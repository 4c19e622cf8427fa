"""Folded attention against `transformers`' own."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specbench.attention import FOLDED, fold_attention, folded_attention


class Layer(torch.nn.Module):
    """What the attention functions read off a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def causal_mask(length: int, positions: int) -> torch.Tensor:
    rows = torch.arange(positions - length, positions)[:, None]
    return (torch.arange(positions)[None, :] <= rows).view(1, 1, length, positions)


@pytest.mark.parametrize("length", [1, 2, 5, 31, 40])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_it_computes_the_same(length: int, groups: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    positions = 50 if masked or length == 1 else length
    query = torch.randn(1, 2 * groups, length, 8, generator=generator)
    key, value = (torch.randn(1, 2, positions, 8, generator=generator) for _ in range(2))
    mask = causal_mask(length, positions) if masked else None
    found, _ = folded_attention(Layer(groups), query, key, value, mask, scaling=0.3, dropout=0.0)
    wanted, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, scaling=0.3, dropout=0.0)
    assert found.shape == wanted.shape == (1, length, 2 * groups, 8)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_position_bias_is_not_lost() -> None:
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    bias = torch.randn(1, 4, 1, 6)
    arguments = {"scaling": 0.3, "dropout": 0.0, "position_bias": bias}
    found, _ = folded_attention(Layer(2), query, key, value, None, **arguments)
    wanted, _ = sdpa_attention_forward(Layer(2), query, key, value, None, **arguments)
    torch.testing.assert_close(found, wanted)


def test_models_are_switched_only_where_heads_are_shared() -> None:
    shared = tiny_llama()
    ids = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    before = shared(input_ids=ids).logits
    assert fold_attention(shared)
    assert shared.config._attn_implementation == FOLDED
    torch.testing.assert_close(shared(input_ids=ids).logits, before)
    own_heads = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    assert not fold_attention(own_heads)


def test_wide_passes_over_a_cache_get_their_mask() -> None:
    model = tiny_llama()
    ids = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(1))
    whole = model(input_ids=ids).logits
    fold_attention(model)
    cache = model(input_ids=ids[:, :12], use_cache=True).past_key_values
    tail = model(input_ids=ids[:, 12:], past_key_values=cache).logits
    torch.testing.assert_close(tail, whole[:, 12:], rtol=1e-4, atol=1e-5)
