"""Native passes of families other than Llama's: windows, batches, and what is read wrongly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_native import CONTEXT, FAMILIES, build, chosen, relative, target_of
from test_native import level as level

from specbench.backends.torch import forward as ways
from specbench.backends.torch.cache_layers import SLIDING_SLACK, GrowingSlidingLayer
from specbench.backends.torch.scorer import Scorer
from specbench.kernels import decoder_parts, native
from specbench.kernels.weights import can_pack

pytestmark = pytest.mark.skipif(
    not (native.is_available() and can_pack(torch.float32, "cpu")), reason="no native passes here"
)

WINDOWS = [name for name, sizes in FAMILIES.items() if "sliding_window" in sizes]


def packed(kind: str, **more: Any) -> Any:
    return target_of(kind, torch.float32, **more)


def usual(model: Any) -> Scorer:
    scorer = Scorer(model)
    scorer.forward = ways.HFForward(model, scorer.cache)
    return scorer


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_drop_what_is_far_behind_and_give_the_same(kind):
    """Over more tokens than a layer with a window keeps, from a prefill of `transformers` or a native one."""
    model = packed(kind)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 301, (2 * SLIDING_SLACK + 400,), generator=generator).tolist()
    for first in (30, 300):  # rows of one native call, and more than that
        scorer, own = chosen(model), usual(model)
        for each in (scorer, own):
            each.begin()
        end = first
        while end < len(text) - 50:
            found, expected = (each.logits(text[:end], text[end : end + 40]) for each in (scorer, own))
            assert relative(found, expected) < 1e-4
            end += 37  # some are rolled back
            for each in (scorer, own):
                each.rollback(end)
        sliding = [
            layer
            for layer in scorer.cache.model_kwargs()["past_key_values"].layers
            if isinstance(layer, GrowingSlidingLayer)
        ]
        assert sliding
        assert all(layer.get_seq_length() == end for layer in sliding)
        assert all(layer.dropped and layer.keys.shape[-2] < 900 for layer in sliding)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_rows_whose_windows_begin_apart_have_parts_of_their_own(cache):
    """In layers with a window of more than one part; the others take all of their rows at once."""
    model, context, width = packed("Gemma3", sliding_window=300), CONTEXT * 5, 6
    scorer, own = chosen(model, cache), usual(model)
    for each in (scorer, own):
        each.begin()
        each.logits(context, rows=1)
    together, expected = (each.logits(context, CONTEXT[:width], rows=width) for each in (scorer, own))
    assert relative(together, expected) < 1e-4
    scorer.rollback(len(context))
    for n in range(width):
        assert torch.equal(scorer.logits([*context, *CONTEXT[: n + 1]], rows=1)[0], together[n])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("Gemma3", {"norm_offset": 0.0}),
        ("Gemma3", {"attention_out_norm": None}),
        ("Gemma3", {"window": 0}),
        ("Gemma3", {"rotation": 0}),
        ("Gemma", {"gelu": False}),
        ("Granite", {"mlp_norm": "input_layernorm"}),
        ("Granite", {"residual_multiplier": 1.0}),
        ("Olmo2", {"joint_norms": False}),
        ("SmolLM3", {"rotation": 0}),
    ],
)
def test_a_layer_that_is_described_or_read_wrongly_is_found_out(kind, wrong, monkeypatch):
    """Windows too, though the trial reads few tokens."""
    whole, (field,) = decoder_parts.read_layer, wrong

    def misread(layer: Any, index: int, family: Any, rotations: Any) -> Any:
        if field in family._fields:
            return whole(layer, index, family._replace(**wrong), rotations)
        found = whole(layer, index, family, rotations)
        return tuple(
            part._replace(**wrong) if field in getattr(part, "_fields", ()) else part for part in found
        )

    monkeypatch.setattr(decoder_parts, "read_layer", misread)
    model = packed(kind, **({"sliding_window": 512} if field == "window" else {}))
    assert type(Scorer(model).forward) is ways.HFForward


def test_other_models_are_not_read():
    model = packed("Gemma3")
    assert decoder_parts.read_parts(build("Gemma3")) is None, "nothing is packed"
    assert decoder_parts.read_parts(copy.copy(model)) is not None
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert decoder_parts.read_parts(model) is None
