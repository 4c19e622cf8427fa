"""Models with hooks, and models that are changed after they were loaded: what `transformers` makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from test_native import CONTEXT, build, passes

from specbench.backends.torch.scorer import Scorer
from specbench.decoding.protocols import Drafter
from specbench.generate import speculative_generate
from specbench.kernels.surgery import pack, quantize
from specbench.kernels.weights import can_pack
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, wrap_target

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32, "cpu"), reason="no packed layers on this processor"
)

CHOSEN = 8
"""Tokens of a continuation: several steps."""


def plain_model(kind: str = "Qwen3") -> Any:
    """A random model as ``transformers`` makes it."""
    return build(kind, fold=False, intermediate_size=128)


def packed_model(kind: str = "Llama") -> Any:
    model = build(kind, intermediate_size=128)
    pack(model)
    return model


def identical(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


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


def test_products_that_are_replaced_later_are_noticed():
    fresh, model = packed_model(), packed_model()
    scorer = Scorer(model)
    packed = passes(scorer)
    for each in (fresh, model):
        quantize(each)
    assert identical(passes(scorer), passes(Scorer(fresh)))
    assert not identical(passes(scorer), packed)


# -- hooks -------------------------------------------------------------------------------------------


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
        "", "model.embed_tokens", "model.rotary_emb", "lm_head", LAYER, f"{LAYER}.self_attn.q_norm",
        f"{LAYER}.self_attn.v_proj", f"{LAYER}.mlp.act_fn",
    )),
    (turn_input, LAYER), (turn_input, f"{LAYER}.self_attn.k_proj"), (negate_input, f"{LAYER}.self_attn.k_proj"),
    (of_all_modules, f"{LAYER}.mlp"),
]  # fmt: skip


CALLED = [
    *((hook, name, "hook" if row % 2 else "wrap") for row, (hook, name) in enumerate(HOOKED)),
    (of_all_modules, f"{LAYER}.mlp", "hook"),
]


@pytest.mark.parametrize(
    ("hook", "name", "first"),
    CALLED,
    ids=[f"{hook.__name__}-{name or 'all'}-{first}" for hook, name, first in CALLED],
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


CHANGES = ("data", "parameter", "module", "mlp", "forward", "head")


@pytest.mark.parametrize(
    ("change", "cache"),
    list(zip(CHANGES, ("dynamic", "dynamic", "preallocated", "static", "dynamic", "none"), strict=True)),
)
def test_what_is_changed_later_is_not_stale(change, cache):
    def apply(model: Any) -> None:
        layer = model.model.layers[1]
        norm = layer.input_layernorm
        factors = torch.linspace(-2, 2, 48)
        if change == "data":
            norm.weight.data.mul_(factors)
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
