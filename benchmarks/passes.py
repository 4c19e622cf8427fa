"""Measure how close a forward pass is to the machine's limit, and how it grows with the context.

    python benchmarks/passes.py                                       # the built-in model
    python benchmarks/passes.py --target FOLDER --contexts 256 4096   # about a minute for 1.5 billion parameters

A pass over one token reads every weight of its linear layers once, and the keys and values of its context. These
bytes over the bandwidth, measured in turn with the passes as the fastest of several ways to read a large buffer with
the same threads, are the least possible time. Goals: the weights' share of the pass at the shortest context is at
least 0.70, and a pass at the longest takes at most 1.25 × that at the shortest plus the time to read the cache once.
Prints one line of JSON at the end; exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, get_args

import parts  # before torch
import torch
from torch import nn

from specbench.backends.torch.scorer import Scorer
from specbench.bench.passes import time_in_turn
from specbench.kernels.linear import Int4Linear, Int8Linear, PackedLinear
from specbench.models.target import load_target
from specbench.options import CacheKind, LoadOptions

SHARE, GROWTH = 0.70, 1.25
BUFFER_BYTES = 1 << 30


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights of all linear layers, each once."""
    total = 0
    for module in model.modules():
        if isinstance(module, Int8Linear):
            total += module.out_features * module.in_features
        elif isinstance(module, Int4Linear):
            total += module.rounded.nbytes if module.panels is None else module.panels.data.nbytes
        elif isinstance(module, PackedLinear):
            total += module.out_features * module.in_features * module.dtype.itemsize
        elif isinstance(module, nn.Linear):
            total += module.weight.nbytes
    return total


def cache_bytes(model: Any, tokens: int) -> int:
    """Return the bytes of keys and values of that many tokens, in the model's dtype."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = model.get_input_embeddings().weight.element_size()
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * tokens * element)


def readers(buffer: torch.Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """Return ways to read memory, each with its bytes."""
    whole, target = buffer.view(torch.int64), torch.empty_like(buffer[: len(buffer) // 2])
    numbers = buffer.view(torch.float32)
    return {
        "integers summed": (whole.sum, buffer.nbytes),
        "largest of floats": (numbers.amax, buffer.nbytes),
        "copied": (lambda: target.copy_(buffer[: len(target)]), 2 * target.nbytes),
    }


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time passes and readers in turn."""
    target = load_target(given.target, LoadOptions(dtype=given.dtype), cache=given.cache)
    model = target.scorer.model
    if model.device.type != "cpu":
        raise SystemExit("This measures CPUs.")
    vocabulary = target.vocab_size
    text = torch.randint(
        0, vocabulary, (max(given.contexts) + 1,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    scorers = {length: Scorer(model, given.cache) for length in given.contexts}
    for length, scorer in scorers.items():
        scorer.begin()
        scorer.logits(text[:length], rows=1)

    def one_pass(length: int) -> float:
        took = seconds(lambda: scorers[length].logits(text[: length + 1], rows=1))
        scorers[length].rollback(length)
        return took

    ways = readers(torch.zeros(BUFFER_BYTES, dtype=torch.uint8))
    jobs: dict[int | str, Callable[[], float]] = {
        **{length: lambda n=length: one_pass(n) for length in given.contexts},  # type: ignore[misc]
        **{name: lambda r=read: seconds(r) for name, (read, _) in ways.items()},  # type: ignore[misc]
    }
    times = time_in_turn(jobs, given.rounds, Random(0))
    bandwidth = {name: moved / statistics.median(times[name]) for name, (_, moved) in ways.items()}
    best = max(bandwidth.values())
    shortest, longest = min(given.contexts), max(given.contexts)
    pass_s = {length: statistics.median(times[length]) for length in given.contexts}
    weights = weight_bytes(model)
    allowed = GROWTH * pass_s[shortest] + cache_bytes(model, longest) / best
    return {
        "benchmark": "passes",
        "target": target.language_model.name,
        "dtype": target.dtype,
        "cache": given.cache,
        "threads": torch.get_num_threads(),
        "vocab_size": vocabulary,
        "weight_gb": round(weights / 1e9, 6),
        "bandwidth_gb_s": {name: round(value / 1e9, 2) for name, value in bandwidth.items()},
        "pass_ms": {length: round(1e3 * value, 2) for length, value in pass_s.items()},
        "cache_mb": {length: round(cache_bytes(model, length) / 1e6, 3) for length in pass_s},
        "share_of_memory_traffic": round(weights / best / pass_s[shortest], 3),
        "longest_over_allowed": round(pass_s[longest] / allowed, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = parts.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache", default="dynamic", choices=get_args(CacheKind)[:2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096], metavar="N")
    parser.add_argument("--rounds", type=int, default=20)
    result = measure(parser.parse_args(arguments))
    for name, value in result.items():
        print(f"{name:24} {value}")
    print(json.dumps(result))
    good = result["share_of_memory_traffic"] >= SHARE and result["longest_over_allowed"] <= 1.0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
