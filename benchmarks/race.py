"""Race specbench against other engines over HTTP: the same weights, prompts and precision, each with its own drafts.

    python benchmarks/race.py --out race --target FOLDER --drafter FOLDER \\
        --gguf TARGET.gguf --draft-gguf SMALL.gguf --python llama.cpp=~/llama/bin/python --python vllm=~/vllm/bin/python
    python benchmarks/race.py --out race --target FOLDER --side "mine=my-server --model FOLDER --port {port}"

Sides: `specbench serve` without drafts, with its default drafter, and with `--drafter`; `transformers serve`; and, each
in an environment of its own (`--python ENGINE=PYTHON`), llama.cpp from the wheel `xllamacpp` and vLLM, plain, with
n-grams and with the drafter. `--side NAME=COMMAND` adds any other OpenAI server. What cannot take part is named with
its reason. Of one kind of weights: `--dtype` is that of the servers which read folders, and the GGUF files are yours.

Three runs, each a folder of `--out` that a second call continues: `single` (12 mixed prompts × 96 tokens one after the
other), `batch-8` (24 prompts, 8 clients at a time) and `prompts` (time to the first token of prompts of 32, 512 and
4,096 tokens; no two begin alike, so no prompt cache helps). All sides answer each prompt in turn, if all fit into
memory; `--servers N` limits how many run at a time. Prints for every side its tokens per second after the first and in
whole calls, with specbench's best over it and the 95% intervals, the time to the first token by length, how long its
start took, and its memory, and then one line of JSON. `specbench report FOLDER` has the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specbench.base.errors import SpecbenchError
from specbench.base.record import Estimate
from specbench.bench.contexts import load_context_text
from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import Sweep, SweepOptions, server_rows
from specbench.bench.manifest import describe_run, open_run
from specbench.bench.prompts import Prompt, load_prompts
from specbench.bench.session import Session
from specbench.export.start import EngineSetting, StartedEngine, settings_of
from specbench.models.load import load_tokenizer
from specbench.options import DecodingOptions
from specbench.results.compare import compare_configs
from specbench.results.pairs import whole_speed
from specbench.results.results import Results, load_results
from specbench.results.stats import geometric_mean
from specbench.results.summary import Summary
from specbench.rows import conditions_of
from specbench.specs.models import ModelSpec, parse_model
from specbench.specs.policies import parse_policy
from specbench.started import engine_drafters, placed, started_engine

CommandLine = Callable[[int], Sequence[str]]
OURS = "specbench"
LENGTHS = (32, 512, 4096)
SERVER = Path(__file__).with_name("llama_server.py")
VLLM = "-m vllm.entrypoints.openai.api_server"
_GAMMA = 4


def sides_of(given: argparse.Namespace) -> tuple[dict[str, CommandLine], dict[str, str]]:
    """Return the command lines of all sides by name, ours first, and why others take no part."""
    sides: dict[str, CommandLine] = {}
    left_out: dict[str, str] = {}
    base = [
        sys.executable,
        "-m",
        "specbench",
        "serve",
        "--config",
        "none",
        "--target",
        f"{given.target}:{given.dtype}",
    ]
    sides[f"{OURS} plain"] = partial(_with_port, [*base, "--drafter", "none", "--port"])
    sides[OURS] = partial(_with_port, [*base, "--port"])
    if given.drafter:
        sides[f"{OURS} drafter"] = partial(_with_port, [*base, "--drafter", given.drafter, "--port"])
    pythons = dict(each.split("=", 1) for each in given.python)
    for name, target, drafter, command in (
        ("llama.cpp", given.gguf, given.draft_gguf, str(SERVER)),
        ("vllm", given.target, given.drafter, f"{VLLM} --dtype {given.dtype} --model"),
    ):
        if name not in pythons or not target:
            left_out[name] = "no --gguf" if name in pythons else f"no --python {name}=PYTHON"
            continue
        engine = started_engine(name)
        try:
            drafters = engine_drafters(engine, [drafter] if drafter else [], usual=True, elsewhere=False)
            model = placed(engine, parse_model(target))
        except SpecbenchError as error:
            left_out[name] = str(error)
            continue
        policy = [parse_policy("fixed")]
        settings = settings_of(engine, model, drafters, gammas=(_GAMMA,), policies=policy)
        wrapper = f"{shlex.quote(pythons[name])} {command}"
        more = shlex.split(given.options.get(name, ""))
        for setting in settings:
            sides[f"{name} {setting.name}"] = partial(_started, engine, model, setting, more, wrapper)
    if "transformers" in pythons:
        words = [
            pythons["transformers"],
            "-m",
            "transformers.cli.transformers",
            "serve",
            "--force-model",
            given.target,
        ]
        sides["transformers serve"] = partial(_with_port, [*words, "--dtype", given.dtype, "--port"])
    else:
        left_out["transformers"] = "no --python transformers=PYTHON"
    for each in given.side:
        name, _, command = each.partition("=")
        sides[name] = partial(_filled, command)
    return sides, left_out


def _with_port(words: Sequence[str], port: int) -> list[str]:
    return [*words, str(port)]


def _started(
    engine: StartedEngine,
    model: ModelSpec,
    setting: EngineSetting,
    more: Sequence[str],
    wrapper: str,
    port: int,
) -> list[str]:
    return engine.command_line(model, setting.options, port, more, wrapper)


def _filled(command: str, port: int) -> list[str]:
    return [word.replace("{port}", str(port)) for word in shlex.split(command)]


def prompts_of_length(target: str, lengths: Sequence[int], each: int) -> list[Prompt]:
    """Return prompts of so many tokens by the target's tokenizer, all from different places of a text."""
    tokenizer = load_tokenizer(parse_model(target))
    assert tokenizer is not None
    ids = tokenizer.encode(load_context_text(), add_special_tokens=False)
    found, begin = [], 0
    for number in range(each):
        for length in lengths:
            text = tokenizer.decode([ids[(begin + i) % len(ids)] for i in range(length - 4)])
            found.append(Prompt(f"{length}-{number}", f"{length} tokens", (f"{number} {text}",)))
            begin += length
    return found


def measure(
    folder: Path,
    sides: Mapping[str, CommandLine],
    prompts: Sequence[Prompt],
    given: argparse.Namespace,
    starts: dict[str, Any],
    *,
    tokens: int,
    batch: int | None = None,
) -> Results:
    """Measure all sides, or what is missing in the folder."""
    decoding = DecodingOptions(max_new_tokens=tokens, ignore_eos=True)
    options = SweepOptions(
        gammas=(), policies=(), decoding=decoding, repeats=given.repeats, warmup=0, turns=1,
        conditions=conditions_of(batch=[] if batch is None else [batch]), servers=tuple(sides),
    )  # fmt: skip
    launched = LaunchedEngine(
        sides,
        folder / "servers",
        lambda spec: ServerEngine([spec], keys={}, decoding=decoding),
        limit=given.servers,
    )
    configs = tuple(server_rows(options, [(name, None) for name in sides]))
    try:
        together = None if launched.fits([*sides]) else launched.limit or launched.capacity
        sweep = Sweep(options, tuple(prompts), configs, together)
        target = launched.describe_target(decoding)
        sources = {
            "target": parse_model(given.target).name,
            "prompts": ["race"],
            "limit": None,
        }
        with open_run(folder, describe_run(sweep, target, sources)) as store:
            Session(sweep, store, launched).run_all()
        for name, start in launched.starts.items():
            starts[name] = {"seconds": round(start.seconds, 1), "memory_gb": round(start.memory / 1e9, 2)}
    finally:
        launched.close()
    return load_results(folder)


def speeds(results: Results) -> dict[str, dict[str, Any]]:
    """Return each side's tokens per second, and specbench's best over it with its interval: after the first token, and
    (``whole``) of whole calls, with the reading of the prompt.
    """
    rows = {row.config.drafter: row for row in Summary(results).rows if row.generations}
    ours = {name: row for name, row in rows.items() if name.startswith(OURS)}
    best = max(ours, key=lambda name: ours[name].tokens_per_second.value, default=None)
    alone = results.done[results.done["group"] == ""]  # those of a batch are whole anyway
    calls = alone.assign(speed=whole_speed(alone)).pivot_table("speed", ["prompt", "repeat"], "drafter")
    keys = [calls.index.get_level_values(each) for each in ("prompt", "repeat")]
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        found[name] = {"tokens_per_second": round(row.tokens_per_second.value, 2)}
        if name in calls:
            found[name]["whole"] = round(geometric_mean(calls[name], *keys).value, 2)
        if best is not None and name != best:
            ratio = compare_configs(results, rows[best].config.id, row.config.id).rows[0].ratio
            found[name]["ours_over_it"] = _rounded(ratio)
            if name in calls:
                found[name]["whole_over_it"] = _rounded(geometric_mean(calls[best] / calls[name], *keys))
    return found


def _rounded(ratio: Estimate) -> list[float | None]:
    return [None if each is None else round(each, 3) for each in (ratio.value, ratio.low, ratio.high)]


def first_tokens(results: Results) -> dict[str, dict[str, float]]:
    """Return the median milliseconds to the first token by side and length of prompt."""
    done = results.done
    found: dict[str, dict[str, float]] = {}
    for (side, category), rows in done.groupby(["drafter", "category"]):
        found.setdefault(str(side), {})[str(category)] = round(1e3 * statistics.median(rows["ttft_s"]), 1)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the race and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", help="a model or head, for specbench and vLLM")
    parser.add_argument("--gguf")
    parser.add_argument("--draft-gguf")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--options", action="append", default=[], metavar="ENGINE=OPTIONS")
    parser.add_argument("--side", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--servers", type=int, metavar="N")
    parser.add_argument("--limit", type=int, default=12, help="prompts of `single`; twice as many in batches")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, metavar="N")
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args(arguments)
    given.options = dict(each.split("=", 1) for each in given.options)
    try:
        race(given)
    except SpecbenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def race(given: argparse.Namespace) -> None:
    """Measure what is missing, and print it all."""
    sides, left_out = sides_of(given)
    for name, why in left_out.items():
        print(f"{name} takes no part: {why}.")
    starts: dict[str, Any] = {}
    few, many = (load_prompts(("all",), count) for count in (given.limit, 2 * given.limit))
    single = measure(given.out / "single", sides, few, given, starts, tokens=given.tokens)
    result: dict[str, Any] = {
        "benchmark": "race", "target": parse_model(given.target).name, "dtype": given.dtype,
        "cpu": single.run.environment.cpu, "flags": single.run.environment.cpu_capability, "single": speeds(single),
    }  # fmt: skip
    if given.batch:
        folder = given.out / f"batch-{given.batch}"
        batched = measure(folder, sides, many, given, starts, tokens=given.tokens, batch=given.batch)
        result["batch"] = speeds(batched)
    if given.lengths:
        long = prompts_of_length(given.target, given.lengths, 3)
        result["first_token_ms"] = first_tokens(
            measure(given.out / "prompts", sides, long, given, starts, tokens=4)
        )
    failures = single.generations[single.generations["status"] == "failed"]
    failed = failures.groupby("drafter")["error"].first().to_dict()
    for name, why in failed.items():
        print(f"{name} failed: {why}")
    result |= {"starts": starts, "left_out": left_out, "failed": failed}
    for name in sides:
        row, start = result["single"].get(name, {}), starts.get(name, {})
        speed, ratio = row.get("tokens_per_second", math.nan), str(row.get("ours_over_it", ""))
        cost = f"start {start.get('seconds', math.nan):6.1f} s  {start.get('memory_gb', math.nan):6.2f} GB"
        whole = f"whole calls {row.get('whole', math.nan):6.1f}  {row.get('whole_over_it', '')!s:24}"
        print(f"{name:32} {speed:8.1f} tokens/s  ours over it {ratio:24} {whole} {cost}")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
