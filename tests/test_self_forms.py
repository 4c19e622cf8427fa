"""A target that drafts for itself with some of its layers, in its own precision or in int8, on its own cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from test_caches import KINDS, Walk, assert_close, cache_layers, whole
from test_zoo import USUAL as TINY
from test_zoo import ZOO
from tiny import save_tiny, tiny_language_model, tiny_llama, tiny_tokenizer
from torch import nn

from specbench.backends.torch.scorer import Scorer
from specbench.backends.torch.submodels import cheaper_form
from specbench.base.errors import UsageError
from specbench.decoding.sampling import Sampling
from specbench.drafters.model import SelfDrafter
from specbench.generate import speculative_generate
from specbench.kernels.linear import Int8Linear
from specbench.kernels.surgery import pack, quantize
from specbench.models.drafters import check_drafter, load_drafter
from specbench.models.target import wrap_target
from specbench.specs.drafters import SelfForm, parse_drafter
from specbench.specs.models import parse_model

LAYERS = 5
USUAL = {**TINY, "num_hidden_layers": LAYERS}
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 6}
CHANGED: dict[str, dict[str, Any]] = {
    "llama": {}, "tied": {"tie_word_embeddings": True}, "qwen2": {}, "mistral": WINDOW, "gemma2": WINDOW,
    "gemma3": WINDOW | {"layer_types": TYPES}, "phi3": {}, "gpt-neox": {}, "gpt2": {},
}  # fmt: skip


def config_of(family: str) -> Any:
    """Of a family of ``ZOO``, with more layers."""
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS}
    return ZOO["llama" if family == "tied" else family][1](**layers, **CHANGED[family])


@cache
def model_of(family: str) -> Any:
    """The same object every time, so nothing may change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(config_of(family)).eval().requires_grad_(False)


def with_layers(family: str, source: Any, count: int) -> Any:
    """A model of its own, built with as many layers and given the weights of those."""
    config = config_of(family)
    types = getattr(config, "layer_types", None)
    config.num_hidden_layers = count
    if types:
        config.layer_types = types[:count]
    built: Any = hf.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    weights = source.state_dict()
    built.load_state_dict({name: weights[name] for name in built.state_dict()})
    return built


# -- the model of some layers --------------------------------------------------------------------------


@pytest.mark.parametrize("family", CHANGED)
def test_it_computes_what_a_model_with_those_layers_computes(family):
    source = model_of(family)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    before = whole(source, tokens)
    for count in (1, 3):
        found, expected = cheaper_form(source, count), with_layers(family, source, count)
        assert torch.equal(whole(found, tokens), whole(expected, tokens))
    assert torch.equal(whole(source, tokens), before)
    assert source.config.num_hidden_layers == LAYERS


@pytest.mark.parametrize(("kept", "packed"), [(3, True), (LAYERS, False)])
def test_int8_layers_are_made_of_the_kept_ones_alone(kept, packed):
    source: Any = tiny_llama(layers=LAYERS)
    if packed:
        pack(source)
    expected = whole(source, [5, 6, 7, 8])
    form: Any = cheaper_form(source, kept, "int8")
    quantized = [module for module in form.modules() if isinstance(module, Int8Linear)]
    outputs = 2 * 32 + 2 * 16 + 2 * 64 + 32  # query and output, key and value, gate and up, down
    assert sum(module.out_features for module in quantized) == outputs * kept + source.config.vocab_size
    assert form.get_input_embeddings().weight is source.get_input_embeddings().weight
    places = {tensor.data_ptr() for tensor in (*source.parameters(), *source.buffers())}
    assert {parameter.data_ptr() for parameter in form.parameters()} <= places
    assert not any(isinstance(module, Int8Linear) for module in source.modules())
    assert torch.equal(whole(source, [5, 6, 7, 8]), expected)
    plain = cheaper_form(source, kept)
    quantize(plain)
    assert torch.equal(whole(form, [5, 6, 7, 8]), whole(plain, [5, 6, 7, 8]))
    assert torch.equal(whole(source, [5, 6, 7, 8]), expected)


def test_forms_are_made_of_an_int8_model_too():
    source: Any = tiny_llama(layers=LAYERS)
    int8 = cheaper_form(source, LAYERS, "int8")
    again = cheaper_form(int8, 2)
    assert torch.equal(whole(again, [5, 6, 7]), whole(cheaper_form(source, 2, "int8"), [5, 6, 7]))


# -- on the target's cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "gemma3"])
def test_only_its_layers_are_lengthened_and_rolled_back(family, kind):
    model, kept = model_of(family), 3
    target = Scorer(model, kind)
    form = Scorer(cheaper_form(model, kept), target.cache)
    walk = Walk(target, 11)
    for drafts in (0, 3, 1, 9, 2):
        verified = target.cache.length
        drafted = walk.tokens(drafts)
        if drafted and verified:
            one_by_one = []
            for count in range(drafts):
                one_by_one.append(form.logits(walk.context, drafted[:count], rows=1))
                lengths = [layer.get_seq_length() for layer in cache_layers(target)]
                fed = len(walk.context) + count
                assert lengths == [fed if i < kept else verified for i in range(LAYERS)]
            form.rollback(verified)
            at_once = form.logits(walk.context, drafted[:-1])
            assert_close(torch.cat(one_by_one), at_once[-drafts:])
            form.rollback(verified)
        assert {layer.get_seq_length() for layer in cache_layers(target)} == {verified}
        assert_close(target.logits(walk.context, drafted), whole(model, walk.context, drafted))
        walk.rollback(drafted)


@pytest.mark.smoke
def test_every_draft_of_the_whole_target_is_accepted():
    """Sampled: a form that leaves nothing out and is not quantized has the target's own distributions."""
    target = wrap_target(tiny_language_model(layers=3).model, tiny_tokenizer(), pack=False)
    drafter = SelfDrafter(Scorer(cheaper_form(target.language_model.model, 3), target.scorer.cache), "whole")
    result = speculative_generate(
        [5, 6, 7], target, drafter, gamma=4, sampling=Sampling(1.0), max_new_tokens=24, ignore_eos=True
    )
    assert all(step.accepted == step.gamma for step in result.steps)


# -- words and refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "form", "name"),
    [
        ("self:int8", SelfForm(int8=True), "self:int8"),
        ("self:layers=12", SelfForm(layers=12), "self:layers=12"),
        ("self:layers=12,int8", SelfForm(int8=True, layers=12), "self:int8,layers=12"),
    ],
)
def test_specs(spec, form, name):
    assert parse_drafter(spec) == form
    assert str(form) == name
    assert parse_drafter(name) == form


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("self", "does not say how"),
        ("self:int8=yes", "takes no value"),
        ("self:layers", "needs a value"),
        ("self:layers=9", "uses 9 layers"),
        ("self:int8,layers=0", "uses 0 layers"),
    ],
)
def test_refusals_before_any_weights_are_loaded(spec, message, tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "target", layers=LAYERS)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        check_drafter(parse_drafter(spec), parse_model(str(folder)))
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_target_has_no_rounded_form(dtype):
    language_model = tiny_language_model(layers=3)
    target = wrap_target(language_model.model, tiny_tokenizer(), pack=False)
    target.dtype = dtype
    for spec in ("self:int8", "self:int4", "lookup+self:int8,layers=2"):
        with pytest.raises(UsageError, match=f"The target is {dtype} already"):
            load_drafter(spec, target)
    assert load_drafter("self:layers=1", target).traits.name == "self:layers=1"


def test_a_model_whose_layers_are_not_found():
    model: Any = tiny_llama(layers=3)
    model.model.adapters = nn.ModuleList([nn.Identity() for _ in range(3)])
    target = wrap_target(model, tiny_tokenizer(), pack=False)
    with pytest.raises(UsageError, match="This target cannot leave out layers"):
        load_drafter("self:layers=1", target)
    assert load_drafter("self:int8", target).traits.name == "self:int8"
