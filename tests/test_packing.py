"""Packed and int8 linear layers against torch's own, and copies of models that share their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from test_native import relative
from test_zoo import USUAL
from test_zoo import VOCABULARY as VOCAB
from tiny import quantized_copy
from torch import nn

from specbench.backends.torch.submodels import first_layers
from specbench.base.errors import UsageError
from specbench.kernels import instructions, native
from specbench.kernels import linear as module
from specbench.kernels.instructions import has_vnni
from specbench.kernels.linear import Int4Linear, Int8Linear, PackedLinear
from specbench.kernels.surgery import pack, quantize
from specbench.kernels.weights import can_pack
from specbench.models.target import wrap_target

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])

needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, "cpu"), reason="this torch lacks oneDNN's operators"
)
LOOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer: nn.Linear = seeded(lambda: nn.Linear(inputs, outputs, bias=bias, dtype=dtype))
    return layer.requires_grad_(False)


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def llama(**options: Any) -> Any:
    return seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**USUAL | options)).eval().requires_grad_(False))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=IDS, use_cache=False).logits[0]
    return out


@pytest.fixture(params=["native", "packed", "fallback"])
def _with_and_without_operators(request, monkeypatch):
    if request.param != "native":
        monkeypatch.setattr(native, "_load", lambda: "it was not built")
    elif not native.is_available():
        pytest.skip("no native library here")
    if request.param == "fallback":
        monkeypatch.setattr(module, "_prepack_int8", lambda quantized: None)


# -- layers ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_with_and_without_operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (64, 96), (100, 257)])
@pytest.mark.parametrize(("kind", "close"), [(PackedLinear, 0.0), (Int8Linear, 0.02), (Int4Linear, 0.2)])
def test_a_layer_is_close(kind, close, inputs, outputs, dtype):
    if kind is PackedLinear and not can_pack(dtype, "cpu"):
        pytest.skip("this torch lacks oneDNN's operators")
    layer = linear(inputs, outputs, inputs > 1, dtype)
    made = kind(layer.weight, layer.bias)
    for shape in ((1,), (2,), (5,), (33,), (1, 1), (1, 7), (2, 3, 4)):
        x = random_rows(*shape, inputs, dtype=dtype)
        found, expected = made(x), layer(x)
        assert (found.dtype, found.shape) == (dtype, expected.shape)
        assert relative(found, expected) < close + LOOSE[dtype]
    assert made(torch.empty(0, inputs, dtype=dtype)).shape == (0, outputs)


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (None, {"avx512", "vnni", "bfloat16"}),
        ("AVX512_CORE_BF16", {"avx512", "vnni", "bfloat16"}),
        ("avx512_core_vnni", {"avx512", "vnni"}),
        ("AVX512_CORE", {"avx512"}),
        ("AVX2_VNNI", {"vnni"}),
        ("AVX2", set()),
    ],
)
@pytest.mark.parametrize("name", instructions._LIMITS)
def test_a_limit_of_onednn_holds_for_everything(monkeypatch, name, limit, left):
    for each in instructions._LIMITS:
        monkeypatch.delenv(each, raising=False)
    if limit is not None:
        monkeypatch.setenv(name, limit)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    assert {each for each in ("avx512", "vnni", "bfloat16") if instructions.is_allowed(each)} == left
    assert has_vnni() == ("vnni" in left)
    if "bfloat16" not in left:
        assert not instructions.has_bfloat16()
        assert native.is_available() or "avx512" in left or not can_pack(torch.bfloat16, "cpu")


def test_what_cannot_be_packed():
    assert not can_pack(torch.float64, "cpu")
    assert not can_pack(torch.int8, "cpu")
    assert not can_pack(torch.float32, "meta")
    assert not can_pack(torch.float32, torch.device("cuda:0"))


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("replace", "close"), [(pack, 1e-4), (quantize, 0.1 if has_vnni() else 0.2)])
def test_a_model_of_such_layers_computes_the_same(replace, close, tied):
    """In int8 nearly the same; without VNNI instructions activations have one bit less."""
    model = llama(tie_word_embeddings=tied)
    expected = logits(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert replace(model)
    assert relative(logits(model), expected) < close
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert model.get_output_embeddings().weight.shape[0] == VOCAB
    assert model.dtype == torch.float32
    if replace is quantize:
        return
    # Nothing holds the unpacked weights any more, but for those the embeddings are.
    left = {name for name, _ in model.named_parameters()}
    assert left == {name for name in left if "norm" in name} | {"model.embed_tokens.weight"}
    assert sum(parameter.numel() for parameter in model.parameters()) < parameters
    packed = logits(model)
    pack(model)
    assert torch.equal(logits(model), packed)


@needs_packing
def test_other_layers_are_left_alone():
    """A subclass may compute something else."""

    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model: Any = nn.Sequential(Doubling(3, 3), nn.Linear(3, 3), linear(3, 3, False))
    model[2].forward = torch.relu
    assert pack(model)
    assert [type(layer) for layer in model] == [Doubling, PackedLinear, nn.Linear]


@needs_packing
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"tie_word_embeddings": True}, torch.bfloat16),
        ({"attention_bias": True, "mlp_bias": True}, torch.float32),
    ],
)
def test_a_packed_model_is_saved_as_it_was(options, dtype, tmp_path):
    if not can_pack(dtype, "cpu"):
        pytest.skip("no packed layers here")
    model = llama(**options).to(dtype)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = wrap_target(model, name="packed")
    assert target.packed

    def same(found: dict[str, torch.Tensor]) -> bool:
        return list(found) == list(weights) and all(map(torch.equal, found.values(), weights.values()))

    assert same(model.state_dict())
    own = model.model.layers[1].self_attn.k_proj.state_dict()
    assert torch.equal(own["weight"], weights["model.layers.1.self_attn.k_proj.weight"])
    model.save_pretrained(tmp_path)
    assert "specbench" not in (tmp_path / "config.json").read_text()
    assert same(hf.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


def test_an_int8_model_is_not_saved(tmp_path):
    model = llama()
    quantize(model)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UsageError, match=r"int8 model cannot be saved.* Load the model in another"):
            save()
    assert not list(tmp_path.glob("*.safetensors"))


@needs_packing
def test_a_model_that_is_wrapped_again_is_told_for_what_it_is():
    model = llama()
    packed = [wrap_target(model, name="one", pack=pack).packed for pack in (False, True, True, False)]
    assert packed == [False, True, True, True]
    quantize(model)
    again = wrap_target(model, name="one")
    assert not again.packed
    assert again.dtype == "int8"


class SharedInput(nn.Module):
    """Three layers that read one input, as decoder layers name them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(64, size, True, dtype) for size in (64, 32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.v_proj(x), self.q_proj(x), self.k_proj(x)], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replace", [pack, quantize])
def test_layers_that_read_the_same_input_are_one_product(replace, dtype, monkeypatch):
    if replace is pack and not can_pack(dtype, "cpu"):
        pytest.skip("no packed layers here")
    model: Any = SharedInput(dtype)
    weights = [layer.weight.clone() for layer in model.children()]
    inputs = [random_rows(rows, 64, dtype=dtype) for rows in (1, 5, 1)]
    expected = [model(x) for x in inputs]
    assert replace(model)
    join = model.q_proj.merged
    products: list[torch.Tensor] = []
    whole = join.layer.forward
    monkeypatch.setattr(join.layer, "forward", lambda x: products.append(x) or whole(x))
    for x, wanted in zip(inputs, expected, strict=True):
        assert relative(model(x).float(), wanted.float()) < 0.02
    assert len(products) == 3
    assert join._input is None, "an input is kept beyond its pass"
    monkeypatch.undo()
    # A layer asked alone, or twice, gives what it gives among the others.
    assert torch.equal(model.k_proj(inputs[1]), model.k_proj(inputs[1]))
    assert torch.equal(model.k_proj(inputs[1]), model(inputs[1])[:, -32:])
    if replace is pack:
        assert all(torch.equal(a.weight, b) for a, b in zip(model.children(), weights, strict=True))
        int8: Any = quantized_copy(model)
        assert {type(layer.layer) for layer in int8.children()} == {Int8Linear}
        assert relative(int8(inputs[1]).float(), expected[1].float()) < 0.02


class Sharing(nn.Module):
    """One layer under two names here and under a third one below."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = linear(4, 4, True)
        self.below = nn.Sequential(self.first, nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.again(self.first(x)) + self.below(x)
        return out


@needs_packing
@pytest.mark.parametrize(("replace", "kind"), [(pack, PackedLinear), (quantize, Int8Linear)])
def test_shared_layers_stay_shared(replace, kind):
    model: Any = Sharing()
    clone: Any = quantized_copy(model)
    expected = model(random_rows(3, 4))
    assert clone.first is clone.again is clone.below[0]
    assert type(clone.first) is Int8Linear
    assert type(model.first) is type(model.again) is type(model.below[0]) is nn.Linear
    assert replace(model)
    assert model.first is model.again is model.below[0]
    assert type(model.first) is kind
    assert relative(model(random_rows(3, 4)), expected) < 0.02


# -- int8 layers ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("_with_and_without_operators")
@pytest.mark.parametrize("quantized", [Int8Linear, Int4Linear])
def test_channels_of_any_size_are_close_and_zeros_stay_zeros(quantized):
    layer, x = linear(64, 8, False), random_rows(50, 64)
    layer.weight *= torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0, 1.0, 1.0])[:, None]
    found, expected = quantized(layer.weight, None)(x), layer(x)
    for channel in (0, 1, 2, 3, 4, 6, 7):
        error = relative(found[:, channel], expected[:, channel])
        assert error < (0.02 if quantized is Int8Linear else 0.2)
    assert found[:, 5].count_nonzero() == 0
    layer = linear(6, 4, True)
    for rows in (1, 2):
        zeros = quantized(layer.weight, layer.bias)(torch.zeros(rows, 6))
        assert torch.equal(zeros, layer.bias.expand(rows, -1))
        for scale in (1e-44, 1e-35, 1e20):  # no NaN
            assert bool(quantized(layer.weight, None)(torch.full((rows, 6), scale)).isfinite().all())
            assert bool(quantized(layer.weight * scale, None)(torch.ones(rows, 6)).isfinite().all())
    assert quantized(torch.zeros(4, 6), None)(random_rows(3, 6)).count_nonzero() == 0


def test_sums_do_not_overflow_without_vnni(monkeypatch):
    """Such a processor adds pairs of products in 16 bits; here it may be one that would not overflow."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(native, "_load", lambda: "it was not built")
    layer = linear(96, 64, True)
    quick = Int8Linear(layer.weight, layer.bias)
    for scale in (1.0, 1e-3):
        x = torch.full((3, 96), scale)
        assert relative(quick(x), layer(x)) < 0.02


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [quantized_copy, lambda model: first_layers(model, 2)])
def test_a_model_whose_layers_were_wrapped_is_refused(copy):
    """The wrapper's ``forward`` belongs to the original: the copy would run the whole original unnoticed."""
    model = llama()
    add_hook_to_module(model.model.layers[1], AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(UsageError, match="device map"):
        copy(model)
