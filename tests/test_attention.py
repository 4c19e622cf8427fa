"""Folded attention against `transformers`' own."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import tiny_llama
from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specbench.backends.torch import attention
from specbench.backends.torch.attention import (
    FOLDED,
    causal_attention,
    fold_attention,
    folded_attention,
    folded_mask,
)
from specbench.kernels import native


class Layer(torch.nn.Module):
    """What the attention functions read off a layer."""

    def __init__(self, groups: int, is_causal: bool = True) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


def causal_mask(length: int, positions: int) -> torch.Tensor:
    rows = torch.arange(positions - length, positions)[:, None]
    return (torch.arange(positions)[None, :] <= rows).view(1, 1, length, positions)


@pytest.mark.parametrize(("length", "groups"), [(1, 3), (2, 3), (31, 1), (40, 3)])
@pytest.mark.parametrize("form", ["masked", "biased", "without a mask", "looking ahead"])
def test_it_computes_the_same(length, groups, form):
    generator = torch.Generator().manual_seed(length)
    layer, masked = Layer(groups, form != "looking ahead"), form in ("masked", "biased")
    positions = 50 if masked or length == 1 else length
    query = torch.randn(1, 2 * groups, length, 8, generator=generator)
    key, value = (torch.randn(1, 2, positions, 8, generator=generator) for _ in range(2))
    mask = causal_mask(length, positions) if masked else None
    arguments: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0}
    if form == "biased":
        arguments["position_bias"] = torch.randn(1, 2 * groups, length, positions)
    found, _ = folded_attention(layer, query, key, value, mask, **arguments)
    wanted, _ = sdpa_attention_forward(layer, query, key, value, mask, **arguments)
    assert found.shape == wanted.shape == (1, length, 2 * groups, 8)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_pass_of_another_thread_in_between_leaves_the_mask_alone():
    def attend(mask: torch.Tensor) -> torch.Tensor:
        query, key = torch.ones(1, 4, *mask.shape[-2:]), torch.ones(1, 2, mask.shape[-1], mask.shape[-1])
        return folded_attention(Layer(2), query, key, key, mask, scaling=1.0)[0]

    def elsewhere() -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(attend, causal_mask(3, 6)).result()

    before = causal_mask(2, 8)
    attend(before)
    at_its_end = weakref.finalize(before, elsewhere)
    del before
    assert attend(causal_mask(3, 4)).shape == (1, 3, 4, 4)
    assert not at_its_end.alive, "the last pass's mask is let go as soon as there is another"


def test_only_models_with_sdpa_are_switched():
    shared = tiny_llama()
    ids = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    before = shared(input_ids=ids).logits
    assert fold_attention(shared)
    assert shared.config._attn_implementation == FOLDED
    torch.testing.assert_close(shared(input_ids=ids).logits, before)
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    assert not fold_attention(eager)
    assert eager.config._attn_implementation == "eager"


WIDE: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
"""A model whose heads are wide enough for native attention."""


@pytest.mark.parametrize("natively", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_long_passes_over_a_cache_need_no_mask(natively, dtype, monkeypatch, request):
    request.addfinalizer(lambda: AttentionMaskInterface.register(FOLDED, folded_mask))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**WIDE)).to(dtype).eval()
    ids = torch.randint(0, 200, (1, 120), generator=torch.Generator().manual_seed(1))
    whole = model(input_ids=ids).logits
    fold_attention(model)
    calls, masks = [], []
    monkeypatch.setattr(attention, "attend_natively", lambda *given: calls.append(1) or native.attend(*given))
    if not natively:
        monkeypatch.setattr(attention, "can_attend", lambda *_: False)

    def noted(**arguments: Any) -> Any:
        masks.append(folded_mask(**arguments))
        return masks[-1]

    AttentionMaskInterface.register(FOLDED, noted)
    cache = model(input_ids=ids[:, :12], use_cache=True).past_key_values
    parts = [model(input_ids=ids[:, a:b], past_key_values=cache).logits for a, b in ((12, 60), (60, 120))]
    assert [mask is None for mask in masks] == [True, True, True]
    assert len(calls) == (2 * 2 if natively and native.is_available() else 0)
    error = (torch.cat(parts, 1) - whole[:, 12:]).norm() / whole.norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_masks_that_say_more_than_causal_ones_are_made():
    for told in (
        {"attention_mask": torch.arange(80)[None] > 3},
        {"local_size": 50},
        {"allow_is_causal_skip": False},
    ):
        assert folded_mask(40, 80, 40, batch_size=1, **told) is not None


@pytest.mark.parametrize("window", [0, 30, 500])
def test_causal_attention_is_the_same_with_and_without_native_code(window, monkeypatch):
    query = torch.randn(1, 4, 50, 32)
    key, value = (torch.randn(1, 2, 120, 32) for _ in range(2))
    found = causal_attention(query, key, value, None, window)
    monkeypatch.setattr(attention, "can_attend", lambda *_: False)
    torch.testing.assert_close(causal_attention(query, key, value, None, window), found)


def test_causal_attention_can_be_learned_through():
    query, key, value = (torch.randn(1, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2))
    causal_attention(query, key, value)[0, 5].sum().backward()
    assert value.grad is not None
    assert [bool(value.grad[0, 0, i].any()) for i in (0, 5, 6)] == [True, True, False]
