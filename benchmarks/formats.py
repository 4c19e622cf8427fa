"""Measure what formats cost and what forced tokens gain, on prompts that ask for a form.

    python benchmarks/formats.py                                       # the built-in model, some minutes
    python benchmarks/formats.py --target MODEL --model SMALLER        # a pair
    python benchmarks/formats.py --parity                              # greedy parity on 50 schemas × 4 prompts
    python benchmarks/formats.py --suite JSON-Schema-Test-Suite/tests/draft2020-12    # a copy of the suite

Each prompt of `structured-output` with a format below is decoded greedily in every way, one directly after the other in
random order, and speeds (tokens per second of decoding, by `--clock cpu` of CPU time) are compared on each prompt.
Prints the geometric means over prompts of the ratios, with a bootstrap interval over prompts: masked plain decoding to
plain decoding without the format; `grammar`, the best other drafter and `grammar` with it to masked plain decoding;
`grammar+lookup` to `lookup` without a format; and the share of masks in decode time, a mean over prompts. Goals:
`grammar` at least 1.3 × masked plain, with the best drafter at least 1.15 × that drafter, masks at most 3%, requests
without a format at least 0.99. Exit code 1 if one is missed, an output does not fit, or two outputs differ that must
not (`--dtype float32`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from parts import Parts  # before torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import numpy as np
import schemas

from specbench import generate, load_drafter, load_target
from specbench.base.errors import UsageError
from specbench.decoding import formats
from specbench.decoding.clocks import WallClock
from specbench.decoding.metrics import time_split
from specbench.decoding.records import Generation
from specbench.generate import GenerationRun, encode_prompt
from specbench.models.target import Target
from specbench.options import DecodingOptions, LoadOptions

ROOT = Path(__file__).resolve().parents[1]
TEXT = {"type": "string"}
NUMBER = {"type": "number"}


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these keys, all required."""
    keys = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "object", **keys}


def several(each: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": each, **limits}


ORDER = r"""
start: "<order number=\"7731\">\n" customer "  <items>\n" item item item item "  </items>\n" total "</order>"
customer: "  <customer>\n    <name>" TEXT "</name>\n    <email>" TEXT "</email>\n  </customer>\n"
item: "    <item>\n      <article>" /[0-9]{4}/ "</article>\n      <description>" TEXT "</description>\n" price
price: "      <quantity>" /[1-9][0-9]?/ "</quantity>\n      <price currency=\"EUR\">" EUROS "</price>\n    </item>\n"
total: "  <total>" EUROS "</total>\n"
TEXT: /[A-Za-z0-9@.' -]{1,40}/
EUROS: /[1-9][0-9]{0,3}\.[0-9]{2}/
"""
HEAD = r"\| × \| 1 \| 2 \| 3 \| 4 \| 5 \| 6 \| 7 \| 8 \| 9 \|\n(\|---){10}\|"

FORMATS: dict[str, dict[str, str]] = {
    "structured-output-01": {
        "json_schema": json.dumps(
            record(
                name=TEXT, date=TEXT, time=TEXT, guests={"type": "integer"}, wishes=several(TEXT, maxItems=4)
            )
        )
    },
    "structured-output-02": {
        "json_schema": json.dumps(
            several(
                record(
                    name=TEXT,
                    position={"type": "integer"},
                    type={"enum": ["rocky", "gas giant", "ice giant"]},
                    has_rings={"type": "boolean"},
                ),
                minItems=8,
                maxItems=8,
            )
        )
    },
    "structured-output-04": {
        "json_schema": json.dumps(
            several(
                record(
                    id={"type": "integer"},
                    article=TEXT,
                    price=NUMBER,
                    in_stock={"type": "boolean"},
                    weight_g={"type": ["number", "null"]},
                ),
                minItems=5,
                maxItems=5,
            )
        )
    },
    "structured-output-05": {
        "json_schema": json.dumps(
            record(
                results=several(
                    record(
                        message={"type": "integer"},
                        **{"class": {"enum": ["complaint", "question", "praise"]}},
                        confidence={"type": "number", "minimum": 0, "maximum": 1},
                    ),
                    minItems=5,
                    maxItems=5,
                )
            )
        )
    },
    "structured-output-08": {
        "json_schema": json.dumps(
            record(
                titel=TEXT,
                zutaten=several(record(name=TEXT, menge=NUMBER, einheit=TEXT), maxItems=6),
                schritte=several(TEXT, maxItems=6),
            )
        )
    },
    "structured-output-09": {"grammar": ORDER},
    "structured-output-10": {"regex": HEAD + r"(\n\| [1-9] (\| [0-9]{1,2} ){9}\|){9}"},
}


class CpuClock(WallClock):
    """The time of this process on all processors, in which other processes are not counted."""

    def now(self) -> float:
        return time.process_time()


def prompts() -> Iterator[tuple[str, str, str | None]]:
    """Yield the name, the text and the system message of each prompt with a format."""
    for line in (ROOT / "prompts" / "structured-output.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        if prompt["id"] in FORMATS:
            yield prompt["id"], prompt["turns"][0], prompt.get("system")


def fits(text: str, given: dict[str, str], *, cut: bool) -> bool:
    """Return whether a JSON text fits its schema; texts that were cut and other formats are not checked."""
    if cut or "json_schema" not in given:
        return True
    try:
        return schemas.fits(json.loads(text), json.loads(given["json_schema"]))
    except ValueError:
        return False


def speed(result: Generation) -> float:
    return (len(result.token_ids) - 1) / time_split(result.prefill, result.steps).decode_s


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean, and a bootstrap interval over the prompts."""
    logs = np.log(ratios)
    drawn = np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def measure(options: argparse.Namespace) -> bool:
    """Decode the prompts that are not in the file yet, print the figures of all, and return whether they are good."""
    if options.clock == "cpu":
        generate.clock_for = lambda _: CpuClock()
        formats.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    target = load_target(options.target, LoadOptions(dtype=options.dtype))
    names = ["none", "grammar", "lookup", "grammar+lookup"]
    if options.model:
        names += [
            options.model,
            f"lookup+{options.model}",
            f"grammar+lookup+{options.model}",
            f"grammar+{options.model}",
        ]
    drafters = {name: load_drafter(name, target) for name in names}
    chosen = [each for each in prompts() if not options.only or each[0][-2:] in options.only]
    kept = ("target", "model", "dtype", "clock", "rounds", "tokens")
    done = Parts(options.resume, {name: getattr(options, name) for name in kept})
    for prompt in chosen:
        if not any(part["prompt"] == prompt[0] for part in done.done):
            done.add(measured(prompt, target, drafters, options))
            print(f"{prompt[0]} is done", flush=True)
    return good(done.done, names, options)


def measured(
    prompt: tuple[str, str, str | None], target: Target, drafters: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the median speed and the mean share of masks of every way to decode a prompt, and what is wrong."""
    name, text, system = prompt
    ids = encode_prompt(target.tokenizer, text, system=system)
    ways = [
        *drafters,
        *(f"{each}, no format" for each in drafters if each in ("none", "lookup", "grammar+lookup")),
    ]
    found: dict[str, list[float]] = {way: [] for way in ways}
    shares: dict[str, list[float]] = {way: [] for way in drafters}
    outputs: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    part: dict[str, Any] = {"prompt": name, "wrong": 0, "forced": 0, "tokens": 0}
    order = random.Random(name)
    for turn in range(options.rounds + 1):
        for way in order.sample(ways, len(ways)):
            drafter, _, free = way.partition(", ")
            decoding = DecodingOptions(max_new_tokens=options.tokens, **({} if free else FORMATS[name]))
            run = GenerationRun(ids, target, drafters[drafter], decoding=decoding)
            for _ in run:
                pass
            result = run.result()
            if turn == 0:  # it warms up
                continue
            found[way].append(speed(result))
            outputs[bool(free)].add(result.token_ids)
            if not free:
                part["wrong"] += not fits(result.text or "", FORMATS[name], cut=result.finish_reason != "eos")
                split = time_split(result.prefill, result.steps)
                shares[way].append(split.mask_s / split.decode_s)
            if way == "grammar":
                part["forced"] += sum(step.forced_accepted for step in result.steps)
                part["tokens"] += len(result.token_ids)
    part["outputs"] = [len(each) for each in outputs.values()]
    part["wrong"] += options.dtype == "float32" and part["outputs"] != [1, 1]
    part["speeds"] = {way: statistics.median(each) for way, each in found.items()}
    part["masks"] = {way: statistics.mean(each) for way, each in shares.items()}
    return part


def good(done: Sequence[dict[str, Any]], names: Sequence[str], options: argparse.Namespace) -> bool:
    """Print the figures, and return whether they are as good as they should be."""

    def compare(one: str, other: str) -> tuple[float, float, float]:
        return mean_ratio([part["speeds"][one] / part["speeds"][other] for part in done])

    others = [name for name in names if "grammar" not in name and name != "none"]
    best = max(others, key=lambda name: compare(name, "none")[0])
    masks = {name: statistics.mean(part["masks"][name] for part in done) for name in names}
    lines = {
        "masked plain / plain": compare("none", "none, no format"),
        "grammar / masked plain": compare("grammar", "none"),
        f"best other drafter ({best}) / masked plain": compare(best, "none"),
        f"grammar+{best} / masked plain": compare(f"grammar+{best}", "none"),
        f"grammar+{best} / {best}": compare(f"grammar+{best}", best),
        "without a format: grammar+lookup / lookup": compare(
            "grammar+lookup, no format", "lookup, no format"
        ),
    }
    print(
        f"{options.target}, {options.dtype}, {len(done)} prompts, {options.rounds} rounds, {options.clock} time"
    )
    for what, (mean, low, high) in lines.items():
        print(f"{what}: {mean:.3f} [{low:.3f}, {high:.3f}]")
    forced, tokens, wrong = (sum(part[name] for part in done) for name in ("forced", "tokens", "wrong"))
    print(f"forced: {forced / max(1, tokens):.0%} of {tokens} tokens")
    print("masks, of decode time: " + ", ".join(f"{name} {share:.1%}" for name, share in masks.items()))
    print(json.dumps({"ratios": lines, "masks": masks, "wrong": wrong}))
    reached = [lines[name][0] for name in ("grammar / masked plain", f"grammar+{best} / {best}")]
    enough = reached[0] >= 1.3 and reached[1] >= 1.15 and [*lines.values()][-1][0] >= 0.99
    return enough and max(masks.values()) <= 0.03 and not wrong


def parity(options: argparse.Namespace) -> bool:
    """Return whether greedy outputs are those of masked plain decoding, alone and in batches of 8, and fit."""
    target = load_target(options.target, LoadOptions(dtype="float32"))
    failed = schemas.disagreements(target, options.tokens, drafters=("grammar", "grammar+lookup"))
    print("\n".join(failed) or "50 schemas × 4 prompts: all outputs are the same, and fit or were cut.")
    return not failed


def suite(folder: Path, target: Target) -> bool:
    """Return whether formats agree with all tests of the groups whose schemas the library takes."""
    taken = refused = 0
    wrong: list[str] = []
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            try:
                found = schemas.disagreements_of_group(target.language_model.formats, target.tokenizer, group)
            except UsageError:
                refused += 1
                continue
            taken += 1
            wrong += [f"{path.stem}: {group['description']}: {each}" for each in found]
    print("\n".join(wrong))
    print(f"{taken} groups are taken and {refused} refused; {len(wrong)} tests disagree.")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--model", help="a smaller model, as another drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--only", nargs="*", help="numbers of prompts, as 01")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep finished prompts here, and go on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--parity", action="store_true")
    parser.add_argument("--suite", type=Path)
    options = parser.parse_args()
    if options.suite:
        return not suite(options.suite, load_target(options.target))
    return not (parity(options) if options.parity else measure(options))


if __name__ == "__main__":
    sys.exit(main())
