"""Compare the memory that loading takes with the estimate made before, for kinds of quantized checkpoints.

    python benchmarks/memory.py                      # all kinds, each unpacked to bfloat16, in int8 and in int4
    python benchmarks/memory.py gptq fp8 --dtype int8

A random model of some 250M weights is loaded in a process that has loaded a tiny one before. Measured is its own
memory, without that of mapped files, every 2 ms.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parts  # noqa: F401 - before torch
import psutil
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from specbench.models import checkpoints, load
from specbench.models.target import prepare_target
from specbench.options import LoadOptions

PROCESSES = get_context("spawn")
GROUP = 128
SIZES = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8,
}  # fmt: skip
EXPERTS = {"num_hidden_layers": 4, "intermediate_size": 1024, "num_local_experts": 16}
INT4 = {"num_bits": 4, "type": "int", "group_size": GROUP}
KINDS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"format": "pack-quantized", "config_groups": {"group_0": {"weights": INT4}}},
    "gptq": {"bits": 4, "checkpoint_format": "gptq"},
    "awq": {"version": "gemm"},
    "fp8": {"weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"},
    "mxfp4": {},
}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape).half() * 0.01 + 0.001


def layer(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear layer."""
    groups, weight = columns // GROUP, torch.randn(rows, columns) * 0.02
    if kind == "compressed-tensors":
        packed = {"weight_packed": words(rows, columns // 8), "weight_scale": scales(rows, groups).bfloat16()}
        return packed | {"weight_shape": torch.tensor([rows, columns])}
    if kind in ("gptq", "awq"):
        zeros = words(groups, rows // 8)
        codes = words(columns, rows // 8) if kind == "awq" else words(columns // 8, rows)
        zeros = zeros if kind == "awq" else zeros.fill_(0x77777777)
        return {"qweight": codes, "qzeros": zeros, "scales": scales(groups, rows)}
    if kind == "fp8":
        own = scales(rows // GROUP, groups).float()
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": own}
    return {"weight": weight.bfloat16()}


def write(kind: str, folder: Path) -> None:
    """Write a checkpoint; that of mxfp4 has experts."""
    config: Any = GptOssConfig(**SIZES | EXPERTS) if kind == "mxfp4" else LlamaConfig(**SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, torch.Tensor] = {}
    for key, weight in model.state_dict().items():
        if key.endswith("proj.weight"):
            made = layer(kind, *weight.shape)
            tensors |= {key.removesuffix("weight") + part: tensor for part, tensor in made.items()}
        elif weight.dim() == 3:
            experts, inputs, outputs = weight.shape
            blocks = words(experts, outputs, inputs // 32, 4).view(torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": blocks[..., 0] // 16 + 112}
        else:
            tensors[key] = (torch.randn(weight.shape) * 0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.quantization_config = {"quant_method": kind, **KINDS[kind]}
    config.save_pretrained(folder)


def load_both(pipe: Connection, paths: tuple[Path, Path], dtype: Any) -> None:
    """Load two models; after each, send its estimate and the last note, and wait."""
    asked: list[int] = []
    checkpoints.available_memory = lambda *_: 0
    load.check_memory = lambda needed, **_: asked.append(needed)
    for path in paths:
        model = load.load_model(str(path), LoadOptions(dtype, "cpu"), tokenizer=False)
        prepare_target(model, "dynamic" if dtype == "bfloat16" else "preallocated")
        pipe.send((asked[-1], *model.notes[-1:]))
        pipe.recv()


def measure(paths: tuple[Path, Path], dtype: str) -> str:
    """Return estimate, peak and what is held in the end, in MB, and the last note."""
    pipe, its = PROCESSES.Pipe()
    process = PROCESSES.Process(target=load_both, args=(its, paths, dtype))
    process.start()
    its.close()

    def memory() -> int:
        found: Any = psutil.Process(process.pid).memory_info()
        return int(found.rss - found.shared)

    pipe.recv()
    before = peak = memory()
    pipe.send("go on")
    while not pipe.poll(0.002):
        peak = max(peak, memory())
    estimate, *note = pipe.recv()
    sizes = (estimate, peak - before, memory() - before)
    pipe.send("end")
    process.join()
    return "".join(f"{size / 1e6:10.0f}" for size in sizes) + f"{estimate / sizes[1]:10.2f}  {' '.join(note)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", help=", ".join(KINDS))
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "int8", "int4"))
    given = parser.parse_args()
    print(f"{'kind':20}{'dtype':10}{'estimate':>10}{'peak':>10}{'held':>10}{'ratio':>10}")
    with tempfile.TemporaryDirectory() as place:
        folder, tiny = Path(place), Path(place) / "tiny"
        os.environ["SPECBENCH_CACHE"] = f"{place}/cache"
        small = LlamaConfig(**SIZES | {"num_hidden_layers": 1, "vocab_size": 64})
        AutoModelForCausalLM.from_config(small).bfloat16().save_pretrained(tiny)
        for kind in given.kinds or KINDS:
            write(kind, folder)
            for dtype in given.dtype or ("bfloat16", "int8", "int4"):
                print(f"{kind:20}{dtype:10}{measure((tiny, folder), dtype)}", flush=True)


if __name__ == "__main__":
    main()
