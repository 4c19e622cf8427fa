"""Measure how much slower than the best the choice of `specbench tune` is.

    python benchmarks/regret.py --simulated 200                       # races over made-up speeds: seconds
    python benchmarks/regret.py --simulated 100 --spreads results/    # over the scatter of stored runs: minutes

The times are those that such a search takes.
``--spreads`` draws prompts of a stored run, by category, with the times of every configuration, and generations
around them with the scatter of the run's repeats, or of ``NOISE``. Mean speeds are those of the run, all equal, all
but the best just outside the margin (where a wrong choice is likeliest), or with one that is 15% faster than all
others. Machines are quiet, or used by others in three of ten generations, which then take up to three times as long.
Races have the time that a minute leaves, or two and a half for other models than the built-in one. Reported are choices
within 5% of the best by the truth, also where predictions left that out; decided races; those wrongly decided among
the candidates of the race; and the median minutes to a decision.

Goal: choices within 5% of the best: all over simulated runs; over scatter 90 of 100 with the run's speeds, and planted
ones found in as many, both on a quiet machine; nowhere surely more than 5 of 100 decided wrongly, by binomial
tests of each line and of all runs together that share these 5%. Prints one line of JSON at the end; exit code 1 if the
goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import binom

from specbench.results import stats
from specbench.results.results import load_results
from specbench.results.store import find_runs, read_run
from specbench.tune.candidates import BLOCKS, select
from specbench.tune.race import ERROR, MARGIN, Block, Race, Timing, run_race

PLAIN = "plain"
SPREAD_GOAL = 0.9

NOISE = 0.03
"""Scatter of the log speed of a generation, where a run has no repeats to tell."""

TOLD, OWN = 0.03, 0.02
"""Scatter of what passes of the target tell of the log time of a generation, and by how much longer they take with one
candidate than with another."""

PREDICTED = 0.1
"""Scatter of the log of what is predicted of a candidate over the truth: 0.07 to 0.1."""

RACED, PROMPTS, REPEATS = 12, 120, 3
"""In a race over scatter: the most candidates, the prompts, and how often each."""

MINUTES, MINUTES_OF_OTHERS = 1.0, 2.5
"""What the built-in model is given, and a real pair."""

RACING = 0.7
"""Share of the time that is left for a race."""


class FakeClock:
    """A clock that only moves when it is set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


# --- Simulated runs -------------------------------------------------------------------------------


@dataclass
class Simulated:
    """Speeds with a known truth: of each candidate, of prompts, of the two together, noise, and what the machine does.

    Attributes:
        truth: Mean log speed by candidate, ``plain`` among them.
        seed: Of everything random.
        spread: Standard deviation of what a prompt does to one candidate, and to all.
        noise: Of a single generation.
        drift: By how much the machine slows down within a hundred generations, as a share; it does so in waves.
        busy: Chance that others use the machine during a generation, which then takes up to three times as long.
        tokens: Of an output.
        speed: Log tokens per second of plain decoding.
        first_s: To the first token.
        effect: What a prompt does to one candidate, and to all (""), in place of ``spread``.
        error: Standard deviation, in log, of the error in what target passes say about a generation's time.
        own: The same of what they say wrongly of all generations of a candidate.
        predicted: The same of what is predicted of it; ``None``: nothing is.
        categories: Of the prompts, in turn.
    """

    truth: dict[str, float]
    seed: int = 0
    spread: float = 0.15
    noise: float = 0.03
    drift: float = 0.0
    busy: float = 0.0
    tokens: int = 47
    speed: float = 3.0
    first_s: float = 0.0
    effect: Callable[[str, str], float] | None = None
    error: float = TOLD
    own: float = OWN
    predicted: float | None = PREDICTED
    categories: Sequence[str] = ("",)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._effects: dict[tuple[str, str], float] = {}
        self._count = 0

    def measure(self, name: str, block: Block) -> Timing:
        """Simulate a generation, which moves the clock."""
        self._count += 1
        find = self.effect or self._effect
        slow = self.drift * math.sin(self._count / 16)
        if self._random.random() < self.busy:
            slow += math.log(self._random.uniform(1.0, 3.0))
        slow += self.noise * self._random.normal()
        effect = find(name, block.prompt) + find("", block.prompt)
        seconds = self.tokens / math.exp(self.speed + self.truth[name] + effect - slow)
        self.clock.seconds += self.first_s + seconds
        estimate = math.exp(slow + self._drawn(self.own, name) + self.error * self._random.normal())
        return Timing(self.tokens, seconds, estimate)

    def _effect(self, name: str, prompt: str) -> float:
        key = (name, prompt)
        if key not in self._effects:
            self._effects[key] = self._drawn(self.spread, f"{name}/{prompt}")
        return self._effects[key]

    def _drawn(self, deviation: float, name: str) -> float:
        """Return the effect of that name alone, independent of the order of measurement."""
        return deviation * float(np.random.default_rng([self.seed, *name.encode()]).normal())

    def race(self, prompts: int = 100, seconds: float = math.inf, *, chosen: bool = False) -> Race:
        """Run a race of all candidates, or of those ``chosen`` by what is predicted, as `tune` does."""
        each = [(f"p-{n}", self.categories[n % len(self.categories)]) for n in range(prompts)]
        blocks = [Block(name, repeat, category) for repeat in range(REPEATS) for name, category in each]
        names = [name for name in self.truth if name != PLAIN]
        expected = self._expected(names)
        if chosen and expected:
            plain_s = BLOCKS * (self.first_s + self.tokens / math.exp(self.speed + self.truth[PLAIN]))
            names = select(expected, lambda name: plain_s / expected[name], seconds - plain_s, {}, {}).raced
        race = Race(names, PLAIN, limit=len(blocks), expected=expected)
        last_s: dict[str, float] = {}

        def measured(name: str, block: Block) -> Timing:
            began = self.clock()
            timing = self.measure(name, block)
            last_s[name] = self.clock() - began
            return timing

        def in_time(name: str, *_: object) -> bool:
            return self.clock() + last_s.get(name, 0.0) <= seconds

        for _ in run_race(race, blocks, measured, in_time=in_time, seed=self.seed):
            pass
        return race

    def _expected(self, names: Sequence[str]) -> dict[str, float] | None:
        if self.predicted is None:
            return None
        over = {name: self.truth[name] - self.truth[PLAIN] for name in names}
        return {name: math.exp(over[name] + self._drawn(self.predicted, f"{name}=")) for name in names}

    def regret(self, race: Race) -> float:
        """Return the regret of the choice, by the truth."""
        return 1.0 - math.exp(self.truth[choice_of(race)] - max(self.truth.values()))


def choice_of(race: Race) -> str:
    """Return the choice of a race: its leader, or plain decoding if that is as good."""
    return race.plain if race.verdict in ("plain", "equal") else race.leader


def simulated(number: int) -> Simulated:
    """Return the simulated run of that number, with its own candidates, spreads, noise, drift and neighbors."""
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


# --- The scatter of stored runs -------------------------------------------------------------------

TRUTHS = ("as it was", "alike", "apart", "planted")
"""Mean speeds of races over scatter: those of the runs, all the same, or one ahead of the others by little or a lot."""

APART, PLANTED = 0.06, 0.15
"""By how much the best is ahead there, in log speed."""


@dataclass(frozen=True)
class Scatter:
    """The scatter of prompts in stored runs of one target.

    Attributes:
        names: Of the configurations, by run, without plain decoding.
        logs: Log speeds over plain decoding of the same run, shape [prompts, names].
        plain: Log speeds of plain decoding, shape [prompts].
        categories: Of the prompts.
        noise: Standard deviation of the log speed of a generation.
        first_s: Median time to the first token.
        tokens: Median number of tokens.
        minutes: For a search over such models.
    """

    names: Sequence[str]
    logs: stats.Floats
    plain: stats.Floats
    categories: Sequence[str]
    noise: float
    first_s: float
    tokens: int
    minutes: float

    @property
    def truth(self) -> stats.Floats:
        """Return mean log speeds with equal categories, shape [names]."""
        kinds = sorted(set(self.categories))
        places = [[each == kind for each in self.categories] for kind in kinds]
        return np.mean([self.logs[place].mean(axis=0) for place in places], axis=0)

    def simulated(self, seed: int, kind: str, busy: float) -> tuple[Simulated, str]:
        """Return a run over some of the configurations, and the best one's name.

        Args:
            seed: Of everything random.
            kind: One of ``TRUTHS``.
            busy: See ``Simulated``.
        """
        random = np.random.default_rng([11, seed])
        raced = random.permutation(len(self.names))[: int(random.integers(4, RACED + 1))]
        best = int(raced[np.argmax(self.truth[raced])])
        means = self.truth.copy()
        if kind in ("alike", "apart"):
            means[:] = max(0.2, float(self.truth[best]))
        if kind in ("apart", "planted"):
            best = int(random.choice(raced))
            rest = [each for each in raced if each != best]
            means[best] = means[rest].max() + (APART if kind == "apart" else PLANTED)
        place = {self.names[each]: int(each) for each in raced}
        kinds = sorted(set(self.categories))
        of_kind = {kind: [i for i, each in enumerate(self.categories) if each == kind] for kind in kinds}

        def effect(name: str, prompt: str) -> float:
            number = int(prompt.removeprefix("p-"))
            drawn = np.random.default_rng([seed, number]).choice(of_kind[kinds[number % len(kinds)]])
            if not name:
                return float(self.plain[drawn] - self.plain.mean())
            return 0.0 if name == PLAIN else float(self.logs[drawn, place[name]] - self.truth[place[name]])

        truth = {PLAIN: 0.0, **{self.names[each]: float(means[each]) for each in raced}}
        made = Simulated(
            truth,
            seed=seed,
            noise=self.noise,
            drift=0.1,
            busy=busy,
            tokens=self.tokens,
            speed=float(self.plain.mean()),
            first_s=self.first_s,
            effect=effect,
            categories=kinds,
        )
        return made, self.names[best]


def scatter_of(folder: Path) -> Scatter:
    """Return the scatter of a stored run at its first temperature, over prompts that all configurations have."""
    df = load_results(folder).generations
    df = df[(df["temperature"] == df["temperature"].iloc[0]) & (df["turn"] == 0) & (df["status"] == "ok")]
    df = df[(df["tokens_per_second"] > 0) & df["kind"].isin(["plain", "speculative"])]
    df = df.assign(log=np.log(df["tokens_per_second"]))
    table = df.pivot_table(index="prompt", columns="config", values="log").dropna()
    plain = str(df.loc[df["kind"] == "plain", "config"].iloc[0])
    names = [str(name) for name in table.columns if name != plain]
    category = df.groupby("prompt")["category"].first()
    noise = math.sqrt(float(df.groupby(["config", "prompt"])["log"].var(ddof=1).mean()))
    return Scatter(
        names,
        table[names].sub(table[plain], axis=0).to_numpy(),
        table[plain].to_numpy(),
        [str(category[prompt]) for prompt in table.index],
        NOISE if math.isnan(noise) else noise,
        float(df["ttft_s"].median()),
        int(df["new_tokens"].median()) - 1,
        MINUTES if read_run(folder).target.name == "smollm2-135m" else MINUTES_OF_OTHERS,
    )


def over_scatter(folders: Sequence[Path], times: int) -> Iterator[dict[str, Any]]:
    """Return the results of many races over scatter, a line for each run, truth and machine state."""
    for folder in folders:
        scatter = scatter_of(folder)
        for kind in TRUTHS:
            for busy in (0.0, 0.3):
                close = best = decided = wrong = 0
                took = []
                for seed in range(times):
                    made, fastest = scatter.simulated(seed, kind, busy)
                    race = made.race(PROMPTS, RACING * 60 * scatter.minutes, chosen=True)
                    good = made.regret(race) <= MARGIN
                    close += good
                    best += choice_of(race) == fastest
                    decided += race.decided
                    raced = max(made.truth[name] for name in (PLAIN, *race.names))
                    wrong += race.decided and math.exp(made.truth[choice_of(race)] - raced) < 1.0 - MARGIN
                    took.append(
                        made.clock.seconds / 60 if race.ending == "decided" else RACING * scatter.minutes
                    )
                yield {
                    "run": folder.name,
                    "truth": kind,
                    "busy": bool(busy),
                    "races": times,
                    "close": close,
                    "best": best,
                    "decided": decided,
                    "wrong": wrong,
                    "minutes": round(float(np.median(took)), 1),
                }


# --- All of it ------------------------------------------------------------------------------------


def _spread(given: argparse.Namespace) -> int:
    """Run races over scatter and return the exit code."""
    rows = []
    runs = [each for each in find_runs(given.spreads) if not read_run(each).options.get("servers")]
    for row in over_scatter(runs, given.simulated or 100):
        rows.append(row)
        print(json.dumps(row), flush=True)
    quiet = [row for row in rows if not row["busy"]]
    close, planted = (
        sum(row[what] for row in quiet if row["truth"] == truth)
        / sum(row["races"] for row in quiet if row["truth"] == truth)
        for what, truth in (("close", "as it was"), ("best", "planted"))
    )
    cells = pd.DataFrame(rows)[["truth", "busy", "wrong", "races"]]
    counts = pd.concat([cells, cells.groupby(["truth", "busy"], as_index=False).sum()])
    wrong = len(counts) * float(binom.sf(counts["wrong"] - 1, counts["races"], ERROR).min())
    facts = {
        "within_5_percent": close,
        "planted_found": planted,
        "decided": sum(row["decided"] for row in rows),
        "decided_wrongly": sum(row["wrong"] for row in rows),
        "p_of_the_worst": round(min(1.0, wrong), 4),
    }
    print(json.dumps({"benchmark": "regret", **facts}))
    return 0 if min(close, planted) >= SPREAD_GOAL and wrong >= ERROR else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", type=int, metavar="N", help="number of races over made-up speeds")
    parser.add_argument(
        "--spreads", type=Path, nargs="+", metavar="RUN", help="over the scatter of these runs"
    )
    given = parser.parse_args(arguments)
    if given.spreads:
        return _spread(given)
    if not given.simulated:
        sys.exit("Give --simulated N, or --spreads RUN.")
    rows: list[dict[str, Any]] = []
    for number in range(given.simulated):
        made = simulated(number)
        race = made.race()
        best = max(made.truth, key=lambda name: made.truth[name])
        ratio = 1.0 - made.regret(race)
        rows.append({"choice": choice_of(race), "best": best, "ratio": ratio, "blocks": race.blocks})
    for row in rows:
        print(json.dumps(row))
    close = sum(row["ratio"] >= 1.0 - MARGIN for row in rows)
    worst = min((row["ratio"] for row in rows), default=None)
    print(json.dumps({"benchmark": "regret", "races": len(rows), "within_5_percent": close, "worst": worst}))
    return 0 if close == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
