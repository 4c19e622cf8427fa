"""Run many requests for a long time: they arrive, are cancelled, fail, run out of memory; SIGTERM ends processes.

    python benchmarks/soak.py --minutes 30                                   # the built-in model in float32
    python benchmarks/soak.py --minutes 5 --target FOLDER --drafters none lookup self:layers=1 --rate 50

Round after round, prompts arrive at random times (--rate per second) with random drafters, policies, temperatures and
lengths, in a pool that is too small for all; some are cancelled, some do not fit. Every request must have exactly one
end: its whole output, its cancellation, or its error. Greedy outputs must be those of single requests, and pools must
be empty after every round. The process must not grow: its memory in the last third of the rounds against the first
(after two), within 5%; Python's objects at the end against those after two rounds, within 1%. Every few rounds
`specbench generate --prompts` is started and ended by SIGTERM: it must exit with 143 and have printed whole lines,
none twice. Prints one line of JSON at the end; exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from random import Random
from typing import Any

import parts  # noqa: F401 - before torch
from footprint import Footprint, given_back, growth

from specbench.base.errors import UsageError
from specbench.bench.prompts import load_prompts
from specbench.decoding.protocols import Drafter
from specbench.decoding.records import Generation, Prefill
from specbench.decoding.sampling import Greedy, Multinomial
from specbench.generate import GenerationRun, encode_prompt
from specbench.generate_many import GenerationRuns
from specbench.models.drafters import load_drafter
from specbench.models.target import Target, load_target
from specbench.options import LoadOptions
from specbench.policies import build_policy

RULES = ("auto", "fixed:gamma=3", "heuristic", "auto")
LENGTHS = (4, 16, 48)
GROWTH, MORE_OBJECTS = 1.05, 1.01
WARM_UP = 2
"""Rounds in which the process may still grow."""


class Soak:
    """Prompts, drafters and outcomes of the rounds.

    Args:
        given: The options.

    Attributes:
        ends: How requests have ended, by kind.
        wrong: What should not have happened, in sentences.
        rounds: Memory after every round, with uncollected objects.
        settled: Memory after the first rounds and at the end, after collection.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.choice = given, Random(given.seed)
        self.target: Target = load_target(given.target, LoadOptions(dtype="float32"))
        self.drafters: list[Drafter] = [load_drafter(spec, self.target) for spec in given.drafters]
        tokenizer = self.target.tokenizer
        assert tokenizer is not None
        every = [encode_prompt(tokenizer, each.turns[0]) for each in load_prompts(["all"])]
        self.prompts = sorted(every, key=len)[: given.prompts]
        self.longest = max(map(len, self.prompts)) + max(LENGTHS)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rounds: list[Footprint] = []
        self.settled: list[Footprint] = []
        self._alone: dict[tuple[int, int], tuple[int, ...]] = {}

    def round(self) -> None:
        """Run one round of requests."""
        choice, given = self.choice, self.given
        capacity = 4 * (self.longest + 128)  # for some of eight, and for each of those that fit
        picked: list[tuple[int, int, bool]] = []
        runs: list[GenerationRun] = []
        for _ in range(given.requests):
            prompt, tokens = choice.randrange(len(self.prompts)), choice.choice(LENGTHS)
            greedy, fits = choice.random() < 0.7, choice.random() < 0.97
            picked.append((prompt, tokens, greedy))
            runs.append(
                GenerationRun(
                    self.prompts[prompt] * (1 if fits else 1 + capacity // len(self.prompts[prompt])),
                    self.target,
                    choice.choice(self.drafters),
                    policy=build_policy(choice.choice(RULES)),
                    sampling=Greedy() if greedy else Multinomial(0.8),
                    seed=choice.randrange(1000),
                    max_new_tokens=tokens,
                    ignore_eos=True,
                )
            )
        arrivals = list(accumulate(choice.expovariate(given.rate) for _ in runs))
        many = GenerationRuns((), later=runs, max_batch=8, pool="paged", pool_tokens=capacity)
        begun = many.now()
        for run, seconds in zip(runs, arrivals, strict=True):
            many.add(run, begun + seconds)
        cancelled, ended = self._iterate(many)
        for index, (prompt, tokens, greedy) in enumerate(picked):
            self._account(
                many.result(index), index in cancelled, ended[index], (prompt, tokens), greedy=greedy
            )
        assert many.factory is not None
        use = many.factory.use
        if use is None or use.used:
            self.wrong.append(f"the pool is not empty after a round: {use}")
        self.rounds.append(Footprint.now())
        if len(self.rounds) == WARM_UP:
            self.settle()

    def settle(self) -> None:
        """Measure memory after collection."""
        gc.collect()
        self.settled.append(Footprint.now())

    def _iterate(self, many: GenerationRuns) -> tuple[set[int], Counter[int]]:
        """Return the cancelled requests, and how many ends each request has had."""
        cancelled: set[int] = set()
        ended: Counter[int] = Counter()
        for index, event in many:
            if index in cancelled:
                self.wrong.append(f"request {index} has gone on after it was cancelled")
            ended[index] += isinstance(event, Exception) or event.finish_reason is not None
            if self.choice.random() < self.given.cancel:
                other = self.choice.randrange(len(many.runs))
                if not ended[other]:
                    cancelled.add(other)
                    many.cancel(other)
        return cancelled, ended

    def _account(
        self,
        result: Generation | Exception,
        cancelled: bool,
        ended: int,
        asked: tuple[int, int],
        *,
        greedy: bool,
    ) -> None:
        if ended != (not cancelled):
            self.wrong.append(
                f"a request has ended {ended} times, and was {'' if cancelled else 'not '}cancelled"
            )
        if cancelled:
            self.ends["cancelled"] += 1
        elif isinstance(result, UsageError):
            self.ends["failed"] += 1
        elif isinstance(result, Exception):
            self.wrong.append(f"a request has failed: {result!r}")
        else:
            self.ends["done"] += 1
            prompt, tokens = asked
            if result.prompt_tokens == len(self.prompts[prompt]) and len(result.token_ids) != tokens:
                self.wrong.append(f"an output has {len(result.token_ids)} tokens of {tokens}")
            if greedy and result.prompt_tokens == len(self.prompts[prompt]):
                self.ends["compared"] += 1
                if result.token_ids != self._expected(prompt, tokens):
                    self.wrong.append(f"an output of {result.drafter} {result.policy} is not the one alone")

    def _expected(self, prompt: int, tokens: int) -> tuple[int, ...]:
        if (prompt, tokens) not in self._alone:
            run = GenerationRun(self.prompts[prompt], self.target, max_new_tokens=tokens, ignore_eos=True)
            for record in run:
                assert isinstance(record, Prefill) or record.tokens
            self._alone[prompt, tokens] = run.result().token_ids
        return self._alone[prompt, tokens]

    def end_another(self) -> None:
        """Start `generate --prompts`, and end it by SIGTERM at some time after its first line."""
        words = ["generate", "--prompts", "all", "--json", "--quiet", "--batch", "4", "--drafter", "lookup"]
        words += ["--max-new-tokens", "8", "--target", self.given.target]
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
            process = subprocess.Popen(
                [sys.executable, "-m", "specbench", *words], stdout=said, stderr=complained
            )
            while process.poll() is None and not os.fstat(said.fileno()).st_size:
                time.sleep(0.05)
            time.sleep(self.choice.random())
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
            for file in (said, complained):
                file.seek(0)
            lines, complaint = said.readlines(), complained.read()
        names = [_name_in(line) for line in lines]
        self.ends["ended by SIGTERM"] += 1
        if process.returncode not in (143, 0, 1) or "Traceback" in complaint:
            self.wrong.append(f"ended by SIGTERM it exits with {process.returncode}: {complaint}")
        if None in names or len(set(names)) != len(names):
            self.wrong.append("ended by SIGTERM it has printed a line twice, or half of one")


def _name_in(line: str) -> str | None:
    """Return the prompt that a line of output is about; ``None`` if the line is incomplete."""
    try:
        return str(json.loads(line)["id"]) if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=["none", "lookup", "suffix", "self:layers=10"])
    parser.add_argument("--prompts", type=int, default=24, help="number of the shortest prompts")
    parser.add_argument("--requests", type=int, default=40, help="in a round")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals per second")
    parser.add_argument("--cancel", type=float, default=0.01, help="probability after every record")
    parser.add_argument("--sigterm", type=int, default=5, metavar="N", help="every N rounds; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    soak = Soak(given)
    until = time.monotonic() + 60 * given.minutes
    while time.monotonic() < until or not soak.rounds:
        soak.round()
        if given.sigterm and len(soak.rounds) % given.sigterm == 0:
            soak.end_another()
        round_ = f"round {len(soak.rounds)}: {dict(soak.ends)}, {len(soak.wrong)} wrong"
        print(f"{round_}, {soak.rounds[-1].text()}", flush=True)
    soak.settle()
    grown = growth(soak.rounds[WARM_UP:])
    objects = soak.settled[-1].objects / soak.settled[0].objects
    if grown.get("resident", 0.0) > GROWTH:
        soak.wrong.append(f"the process has grown: {grown['resident']:.3f} times the memory")
    if objects > MORE_OBJECTS:
        soak.wrong.append(f"Python has {objects:.3f} times the objects")
    for sentence in soak.wrong:
        print(f"WRONG {sentence}")
    found: dict[str, Any] = {
        "benchmark": "soak",
        "target": given.target,
        "minutes": given.minutes,
        "rounds": len(soak.rounds),
        "requests": len(soak.rounds) * given.requests,
        "ends": dict(soak.ends),
        "grown": grown,
        "objects": round(objects, 4),
        "settled": [asdict(each) for each in soak.settled],
        "peak_rss_mb": round(max(each.resident for each in soak.rounds) / 2**20),
        "given_back_mb": round(given_back() / 2**20),
        "wrong": len(soak.wrong),
    }
    print(json.dumps(found))
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
