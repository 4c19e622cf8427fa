"""Measure the gain of huge pages: passes of two copies of a model in turn, one in pages of 4 KiB.

    python benchmarks/huge_pages.py                                      # the built-in model
    python benchmarks/huge_pages.py --target FOLDER --dtype bfloat16 --assistant FOLDER

Prints the median time of a pass in both and their ratio, for several numbers of tokens, for the target and for int8
drafters (the target itself, and a model of your own). Prints one line of JSON at the end. Needs memory for both
copies, and says so if the system gave no huge pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import parts  # noqa: F401 - before torch
import torch

from specbench.backends.torch.kernels.huge_pages import huge_page_setting
from specbench.backends.torch.scorer import Scorer
from specbench.models.drafters import load_drafter
from specbench.models.target import load_target
from specbench.options import LoadOptions

CONTEXT = 256


def in_huge_pages_gb() -> float:
    """Return how much of this process's memory is in huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def scorers(given: argparse.Namespace) -> dict[str, Scorer]:
    """Return one target and its drafters."""
    target = load_target(given.target, LoadOptions(dtype=given.dtype))
    found = {"target": target.scorer}
    for spec in ["self:int8", *([given.assistant] if given.assistant else [])]:
        drafter: Any = load_drafter(spec, target)
        found[drafter.name] = drafter.scorer
    return found


def timer(scorer: Scorer, text: list[int], count: int) -> Callable[[], float]:
    """Return the seconds of one pass over that many tokens after the context."""

    if scorer.cache.length != CONTEXT:  # a self-drafter has the target's cache
        scorer.begin()
        scorer.logits(text[:CONTEXT], rows=1)

    def once() -> float:
        began = time.perf_counter()
        for _ in range(3):
            scorer.logits(text[: CONTEXT + count], rows=count)
            scorer.rollback(CONTEXT)
        return (time.perf_counter() - began) / 3

    return once


def main() -> None:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--assistant", help="a drafter model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5, 9])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    with patch("specbench.backends.torch.kernels.surgery.in_huge_pages", nullcontext):
        small = scorers(given)
    ordinary = in_huge_pages_gb()
    huge = scorers(given)
    gained = in_huge_pages_gb() - ordinary
    print(
        f"The system's setting is {huge_page_setting()}; {gained:.2f} GB of the second copy lie in huge pages."
    )
    text = torch.randint(0, 1000, (CONTEXT + max(given.widths),), generator=torch.Generator().manual_seed(0))
    rows = []
    for name in small:
        for width in given.widths:
            both = [timer(kind[name], text.tolist(), width) for kind in (small, huge)]
            times = [[each() for each in both] for _ in range(given.rounds + 1)][1:]
            before, after = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            ratio = statistics.median(slow / fast for slow, fast in times)
            rows.append(
                {"model": name, "tokens": width, "ms": before, "huge_ms": after, "ratio": round(ratio, 3)}
            )
            print(
                f"{name}: {width} tokens {before:.1f} ms, in huge pages {after:.1f} ms, ratio {ratio:.2f}",
                flush=True,
            )
    print(
        json.dumps({"benchmark": "huge_pages", "target": given.target, "gb": round(gained, 2), "rows": rows})
    )


if __name__ == "__main__":
    main()
