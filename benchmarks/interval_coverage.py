"""Simulate how often the 95% intervals of specbench.results.stats cover the truth.

    python benchmarks/interval_coverage.py [--trials 40000] [--seed 0] [--stored results/]
    python benchmarks/interval_coverage.py --trials 500 --gates results/smollm2-135m

Values stand for mean log speedups of prompts, from normal, heavy-tailed and skewed families (to both sides). A
sweep's interval ("used") is compared with Student's t. A/A is the normal family: its misses are false verdicts. The
claim is a coverage of 93% or more from 6 prompts on for the families above the line. Below it are families where no
interval of few values holds, because a gain of one prompt in ten is often not in the sample. --stored draws prompts
from stored runs, with replacement.

"Looks" is about sweeps with --until, which may stop at any of their looks or, when the time is up, in between: how
often the intervals of all these hold together, which no rule for stopping can fall below; and how often the interval
holds where such a sweep stops. "Drift" simulates a sweep cell by cell on a machine that gets slower, is disturbed for
a while, and scatters more and more.

Prints one line of JSON at the end; exit code 1 if the claim does not hold, for single intervals or for looks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats as distributions

from specbench.bench.stopping import looks
from specbench.results.compare import ComparedRow
from specbench.results.frames import paired_generations
from specbench.results.gate import decide
from specbench.results.metrics import METRICS, Figures
from specbench.results.results import load_results
from specbench.results.stats import AT_EVERY_LOOK, mean_intervals, nested_means
from specbench.results.summary import Summary

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]

PROMPTS = (6, 8, 12, 16, 24, 50)
LEAST = 0.93


def gamma(k: float) -> Draw:
    return lambda rng, shape: (rng.gamma(k, 1.0, shape) - k) / np.sqrt(k)


def lognormal(sigma: float) -> Draw:
    mean, variance = np.exp(sigma**2 / 2), (np.exp(sigma**2) - 1) * np.exp(sigma**2)
    return lambda rng, shape: (np.exp(sigma * rng.standard_normal(shape)) - mean) / np.sqrt(variance)


def mirrored(draw: Draw) -> Draw:
    return lambda rng, shape: -draw(rng, shape)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.where(rng.random(shape) < 0.1, 3.0, 1.0) * rng.standard_normal(shape)


def gains(share: float, much: float = 1.0, noise: float = 0.1) -> Draw:
    """A share of the prompts gains much, the others nothing; the mean is 0."""
    return lambda rng, shape: (
        much * ((rng.random(shape) < share) - share) + noise * rng.standard_normal(shape)
    )


CLAIMED: dict[str, Draw] = {
    "normal (A/A)": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.uniform(-1.0, 1.0, shape),
    "heavy: Laplace": lambda rng, shape: rng.laplace(size=shape),
    "heavy: Student t, 3 d.f.": lambda rng, shape: rng.standard_t(3, shape),
    "heavy: 10% outliers × 3": outliers,
    "skewed: gamma(4), 1.0": gamma(4),
    "skewed: lognormal(0.5), 1.75": lognormal(0.5),
    "skewed: gamma, 1.9": gamma(4 / 1.9**2),
    "skewed: gamma, -1.9": mirrored(gamma(4 / 1.9**2)),
    "skewed: exponential, 2.0": gamma(1),
}
BEYOND: dict[str, Draw] = {
    "skewed: lognormal(0.75), 3.3": lognormal(0.75),
    "one prompt in four gains much": gains(0.25),
    "one prompt in ten gains much": gains(0.1),
}


def judge(samples: Floats) -> dict[str, float]:
    """Return coverage of 0 and widths, for samples of shape [trials, n]."""
    n = samples.shape[1]
    low, high = mean_intervals(samples)
    half = distributions.t.ppf(0.975, n - 1) * samples.std(axis=1, ddof=1) / np.sqrt(n)
    with np.errstate(invalid="ignore"):  # one prompt drawn n times from a stored run
        wider = (high - low) / (2.0 * half)
    return {
        "used": float(np.mean((low <= 0.0) & (high >= 0.0))),
        "below": float(np.mean(high < 0.0)),
        "above": float(np.mean(low > 0.0)),
        "t": float(np.mean(np.abs(samples.mean(axis=1)) <= half)),
        "width": float((high - low).mean() / (2.0 * half.mean())),
        "median_width": float(np.median(wider)),
    }


def drifting(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Return mean log speedups, with mean 0, of prompts that two configurations decode one right after the other.

    The machine's slowdown is a random walk (1% per generation) with a trend (30% over all prompts), and doubles for a
    tenth of the prompts; the scatter of a single generation rises from 3% to 12%.
    """
    trials, prompts = shape
    place = np.arange(2 * prompts)
    slow = np.cumsum(0.01 * rng.standard_normal((trials, 2 * prompts)), axis=1) + 0.15 * place / prompts
    begin = rng.integers(0, 2 * prompts, (trials, 1))
    slow += np.log(2.0) * ((place >= begin) & (place < begin + prompts // 5))
    slow += (0.03 + 0.045 * place / prompts) * rng.standard_normal(slow.shape)
    order = rng.choice([-1.0, 1.0], shape)
    return 0.15 * rng.standard_normal(shape) + order * (slow[:, 1::2] - slow[:, ::2])


def judge_looks(samples: Floats, rng: np.random.Generator, true: float = 0.0) -> dict[str, float]:
    """Return how often intervals hold at looks.

    Args:
        samples: Mean log speedups of prompts less the true one, shape [trials, prompts].
        rng: Draws when the time is up.
        true: The true log speedup, for ``sure`` and ``prompts``.

    Returns:
        ``together``: the share of trials in which the intervals of all looks hold, and one more at a random place;
        ``single``: the same with ordinary intervals; ``sure``: the share in which the interval holds where a sweep
        stops as soon as it excludes the baseline's speed; ``narrow``: the same for ±5%; ``prompts``: after how many it
        is sure, on average.
    """
    trials, prompts = samples.shape
    together, single = np.ones(trials, bool), np.ones(trials, bool)
    held = {name: np.zeros(trials, bool) for name in ("sure", "narrow")}
    running = {name: np.ones(trials, bool) for name in held}
    taken = 0.0
    times_up = rng.integers(6, prompts + 1, trials)
    for n in range(6, prompts + 1):
        due = times_up == n
        if n in looks(prompts, 1):
            due = np.ones(trials, bool)
        low, high = mean_intervals(samples[:, :n], AT_EVERY_LOOK)
        usual_low, usual_high = mean_intervals(samples[:, :n])
        holds = (low <= 0.0) & (high >= 0.0)
        together &= holds | ~due
        single &= (usual_low <= 0.0) & (usual_high >= 0.0) | ~due
        known = {
            "sure": (low + true > 0.0) | (high + true < 0.0),
            "narrow": np.sinh((high - low) / 2) <= 0.05,
        }
        for name, each in known.items():
            stops = running[name] & due & (each | (times_up == n) | (n == prompts))
            held[name] |= stops & holds
            running[name] &= ~stops
            taken += n * float(stops.mean()) * (name == "sure")
    shares = {name: float(each.mean()) for name, each in held.items()}
    return {"together": float(together.mean()), "single": float(single.mean()), **shares, "prompts": taken}


def simulate_looks(trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Print and return the coverage over looks, for every family and for drift."""
    print(f"\n{'looks, up to 120 prompts':32} together single   sure    ±5%", flush=True)
    rows = []
    for family, draw in {**CLAIMED, "drift": drifting, **BEYOND}.items():
        row = judge_looks(draw(rng, (trials, 120)), rng)
        rows.append({"family": family, "claimed": family not in BEYOND, **row})
        shares = (f"{100 * row[name]:6.1f}" for name in ("together", "single", "sure", "narrow"))
        print(f"{family:32} ", *shares, flush=True)
    print(f"\n{'until sure, prompts ± 26%':32} true speedup, prompts, coverage", flush=True)
    for speedup in (1.02, 1.05, 1.1, 1.2, 1.5, 2.0):
        row = judge_looks(0.26 * rng.standard_normal((trials, 120)), rng, float(np.log(speedup)))
        rows.append({"family": "until sure", "claimed": True, "speedup": speedup, **row})
        print(f"{'':32} {speedup:4.2f} {row['prompts']:6.1f} {100 * row['sure']:6.1f}", flush=True)
    return rows


def stored_logs(folder: Path) -> dict[str, Floats]:
    """Return the mean log speedups of prompts, for every configuration of every run in a folder."""
    found = {}
    for run in sorted(path.parent for path in folder.glob("*/run.json")):
        for config, pairs in paired_generations(load_results(run)).groupby("config", sort=False):
            logs = np.log(pairs["ratio"].to_numpy())
            means = nested_means(logs, pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy())[1]
            found[f"{run.name}: {config}"] = np.asarray(means - means.mean())
    return found


EFFECTS = ((0.0,) * 4, (0.03, 0.0, 0.0, 0.0), (0.03,) * 4, (0.05, 0.0, 0.0, 0.0), (0.1, 0.0, 0.0, 0.0))
"""By how much each of the four rows of a gate is worse."""
SAID = ("worse", "cannot tell", "not worse")


def simulate_gates(run: Path, metric: str, trials: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Print and return what gates of four rows with ``--worse-than 3%`` say.

    Prompts are drawn from a stored run. The noise of a speedup is what the times of a prompt's steps scatter, with and
    without drafts, on both sides. Of acceptance the new side loses accepted tokens by chance.
    """
    plain, *others = Summary(load_results(run)).rows
    kind, rows = METRICS[metric], [row.values(metric) for row in others]
    noise = [np.sqrt(2.0 * (_scatter(plain) ** 2 + _scatter(row) ** 2)) for row in others]
    noise = [each[row["prompt"]].to_numpy() for each, row in zip(noise, rows, strict=True)]
    found = []
    for prompts, effects in product((12, 24, 48), EFFECTS):
        said = Counter[str]()
        for _ in range(trials):
            drawn, outcomes = rng.integers(0, len(rows[0]), prompts), set()
            for place, effect in zip(rng.integers(0, len(rows), 4), effects, strict=True):
                old = rows[place].iloc[drawn].assign(prompt=np.arange(prompts))
                if kind.sums is None:
                    values = old["value"] * (1 - effect) * np.exp(rng.normal(0.0, noise[place][drawn]))
                else:
                    values = rng.binomial(old["value"].astype(int), 1 - effect)
                row = ComparedRow((), "", None, kind, (old.assign(value=values), old))  # type: ignore[arg-type]
                outcomes.add(decide(row, 0.03, 4)[1])
            said[next(name for name in SAID if name in outcomes)] += 1
        found.append({"metric": metric, "prompts": prompts, "effects": effects, **said})
        shares = " ".join(f"{100 * said[name] / trials:11.1f}" for name in SAID)
        worse_by = " / ".join(f"{effect:.0%}" for effect in effects)
        print(f"{metric:16} {prompts:7} {worse_by:20} {shares}", flush=True)
    return found


def _scatter(row: Figures) -> pd.Series[float]:
    """Return by prompt the standard error of the time of its steps, as a share."""
    times = row.steps.groupby(row.steps["output"].map(row.done["prompt"]))["total_s"]
    return times.std() / times.mean() / np.sqrt(times.size())


def show(name: str, prompts: int, row: dict[str, float]) -> None:
    shares = " ".join(f"{100 * row[each]:6.1f}" for each in ("used", "below", "above", "t"))
    print(f"{name:32} {prompts:7} {shares} {row['width']:6.2f} {row['median_width']:6.2f}", flush=True)


def main() -> int:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stored", type=Path, metavar="FOLDER")
    parser.add_argument("--gates", type=Path, metavar="RUN", help="simulate only `compare --worse-than 3%%`")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    if options.gates is not None:
        print(f"{'gates of 4 rows':16} prompts {'worse by':20} {' '.join(f'{each:>11}' for each in SAID)}")
        names = ("speedup", "acceptance_rate")
        gates = [simulate_gates(options.gates, name, options.trials, rng) for name in names]
        print(json.dumps({"benchmark": "interval_coverage", "gates": gates}))
        return 0

    heading = f"{'family':32} prompts   used  below  above      t  width median"
    print(
        f"Coverage in %, misses on either side, and widths over Student's; {options.trials} trials\n\n{heading}"
    )
    rows: list[dict[str, Any]] = []
    for family, draw in {**CLAIMED, **BEYOND}.items():
        if family == next(iter(BEYOND)):
            print("-" * len(heading))
        for prompts in PROMPTS:
            row = judge(draw(rng, (options.trials, prompts)))
            rows.append({"family": family, "prompts": prompts, "claimed": family in CLAIMED, **row})
            show(family, prompts, row)

    at_looks = simulate_looks(max(4, options.trials // 4), rng)

    stored: list[dict[str, Any]] = []
    if options.stored is not None:
        logs = stored_logs(options.stored)
        print(f"\n{'stored runs':32} prompts  configurations, mean and least coverage, of Student's t")
        for prompts in PROMPTS:
            judged = [
                judge(rng.choice(each, (4000, prompts))) for each in logs.values() if len(each) >= prompts
            ]
            if not judged:
                continue
            used, t = ([row[name] for row in judged] for name in ("used", "t"))
            stored.append({"prompts": prompts, "configurations": len(judged), "used": used, "t": t})
            figures = " ".join(
                f"{100 * each:6.1f}" for each in (np.mean(used), min(used), np.mean(t), min(t))
            )
            print(f"{'':32} {prompts:7} {len(judged):6} {figures}", flush=True)

    lowest = min(row["used"] for row in rows if row["claimed"])
    together = min(row["together"] for row in at_looks if row["claimed"])
    holds = min(lowest, together) >= LEAST
    result = {
        "benchmark": "interval_coverage",
        "seed": options.seed,
        "trials": options.trials,
        "lowest": lowest,
        "lowest_together": together,
    }
    found = {"rows": rows, "looks": at_looks, "stored": stored}
    print(json.dumps({**result, "holds": holds, **found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
