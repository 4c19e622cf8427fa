"""Measure the machine's limit, and how close specbench and others come to it.

    python benchmarks/limits.py                                         # the built-in model in five forms, two minutes
    python benchmarks/limits.py --model FOLDER --model SMALL --form bfloat16 --form drafter-int8
    python benchmarks/limits.py --model FOLDER --beside bfloat16 --assistant SMALL --setting SMALL@auto \
        --peer xllamacpp=FILE.gguf --peer xllamacpp:lookup=FILE.gguf --peer-python xllamacpp=PATH
    python benchmarks/limits.py --busy                                                  # next to a busy process too
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/limits.py        # as on an older processor

A pass reads every weight of its linear layers once, and the keys and values of its context. For every model and form:
the bytes of both, passes over one and five tokens, timed in turn with the fastest of several ways to read a large
buffer with the same threads, the share of that bandwidth, and the time by operator (torch's profiler, which slows
small ones down; "outside" is what no operator takes, such as a native call).

Forms: float32, bfloat16, float16, int8 and int4 are those of --dtype; drafter-int8 is a drafter's on a CPU (with
native products the same as int8). With --busy passes are also timed, native and in operators, while a process keeps
one core busy, in blocks alternating with quiet ones: mean time over the quiet mean. Two threads that share two cores
fairly with another process get three quarters of them; goal: at most 2.3 times as long. With --beside DTYPE the model
decodes prompts in that dtype, in turn with `transformers` and --peer, with and without drafts, as in
vs_transformers.py, and outputs are compared; what is not installed is left out with a reason. Prints one line of JSON
at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any

import parts
import passes
import peers
import torch
import vs_transformers
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from specbench.backends.torch.caches import make_cache
from specbench.backends.torch.forward import Forward, FusedForward, NativeForward
from specbench.backends.torch.kernels.attention import fold_attention
from specbench.backends.torch.kernels.surgery import quantize_linears
from specbench.backends.torch.scorer import Scorer
from specbench.base.errors import SpecbenchError
from specbench.bench.environment import describe_environment
from specbench.bench.passes import time_in_turn
from specbench.cli.options import DEFAULT_TARGET
from specbench.models.load import load_model
from specbench.models.target import load_target
from specbench.options import LoadOptions

DRAFTER = "drafter-int8"
FORMS = ("float32", "bfloat16", "float16", "int8", "int4", DRAFTER)
VERIFIED = 5
PROFILED = 10
SHOWN = 5
BUSY_GOAL = 2.3
BUSY_BLOCK = 10
"""Consecutive rounds of passes, next to a busy process and without."""
LIMITS = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OMP_NUM_THREADS", "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
)  # fmt: skip


def load_form(name: str, form: str) -> PreTrainedModel:
    """Load a model in a form.

    Raises:
        SpecbenchError: It cannot be loaded.
    """
    if form != DRAFTER:
        return load_target(name, LoadOptions(dtype=form, device="cpu")).scorer.model
    model = load_model(name, LoadOptions(device="cpu"), tokenizer=False).model
    fold_attention(model)
    quantize_linears(model, row_invariant=False)
    return model


def operators(action: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the operators of one call with their own milliseconds and calls, the slowest first."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(PROFILED):
            action()
    found = [
        {
            "name": str(event.key).removeprefix("aten::"),
            "ms": event.self_cpu_time_total / 1e3 / PROFILED,
            "calls": event.count / PROFILED,
        }
        for event in watched.key_averages()
    ]
    return sorted(found, key=lambda each: -each["ms"])


def measure(name: str, form: str, model: PreTrainedModel, context: int, rounds: int) -> dict[str, Any]:
    """Time a form's passes and readers of memory in turn."""
    scorer = Scorer(model)
    text = torch.randint(
        0, scorer.embeddings, (context + 1,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    scorer.begin()
    scorer.logits(text[:context], rows=1)

    def one_pass(drafted: int) -> float:
        took = passes.seconds(lambda: scorer.logits(text, text[:drafted]))
        scorer.rollback(context)
        return took

    ways = passes.readers(torch.zeros(passes.BUFFER_BYTES, dtype=torch.uint8))
    jobs: dict[int | str, Callable[[], float]] = {
        1: lambda: one_pass(0),
        VERIFIED: lambda: one_pass(VERIFIED - 1),
        **{way: lambda read=read: passes.seconds(read) for way, (read, _) in ways.items()},  # type: ignore[misc]
    }
    times = time_in_turn(jobs, rounds, Random(0))
    middle = {job: statistics.median(each) for job, each in times.items()}
    bandwidth = max(moved / middle[way] for way, (_, moved) in ways.items())
    weights, cache = passes.weight_bytes(model), passes.cache_bytes(model, context)
    spent = operators(lambda: one_pass(0))
    return {
        "model": Path(name).name,
        "form": form,
        "weight_mb": round(weights / 1e6, 2),
        "cache_mb": round(cache / 1e6, 2),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "least_ms": round(1e3 * (weights + cache) / bandwidth, 3),
        "pass_ms": round(1e3 * middle[1], 3),
        "verified_ms": round(1e3 * middle[VERIFIED], 3),
        "share": round((weights + cache) / bandwidth / middle[1], 3),
        "operators": [{**each, "ms": round(each["ms"], 3)} for each in spent[:SHOWN]],
        "other_operators_ms": round(sum(each["ms"] for each in spent[SHOWN:]), 3),
        "outside_ms": round(max(0.0, 1e3 * middle[1] - sum(each["ms"] for each in spent)), 3),
    }


def next_to_busy(
    name: str, form: str, model: PreTrainedModel, context: int, rounds: int
) -> list[dict[str, Any]]:
    """Time a form's passes in alternating blocks: quiet, and next to a process that keeps a core busy."""
    usual = type(Scorer(model).forward)
    ways = (usual, FusedForward) if usual is NativeForward else (usual,)
    timers = {way: _timer(way, model, context) for way in ways}
    jobs: dict[tuple[str, int], Callable[[], float]] = {
        (way.__name__, tokens): lambda seconds=seconds, tokens=tokens: seconds(tokens)  # type: ignore[misc]
        for way, seconds in timers.items()
        for tokens in (1, VERIFIED)
    }
    quiet: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    shared: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    for block in range(max(1, rounds // BUSY_BLOCK)):
        for times in (quiet, shared):
            with parts.busy_core(times is shared):
                for job, found in time_in_turn(jobs, min(rounds, BUSY_BLOCK), Random(block)).items():
                    times[job] += found
    return [
        {
            "model": Path(name).name,
            "form": form,
            "way": way,
            "tokens": tokens,
            "quiet_ms": round(1e3 * statistics.fmean(quiet[way, tokens]), 3),
            "busy_ms": round(1e3 * statistics.fmean(shared[way, tokens]), 3),
            "ratio": round(statistics.fmean(shared[way, tokens]) / statistics.fmean(quiet[way, tokens]), 3),
            "ratio_of_medians": round(
                statistics.median(shared[way, tokens]) / statistics.median(quiet[way, tokens]), 3
            ),
        }
        for way, tokens in jobs
    ]


def _timer(way: type[Any], model: PreTrainedModel, context: int) -> Callable[[int], float]:
    """Return a timer of passes over that many tokens after a context."""
    cache = make_cache("dynamic", model.config)
    forward: Forward = way(model, cache)
    embeddings: Any = model.get_input_embeddings()
    random = torch.Generator().manual_seed(0)
    text = torch.randint(0, embeddings.num_embeddings, (1, context + VERIFIED), generator=random)

    @torch.inference_mode()
    def seconds(tokens: int) -> float:
        cache.rollback(context)
        ids = text[:, context : context + tokens]
        return passes.seconds(lambda: forward(ids, tokens))

    with torch.inference_mode():
        forward(text[:, :context], 1)
    return seconds


def show_busy(rows: Sequence[dict[str, Any]]) -> None:
    """Show how much longer passes take next to a busy process."""
    width = max(len(row["model"]) for row in rows)
    heads = f"{'form':12} {'way':12} {'tokens':>6} {'quiet ms':>9} {'busy ms':>9} {'ratio':>6}"
    print(f"\n{'':{width}} {heads}  of medians (next to a busy process; goal {BUSY_GOAL})")
    for row in rows:
        print(
            f"{row['model']:{width}} {row['form']:12} {row['way']:12} {row['tokens']:6} {row['quiet_ms']:9.2f}"
            f" {row['busy_ms']:9.2f} {row['ratio']:6.2f}  {row['ratio_of_medians']:.2f}"
        )


def compare_with_float32(rows: Sequence[dict[str, Any]]) -> None:
    """Print how many times as fast as in float32 a pass is in every form."""
    exact = {row["model"]: row["pass_ms"] for row in rows if row["form"] == "float32" and "reason" not in row}
    for row in rows:
        if "reason" not in row and row["model"] in exact:
            row["over_float32"] = round(exact[row["model"]] / row["pass_ms"], 3)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table, and the slowest operators of a pass."""
    width = max(len(row["model"]) for row in rows)
    heads = f"{'form':12} {'MB':>8} {'GB/s':>6} {'at least ms':>11} {'a pass ms':>9} {'of 5':>7} {'share':>6}"
    heads += f" {'× float32':>9}"
    print(f"\n{'':{width}} {heads}")
    for row in rows:
        if "reason" in row:
            print(f"{row['model']:{width}} {row['form']:12} left out: {row['reason']}")
            continue
        print(
            f"{row['model']:{width}} {row['form']:12} {row['weight_mb'] + row['cache_mb']:8.1f}"
            f" {row['bandwidth_gb_s']:6.1f} {row['least_ms']:11.2f} {row['pass_ms']:9.2f} {row['verified_ms']:7.2f}"
            f" {row['share']:6.2f} " + (f"{row['over_float32']:9.2f}" if "over_float32" in row else "")
        )
    for row in rows:
        if "reason" not in row:
            spent = [f"{each['name']} {each['ms']:.2f} ({each['calls']:.0f})" for each in row["operators"]]
            spent.append(f"other operators {row['other_operators_ms']:.2f}")
            spent.append(f"outside {row['outside_ms']:.2f}")
            print(f"{row['model']} {row['form']}, ms of a pass (calls): {', '.join(spent)}")


def beside(given: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Compare a model with other decoders on the same prompts in one dtype."""
    asked = ["--target", given.model[0], "--dtype", dtype, "--limit", str(given.limit)]
    asked += ["--tokens", str(given.tokens), "--prompts", *given.prompts]
    for option in ("setting", "peer"):
        asked += [word for value in getattr(given, option) for word in (f"--{option}", value)]
    asked += [word for name, path in given.peer_python for word in ("--peer-python", f"{name}={path}")]
    asked += [] if given.assistant is None else ["--assistant", given.assistant]
    settings = vs_transformers.parse(asked)
    done, _ = vs_transformers.decoded(settings, parts.Parts(None, {}), math.inf)
    lines = vs_transformers.summary(done)
    print(f"\n{Path(given.model[0]).name} in {dtype} and others, {len(done)} prompts × {given.tokens} tokens")
    vs_transformers.show(lines)
    return {
        "dtype": dtype,
        "prompts": len(done),
        "rows": [{name: vs_transformers.plain(value) for name, value in line.items()} for line in lines],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help=f"repeatable; {DEFAULT_TARGET}")
    parser.add_argument("--form", action="append", choices=FORMS, help="repeatable; all but float16")
    parser.add_argument("--context", type=int, default=256, help="tokens that were read before")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="also time passes next to a busy process")
    parser.add_argument("--beside", action="append", default=[], choices=FORMS[:-1], metavar="DTYPE",
                        help="compare with other decoders in this dtype, repeatable")  # fmt: skip
    parser.add_argument("--assistant", help="a small model, for transformers' assisted generation")
    parser.add_argument("--setting", action="append", default=[], metavar="DRAFTER@RULE")
    parser.add_argument("--peer", action="append", default=[], type=peers.check_peer, metavar="PEER",
                        help=f"repeatable: {', '.join(peers.PEERS)}")  # fmt: skip
    parser.add_argument("--peer-python", action="append", default=[], type=peers.check_python,
                        metavar="PACKAGE=PATH", help="the interpreter that has it, repeatable")  # fmt: skip
    parser.add_argument("--prompts", nargs="+", default=["all"], help="sets or files")
    parser.add_argument("--limit", type=int, default=12, help="prompts, in turn from the categories")
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args(arguments)
    given.model = given.model or [DEFAULT_TARGET]
    given.form = given.form or [form for form in FORMS if form != "float16"]
    return given


def measured(name: str, form: str, given: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a form's passes, quiet and next to a busy process; none if it cannot be loaded."""
    try:
        model = load_form(name, form)
        alone = measure(name, form, model, given.context, given.rounds)
        return alone, next_to_busy(name, form, model, given.context, given.rounds) if given.busy else []
    except SpecbenchError as error:
        return {"model": Path(name).name, "form": form, "reason": str(error)}, []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    given = parse(arguments)
    rows: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    for name in given.model:
        for form in given.form:
            alone, shared = measured(name, form, given)
            rows.append(alone)
            busy += shared
            gc.collect()
    compare_with_float32(rows)
    show(rows)
    if busy:
        show_busy(busy)
    compared = [beside(given, dtype) for dtype in given.beside]
    environment = describe_environment()
    print(
        json.dumps(
            {
                "benchmark": "limits",
                **{
                    name: getattr(environment, name)
                    for name in ("cpu", "cpu_capability", "threads", "huge_pages")
                },
                "limited_by": {name: os.environ[name] for name in LIMITS if name in os.environ},
                **{name: metadata.version(name) for name in ("torch", "transformers")},
                "context": given.context,
                "rows": rows,
                "busy": busy,
                "beside": compared,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
