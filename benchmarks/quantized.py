"""Write tests/quantized.safetensors: a layer in each form of quantized checkpoints, packed by the form's own package.

`tests/test_quantized.py` compares what specbench makes of them with a hash of what the package itself makes of them.
The file is made in an environment of its own, on a CPU:

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.1 gptqmodel==7.7.0
    python benchmarks/quantized.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parents[1] / "tests" / "quantized.safetensors"
ROWS, COLUMNS, GROUP = 32, 64, 32

Form = tuple[str, dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""Name, settings of the config.json, tensors of a layer, and its weight."""


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)


def compressed_tensors() -> Iterator[Form]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    for preset, form in (
        ("W4A16", "pack-quantized"),
        ("W4A16_ASYM", "pack-quantized"),
        ("W8A8", "int-quantized"),
        ("FP8", "float-quantized"),
        ("FP8_DYNAMIC", "float-quantized"),
        ("NVFP4A16", "nvfp4-pack-quantized"),
        ("MXFP4A16", "mxfp4-pack-quantized"),
    ):
        scheme = preset_name_to_scheme(preset, ["Linear"])
        args, state = scheme.weights, {"weight": weight()}
        if args.group_size:
            args.group_size = min(args.group_size, GROUP)
        strategy = str(args.strategy)
        width = {"tensor": ROWS * COLUMNS, "channel": COLUMNS}.get(strategy, args.group_size)
        groups = (
            weight().float().view(-1, width)
            if strategy == "tensor"
            else weight().float().view(ROWS, -1, width)
        )
        overall = None
        if strategy == "tensor_group":
            overall = state["weight_global_scale"] = 448 * 6 / weight().abs().max().float().view(1)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=overall)
        state["weight_scale"] = scale.bfloat16() if overall is None else scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        package = BaseCompressor.get_value_from_registry(form)
        packed = package.compress(state, scheme)
        told = json.loads(scheme.model_dump_json())
        settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": told}}
        yield f"compressed-tensors {preset}", settings, packed, package.decompress(packed, scheme)["weight"]


def gptq() -> Iterator[Form]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits, acts, older in ((4, False, True), (4, True, False), (8, False, True)):
        order = (
            torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
            if acts
            else torch.arange(COLUMNS)
        )
        groups = (torch.arange(COLUMNS) // GROUP)[order].int()
        numbers = torch.stack([weight().float()[:, groups == group] for group in range(COLUMNS // GROUP)], 1)
        scales = ((numbers.amax(-1) - numbers.amin(-1)) / (2**bits - 1)).half().float()
        zeros = (-numbers.amin(-1) / scales).round()
        layer = TorchLinear(bits, GROUP, False, acts, in_features=COLUMNS, out_features=ROWS)
        plain = torch.nn.Linear(COLUMNS, ROWS, False)
        plain.weight.data = weight().float()
        layer.pack(plain, scales.clone(), zeros.clone(), groups)
        layer.post_init()
        layer.dequant_dtype = torch.int16
        made = layer.dequantize_weight().t().half()
        if older:
            layer.qzero_format(format=2)
            convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits, group_size=GROUP, sym=False))
        kept = ("qweight", "qzeros", "scales", "g_idx")
        settings = {"quant_method": "gptq", "checkpoint_format": "gptq" if older else "gptq_v2"}
        name = f"gptq {bits} bits{', in the order of activations' if acts else ''}"
        yield name, settings, {key: part for key, part in layer.state_dict().items() if key in kept}, made


def awq() -> Iterator[Form]:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    draw, count = torch.Generator().manual_seed(2), COLUMNS // GROUP
    codes, zeros = (torch.randint(16, (rows, ROWS), generator=draw) for rows in (COLUMNS, count))
    scales = (torch.rand(count, ROWS, generator=draw) * 0.1).half()
    words, packed = pack_awq(codes, zeros, 4)
    made = dequantize_gemm(words, packed, scales, 4, GROUP).t()
    yield "awq", {"quant_method": "awq"}, {"qweight": words, "qzeros": packed, "scales": scales}, made


def of_transformers() -> Iterator[Form]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(3)
    codes, scales = weight().mul(100).to(torch.float8_e4m3fn), torch.rand(2, 4, generator=draw)
    made = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    yield "fp8", settings, {"weight": codes, "weight_scale_inv": scales}, made
    blocks = torch.randint(256, (2, ROWS, COLUMNS // 32, 16), dtype=torch.uint8, generator=draw)
    exponents = torch.randint(118, 130, (2, ROWS, COLUMNS // 32), dtype=torch.uint8, generator=draw)
    made = convert_moe_packed_tensors(blocks, exponents)
    yield "mxfp4", {"quant_method": "mxfp4"}, {"weight_blocks": blocks, "weight_scales": exponents}, made


def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    told: dict[str, str] = {}
    for forms in (compressed_tensors, gptq, awq, of_transformers):
        for name, settings, parts, made in forms():
            tensors |= {f"{name}/layer.{key}": part.detach().contiguous() for key, part in parts.items()}
            facts = {
                "settings": settings,
                "dtype": str(made.dtype).removeprefix("torch."),
                "hash": hash_of(made),
            }
            told[name] = json.dumps(facts)
    save_file(tensors, FILE, told)


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's shape and numbers; zeros have no sign."""
    numbers = (tensor.detach() + 0.0).contiguous()
    return hashlib.sha256(
        repr(numbers.shape).encode() + numbers.view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


if __name__ == "__main__":
    main()
