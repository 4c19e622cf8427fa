"""Forwards in few operators: the same as those of `transformers` up to rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import pytest
import torch
import transformers as hf
from tiny import tiny_language_model, tiny_llama

from specbench.backends.torch import forward as ways
from specbench.backends.torch import trials
from specbench.backends.torch.kernels import llama_layers, native
from specbench.backends.torch.kernels.attention import LONGEST_PASS, fold_attention, fold_mask
from specbench.backends.torch.kernels.decoder_parts import FAMILIES, Norm, read_layer, read_parts
from specbench.backends.torch.kernels.linear import Int8Linear, can_pack
from specbench.backends.torch.kernels.surgery import (
    first_layers,
    pack_linears,
    quantize_linears,
    quantized_copy,
)
from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import Drafter, ForwardRequest
from specbench.generate import speculative_generate
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.target import Target, wrap_target
from specbench.options import CacheKind

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, "cpu"), reason="no packed layers on this processor"
)

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 24},
}  # fmt: skip
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, "cpu")]
CONTEXT = torch.randint(0, 300, (41,), generator=torch.Generator().manual_seed(0)).tolist()


def build(
    kind: str,
    dtype: torch.dtype = torch.float32,
    *,
    int8: bool = False,
    rounded: bool = False,
    packed: bool = True,
) -> Any:
    """A random model as it decodes; if ``rounded``, weights of ``dtype`` in wider numbers."""
    config = getattr(hf, f"{kind}Config")(**SIZES, **KINDS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(hf, f"{kind}ForCausalLM")(config).to(dtype).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones so far, which would hide a missing weight
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if rounded:
        model = model.to(torch.float64 if dtype == torch.float32 else torch.float32)
    if not packed:
        return model
    fold_attention(model)
    if int8:
        quantize_linears(model)
    else:
        pack_linears(model)
    return model


@pytest.fixture(autouse=True)
def nothing_in_one_call(monkeypatch):
    """Passes of targets in one call, which tests/test_native.py is about, count as slower ones."""
    monkeypatch.setattr(trials, "_MAX_SLOWDOWN", 0.0)


def ordinary(model: Any, cache: CacheKind = "dynamic") -> Scorer:
    """A scorer that is not fused."""
    scorer = Scorer(model, cache)
    scorer.forward = ways.HFForward(model, scorer.cache)
    return scorer


def is_fused(model: Any) -> bool:
    return isinstance(Scorer(model).forward, ways.FusedForward)


def passes(scorer: Scorer) -> list[torch.Tensor]:
    """Logits of prefills and of passes of several widths behind the longer one, with rollbacks in between."""
    scorer.begin()
    found = [scorer.logits(CONTEXT[:7])]  # a short one
    scorer.begin()
    found.append(scorer.logits(CONTEXT))
    for width in (1, 2, 5, 31, 32, 40):
        found.append(scorer.logits(CONTEXT, CONTEXT[:width]))
        scorer.rollback(len(CONTEXT))
    return found


def identical(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_pass_is_that_of_transformers(kind, dtype, cache):
    model = build(kind, dtype)
    expected, found = passes(ordinary(model, cache)), passes(Scorer(model, cache))
    assert cache == "none" or not identical(found, expected)
    # The order of roundings differs, their number is no larger.
    exact = passes(Scorer(build(kind, dtype, rounded=True, packed=False), cache))
    assert deviation(found, exact) < 1.3 * deviation(expected, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_a_row_has_the_same_bits_in_every_short_pass(kind, dtype):
    scorer = Scorer(build(kind, dtype), "preallocated")
    if scorer.why_not_bit_exact() is not None:
        pytest.skip("not even products and attention are independent of the width here")
    scorer.begin()
    scorer.logits(CONTEXT)
    one_by_one = [scorer.logits([*CONTEXT, *CONTEXT[: n + 1]], rows=1)[0] for n in range(20)]
    for width in (2, 3, 7, 20):
        scorer.rollback(len(CONTEXT))
        together = scorer.logits(CONTEXT, CONTEXT[:width], rows=width)
        assert identical(list(together), one_by_one[:width])


@pytest.mark.parametrize("kind", KINDS)
def test_short_forwards_are_fused(kind, monkeypatch):
    scorer = Scorer(build(kind))
    taken: list[tuple[int, ...]] = []
    whole = llama_layers._root_mean_square_norm

    def counted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        taken.append(tuple(x.shape))
        return whole(x, *arguments)

    monkeypatch.setattr(llama_layers, "_root_mean_square_norm", counted)
    scorer.begin()
    scorer.logits(CONTEXT)
    assert taken == []
    scorer.logits([*CONTEXT, 5])
    assert taken == [(1, 1, 32)] * 2 * 3


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_in_chunks(kind, dtype, cache, monkeypatch):
    monkeypatch.setattr(ways, "_CHUNK_ROWS", 60)
    model, text, read = build(kind, dtype), (CONTEXT * 5)[:170], list[int]()
    real = ways.HFForward._run

    def counted(way: ways.HFForward, ids: torch.Tensor, *arguments: Any) -> Any:
        read.append(ids.shape[1])
        return real(way, ids, *arguments)

    def rows(scorer: Scorer) -> list[torch.Tensor]:
        scorer.begin()
        prompt = scorer.score(ForwardRequest(scorer, text, rows=100, layers=[1, 3]))
        assert prompt.logits.shape == (100, 300)
        return [prompt.logits, cast("torch.Tensor", prompt.hidden), scorer.logits([*text, 5], [7, 8])]

    expected = rows(ordinary(model, cache))
    exact = rows(Scorer(build(kind, dtype, rounded=True, packed=False), cache))
    scorer = Scorer(model, cache)
    monkeypatch.setattr(ways.HFForward, "_run", counted)
    found = rows(scorer)
    # With windows, and without a cache, all at once.
    assert read[:3] == [57, 57, 56] if kind != "Mistral" and cache != "none" else read[0] == 170
    assert deviation(found, exact) < 1.3 * deviation(expected, exact)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_what_a_prompt_has_left_behind_is_not_copied_by_the_first_step(kind, monkeypatch):
    monkeypatch.setattr(ways, "_CHUNK_ROWS", 60)
    scorer = Scorer(build(kind))
    scorer.begin()
    text = (CONTEXT * 7)[:260]
    scorer.logits(text)
    layers = scorer.cache.model_kwargs()["past_key_values"].layers
    kept = [(layer.keys, layer.values) for layer in layers]
    scorer.logits([*text, 5])
    for layer, (keys, values) in zip(layers, kept, strict=True):
        assert layer.keys is keys
        assert layer.values is values
        assert keys.shape[2] == 260 + 256


@pytest.mark.parametrize("kind", KINDS)
def test_an_int8_model_takes_them_too(kind):
    exact = passes(Scorer(build(kind)))
    model = build(kind, int8=True)
    assert is_fused(model)
    expected, found = passes(ordinary(model)), passes(Scorer(model))
    assert deviation(found, exact) < 1.1 * deviation(expected, exact)


def test_an_int8_copy_has_products_of_its_own():
    model = build("Llama")
    expected = passes(Scorer(quantized_copy(model)))
    own = passes(Scorer(model))
    assert not identical(own, expected)
    assert identical(passes(Scorer(quantized_copy(model))), expected)
    assert identical(passes(Scorer(model)), own)


def test_products_that_are_replaced_later_are_noticed():
    fresh, model = build("Llama"), build("Llama")
    scorer = Scorer(model)
    packed = passes(scorer)
    for each in (fresh, model):
        quantize_linears(each)
    assert identical(passes(scorer), passes(Scorer(fresh)))
    assert not identical(passes(scorer), packed)


def test_two_models_in_turn_do_not_mix_up_their_rotations():
    scorers = [Scorer(build("Llama")), Scorer(build("Qwen3"))]
    wanted = [passes(scorer) for scorer in scorers]
    found: list[list[torch.Tensor]] = [[], []]
    for context, widths in ((CONTEXT[:7], ()), (CONTEXT, (1, 2, 5, 31, 32, 40))):
        for drafted in (None, *widths):
            for scorer, rows in zip(scorers, found, strict=True):
                if drafted is None:
                    scorer.begin()
                rows.append(scorer.logits(context, context[: drafted or 0]))
                if drafted:
                    scorer.rollback(len(CONTEXT))
    assert all(identical(*each) for each in zip(found, wanted, strict=True))


@pytest.fixture
def _threads_in_quick_turns() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_threads_in_quick_turns")
def test_two_threads_decode_with_a_target_each():
    targets = [
        wrap_target(build("Llama"), name="packed"),
        wrap_target(build("Qwen3", int8=True), name="int8"),
    ]
    drafters = [
        load_drafter(spec, target) for spec, target in zip(("self:int8", "lookup"), targets, strict=True)
    ]

    def decode(target: Target, drafter: Drafter) -> list[tuple[int, ...]]:
        drafted = speculative_generate(CONTEXT, target, drafter, gamma=3, max_new_tokens=12)
        ids = torch.tensor([CONTEXT])
        model: Any = target.language_model.model
        own = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        return [drafted.token_ids, tuple(own[0, len(CONTEXT) :].tolist())]

    wanted = [decode(*pair) for pair in zip(targets, drafters, strict=True)]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        runs = [
            [thread.submit(decode, target, drafter) for _ in range(6)]
            for thread, target, drafter in zip((first, second), targets, drafters, strict=True)
        ]
        assert [[run.result() for run in each] for each in runs] == [[each] * 6 for each in wanted]


def test_the_model_s_own_generation_stays_as_it_was():
    model = build("Llama")
    ids = torch.tensor([CONTEXT[:6], CONTEXT[6:12]])
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    expected = model.generate(ids, **settings)
    assert not identical(passes(Scorer(model)), passes(ordinary(model)))
    assert torch.equal(model.generate(ids, **settings), expected)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("broken", ["silu", "layer"])
def test_what_comes_out_differently_is_not_taken(broken, int8, monkeypatch):
    model = quantized_copy(build("Llama")) if int8 else build("Llama")
    assert is_fused(model)
    if broken == "silu":
        monkeypatch.setattr(llama_layers, "silu", torch.relu)
    else:
        monkeypatch.setattr(llama_layers.FusedLayer, "__call__", lambda _, residual, *__: residual)
    assert not is_fused(model)
    assert identical(passes(Scorer(model)), passes(ordinary(model)))


def test_what_is_not_known_goes_the_way_of_transformers():
    unfolded, unpacked, layer_wrapped, wrapped, other = (
        tiny_llama(),
        tiny_llama(),
        *(build("Llama") for _ in range(3)),
    )
    pack_linears(unfolded)
    fold_attention(unpacked)
    for module in (layer_wrapped.model.layers[1], wrapped.model):
        module.forward = module.forward  # as a device map leaves it
    other.model.layers[2].mlp.act_fn = torch.nn.GELU()
    for model in (unfolded, unpacked, layer_wrapped, wrapped, other):
        assert not is_fused(model)


# --- Whole models ---------------------------------------------------------------------------------


def trees(scorer: Scorer) -> torch.Tensor:
    """Logits of a pass over a tree."""
    scorer.begin()
    scorer.logits(CONTEXT)
    scorer.rollback(len(CONTEXT) - 1)
    return scorer.score(ForwardRequest(scorer, CONTEXT, [3, 4, 5, 6, 7], (-1, 0, 1, 0, -1))).logits


@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("kind", KINDS)
def test_around_the_layers_a_fused_forward_is_the_model_s_own_to_the_bit(kind, cache):
    dtype = torch.bfloat16 if can_pack(torch.bfloat16, "cpu") else torch.float32
    model, own = build(kind, dtype), build(kind, dtype)
    for layer in own.model.layers:
        layer.forward = short_forward(layer)
    assert identical(passes(Scorer(model, cache)), passes(ordinary(own, cache)))
    if kind != "Mistral":
        assert torch.equal(trees(Scorer(model, cache)), trees(ordinary(own, cache)))


def short_forward(layer: Any) -> Any:
    """A layer's ``forward`` that is short in short passes."""
    read = read_layer(layer, 0, FAMILIES["Llama"], by_type=False)
    short, whole = llama_layers.FusedLayer(read), layer.forward

    def forward(x: torch.Tensor, attention_mask: Any = None, **more: Any) -> Any:
        if x.shape[1] > LONGEST_PASS:
            return whole(x, attention_mask=attention_mask, **more)
        if attention_mask is None and x.shape[1] > 1:  # attention itself leaves out what follows
            attention_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        masks = None if attention_mask is None else fold_mask(attention_mask, read.groups, x.dtype)
        rotation = llama_layers.spread_rotation(*more["position_embeddings"])
        return short(x, rotation, masks, more["past_key_values"].layers[short.place])

    return forward


def test_fused_forwards_leave_the_model_s_own_forward_out(monkeypatch):
    model = build("Llama")
    scorer, early = Scorer(model), Scorer(first_layers(model, 2))
    for each in (scorer, early):
        each.begin()
        each.logits(CONTEXT)
    monkeypatch.setattr(type(model), "forward", None)
    assert scorer.logits([*CONTEXT, 5], [7, 8]).shape == (3, 300)
    assert early.logits([*CONTEXT, 5], [7, 8]).shape == (3, 300)
    with pytest.raises(TypeError):
        scorer.logits([*CONTEXT, 5, *range(40)])


def test_what_is_loaded_is_fused():
    target = wrap_target(tiny_llama(), None, name="tiny")
    drafters: list[Any] = [wrap_drafter(tiny_language_model(1), target), load_drafter("self:int8", target)]
    for scorer in (target.scorer, *(drafter.scorer for drafter in drafters)):
        assert isinstance(scorer.forward, ways.FusedForward)


def test_a_mask_that_shows_what_follows_is_noticed(monkeypatch):
    broken, causal_mask = build("Llama"), ways._causal_mask
    assert is_fused(broken)

    def sees_all(*arguments: Any) -> Any:
        mask = causal_mask(*arguments)
        return None if mask is None else torch.zeros_like(mask)

    monkeypatch.setattr(ways, "_causal_mask", sees_all)
    assert not is_fused(broken)


# --- Models that were changed ---------------------------------------------------------------------


CHOSEN = 8
"""Tokens of a continuation: several steps."""


def own_choice(model: Any) -> tuple[int, ...]:
    """The greedy continuation by ``transformers``."""
    ids = torch.tensor([CONTEXT[:30]])
    settings = {"do_sample": False, "max_new_tokens": CHOSEN, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tuple(found[0, 30:].tolist())


def choice(target: Target, drafter: Drafter | None) -> tuple[int, ...]:
    """The same by specbench."""
    settings: dict[str, Any] = {"gamma": 3, "max_new_tokens": CHOSEN, "ignore_eos": True}
    return speculative_generate(CONTEXT[:30], target, drafter, **settings).token_ids


def plain_model(kind: str = "Qwen3") -> Any:
    """As ``transformers`` makes it, with the weights of ``build``."""
    return build(kind, packed=False)


@cache
def own_choice_of(name: str, hook: Callable[[Any], Any] | None = None) -> tuple[int, ...]:
    """What ``transformers`` chooses with a module hooked."""
    model = plain_model()
    handle = None if hook is None else hook(model.get_submodule(name))
    found = own_choice(model)
    if handle is not None:
        handle.remove()
    return found


def turned(value: Any) -> Any:
    """What a module gave, with every vector turned by one place."""
    if isinstance(value, torch.Tensor):
        return value.roll(1, -1)
    if isinstance(value, tuple):
        return tuple(each.roll(1, -1) if isinstance(each, torch.Tensor) else each for each in value)
    name = next(iter(value))
    value[name] = value[name].roll(1, -1)
    return value


def turn_output(module: torch.nn.Module) -> Any:
    return module.register_forward_hook(lambda _module, _inputs, output: turned(output))


def turn_input(module: torch.nn.Module) -> Any:
    return module.register_forward_pre_hook(lambda _module, inputs: turned(inputs))


def negate_input(module: torch.nn.Module) -> Any:
    """In place, so that layers behind that read the same tensor are given another one as well."""
    return module.register_forward_pre_hook(lambda _module, inputs: (inputs[0].neg_(),))


def of_all_modules(module: torch.nn.Module) -> Any:
    def turn(called: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        return turned(output) if called is module else None

    return torch.nn.modules.module.register_module_forward_hook(turn)


LAYER = "model.layers.1"
HOOKED = [
    *((turn_output, name) for name in (
        "", "model", "model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", LAYER, f"{LAYER}.self_attn",
        f"{LAYER}.mlp", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", f"{LAYER}.self_attn.q_norm",
        f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.v_proj", f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.up_proj",
        f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp.act_fn",
    )),
    *((turn_input, name) for name in (LAYER, f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp", "lm_head")),
    (negate_input, f"{LAYER}.self_attn.k_proj"),
    (of_all_modules, f"{LAYER}.mlp"),
]  # fmt: skip


@pytest.mark.parametrize("first", ["hook", "wrap"])
@pytest.mark.parametrize(
    ("hook", "name"), HOOKED, ids=[f"{hook.__name__}-{name or 'all'}" for hook, name in HOOKED]
)
def test_hooks_are_called(hook, name, first):
    without = own_choice_of("")
    expected = own_choice_of(name, hook)
    assert expected != without
    model = plain_model()
    handle = hook(model.get_submodule(name)) if first == "hook" else None
    target = wrap_target(model, name="hooked")
    drafters = [None, *(load_drafter(spec, target) for spec in ("self:int8", "self:layers=2"))]
    if first == "wrap":
        assert choice(target, None) == without
        handle = hook(model.get_submodule(name))
    assert handle is not None
    try:
        assert [choice(target, drafter) for drafter in drafters] == [expected] * 3
        if hook is not of_all_modules or first == "wrap":  # else it is for a layer that was replaced
            assert own_choice(model) == expected
    finally:
        handle.remove()
    assert [choice(target, drafter) for drafter in drafters] == [without] * 3


def test_hooks_hold_in_a_self_drafter_too():
    model = plain_model()
    target = wrap_target(model, name="hooked")
    drafter = load_drafter("self:layers=3", target)
    for name in ("model.layers.0.mlp", f"{LAYER}.self_attn.q_proj"):
        turn_output(model.get_submodule(name))
    run = speculative_generate(CONTEXT[:30], target, drafter, gamma=3, max_new_tokens=14, ignore_eos=True)
    assert all(step.accepted == len(step.drafted) for step in run.steps)
    int8: Any = quantized_copy(model)
    called: list[int] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: called.append(1))
    int8(input_ids=torch.tensor([CONTEXT]))
    assert called == [1]


def test_fused_forwards_are_taken_again_when_a_hook_is_gone():
    model = build("Llama")
    scorer = Scorer(model)
    scorer.begin()
    scorer.logits(CONTEXT)
    assert isinstance(scorer.forward, ways.FusedForward)
    assert scorer.forward.is_available()
    handle = turn_output(model.model.layers[2].mlp)
    assert not scorer.forward.is_available()
    assert not is_fused(model)
    handle.remove()
    assert scorer.forward.is_available()
    assert is_fused(model)


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "static", "none"])
@pytest.mark.parametrize("change", ["data", "in place", "parameter", "module", "mlp", "forward", "head"])
def test_what_is_changed_later_is_not_stale(change, cache):
    def apply(model: Any) -> None:
        layer = model.model.layers[1]
        norm = layer.input_layernorm
        factors = torch.linspace(-2, 2, 32)
        if change == "data":
            norm.weight.data.mul_(factors)
        elif change == "in place":
            with torch.no_grad():
                norm.weight.mul_(factors)
        elif change == "parameter":
            norm.weight = torch.nn.Parameter(norm.weight * factors, requires_grad=False)
        elif change == "module":
            layer.post_attention_layernorm = torch.nn.Sequential(layer.post_attention_layernorm, Turned())
        elif change == "mlp":
            layer.mlp = torch.nn.Sequential(layer.mlp, Turned())
        elif change == "forward":
            own = layer.mlp.forward
            layer.mlp.forward = lambda x: turned(own(x))
        else:
            model.lm_head = torch.nn.Sequential(model.lm_head, Turned())

    model, wanted = plain_model(), plain_model()
    target = wrap_target(model, name="changed", cache=cache)
    drafter = load_drafter("self:int8", target) if cache != "none" else None
    without = choice(target, drafter)
    assert own_choice(model) == without
    apply(model)
    apply(wanted)
    expected = own_choice(wanted)
    assert expected != without
    assert choice(target, None) == expected
    assert choice(target, drafter) == expected
    assert own_choice(model) == expected


class Turned(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, -1)


# --- Drafters in int8 -----------------------------------------------------------------------------


def deviation(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Mean over all passes, relative to the size of the logits."""
    pairs = [(one.to(other.dtype), other) for one, other in zip(found, exact, strict=True)]
    return sum(float((one - other).norm() / other.norm()) for one, other in pairs) / len(pairs)


def has_fbgemm() -> bool:
    return Int8Linear(torch.eye(4), None, row_invariant=False).float32_io


@pytest.mark.parametrize("cache", ["dynamic", "preallocated", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_in_float32_is_the_same_up_to_rounding(kind, dtype, cache):
    if not can_pack(dtype, "cpu") or not has_fbgemm():
        pytest.skip(f"no int8 products of FBGEMM's, or no packed layers in {dtype}")
    exact = passes(Scorer(build(kind, dtype, rounded=True), cache))
    model = quantized_copy(build(kind, dtype))
    assert is_fused(model)
    expected, found = passes(ordinary(model, cache)), passes(Scorer(model, cache))
    assert deviation(found, exact) < 1.2 * deviation(expected, exact), "no coarser than the usual way"
    assert dtype == torch.bfloat16 or deviation(found, exact) < 0.2
    whole = slice(1, 2) if cache != "none" else slice(None)
    assert identical(found[whole], expected[whole]), "long passes go the old way"


def test_a_drafter_in_float32_leaves_the_cache_in_its_dtype():
    if not can_pack(torch.bfloat16, "cpu") or not has_fbgemm():
        pytest.skip("no int8 products of FBGEMM's, or no packed layers in bfloat16")
    target = build("Llama", torch.bfloat16)
    owner = Scorer(target)
    owner.begin()
    expected = owner.logits([*CONTEXT, 5])
    owner.begin()
    owner.logits(CONTEXT)
    drafting = Scorer(quantized_copy(target), owner.cache)
    drafted = drafting.logits(CONTEXT, [5, 6])
    layers = owner.cache.model_kwargs()["past_key_values"].layers
    assert {layer.keys.dtype for layer in layers} == {torch.bfloat16}
    assert drafted.dtype == torch.float32
    owner.rollback(len(CONTEXT))
    assert float((owner.logits([*CONTEXT, 5]) - expected).abs().max()) < 0.1 * float(expected.abs().max())


def fused_layers(model: Any) -> list[llama_layers.FusedLayer]:
    read = read_parts(model)
    assert read is not None
    return [llama_layers.FusedLayer(layer) for layer in read.layers]


def test_products_with_float32_io_alone_are_read_in_float32(monkeypatch):
    monkeypatch.setattr(native, "is_available", lambda: False)
    alike = build("Llama", torch.bfloat16, int8=True)
    assert {layer._residual_dtype for layer in fused_layers(alike)} == {torch.bfloat16}
    if has_fbgemm():
        quick = build("Llama", torch.bfloat16, packed=False)
        quantize_linears(quick, row_invariant=False)
        assert {layer._residual_dtype for layer in fused_layers(quick)} == {torch.float32}


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_in_few_operators_is_the_norm(scale):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * scale
    norm = hf.models.llama.modeling_llama.LlamaRMSNorm(40, eps=1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    scale = llama_layers._scale_of(Norm(norm, norm.weight.detach(), 1e-5))
    few = llama_layers._root_mean_square_norm(x, *scale)
    torch.testing.assert_close(few, norm(x).detach())
    zeros = llama_layers._root_mean_square_norm(x * 0, *scale)
    assert not zeros.any()
