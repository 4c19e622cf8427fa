"""Measure how much slower than the best the choice of `specbench tune --engine` is, over stored times.

    specbench sweep --engine llama.cpp --target TARGET.gguf --drafter ngram-simple --drafter ngram-mod \\
        --drafter SMALL.gguf --draft-policy fixed --draft-policy confidence:threshold=0.6 --limit 16 --out FOLDER
    python benchmarks/engine_regret.py FOLDER --times 10 --minutes 20

A search runs over the generations of a stored sweep of all its settings, on a clock that moves by the stored times,
with another order of prompts each time. Its tries are the first tokens of the same generations, in proportion. The
regret of a choice is 1 less its speed over that of the fastest setting, as geometric means over all prompts.

Goal: choices within 5% of the best in nine of ten. Prints a line of JSON; exit code 1 if the goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from regret import FakeClock, choice_of

from specbench.bench.engines.engine import BenchEngine, Outcome
from specbench.bench.engines.launched import Start
from specbench.bench.grid import Sweep, SweepConfig, SweepOptions
from specbench.bench.manifest import open_run
from specbench.bench.prompts import Prompt
from specbench.cli.started import engine_configs
from specbench.export.start import PLAIN, EngineSetting
from specbench.options import DecodingOptions
from specbench.results.lines import Generation, ServerAnswer
from specbench.results.run import Run, TargetModel
from specbench.results.store import read_lines, read_run
from specbench.tune.engine_search import EngineSearch

START_S = 8.0
"""What a start of a server takes."""

GOAL, MARGIN = 0.9, 0.05


class StoredServers(BenchEngine[str]):
    """Servers that answer as they did in a stored sweep."""

    limit = None

    def __init__(self, stored: dict[tuple[str, str], list[Generation]], clock: FakeClock) -> None:
        self._stored, self._clock = stored, clock
        self.starts: dict[str, Start] = {}
        self._asked: dict[tuple[str, str], int] = defaultdict(int)

    @property
    def running(self) -> dict[str, Start]:
        return self.starts

    @property
    def capacity(self) -> int:
        return len(self.starts)

    def fits(self, names: Sequence[str]) -> bool:
        for name in names:
            if name not in self.starts:
                self._clock.seconds += START_S
                self.starts[name] = Start(START_S, 0)
        return True

    def encode(self, prompt: Prompt, answers: object) -> str:  # noqa: ARG002
        return prompt.id

    def generate(self, config: SweepConfig, prompt: str, decoding: DecodingOptions, *, seed: int) -> Outcome:  # noqa: ARG002
        self.fits([config.drafter])
        key = config.drafter, prompt
        found = self._stored[key][self._asked[key] % len(self._stored[key])]
        self._asked[key] += 1
        tokens = min(decoding.max_new_tokens, found.new_tokens)
        share = (tokens - 1) / max(1, found.new_tokens - 1)
        self._clock.seconds += found.ttft_s + share * found.decode_s
        answer = found.server or ServerAnswer(text="", counted_by="usage", pieces=1, bursts=1, attempts=1)
        kept = None if answer.kept_at is None else [round(share * each) for each in answer.kept_at]
        cut = {
            name: None if (n := getattr(answer, name)) is None else round(share * n)
            for name in ("drafted", "accepted")
        }
        fields = {name: getattr(answer, name) for name in ("counted_by", "pieces", "bursts", "attempts")}
        return Outcome(
            found.prompt_tokens, (), "length", found.ttft_s, found.ttft_s, share * found.decode_s,
            first_tokens=found.first_tokens, reported_tokens=tokens,
            server=ServerAnswer(text="", kept_at=kept, drafts=None, **cut, **fields),
        )  # fmt: skip


def settings_of_run(run: Run) -> dict[str, EngineSetting]:
    """Return the settings of a stored sweep."""
    found = {}
    for config in run.configs:
        name, _, end = config.drafter.partition("@")
        rest = end.partition(",")[2]
        family = "" if config.drafter == PLAIN else f"{name},{rest}"
        found[config.drafter] = EngineSetting(config.drafter, family, config.gamma or 0, {})
    return found


def search(
    run: Run,
    names: Sequence[str],
    stored: dict[tuple[str, str], list[Generation]],
    prompts: Sequence[str],
    seed: int,
    minutes: float,
) -> str:
    """Return the choice of a search over stored times."""
    settings = {name: setting for name, setting in settings_of_run(run).items() if name in names}
    category = {each.id: each.category for each in run.prompts}
    order = [prompts[each] for each in np.random.default_rng(seed).permutation(len(prompts))]
    options = SweepOptions(
        gammas=(), policies=(), decoding=DecodingOptions(max_new_tokens=run.max_new_tokens or 48), repeats=2, warmup=0,
        turns=1, seed=seed, cache="none", servers=tuple(settings),
    )  # fmt: skip
    chosen = tuple(Prompt(id=name, category=category[name], turns=("",)) for name in order)
    sweep = Sweep(options, chosen, tuple(engine_configs(options, list(settings.values()))))
    clock = FakeClock()
    servers: Any = StoredServers(stored, clock)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_run(
            Path(folder) / "run", sweep, target=TargetModel(name="t"), sources={"engine": "x"}, advice=""
        ) as store,
    ):
        found = EngineSearch(
            sweep, settings, store, servers, clock=clock, seconds=60 * minutes, until=60 * minutes
        ).run()
    return choice_of(found.found.race)


def _log_speed(generations: Sequence[Generation]) -> float:
    logs = [math.log((each.new_tokens - each.first_tokens) / each.decode_s) for each in generations]
    return float(np.mean(logs))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drafter", action="append", help="search only over these; repeatable")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=20.0)
    asked = parser.parse_args(arguments)
    run = read_run(asked.folder)
    stored: dict[tuple[str, str], list[Generation]] = defaultdict(list)
    drafters = {config.id: config.drafter for config in run.configs}
    for each in read_lines(asked.folder, []):
        if isinstance(each.result, Generation) and not each.line.warmup:
            stored[drafters[each.line.config], each.line.prompt].append(each.result)
    names = [
        name
        for name in dict.fromkeys(drafters.values())
        if name == PLAIN or not asked.drafter or name.partition("@")[0] in asked.drafter
    ]
    prompts = [each.id for each in run.prompts if all((name, each.id) in stored for name in names)]
    speeds = {
        name: _log_speed([each for prompt in prompts for each in stored[name, prompt]]) for name in names
    }
    best = max(speeds, key=lambda name: speeds[name])
    regrets = []
    for seed in range(asked.times):
        choice = search(run, names, stored, prompts, seed, asked.minutes)
        regrets.append(1.0 - math.exp(speeds[choice] - speeds[best]))
        print(f"seed {seed}: {choice}, {100 * regrets[-1]:.1f}% slower than {best}")
    within = sum(each <= MARGIN for each in regrets)
    over_plain = math.exp(speeds[best] - speeds[PLAIN])
    print(json.dumps({"searches": len(regrets), "within_5_percent": within, "worst": round(max(regrets), 4),
                      "best": best, "best_over_plain": round(over_plain, 3), "prompts": len(prompts)}))  # fmt: skip
    return 0 if within >= GOAL * len(regrets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
