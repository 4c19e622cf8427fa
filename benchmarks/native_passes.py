"""Measure native forward passes of a target against those of transformers, in turn in one process.

    python benchmarks/native_passes.py --target gemma-3-270m-q4_k_m.gguf --dtype bfloat16
    python benchmarks/native_passes.py --target FOLDER --contexts 64 600 1500 --widths 1 5 --rounds 15

Each pass reads WIDTH tokens after a context, as decoding (1) and a verification (γ + 1) do. Both forwards have the same
packed weights and caches of their own. The ratio is the median over rounds of the two times in a round; its interval
is from the 5th to the 95th percentile. Prints one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import parts  # noqa: F401 - before torch
import torch

from specbench.backends.torch.forward import HFForward, NativeForward
from specbench.backends.torch.scorer import Scorer
from specbench.models.target import load_target
from specbench.options import LoadOptions


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time both forwards in turn, for every context and width."""
    target = load_target(given.target, LoadOptions(dtype=given.dtype))
    chosen = target.scorer.forward
    if not isinstance(chosen, NativeForward):
        raise SystemExit(f"The target's forward is {type(chosen).__name__}.")
    model, cache = target.scorer.model, given.cache or "dynamic"
    random = torch.Generator().manual_seed(0)
    longest = max(given.contexts) + max(given.widths)
    text = torch.randint(0, target.vocab_size, (longest,), generator=random).tolist()
    rows = []
    for context in given.contexts:
        scorers = [Scorer(model, cache), Scorer(model, cache)]
        scorers[1].forward = HFForward(model, scorers[1].cache)
        for scorer in scorers:
            scorer.begin()
            scorer.logits(text[:context], rows=1)
        for width in given.widths:
            times: list[list[float]] = [[], []]
            for turn in range(given.rounds + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    scorer = scorers[which]
                    began = time.perf_counter()
                    scorer.logits(text[: context + 1], text[context + 1 : context + width])
                    times[which].append(time.perf_counter() - began)
                    scorer.rollback(context)
            native, usual = (each[1:] for each in times)  # the first ones find cold caches
            ratios = sorted(one / other for one, other in zip(usual, native, strict=True))
            edge = max(0, round(0.05 * len(ratios)) - 1)
            rows.append(
                {
                    "context": context,
                    "width": width,
                    "native_ms": round(1e3 * statistics.median(native), 2),
                    "transformers_ms": round(1e3 * statistics.median(usual), 2),
                    "speedup": round(statistics.median(ratios), 3),
                    "interval": [round(ratios[edge], 3), round(ratios[-1 - edge], 3)],
                }
            )
    return {
        "benchmark": "native_passes",
        "target": target.language_model.name,
        "dtype": target.dtype,
        "threads": torch.get_num_threads(),
        "passes": rows,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache", choices=("dynamic", "preallocated"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 600, 1500], metavar="N")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5], metavar="N")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    result = measure(parse(arguments))
    for row in result["passes"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
