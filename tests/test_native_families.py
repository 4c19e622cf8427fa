"""Native passes of families other than Llama's: equal to `transformers`' forward, row by row, over windows too."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from test_native import chosen, in_one_call, relative

from specbench.backends.torch import forward as ways
from specbench.backends.torch import trials
from specbench.backends.torch.batch import BatchedModel
from specbench.backends.torch.cache_layers import SLIDING_SLACK, GrowingSlidingLayer
from specbench.backends.torch.kernels import decoder_parts, native
from specbench.backends.torch.kernels.attention import fold_attention
from specbench.backends.torch.kernels.linear import can_pack
from specbench.backends.torch.kernels.surgery import pack_linears, quantized_copy
from specbench.backends.torch.pools import KVPool
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import ForwardRequest
from specbench.generate import speculative_generate
from specbench.models.drafters import load_drafter
from specbench.models.target import wrap_target

pytestmark = pytest.mark.skipif(
    not (native.is_available() and can_pack(torch.float32, "cpu")), reason="no native passes here"
)

SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MIXED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma": {},
    "Gemma3": MIXED | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 10.0},
    "Granite": {
        "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 5.0, "attention_multiplier": 0.2,
    },
    "Mistral": {"sliding_window": 20},
    "Olmo2": {},
    "Olmo3": MIXED,
    "Phi3": {"head_dim": 32, "rope_parameters": PARTIAL, "sliding_window": 33},
    "SmolLM3": {"no_rope_layers": [1, 0, 1]},
}  # fmt: skip
WINDOWS = [name for name, sizes in FAMILIES.items() if "sliding_window" in sizes]
CONTEXT = torch.randint(0, 301, (60,), generator=torch.Generator().manual_seed(0)).tolist()


def build(kind: str, **more: Any) -> Any:
    """A random model in float32, not packed."""
    config = getattr(hf, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(
        **SIZES | FAMILIES[kind] | more
    )
    config.head_dim = (SIZES | FAMILIES[kind])["head_dim"]  # not an argument of all of them
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.generation_config = hf.GenerationConfig(do_sample=False)
    model.requires_grad_(False)
    fold_attention(model)
    return model


def packed(kind: str, **more: Any) -> Any:
    """The same as it decodes."""
    model = build(kind, **more)
    pack_linears(model)
    return model


def usual(model: Any) -> Scorer:
    scorer = Scorer(model)
    scorer.forward = ways.HFForward(model, scorer.cache)
    return scorer


def passes(scorer: Scorer) -> Iterator[torch.Tensor]:
    """Logits of a prefill, of passes of several widths behind it, and of a step with hidden states."""
    scorer.begin()
    yield scorer.logits(CONTEXT)
    for width in (1, 2, 7, 33):
        yield scorer.logits(CONTEXT, CONTEXT[:width])
        scorer.rollback(len(CONTEXT))
    found = scorer.score(ForwardRequest(scorer, [*CONTEXT, 5], [6, 7], layers=(3, 0, 1)))
    yield found.logits
    assert found.hidden is not None
    yield found.hidden


@pytest.fixture(params=[1, 2], ids=["avx2", "avx512"])
def level(request, monkeypatch) -> int:
    own = native.loaded()
    if own.highest < request.param:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(native, "loaded", lambda: own._replace(level=request.param))
    return int(request.param)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_passes_are_those_of_transformers(kind, cache, level):
    model = packed(kind)
    exact = list(passes(Scorer(build(kind).double())))
    for one, other, truth in zip(passes(chosen(model, cache)), passes(usual(model)), exact, strict=True):
        assert relative(one, truth) < 2 * relative(other, truth) + 1e-6


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_has_the_same_bits_in_every_pass(kind, rounded, level):
    scorer = chosen(quantized_copy(packed(kind)) if rounded else packed(kind))
    scorer.begin()
    scorer.logits(CONTEXT)
    one_by_one = [scorer.logits([*CONTEXT, *CONTEXT[: n + 1]], rows=1)[0] for n in range(24)]
    for width in (2, 3, 7, 13, 24):
        scorer.rollback(len(CONTEXT))
        together = scorer.logits(CONTEXT, CONTEXT[:width], rows=width)
        assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=False))


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_outputs_are_those_of_generate(kind):
    model, ids = build(kind), torch.tensor([CONTEXT])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
                         eos_token_id=None)[0, len(CONTEXT):].tolist()  # fmt: skip
    target = wrap_target(packed(kind))
    assert type(target.scorer.forward) is ways.NativeForward
    for spec in (None, "lookup", "self:int8", "self:layers=2", "self:skip=2"):
        drafter = None if spec is None else load_drafter(spec, target)
        run = speculative_generate(CONTEXT, target, drafter, gamma=4, max_new_tokens=24, ignore_eos=True)
        assert list(run.token_ids) == own


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


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
def test_rows_whose_windows_begin_apart_have_parts_of_their_own(cache, level):
    """In layers with a window of more than one part; the others take all of their rows at once."""
    model, context, width = packed("Gemma3", sliding_window=300), CONTEXT * 12, 6
    scorer, own = chosen(model, cache), usual(model)
    for each in (scorer, own):
        each.begin()
        each.logits(context, rows=1)
    together, expected = (each.logits(context, CONTEXT[:width], rows=width) for each in (scorer, own))
    assert relative(together, expected) < 1e-4
    scorer.rollback(len(context))
    for n in range(width):
        assert torch.equal(scorer.logits([*context, *CONTEXT[: n + 1]], rows=1)[0], together[n])


@pytest.mark.parametrize("pool", ["slotted", "paged"])
@pytest.mark.parametrize("kind", ["Gemma3", "Granite", "SmolLM3", "Mistral"])
def test_requests_have_the_bits_they_have_alone(kind, pool, monkeypatch):
    monkeypatch.setattr(native, "most_rows", lambda _: 128)  # so many are native on any processor
    scorer, choice = chosen(packed(kind)), random.Random(0)
    batch = BatchedModel(scorer, KVPool(scorer.model.config, pool, 1024, 4))
    assert batch.why_not_batched is None
    seen = in_one_call(monkeypatch)
    scorers, contexts = [batch.open() for _ in range(3)], [CONTEXT[:50], CONTEXT[5:9], CONTEXT[3:41]]
    order = choice.sample(range(3), 3)
    batch.score([ForwardRequest(scorers[i], contexts[i][:-1], rows=1) for i in order])
    found = batch.score([ForwardRequest(scorers[i], contexts[i], CONTEXT[:3]) for i in order])
    for i, each in zip(order, found, strict=True):
        alone = chosen(scorer.model)
        alone.logits(contexts[i][:-1], rows=1)
        assert torch.equal(each.logits, alone.logits(contexts[i], CONTEXT[:3]))
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Gemma3", {"norm_offset": 0.0}),
        ("Gemma3", {"attention_out_norm": None}),
        ("Olmo2", {"joint_norms": False}),
        ("Granite", {"mlp_norm": "input_layernorm"}),
    ],
)
def test_a_wrong_description_is_found_out(kind, change, monkeypatch):
    known = decoder_parts.FAMILIES[kind]
    monkeypatch.setitem(decoder_parts.FAMILIES, kind, known._replace(**change))
    assert type(Scorer(packed(kind)).forward) is ways.HFForward


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        ("Gemma3", "window", 0),
        ("Gemma3", "rotation", 0),
        ("Gemma", "gelu", False),
        ("Granite", "residual_multiplier", 1.0),
        ("SmolLM3", "rotation", 0),
    ],
)
def test_a_layer_that_is_read_wrongly_is_found_out(kind, field, wrong, monkeypatch):
    """Windows too, though the trial reads few tokens."""
    whole = decoder_parts.read_layer

    def misread(*given: Any) -> Any:
        return tuple(
            part._replace(**{field: wrong}) if field in getattr(part, "_fields", ()) else part
            for part in whole(*given)
        )

    monkeypatch.setattr(decoder_parts, "read_layer", misread)
    model = packed(kind, **({"sliding_window": 512} if kind == "Gemma3" else {}))
    assert type(Scorer(model).forward) is ways.HFForward


def test_layers_of_every_kind_are_tried():
    model = packed("SmolLM3", num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1])
    sample = trials._one_of_each_kind(model, least=2)
    assert sample is not None
    assert sample.config.num_hidden_layers == 4


def test_other_models_are_not_read():
    model = packed("Gemma3")
    assert decoder_parts.read_parts(build("Gemma3")) is None, "nothing is packed"
    assert decoder_parts.read_parts(copy.copy(model)) is not None
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert decoder_parts.read_parts(model) is None
