"""Time one forward pass over several requests against one pass per request.

    python benchmarks/batch.py                                # the built-in model, 8 requests, contexts of 256 tokens
    python benchmarks/batch.py --target FOLDER --requests 4 16 --contexts 64 2048

Every request brings 1 row (plain decoding) or 5 (four drafts). Context lengths vary from half of the given length to
all of it. Single passes use the driver of one request with its own caches. Prints a table and one line of JSON.
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

import parts  # noqa: F401 - before torch
import torch

from specbench.backends.torch.batch import BatchedModel
from specbench.backends.torch.pools import KVPool, PoolKind
from specbench.backends.torch.scorer import Scorer
from specbench.bench.passes import time_in_turn
from specbench.decoding.protocols import ForwardRequest
from specbench.models.target import load_target
from specbench.options import LoadOptions

WIDTHS = (1, 5)


def timed(
    scorers: Sequence[Scorer],
    passes: Sequence[ForwardRequest],
    score: Callable[[Sequence[ForwardRequest]], object],
) -> float:
    """Return the seconds of these passes; caches are restored."""
    began = time.perf_counter()
    score(passes)
    took = time.perf_counter() - began
    for scorer, each in zip(scorers, passes, strict=True):
        scorer.rollback(len(each.context) - 1)
    return took


def one_by_one(passes: Sequence[ForwardRequest]) -> None:
    """Make the passes as drivers of single requests do."""
    for each in passes:
        each.scorer.score(each)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time both in turn."""
    target = load_target(given.target, LoadOptions(dtype=given.dtype), cache=given.cache)
    loaded, choice = target.scorer, Random(0)
    rows: list[dict[str, Any]] = []
    for context in given.contexts:
        for requests in given.requests:
            lengths = [context // 2 + context * i // (2 * max(1, requests - 1)) for i in range(requests)]
            texts = [[choice.randrange(target.vocab_size) for _ in range(length + 5)] for length in lengths]
            ways: dict[str, tuple[list[Scorer], Callable[[Sequence[ForwardRequest]], object]]] = {
                "separate": ([Scorer(loaded.model, given.cache) for _ in texts], one_by_one)
            }
            for kind in get_args(PoolKind):
                stretch = context + 64
                batch = BatchedModel(loaded, KVPool(loaded.model.config, kind, requests * stretch, requests))
                if batch.why_not_batched is not None:
                    raise SystemExit(batch.why_not_batched)
                ways[kind] = ([batch.open() for _ in texts], batch.score)
            jobs: dict[tuple[str, int], Callable[[], float]] = {}
            for way, (scorers, score) in ways.items():
                one_by_one(
                    [ForwardRequest(scorer, text[:-5]) for scorer, text in zip(scorers, texts, strict=True)]
                )
                for width in WIDTHS:
                    passes = [
                        ForwardRequest(scorer, text[:-4], text[-4:][: width - 1])
                        for scorer, text in zip(scorers, texts, strict=True)
                    ]
                    jobs[way, width] = lambda s=scorers, p=passes, f=score: timed(s, p, f)  # type: ignore[misc]
            times = time_in_turn(jobs, given.rounds, choice)
            for width in WIDTHS:
                alone = statistics.median(times["separate", width])
                row: dict[str, Any] = {"context": context, "requests": requests, "rows": width}
                row["separate_ms"] = round(1e3 * alone, 2)
                for kind in get_args(PoolKind):
                    together = statistics.median(times[kind, width])
                    row[f"{kind}_ms"] = round(1e3 * together, 2)
                    row[f"{kind}_ratio"] = round(alone / together, 2)
                rows.append(row)
    return {
        "benchmark": "batch",
        "target": target.language_model.name,
        "dtype": target.dtype,
        "threads": torch.get_num_threads(),
        "passes": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cache", default="dynamic", choices=("dynamic", "preallocated"))
    parser.add_argument("--requests", type=int, nargs="+", default=[8], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256], metavar="N")
    parser.add_argument("--rounds", type=int, default=20)
    found = measure(parser.parse_args(arguments))
    print("context requests rows  separate   paged (ratio)   slotted (ratio), ms")
    for row in found["passes"]:
        print(
            f"{row['context']:7} {row['requests']:8} {row['rows']:4} {row['separate_ms']:9.2f}"
            f" {row['paged_ms']:7.2f} ({row['paged_ratio']:.2f}) {row['slotted_ms']:9.2f} ({row['slotted_ratio']:.2f})"
        )
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
