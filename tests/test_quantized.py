"""Quantized checkpoints: what they are unpacked to, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_models import edit_config
from tiny import save_tiny

from specbench.base.errors import UsageError
from specbench.generate import speculative_generate
from specbench.models import quantized as reading
from specbench.models.load import load_model
from specbench.models.quantized import stored_weights
from specbench.models.target import load_target
from specbench.options import LoadOptions

FILE = Path(__file__).with_name("quantized.safetensors")
with safe_open(FILE, "pt") as packed:
    FORMS = {name: json.loads(told) for name, told in sorted(packed.metadata().items())}
CPU = LoadOptions("float32", "cpu")


def parts_of(form: str) -> dict[str, torch.Tensor]:
    return {
        key.removeprefix(f"{form}/"): part
        for key, part in load_file(FILE).items()
        if key.startswith(f"{form}/")
    }


def unpacked(
    folder: Path, parts: dict[str, torch.Tensor], settings: dict[str, Any], dtype: torch.dtype
) -> Any:
    save_file({key: part.contiguous() for key, part in parts.items()}, folder / "layer.safetensors")
    found = stored_weights([folder / "layer.safetensors"], settings, dtype)
    return {key: part[...] for key, part in found.items()}


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_to_the_bit_those_of_the_package_that_packed_them(tmp_path, monkeypatch, form):
    monkeypatch.setattr(reading, "_CHUNK", 1)  # a few rows at a time
    told = FORMS[form]
    parts = parts_of(form) | {"layer.bias": torch.ones(3)}
    found = unpacked(tmp_path, parts, told["settings"], getattr(torch, told["dtype"]))
    assert found.keys() == {"layer.weight", "layer.bias"}
    numbers = (found["layer.weight"] + 0.0).contiguous()
    content = repr(numbers.shape).encode() + numbers.view(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == told["hash"]


def test_blocks_that_end_in_the_middle(tmp_path):
    codes, scales = torch.randn(40, 24).to(torch.float8_e4m3fn), torch.rand(3, 2)
    parts = {"layer.weight": codes, "layer.weight_scale_inv": scales}
    found = unpacked(tmp_path, parts, {"quant_method": "fp8", "weight_block_size": [16, 16]}, torch.float32)
    expected = torch.tensor(
        [[codes[i, j].float() * scales[i // 16, j // 16] for j in range(24)] for i in range(40)]
    )
    assert torch.equal(found["layer.weight"], expected)


def test_experts_that_have_a_scale_each(tmp_path):
    codes, scales = torch.randn(3, 8, 4).to(torch.float8_e4m3fn), torch.rand(3)
    parts = {"experts.up_proj": codes, "experts.up_proj_scale": scales, "experts.up_proj_bias": torch.ones(3)}
    found = unpacked(tmp_path, parts, {"quant_method": "fp8"}, torch.float32)
    assert torch.equal(found["experts.up_proj"], codes.float() * scales[:, None, None])
    assert found.keys() == {"experts.up_proj", "experts.up_proj_bias"}


def pack_like_gptq(folder: Path) -> None:
    """Store the linear layers of a folder in whole numbers of 4 bits."""
    kept: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        layer = key.removesuffix(".weight")
        if not key.endswith("proj.weight"):
            kept[key] = tensor
            continue
        rows, columns = tensor.shape
        scales = tensor.float().view(rows, 2, -1).abs().amax(2) / 7
        codes = (tensor.float() / scales.repeat_interleave(columns // 2, 1)).round().long() + 8
        shifts = 4 * torch.arange(8)
        words = (codes.t().reshape(-1, 8, rows) << shifts[:, None]).sum(1)
        zeros = torch.full((2, rows // 8), 0x77777777)
        kept |= {
            f"{layer}.qweight": words.int(),
            f"{layer}.qzeros": zeros.int(),
            f"{layer}.scales": scales.t().contiguous(),
        }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("quantized") / "packed", seed=3)
    pack_like_gptq(folder)
    return folder


@pytest.mark.smoke
def test_a_quantized_model_is_target_and_drafter(packed_model, tmp_path):
    target = load_target(str(packed_model), CPU)
    assert "packed are quantized (gptq)" in target.language_model.notes[0]
    plain = speculative_generate([1, 2, 3], target, "none", max_new_tokens=12, ignore_eos=True).token_ids
    for drafter in ("lookup", "self:int8", str(packed_model)):
        found = speculative_generate([1, 2, 3], target, drafter, max_new_tokens=12, ignore_eos=True)
        assert found.token_ids == plain
    target.language_model.model.save_pretrained(tmp_path)  # of what was unpacked, an ordinary model
    again = load_model(str(tmp_path), CPU, tokenizer=False)
    assert not again.notes
    assert again.identity == target.language_model.identity


def test_a_model_keeps_its_generation_config(packed_model, tmp_path):
    folder = save_tiny(tmp_path / "m", seed=3)
    pack_like_gptq(folder)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.5, "eos_token_id": [5, 7]}')
    assert load_model(str(folder), CPU).model.generation_config.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ({"quant_method": None}, "'None'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}, "rotations"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse",
        ),
    ],
)
def test_other_forms_are_refused(tmp_path, settings, says):
    folder = save_tiny(tmp_path / "m")
    edit_config(folder, quantization_config=settings)
    with pytest.raises(UsageError) as refusal:
        load_model(str(folder), CPU)
    assert says in refusal.value.message
