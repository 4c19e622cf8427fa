"""Native products and passes: what torch computes with the same weights, row by row, whatever the width."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any, cast

import pytest
import torch
import transformers as hf
from tiny import quantized_copy
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from specbench.backends.torch import forward as ways
from specbench.backends.torch import head_forward, trials
from specbench.backends.torch.attention import fold_attention
from specbench.backends.torch.batch import BatchedModel, RequestFactory
from specbench.backends.torch.cache_layers import SLIDING_SLACK, PreallocatedLayer, PreallocatedSlidingLayer
from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.head_forward import (
    HeadForward,
    HeadInput,
    NativeHeadForward,
    choose_head_forward,
)
from specbench.backends.torch.heads import EagleHead, EagleShape
from specbench.backends.torch.pools import KVPool
from specbench.backends.torch.scorer import Scorer
from specbench.bench.environment import reset_peak_memory
from specbench.decoding.clocks import peak_memory
from specbench.decoding.protocols import ForwardRequest, NoDraft
from specbench.generate import speculative_generate
from specbench.kernels import ModelPasses, decoder_parts, native
from specbench.kernels.linear import Int4Linear, Int8Linear, PackedLinear
from specbench.kernels.surgery import pack, quantize
from specbench.kernels.weights import can_pack, fake_quantize_int4
from specbench.models.drafters import load_drafter
from specbench.models.load import wrap_model
from specbench.models.target import Target, default_cache, prepare_target, wrap_target
from specbench.options import CacheKind

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no native library here")

SIZES: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MIXED = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {"num_attention_heads": 3, "num_key_value_heads": 1}, "Qwen3": {"head_dim": 32},
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = KINDS | {
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
CONTEXT = torch.randint(0, 301, (150,), generator=torch.Generator().manual_seed(0)).tolist()
COPIES = {8: quantized_copy, 4: partial(quantized_copy, kind="int4")}
OTHER_SIZES: list[dict[str, Any]] = [
    {"hidden_size": 36},
    {"intermediate_size": 80},
    {"head_dim": 8},
]  # unsupported
LEVELS = ("avx2", "vnni", "avx512", "bfloat16")
LAYERS: dict[str, Any] = {"int8": Int8Linear, "int4": Int4Linear}
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, "cpu")]


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch) -> int:
    """Instructions to be used, below those of the processor too; for what has its own code for each."""
    own = native.loaded()
    if request.param is None:
        return own.level
    number = 1 + LEVELS.index(request.param)
    if own.highest < number:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(native, "loaded", lambda: own._replace(level=number))
    return number


def build(kind: str, dtype: torch.dtype = torch.float32, *, fold: bool = True, **more: Any) -> Any:
    """A random model, not packed."""
    sizes = SIZES | FAMILIES[kind] | more
    config = getattr(hf, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(**sizes)
    config.head_dim = sizes["head_dim"]  # not an argument of all of them
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            if "bias" in name:
                torch.nn.init.normal_(parameter)
    model.generation_config = hf.GenerationConfig(do_sample=False)
    model = model.to(dtype).requires_grad_(False)
    if fold:
        fold_attention(model)
    return model


def rows_in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Activations as they are after rounding, in float64."""
    steps = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x.double() / steps).round() * steps


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# -- products ----------------------------------------------------------------------------------------

FORMS = [*LAYERS, "16 bits", *DTYPES]


def panels_of(form: Any, weight: torch.Tensor) -> native.Panels:
    """Panels of a weight in a form of ``FORMS``."""
    if form in LAYERS:
        return cast("native.Panels", LAYERS[form](weight, None).panels)
    if form == "16 bits":
        return native.Panels.from_bfloat16(weight.bfloat16())
    return numbers(weight.to(form))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_the_weights_and_rows_as_they_are_rounded(form, level):
    """A row has the same bits among any others."""
    choice = random.Random(0)
    shapes = [(choice.randint(1, 150), choice.randint(1, 300)) for _ in range(4)]
    for outputs, inputs in (*shapes, (128, 64), (33, 96), (70, 2100), (190, 1100)):
        draw = torch.Generator().manual_seed(inputs)
        weight, x = torch.randn(outputs, inputs, generator=draw), torch.randn(300, inputs, generator=draw)
        panels = panels_of(form, weight)
        exact = panels.product(torch.eye(inputs)).T
        loss = 1e-6 if form is torch.float32 else 0.2 if panels.bits == 4 else 0.01
        assert relative(exact, weight) < loss
        rounded = x if panels.bits > 8 else rows_in_bytes(x)
        if 8 < panels.bits <= 16 and level == 4:
            rounded = x.bfloat16()
        one_by_one = torch.cat([panels.product(row) for row in x.split(1)])
        error = relative(one_by_one, rounded.double() @ exact.double().T)
        assert error < (1e-4 if panels.bits <= 8 else 1e-6)
        for width in (*range(2, 15), 31, 32, 33, 43, 300):
            assert torch.equal(panels.product(x[:width]), one_by_one[:width])


def test_groups_in_4_bits_get_the_scale_with_the_least_error():
    """So blocks of a file in 4 bits, such as Q4_1 and Q4_K, come back, whatever share of the codes is used."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 200, generator=draw) ** 3
    native_weight = native.Panels.quantize_int4(weight).product(torch.eye(200)).T
    expected = fake_quantize_int4(weight)
    assert (native_weight - expected).abs().gt(1e-4).float().mean() < 0.01  # ties
    assert relative(native_weight, weight) < 1.001 * relative(expected, weight)
    largest = weight.abs().amax(1, keepdim=True)
    one_scale = (weight / largest * 7).round() * largest / 7
    assert relative(native_weight, weight) < 0.7 * relative(one_scale, weight)
    for most in (15, 8):
        codes = torch.randint(0, most + 1, (40, 3, 32), generator=draw).float()
        codes[..., 0], codes[..., 1] = 0, most
        scales = torch.rand(40, 3, 1, generator=draw) + 0.1
        weight = (scales * codes + torch.randn(40, 3, 1, generator=draw)).view(40, 96)
        assert relative(fake_quantize_int4(weight), weight) < 0.01
        assert relative(native.Panels.quantize_int4(weight).product(torch.eye(96)).T, weight) < 0.01


def numbers(weight: torch.Tensor) -> native.Panels:
    """Panels of a weight as it is."""
    panels = PackedLinear(weight, None).panels
    if panels is None:
        pytest.skip("oneDNN packs weights in another order here")
    return panels


def test_long_sums_are_as_exact_as_short_ones():
    weight = 1 + torch.rand(64, 16384, generator=torch.Generator().manual_seed(0))
    x = torch.full((1, 16384), 0.1)
    assert relative(numbers(weight).product(x), x.double() @ weight.double().T) < 5e-7


def spread(outputs: int, inputs: int) -> torch.Tensor:
    """A bfloat16 weight with what takes more than a few exponents: outliers, zeros, tiny numbers and infinities."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)) * 0.02
    weight[1, ::31] *= 1e6
    weight[:, 5] *= 1e-12
    weight[2, ::3] = 0.0
    weight[0, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, 1e-40])
    return weight.bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 1500), (70, 33)])
def test_halves_in_12_bits_are_the_same_to_the_bit(outputs, inputs, level):
    bias = torch.randn(outputs)
    plain = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    for weight in (plain, spread(outputs, inputs)):
        short = native.Panels.shorten_bfloat16(weight)
        assert (short is None) == (level < 3)
        if short is None:
            continue
        assert torch.equal(short.dense().view(torch.int16), weight.view(torch.int16))
        weight[weight.isinf()] = 1.0
        short, full = native.Panels.shorten_bfloat16(weight), native.Panels.from_bfloat16(weight)
        assert short is not None
        for rows in (1, 2, 6, 7, 13, 129, 300):
            x = torch.randn(rows, inputs)
            assert torch.equal(short.product(x), full.product(x))
            rounded = full.product(x.bfloat16().float(), bias).bfloat16()
            assert torch.equal(short.product(x.bfloat16(), bias), rounded)


def test_what_has_no_panels():
    """Numbers of too many sizes are not shortened, and where all of oneDNN's orders look alike, none is taken."""
    powers = (2.0 ** torch.randint(-60, 60, (128, 64), generator=torch.Generator().manual_seed(0))).bfloat16()
    assert native.Panels.shorten_bfloat16(powers) is None
    assert PackedLinear(powers, None).weight.equal(powers)
    weight = torch.randn(128, 96)
    assert numbers(weight).width % 8 == 0
    assert PackedLinear(torch.zeros(128, 96), None).panels is None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 5)
    assert native.Panels.from_onednn(packed, weight) is not None
    assert native.Panels.from_onednn(packed, weight.roll(1)) is None


def test_halves_are_packed_where_onednn_would_take_them_apart(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)
    packed = PackedLinear(layer.weight, layer.bias)
    assert packed._packed is None
    assert torch.equal(packed.weight, layer.weight)
    assert PackedLinear(layer.weight.float(), None)._packed is not None
    for shape in ((64,), (1, 64), (2, 5, 64), (70, 64), (0, 64)):
        x = torch.randn(shape).bfloat16()
        torch.testing.assert_close(packed(x), layer(x), rtol=2e-2, atol=2e-2)
    monkeypatch.setattr(native, "_load", lambda: "it was not built")
    assert not can_pack(torch.bfloat16, "cpu") or PackedLinear(layer.weight, None)._packed is not None


# -- passes ------------------------------------------------------------------------------------------


def scorer_of(model: Any, way: type[ways.Forward], cache: CacheKind = "dynamic") -> Scorer:
    scorer = Scorer(model, cache)
    assert isinstance(scorer.forward, ways.NativeForward)
    scorer.forward = way(model, scorer.cache)  # type: ignore[call-arg]
    return scorer


WIDTHS = (1, 2, 5, 31, 32, 40, 120)


def passes(scorer: Scorer) -> list[torch.Tensor]:
    """Logits of prefills and of passes of several widths behind the longer one, with rollbacks; and hidden states."""
    scorer.begin()
    found = [scorer.logits(CONTEXT[:7]), scorer.logits(CONTEXT[:9])]
    scorer.begin()
    found.append(scorer.logits(CONTEXT))
    for width in WIDTHS:
        found.append(scorer.logits(CONTEXT, CONTEXT[:width]))
        scorer.rollback(len(CONTEXT))
    output = scorer.score(ForwardRequest(scorer, [*CONTEXT, 5], [6, 7], layers=(3, 0, 1)))
    return [*found, output.logits, cast("torch.Tensor", output.hidden)]


def layers_of(scorer: Scorer) -> list[Any]:
    """Of what its cache holds."""
    return list(scorer.cache.model_kwargs()["past_key_values"].layers)


def deviation(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(relative(one, other) for one, other in zip(found, expected, strict=True))


@cache
def exact_passes(kind: str, dtype: torch.dtype, **more: Any) -> list[torch.Tensor]:
    return passes(Scorer(build(kind, dtype, **more).double()))


@pytest.mark.parametrize(("kind", "bits"), [("Llama", 8), ("Qwen2", 4), ("Qwen3", 8)])
def test_every_pass_is_that_of_torch_up_to_rounding(kind, bits):
    copy = COPIES[bits](build(kind))
    expected = passes(scorer_of(copy, ways.HFForward))
    found = passes(scorer_of(copy, ways.NativeForward))
    # A last bit decides which byte an activation becomes, so both are as far from the model as from each other at most.
    exact = exact_passes(kind, torch.float32)
    assert deviation(found, expected) < 0.5 * deviation(expected, exact) + 0.02
    assert deviation(found, exact) < 1.1 * deviation(expected, exact)


# -- of targets --------------------------------------------------------------------------------------


def target_of(kind: str, dtype: torch.dtype, **more: Any) -> Any:
    """A packed model whose gates fill panels."""
    model = build(kind, dtype, **{"intermediate_size": 128} | more)
    pack(model)
    numbers(torch.randn(128, 96))  # or else skipped
    return model


def chosen(model: Any, cache: CacheKind = "dynamic") -> Scorer:
    """A scorer that has come to native passes by itself."""
    scorer = Scorer(model, cache)
    assert type(scorer.forward) is ways.NativeForward
    return scorer


@pytest.mark.parametrize(
    ("kind", "dtype", "kept", "level"),
    [
        *(("Llama", dtype, "dynamic", None) for dtype in DTYPES),
        *((kind, torch.float32, "preallocated", None) for kind in FAMILIES),
        *((kind, DTYPES[-1], "preallocated", level) for kind in ("Llama", "Gemma3") for level in LEVELS),
    ],
    ids=str,
    indirect=["level"],
)
def test_a_target_s_passes_are_as_near_to_the_exact_ones_as_torch_s(kind, dtype, kept, level):
    """The exact ones are those in float64. Both kinds of gates are tried with all instructions."""
    model, level = target_of(kind, dtype), native.loaded().level
    exact = exact_passes(kind, dtype, intermediate_size=128)
    expected = passes(scorer_of(model, ways.HFForward, kept))
    found = passes(chosen(model, kept))
    for width, one, usual, truth in zip((*WIDTHS, 3, 0), found[3:], expected[3:], exact[3:], strict=True):
        in_one_call = width < 48 or level > 2 or dtype == torch.bfloat16
        assert width == 0 or one.dtype == (torch.float32 if in_one_call else usual.dtype)
        assert relative(one, truth) < 2 * relative(usual, truth) + 1e-6
    assert deviation(found, exact) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(
    ("kind", "form", "level"),
    [
        *(("Llama", form, level) for form in (*COPIES, *DTYPES) for level in LEVELS),
        *((kind, 8 if kind in KINDS else torch.float32, None) for kind in FAMILIES),
    ],
    ids=str,
    indirect=["level"],
)
@pytest.mark.usefixtures("level")
def test_a_row_has_the_same_bits_in_every_pass(kind, form):
    if form in COPIES:
        scorer = Scorer(COPIES[form](build(kind, torch.bfloat16)), "dynamic")
    else:
        scorer = chosen(target_of(kind, form), "preallocated")
    scorer.begin()
    scorer.logits(CONTEXT)
    one_by_one = [scorer.logits([*CONTEXT, *CONTEXT[: n + 1]], rows=1)[0] for n in range(31)]
    for width in (2, 3, 6, 7, 13, 16, 19, 31):
        scorer.rollback(len(CONTEXT))
        together = scorer.logits(CONTEXT, CONTEXT[:width], rows=width)
        assert all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=False))
    assert form in COPIES or kind not in KINDS or scorer.why_not_bit_exact() is None


@pytest.mark.smoke
@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_outputs_are_those_of_generate(kind):
    model = build(kind, intermediate_size=128)
    ids = torch.tensor([CONTEXT])
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
                         eos_token_id=None)[0, len(CONTEXT):].tolist()  # fmt: skip
    target = wrap_target(target_of(kind, torch.float32))
    assert type(target.scorer.forward) is ways.NativeForward
    specs = ("none", "self:int8", "self:layers=2", "lookup")
    for spec in specs if kind in KINDS else ("none", "self:layers=2"):
        drafter = load_drafter(spec, target)
        run = speculative_generate(CONTEXT, target, drafter, gamma=4, max_new_tokens=24, ignore_eos=True)
        assert list(run.token_ids) == own


def rounded_target(kind: str, bits: int, dtype: torch.dtype = torch.float32, **more: Any) -> Target:
    """A model in int8 or int4 as ``load_target`` makes a target of it."""
    model = build(kind, dtype, **more)
    loaded = wrap_model(model, None, "tiny", quantize="int8" if bits == 8 else "int4")
    return prepare_target(loaded, default_cache(model.config, quantized=True))


# -- of other families ---------------------------------------------------------------------------------


def usual(model: Any) -> Scorer:
    scorer = Scorer(model)
    scorer.forward = ways.HFForward(model, scorer.cache)
    return scorer


@pytest.mark.parametrize(("kind", "window"), [("Gemma3", 300), ("Phi3", 33)])  # in some layers, and in all
def test_windows_drop_what_is_far_behind_and_give_the_same(kind, window):
    """Over more tokens than a layer with a window keeps, from a prefill of `transformers` or a native one. The windows
    of rows begin apart, the longer ones in other parts.
    """
    model, kept = target_of(kind, torch.float32, sliding_window=window), window + SLIDING_SLACK
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 301, (2 * kept + 400,), generator=generator).tolist()
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
        together = scorer.logits(text[:end], text[end : end + 6], rows=6)
        scorer.rollback(end)
        for n in range(6):
            assert torch.equal(scorer.logits(text[: end + n + 1], rows=1)[0], together[n])
        scorer.rollback(end)
        sliding = [layer for layer in layers_of(scorer) if isinstance(layer, PreallocatedSlidingLayer)]
        assert sliding
        assert all(layer.get_seq_length() == end for layer in sliding)
        assert all(layer.dropped and layer.keys.shape[-2] < 2 * kept + 350 for layer in sliding)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("Gemma3", {"norm_offset": 0.0}),
        ("Gemma3", {"attention_out_norm": None}),
        ("Gemma3", {"window": 0}),
        ("Gemma", {"gelu": False}),
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
    model = target_of(kind, torch.float32, **({"sliding_window": 512} if field == "window" else {}))
    assert type(Scorer(model).forward) is ways.HFForward


# -- of several requests -----------------------------------------------------------------------------


def in_one_call(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every pass over several requests from now on, whether it was made in one call."""
    whole, run, ran, seen = ways.RaggedForward.__call__, ModelPasses.run, list[int](), list[bool]()

    def noticed(*given: Any) -> Any:
        ran.clear()
        found = whole(*given)
        seen.append(bool(ran))
        return found

    monkeypatch.setattr(ModelPasses, "run", lambda *given: ran.append(1) or run(*given))
    monkeypatch.setattr(ways.RaggedForward, "__call__", noticed)
    return seen


@pytest.mark.parametrize(
    ("kind", "form", "page"),
    [
        *(("Llama", form, 16) for form in (*COPIES, *DTYPES)),
        *(("Gemma3", torch.float32, page) for page in (227, 16)),
        ("Qwen3", 8, 227),
    ],
    ids=str,
)
def test_a_request_s_rows_have_the_same_bits_alone_and_among_others(kind, form, page, monkeypatch):
    """Prompts read in other parts beside others, and drafts beside prompts; rounded ones as alone without a pool."""
    monkeypatch.setattr(native, "most_rows", lambda _: 128)  # all of them, on any processor
    choice, rounds = random.Random(0), form in COPIES
    scorer = rounded_target(kind, form).scorer if rounds else chosen(target_of(kind, form))
    batch = BatchedModel(scorer, KVPool(scorer.model.config, 2048, page))
    assert batch.why_not_batched is None
    seen, trees = in_one_call(monkeypatch), not rounds and "sliding_window" not in FAMILIES[kind]
    contexts = [CONTEXT[:size] for size in (130, 3, 40, 17)]
    drafts = [([7, 8, 9], None), ([], None), ([5, 6, 7, 8], [-1, 0, 0, -1] if trees else None), ([4], None)]
    together, alone = ([batch.open() for _ in contexts] for _ in range(2))
    for end in (1, 17, 33, 49, 115):
        some = [i for i, context in enumerate(contexts) if end < len(context)]
        asked = [ForwardRequest(together[i], contexts[i][:end], rows=1) for i in some]
        batch.score(choice.sample(asked, len(asked)))
        for i in some:
            batch.score([ForwardRequest(alone[i], contexts[i][:end], rows=1)])
    order = choice.sample(range(4), 4)
    asked = [ForwardRequest(together[i], contexts[i], *drafts[i], layers=(3, 1)) for i in order]
    for i, found in zip(order, batch.score(asked), strict=True):
        known = batch.score([ForwardRequest(alone[i], contexts[i], *drafts[i], layers=(3, 1))])[0]
        assert torch.equal(found.logits, known.logits)
        assert torch.equal(cast("torch.Tensor", found.hidden), cast("torch.Tensor", known.hidden))
        own = (
            scorer.clone_for(make_cache("preallocated", scorer.model.config))
            if rounds
            else chosen(scorer.model)
        )
        own.score(ForwardRequest(own, contexts[i][:-1], rows=1))
        expected = own.score(ForwardRequest(own, contexts[i], *drafts[i])).logits
        assert relative(found.logits, expected) < (0.0001 if form == torch.float32 else 0.1)
        assert not rounds or torch.equal(found.logits, expected)
    assert all(seen)


@pytest.mark.parametrize(
    ("rows", "size", "past"), [(2, 32, 40), (3, 32, 254), (7, 128, 511), (33, 64, 700), (120, 48, 256)]
)
def test_long_contexts_are_taken_in_parts_whose_joint_is_the_same_for_any_rows(level, past, rows, size):
    """Threads share the parts of few rows, not those of many. Another request holds other places beside them."""
    choice, count = torch.Generator().manual_seed(past), past + rows
    query = torch.randn(rows + 1, 6, size, generator=choice)
    tree = torch.rand(rows, count, generator=choice) < 0.5
    tree[:, 256:512] &= torch.arange(rows)[:, None] > 0  # row 0 sees nothing of the second part
    tree[:, :256] &= torch.arange(rows)[:, None] != 1  # and row 1 nothing of the first
    tree[0, 0] = tree[1:, -1] = True
    order = torch.randperm(count + 3, generator=choice).int()
    for dtype in (torch.float32, torch.bfloat16):
        keys, values = (torch.randn(1, 2, count + 3, size, generator=choice).to(dtype) for _ in range(2))
        assert native.can_attend(keys, values)
        for mask, places in ((None, None), (tree, order[:count])):
            held = (torch.arange(count) if places is None else places).long()
            asked = [native.Request(rows, past, mask, places), native.Request(1, 2, indices=order[-3:])]
            found = native.Attention(asked)(query, keys, values)
            k, v = (each[0, :, held].float().repeat_interleave(3, 0) for each in (keys, values))
            seen = torch.ones(rows, count, dtype=torch.bool).tril(past) if mask is None else mask
            expected = scaled_dot_product_attention(query[:-1].transpose(0, 1), k, v, attn_mask=seen)
            assert relative(found[:-1], expected.transpose(0, 1)) < 1e-5
            for row in {*range(min(3, rows)), *range(rows - 1, 3, -9)}:
                own = None if mask is None else mask[row : row + 1]
                before = past + row if own is None else count - 1
                alone = native.Attention([native.Request(1, before, own, places)])
                assert torch.equal(alone(query[row : row + 1], keys, values)[0], found[row])
            last = native.Attention([native.Request(1, 2)])(
                query[-1:], *(e[:, :, order[-3:].long()] for e in (keys, values))
            )
            assert torch.equal(last[0], found[-1])


def test_attention_of_many_rows_takes_bounded_memory():
    """What rows find in parts that threads share would take 56 MB; the bits are those without sharing."""
    rows, heads, shared, size, count = 64, 100, 1, 32, 16_384
    choice, threads, found = torch.Generator().manual_seed(0), torch.get_num_threads(), []
    query = torch.randn(rows, heads, size, generator=choice)
    keys, values = (torch.randn(1, shared, count, size, generator=choice).bfloat16() for _ in range(2))
    attention = native.Attention([native.Request(rows, count - rows)])
    try:
        for number in (1, 16):
            torch.set_num_threads(number)
            reset_peak_memory("cpu")
            before = peak_memory("cpu")
            found.append(attention(query, keys, values))
            assert peak_memory("cpu") - before < 30e6
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def causal_mask(queries: int, keys: int, window: int = 0) -> torch.Tensor:
    own, seen = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    return (seen <= own) & (seen > own - (window or keys))


@pytest.mark.parametrize(
    ("heads", "size", "rows", "keys", "window"),
    [
        ((4, 4), 80, 300, 300, 0),
        ((3, 1), 256, 97, 260, 0),
        ((4, 2), 96, 300, 901, 100),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_s_rows_attend_to_all_before_them(heads, size, rows, keys, window, dtype, level):
    choice = torch.Generator().manual_seed(size)
    query = (2 * torch.randn(1, rows, heads[0], size, generator=choice)).to(dtype).transpose(1, 2)
    key = torch.randn(1, heads[1], keys + 9, size, generator=choice).to(dtype)[:, :, :keys]
    value = torch.randn(1, keys, heads[1], size, generator=choice).to(dtype).transpose(1, 2)
    found = native.attend(query, key, value, 0.2, window)
    assert found.dtype == dtype
    whole = [each.double() for each in (query, key, value)]
    mask = causal_mask(rows, keys, window)
    exact = scaled_dot_product_attention(*whole, mask, scale=0.2, enable_gqa=True)
    assert relative(found.double(), exact.transpose(1, 2)) < (1e-5 if dtype == torch.float32 else 0.02)
    last = native.attend(query[:, :, 20:], key, value, 0.2, window)
    assert torch.equal(last, found[:, 20:]), "a row does not depend on those before it"


def test_a_prompt_s_attention_takes_huge_scores(level):
    query, key = torch.full((1, 1, 40, 16), 1e4), torch.zeros(1, 1, 300, 16)
    key[0, 0, 100], value = 1e4, torch.arange(300.0)[None, None, :, None].expand(1, 1, 300, 16)
    found = native.attend(query, key, value)
    assert torch.equal(found, torch.full_like(found, 100.0))


def test_rounded_targets_are_read_apart_where_bits_would_differ(monkeypatch):
    monkeypatch.setattr(trials, "_native_is_right", lambda *_: False)
    other = rounded_target("Llama", 8)
    factory = RequestFactory(other.scorer, 256)
    assert factory.why_not_batched is not None
    assert factory.use is None
    scorer, _ = factory.open(NoDraft())
    assert scorer.cache.kind == "preallocated"


@pytest.mark.parametrize("bits", [8, 4])
def test_long_passes_over_rounded_weights_are_those_of_short_ones(bits, monkeypatch):
    """In one call and in several, from an empty cache on."""
    scorer = rounded_target("Qwen3", bits).scorer
    scorer.begin()
    expected = torch.cat([scorer.logits(CONTEXT[: end + 1], rows=1) for end in range(len(CONTEXT))])
    for most in (512, 64):
        monkeypatch.setattr(ways, "_CHUNK_ROWS", most)
        for rows in (1, 70, 150):
            scorer.begin()
            found = scorer.score(ForwardRequest(scorer, CONTEXT, rows=rows, layers=(0, 3)))
            assert torch.equal(found.logits, expected[-rows:])
            assert found.hidden is not None
            assert found.hidden.shape == (150, 2, 48)


# -- what is kept, and how it is taken ---------------------------------------------------------------


def test_a_dynamic_cache_grows_in_steps():
    copy = quantized_copy(build("Llama"))
    scorer, alone = scorer_of(copy, ways.NativeForward), scorer_of(copy, ways.NativeForward)
    text, places = CONTEXT * 3, []
    scorer.begin()
    for end in range(10, len(text), 10):
        found = scorer.logits(text[:end], text[end : end + 5])
        alone.begin()
        assert torch.equal(found, alone.logits(text[:end], text[end : end + 5]))
        scorer.rollback(end + end % 3)
        assert {layer.get_seq_length() for layer in layers_of(scorer)} == {end + end % 3}
        places.append([(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers_of(scorer)])
    assert sum(one != other for one, other in pairwise(places)) == 1
    assert all(layer.keys.shape[-2] < 2 * len(text) for layer in layers_of(scorer))


def _replaced_activation() -> Any:
    model = target_of("Gemma3", torch.float32)
    assert decoder_parts.read_parts(copy.copy(model)) is not None
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    return model


def _rerouted(place: str) -> Any:
    """A model with a ``forward`` of its own, as a device map leaves it."""
    model = target_of("Llama", torch.float32)
    module = model.get_submodule(place)
    module.forward = module.forward
    return model


@pytest.mark.parametrize(
    "made",
    [
        *(partial(lambda sizes: quantized_copy(build("Llama", **sizes)), sizes) for sizes in OTHER_SIZES),
        partial(build, "Gemma3"),  # nothing is packed
        partial(target_of, "Llama", torch.float32, fold=False),
        _replaced_activation,
        *(partial(_rerouted, place) for place in ("model", "model.layers.1")),
    ],
)
def test_other_models_go_the_way_of_transformers(made):
    assert type(Scorer(made()).forward) is ways.HFForward


@pytest.mark.parametrize("sizes", [*OTHER_SIZES[1:], None])
def test_other_heads_go_through_operators(sizes):
    head = head_of(8, sizes) if sizes else EagleHead(head_of(8).shape)
    assert type(choose_head_forward(head)) is HeadForward


def test_what_comes_out_differently_is_not_taken(monkeypatch):
    copy, head, run = quantized_copy(build("Llama")), head_of(8), native.DecoderStack.__call__
    monkeypatch.setattr(native.DecoderStack, "__call__", lambda *given: (run(*given)[0].roll(1, -1), None))
    assert type(Scorer(copy).forward) is ways.HFForward
    assert type(choose_head_forward(head)) is HeadForward


# -- trained heads ---------------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "plain": {}, "of three layers": {"layers": 3}, "normed": {"norm_before_residual": True, "norm_output": True},
    "biased": {"biases": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head"})},
    "head norms": {"head_norms": True},
}  # fmt: skip


def head_of(bits: int, sizes: Mapping[str, Any] | None = None, vocab: int = 90, **shape: Any) -> EagleHead:
    """An EAGLE-3 head with few bits, of random weights."""
    layer = LlamaConfig(**{key: SIZES[key] for key in SIZES if key != "num_hidden_layers"} | (sizes or {}))
    hidden = layer.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = EagleHead(EagleShape(2, hidden, vocab, layer, **shape))
        for name, parameter in head.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    head.eval().requires_grad_(False)
    quantize(cast("Any", head), "int8" if bits == 8 else "int4")
    return head


@pytest.mark.parametrize(
    ("shape", "bits", "longest"), [*zip(HEADS, (4, 8, 8, 4, 8), (300,) * 5, strict=True), ("plain", 8, 30)]
)
@torch.inference_mode()
def test_a_head_in_one_call_gives_what_it_gives_in_operators_and_alone(shape, bits, longest, monkeypatch):
    """To the bit alone; not in operators, where another byte stands for a number between two."""
    monkeypatch.setattr(head_forward, "LONG_READING", longest)  # of one request, beside which others wait
    head = head_of(bits, **HEADS[shape])
    way, operators = choose_head_forward(head), HeadForward(head)
    assert type(way) is NativeHeadForward
    hidden, draw = head.shape.layer.hidden_size, torch.Generator().manual_seed(6)
    beside, alone, others = ([[PreallocatedLayer() for _ in head.layers] for _ in range(3)] for _ in range(3))
    for lengths in ((7, 40, 1), (1, 1, 2), (3, 1, 4)):
        readings = []
        for caches, length in zip(beside, lengths, strict=True):
            past = caches[0].used
            mask = torch.ones(1, 1, length, past + length, dtype=torch.bool).tril(past)
            mask[..., -1, past : past + length - 1] = False  # another node beside those before it
            embedded, features = torch.randn(2, length, hidden, generator=draw)
            places = torch.arange(past, past + length)
            readings.append(
                HeadInput(embedded, features, places, mask if length < 5 else None, caches, min(2, length))
            )
        for found, reading, own, theirs in zip(way(readings), readings, alone, others, strict=True):
            (same,) = way([reading._replace(caches=own)])
            (usual,) = operators([reading._replace(caches=theirs)])
            assert found.features.shape == reading.features.shape
            assert found.logits.shape == (reading.wanted, 90)
            assert all(map(torch.equal, found, same))
            assert all(relative(one, other) < 0.02 for one, other in zip(found, usual, strict=True))
        for layer in chain.from_iterable((*beside, *alone, *others)):
            layer.rollback(layer.used - 1)
