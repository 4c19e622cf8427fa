"""How much slower than the best is what `specbench tune` chooses?

    python benchmarks/regret.py --simulated 200                       # races over made-up speeds: seconds
    python benchmarks/regret.py --stored results/                     # races over the generations of stored runs
    python benchmarks/regret.py --times 10 --busy --sweep results/regret --resume regret.jsonl    # for real: hours
    python benchmarks/regret.py --target MODEL --drafter SMALL --minutes 30 --sweep results/regret-pair

For real, `tune` is run so many times, each with a seed of its own, and then every configuration that it raced, or
predicted not to be far behind, is swept on the same prompts, interleaved. The regret of a choice is 1 less its speed
over that of the sweep's fastest, paired, with its 95% interval over prompts. With ``--busy`` another process keeps a
core busy while `tune` runs, and not while the sweep does. Goal: choices within 5% of the best, of races over stored and
simulated runs all, of those beside a busy core nine in ten. Ends with one line of JSON; exit code 1 if the goal is
missed, 3 if something is left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from parts import Parts, busy_core

from specbench.bench.environment import describe_environment
from specbench.bench.grid import Sweep, SweepOptions, build_configs
from specbench.bench.manifest import describe_run
from specbench.bench.prompts import load_prompts
from specbench.bench.runner import CellDone, Event, run_sweep
from specbench.cli import run
from specbench.options import ModelOptions
from specbench.results import stats
from specbench.results.compare import side_by_side
from specbench.results.store import RunStore, find_runs, load_results, read_run
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.tune.candidates import GAMMAS, rules_to_try
from specbench.tune.loading import load_candidates
from specbench.tune.race import MARGIN, Block, Race, Timing, run_race

PLAIN = "plain"
BUSY_GOAL = 0.9

Measure = Callable[[str, Block], Timing | None]


class FakeClock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


# --- Simulated runs -------------------------------------------------------------------------------


@dataclass
class Simulated:
    """Speeds with a known truth: of each candidate, of prompts, of the two together, noise, and what the machine does.

    Attributes:
        truth: Mean log speed by candidate, ``plain`` among them.
        seed: Of everything random.
        spread: Standard deviation of what a prompt does to one candidate.
        noise: Of a single generation.
        drift: By how much the machine slows down within a hundred generations, as a share; it does so in waves.
        busy: Chance that others use the machine during a generation, which then takes up to three times as long.
        tokens: Of an output.
    """

    truth: dict[str, float]
    seed: int = 0
    spread: float = 0.15
    noise: float = 0.03
    drift: float = 0.0
    busy: float = 0.0
    tokens: int = 47
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._effects: dict[tuple[str, str], float] = {}
        self._count = 0

    def measure(self, name: str, block: Block) -> Timing:
        """A generation; the clock moves on by what it takes."""
        self._count += 1
        effect = self._effect(name, block.prompt) + self._effect("", block.prompt)
        slow = self.drift * math.sin(self._count / 16)
        if self._random.random() < self.busy:
            slow += math.log(self._random.uniform(1.0, 3.0))
        log_speed = 3.0 + self.truth[name] + effect + self.noise * self._random.normal() - slow
        seconds = self.tokens / math.exp(log_speed)
        self.clock.seconds += seconds
        return Timing(self.tokens, seconds)

    def _effect(self, name: str, prompt: str) -> float:
        # Of its own, so that it does not hang on who is measured when.
        key = (name, prompt)
        if key not in self._effects:
            words = [self.seed, *f"{name}/{prompt}".encode()]
            self._effects[key] = self.spread * float(np.random.default_rng(words).normal())
        return self._effects[key]

    def race(self, prompts: int = 100, seconds: float = math.inf) -> Race:
        """A race over them, the candidates in their order."""
        race = Race([name for name in self.truth if name != PLAIN], PLAIN)
        blocks = (Block(f"p-{n}", repeat) for repeat in range(3) for n in range(prompts))
        run_race(race, blocks, self.measure, clock=self.clock, until=seconds, seed=self.seed)
        return race

    def regret(self, race: Race) -> float:
        """Of the choice, by the truth."""
        return 1.0 - math.exp(self.truth[choice_of(race)] - max(self.truth.values()))


def choice_of(race: Race) -> str:
    """What a race comes to: its leader, or plain decoding where that is as good."""
    return race.plain if race.verdict in ("plain", "equal") else race.leader


def simulated(number: int) -> Simulated:
    """The simulated run of that number: other candidates, spreads, noise, drift and neighbours than the others."""
    random = np.random.default_rng([7, number])
    truth = {f"c-{n}": float(random.normal(0.15, 0.2)) for n in range(int(random.integers(4, 14)))}
    return Simulated(
        {PLAIN: 0.0, **truth},
        seed=number,
        spread=float(random.uniform(0.05, 0.25)),
        noise=float(random.uniform(0.01, 0.06)),
        drift=float(random.uniform(0.0, 0.4)),
        busy=float(random.choice([0.0, 0.0, 0.3])),
    )


# --- Stored runs ----------------------------------------------------------------------------------


def stored(df: pd.DataFrame) -> tuple[list[str], str, list[Block], Measure]:
    """The configurations of a stored run at its first temperature, plain decoding, the blocks, and their times."""
    first = df[df["temperature"] == df["temperature"].iloc[0]]
    rows = first[(first["turn"] == 0) & (first["status"] == "ok")]
    plain = str(rows.loc[rows["kind"] == "plain", "config"].iloc[0])
    names = [str(name) for name in dict.fromkeys(rows.loc[rows["kind"] == "speculative", "config"])]
    times = {
        (str(row.config), Block(str(row.prompt), int(row.repeat))): Timing(
            int(row.new_tokens) - 1, float(row.decode_s)
        )
        for row in rows.itertuples()
    }
    blocks = sorted({block for _, block in times}, key=lambda block: (block.repeat, block.prompt))
    whole = [block for block in blocks if all((name, block) in times for name in (plain, *names))]
    return names, plain, whole, lambda name, block: times[name, block]


def race_over(df: pd.DataFrame) -> Race:
    """A race over the generations of a stored run."""
    names, plain, blocks, measure = stored(df)
    race = Race(names, plain)
    run_race(race, blocks, measure, clock=FakeClock())
    return race


def regret_in(df: pd.DataFrame, choice: str, names: Sequence[str]) -> tuple[str, stats.Estimate]:
    """The fastest of some configurations in a run, and the speed of a choice over its own."""
    speeds = df[(df["status"] == "ok") & df["config"].isin(names) & (df["tokens_per_second"] > 0)]
    means = {
        str(config): stats.geometric_mean(rows["tokens_per_second"], rows["prompt"], rows["repeat"]).value
        for config, rows in speeds.groupby("config")
    }
    best = max(means, key=lambda name: means[name])
    if best == choice:
        return best, stats.Estimate(1.0, 1.0, 1.0, int(speeds["prompt"].nunique()), "prompts")
    pairs = side_by_side(df, choice, best)
    ratio = stats.geometric_mean(pairs["a"] / pairs["b"], pairs["prompt"], pairs["repeat"])
    return best, ratio


# --- For real -------------------------------------------------------------------------------------


class _TimeUpError(Exception):
    """The hours are over."""


def tuned(given: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """What `specbench tune` says, by its ``--json``."""
    words = [
        "tune",
        "--target",
        given.target,
        "--minutes",
        given.minutes,
        "--seed",
        seed,
        "--json",
        "--quiet",
    ]
    words += [
        "--results",
        folder,
        "--resume",
        "--out",
        folder / "specbench.toml",
        "--overwrite",
        "-n",
        given.tokens,
    ]
    words += [word for drafter in given.drafter for word in ("--drafter", drafter)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), busy_core(given.busy):
        run([str(word) for word in words])
    answer: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return answer


def swept(given: argparse.Namespace, wanted: set[str], cache: Any, until: float) -> pd.DataFrame:
    """The exhaustive sweep, or the rest of it."""
    options = SweepOptions(
        gammas=GAMMAS,
        policies=rules_to_try(chained=False),
        max_new_tokens=given.tokens,
        repeats=given.repeats,
        turns=1,
        seed=given.seed,
        cache=cache,
    )
    prompts = tuple(load_prompts(["all"], limit=given.limit))
    target = parse_model(given.target)
    drafters = [parse_drafter(drafter) for drafter in given.drafter]
    empty = Sweep(options, prompts, ())
    loaded = load_candidates(target, drafters, ModelOptions(), empty, cache=cache)
    engine = loaded.engine
    configs = build_configs(options, engine.specs, engine.fingerprints)
    sweep = Sweep(options, prompts, tuple(c for c in configs if c.kind == "plain" or c.id in wanted))

    def watch(event: Event) -> None:
        if isinstance(event, CellDone):
            print(f"\r{event.done} of {event.total} generations", end="", file=sys.stderr, flush=True)
            if time.monotonic() > until:
                raise _TimeUpError

    if RunStore.exists(given.sweep):
        store = RunStore.open(given.sweep)
    else:
        described = describe_run(
            sweep, target=engine.describe_target(), environment=describe_environment(), sources={}
        )
        store = RunStore.create(given.sweep, described)
    with store:
        run_sweep(sweep, store, engine, on_event=watch)
    return load_results(given.sweep)


def _for_real(given: argparse.Namespace, until: float) -> Iterator[dict[str, Any]]:
    """Choices with their regret; fewer than there should be if the time is over."""
    names = ("target", "drafter", "minutes", "tokens", "busy", "seed")
    parts = Parts(given.resume, {name: getattr(given, name) for name in names})
    place = Path(f"{given.sweep}-tuned")
    for number in range(len(parts.done), given.times):
        if time.monotonic() > until:
            return
        parts.add(tuned(given, given.seed + number, place / str(number)))
        print(f"{number + 1}: {parts.done[-1]['headline']}", flush=True)
    runs = [read_run(place / str(number)) for number in range(given.times)]
    wanted = {
        name
        for predicted in (stored_run["tuning"]["predicted"] for stored_run in runs)
        for name, speedup in predicted.items()
        if speedup >= given.least * max(predicted.values())
    }
    wanted |= {name for stored_run in runs for name in stored_run["tuning"]["raced"]}
    try:
        df = swept(given, wanted, runs[0]["configs"][0]["cache"], until)
    except _TimeUpError:
        return
    for part in parts.done[: given.times]:
        choice = part["winner"] or part["leader"]
        yield _row(str(choice), *regret_in(df, str(choice), [PLAIN, *wanted]))


def _row(choice: str, best: str, ratio: stats.Estimate) -> dict[str, Any]:
    return {"choice": choice, "best": best, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}


# --- All of it ------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", type=int, metavar="N", help="so many races over made-up speeds")
    parser.add_argument("--stored", type=Path, nargs="+", metavar="RUN", help="races over these runs")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", default=[], help="for tune, repeatable")
    parser.add_argument("--times", type=int, default=1, help="how often tune is run")
    parser.add_argument("--minutes", type=float, default=6.0, help="of each")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--busy", action="store_true", help="another process keeps a core busy beside tune")
    parser.add_argument("--sweep", type=Path, help="folder of the exhaustive sweep, begun or not")
    parser.add_argument(
        "--least", type=float, default=0.6, help="predicted below so much of the best is not swept"
    )
    parser.add_argument("--limit", type=int, default=36, help="its prompts")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--hours", type=float, default=math.inf, help="stop then; the same call goes on")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep what tune said there, and go on")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    given = parse(arguments)
    goal, expected = 1.0, 0
    rows: list[dict[str, Any]] = []
    if given.simulated:
        expected = given.simulated
        for number in range(given.simulated):
            made = simulated(number)
            race = made.race()
            best = max(made.truth, key=lambda name: made.truth[name])
            ratio = 1.0 - made.regret(race)
            rows.append({"choice": choice_of(race), "best": best, "ratio": ratio, "blocks": race.blocks})
    elif given.stored:
        folders = find_runs(given.stored)
        expected = len(folders)
        for folder in folders:
            df = load_results(folder)
            race = race_over(df)
            best, ratio_in = regret_in(df, choice_of(race), [race.plain, *race.running, *race.fallen])
            rows.append({"run": folder.name, "blocks": race.blocks, **_row(choice_of(race), best, ratio_in)})
    elif given.sweep:
        expected, goal = given.times, BUSY_GOAL if given.busy else 1.0
        rows = list(_for_real(given, time.monotonic() + 3600 * given.hours))
    else:
        sys.exit("Give --simulated N, --stored RUN, or --sweep FOLDER.")
    for row in rows:
        print(json.dumps(row))
    close = sum(row["ratio"] >= 1.0 - MARGIN for row in rows)
    worst = min((row["ratio"] for row in rows), default=None)
    print(json.dumps({"benchmark": "regret", "races": len(rows), "within_5_percent": close, "worst": worst}))
    if len(rows) < expected:
        return 3
    return 0 if close >= goal * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
