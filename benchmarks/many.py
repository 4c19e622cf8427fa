"""Measure the throughput of many requests: every way to decode the same prompts, in turn.

    python benchmarks/many.py                                    # the built-in model, 48 prompts, 64 tokens, batch 8
    python benchmarks/many.py --target FOLDER --drafter FOLDER2 --rules auto fixed:gamma=4 --ways plain
    python benchmarks/many.py --ways alone one --prompts 24      # the scheduler's own share, at batch 1

Ways: *alone* is plain decoding by the driver of one request, prompt by prompt; *one* the same through the scheduler
at batch 1; *plain* the same at --batch; *transformers* its `generate` with batches padded on the left; and each of
--rules at --batch. Groups of prompts are decoded in all ways in random order, with outputs of a fixed length: equal
lengths let plain requests begin and end together, those of --spread do not. The scheduler runs a closed loop: it
starts with as many other requests as there are clients, which are not measured, and stays full until the last request
of the group ends. Tokens per second are clients · tokens / latencies (docs/metrics.md). Prints them, the ratios with
95% intervals over groups, and for every policy over *plain* each request's tokens over its latency, by category with
intervals over prompts. Prints one line of JSON at the end; exit code 1 if a policy changed an output in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import parts  # noqa: F401 - before torch
import torch
from transformers import GenerationConfig

from specbench.base.progress import quiet_transformers
from specbench.base.record import Estimate
from specbench.bench.prompts import Prompt, load_prompts
from specbench.bench.serving import BenchRequest, SkippingClock, Workload, run_workload
from specbench.decoding.clocks import WallClock
from specbench.decoding.protocols import Drafter
from specbench.generate import GenerationRun, encode_prompt
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import load_drafter
from specbench.models.load import load_model
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy
from specbench.results.stats import geometric_mean, ratio_text

WAYS = ("alone", "one", "plain", "transformers")


@dataclass(frozen=True)
class Taken:
    """The outputs and times of a group of prompts in one way.

    Attributes:
        seconds: That they took, prompts included; in a closed loop their latencies over the clients.
        outputs: Token ids of each.
        latencies: Seconds from when each was sent to its end; NaN where nobody says.
    """

    seconds: float
    outputs: list[tuple[int, ...]]
    latencies: list[float]

    @property
    def speed(self) -> float:
        """Return tokens per second over all requests."""
        return sum(map(len, self.outputs)) / self.seconds


class Job(NamedTuple):
    """A prompt, and how many tokens are decoded after it."""

    prompt: list[int]
    tokens: int


Way = Callable[[Sequence[Job]], Taken]
"""Decodes prompts."""


class Ours:
    """specbench, with a rule or plainly.

    Args:
        given: The options of the benchmark.
        target, drafter: The models; ``None``: no drafter.
        rule: Decides draft lengths.
        batch: Requests at a time; ``None``: the driver of one request.
    """

    def __init__(
        self, given: argparse.Namespace, target: Target, drafter: Drafter | None, rule: str, batch: int | None
    ) -> None:
        self.given, self.target, self.drafter, self.rule, self.batch = given, target, drafter, rule, batch

    def __call__(self, jobs: Sequence[Job]) -> Taken:
        if self.batch is None:
            return self._one_by_one(jobs)
        clock = SkippingClock(WallClock())
        asked = [BenchRequest(job, 0) for job in jobs]
        before = asked[-self.batch :]
        load = Workload([*before, *asked], clients=self.batch, background=asked)
        runs = GenerationRuns(
            [],
            max_batch=self.batch,
            pool=self.given.pool,
            later=[self._run(job) for job in jobs],
            clock=clock,
        )
        served = run_workload(load, runs, lambda each: self._run(each.prompt), clock).requests[len(before) :]
        latencies = [each.last_s - each.arrived_s for each in served]
        outputs = [each.run.result().token_ids for each in served]
        return Taken(sum(latencies) / self.batch, outputs, latencies)

    def _one_by_one(self, jobs: Sequence[Job]) -> Taken:
        outputs, latencies = [], []
        for job in jobs:
            run = self._run(job)
            began = time.perf_counter()
            for _ in run:
                pass
            latencies.append(time.perf_counter() - began)
            outputs.append(run.result().token_ids)
        return Taken(sum(latencies), outputs, latencies)

    def _run(self, job: Job) -> GenerationRun:
        return GenerationRun(
            job.prompt,
            self.target,
            self.drafter,
            policy=build_policy(self.rule),
            max_new_tokens=job.tokens,
            ignore_eos=True,
        )


class Theirs:
    """``generate`` of ``transformers``, in batches padded to their longest output.

    Args:
        given: The options of the benchmark.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.model = load_model(given.target, LoadOptions(dtype=given.dtype)).model

    def __call__(self, jobs: Sequence[Job]) -> Taken:
        began, outputs = time.perf_counter(), []
        for first in range(0, len(jobs), self.given.batch):
            part = jobs[first : first + self.given.batch]
            config = GenerationConfig(
                do_sample=False,
                max_new_tokens=max(job.tokens for job in part),
                eos_token_id=None,
                pad_token_id=0,
            )
            longest = max(len(job.prompt) for job in part)
            gaps = [longest - len(job.prompt) for job in part]
            ids = torch.tensor([[0] * gap + job.prompt for gap, job in zip(gaps, part, strict=True)])
            mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
            with torch.inference_mode():
                found = self.model.generate(ids, attention_mask=mask, generation_config=config)
            rows = found[:, longest:].tolist()
            outputs += [tuple(row[: job.tokens]) for row, job in zip(rows, part, strict=True)]
        return Taken(time.perf_counter() - began, outputs, [float("nan")] * len(jobs))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Decode the prompts in all ways, in turn."""
    target = load_target(given.target, LoadOptions(dtype=given.dtype))
    drafter = load_drafter(given.drafter, target) if given.rules else None
    prompts = load_prompts(given.sets, limit=given.prompts)
    assert target.tokenizer is not None
    choice = Random(0)
    jobs = [
        Job(
            encode_prompt(target.tokenizer, each.turns[0], system=each.system),
            max(1, round(given.tokens * (1 + given.spread * choice.uniform(-1, 1)))),
        )
        for each in prompts
    ]
    ways: dict[str, Way] = {
        "alone": Ours(given, target, None, "fixed", None),
        "one": Ours(given, target, None, "fixed", 1),
        "plain": Ours(given, target, None, "fixed", given.batch),
    }
    ways = {name: way for name, way in ways.items() if name in given.ways}
    if "transformers" in given.ways:
        ways["transformers"] = Theirs(given)
    ways |= {rule: Ours(given, target, drafter, rule, given.batch) for rule in given.rules}
    for way in ways.values():
        way(jobs[: given.batch])
    taken: list[tuple[list[Prompt], dict[str, Taken]]] = []
    for _ in range(given.rounds):
        order = choice.sample(range(len(prompts)), len(prompts))
        for first in range(0, len(order), given.group):
            members = order[first : first + given.group]
            found = {}
            for name in choice.sample(list(ways), len(ways)):
                found[name] = ways[name]([jobs[i] for i in members])
                print(f"{len(taken) + 1:3} {name:14} {found[name].speed:8.1f} tokens/s", flush=True)
            taken.append(([prompts[i] for i in members], found))
    return {
        "benchmark": "many",
        "target": target.language_model.name,
        "dtype": target.dtype,
        "drafter": given.drafter,
        "threads": torch.get_num_threads(),
        **{
            name: getattr(given, name)
            for name in ("prompts", "tokens", "spread", "batch", "group", "rounds", "pool")
        },
        "tokens_per_second": {name: _together(taken, name) for name in ways},
        "ratios": _ratios(taken, given.rules),
        "requests": _by_category(taken, given.rules),
        "parted": _count_different(taken, given.rules),
    }


def _together(taken: Sequence[tuple[list[Prompt], dict[str, Taken]]], way: str) -> float:
    tokens = sum(len(output) for _, found in taken for output in found[way].outputs)
    return round(tokens / sum(found[way].seconds for _, found in taken), 2)


def _ratios(
    taken: Sequence[tuple[list[Prompt], dict[str, Taken]]], rules: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return ratios of throughput by group."""
    pairs = [
        ("one", "alone"),
        ("plain", "one"),
        ("plain", "transformers"),
        *((rule, "plain") for rule in rules),
    ]
    made = {}
    for a, b in pairs:
        if all({a, b} <= found.keys() for _, found in taken):
            values = [found[a].speed / found[b].speed for _, found in taken]
            made[f"{a} / {b}"] = _show(geometric_mean(values, range(len(values))))
    return made


def _by_category(
    taken: Sequence[tuple[list[Prompt], dict[str, Taken]]], rules: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return latencies without a policy over those with it, by category and over all."""
    made: dict[str, dict[str, Any]] = {}
    for rule in rules:
        if any("plain" not in found for _, found in taken):
            continue
        ratios: dict[str, list[tuple[str, float]]] = {"all": []}
        for prompts, found in taken:
            pairs = zip(prompts, found[rule].latencies, found["plain"].latencies, strict=True)
            for prompt, took, plain in pairs:
                for name in ("all", prompt.category):
                    ratios.setdefault(name, []).append((prompt.id, plain / took))
        made[rule] = {
            name: _show(geometric_mean([ratio for _, ratio in each], [prompt for prompt, _ in each]))
            for name, each in sorted(ratios.items())
        }
    return made


def _count_different(taken: Sequence[tuple[list[Prompt], dict[str, Taken]]], rules: Sequence[str]) -> int:
    """Count the outputs that a policy, or the scheduler, has changed."""
    ours = {"alone", "one", "plain", *rules}
    count = 0
    for _, found in taken:
        reference, *others = (found[name].outputs for name in found if name in ours)
        count += sum(a != b for other in others for a, b in zip(reference, other, strict=True))
    return count


def _show(ratio: Estimate) -> dict[str, Any]:
    return {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "text": ratio_text(ratio)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--rules", nargs="*", default=["auto"], metavar="RULE")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--sets", nargs="+", default=["all"], help="of prompts, or files")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="of --tokens, by how much an output may be shorter or longer",
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--group", type=int, default=24, metavar="N", help="prompts that are decoded at a stretch"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pool", choices=("slotted", "paged"), default="slotted")
    given = parser.parse_args(arguments)
    with quiet_transformers():
        found = measure(given)
    for name, speed in found["tokens_per_second"].items():
        print(f"{name:24} {speed:8.1f} tokens/s")
    for name, ratio in found["ratios"].items():
        print(f"{name:24} {ratio['text']}")
    for rule, categories in found["requests"].items():
        print(f"{rule} over plain, as requests saw it")
        for name, ratio in categories.items():
            print(f"  {name:22} {ratio['text']}")
    print(json.dumps(found))
    return int(found["parted"] > 0 and found["dtype"] == "float32")


if __name__ == "__main__":
    sys.exit(main())
