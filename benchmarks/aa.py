"""Run A/A tests of sweeps: no difference where there is none, and a 10% slowdown found.

    python benchmarks/aa.py                                   # 20 sweeps, about half an hour on two cores
    python benchmarks/aa.py --load                            # again, while a process keeps a core busy

Each sweep decodes 8 new prompts × 32 tokens × 3 repeats with four configurations: plain decoding, X, X again under
another id, and X with a pause that makes each step 10% longer. `Session` measures and `compare_runs` judges, as
`specbench compare` does. Goals: the 95% interval of X against itself covers 1 in at least 17 of 20 sweeps, and the
slowed X is called slower in at least 18. Prints one line of JSON at the end; exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parts

from specbench.base.errors import RunError
from specbench.base.record import Estimate
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.engines.own import ModelEngine, load_engine
from specbench.bench.grid import Sweep, SweepOptions
from specbench.bench.manifest import describe_run
from specbench.bench.prompts import Prompt, load_prompts
from specbench.bench.session import Session
from specbench.models.prepare import LoadedDrafter
from specbench.options import DecodingOptions
from specbench.recipe import Recipe
from specbench.results.compare import compare_runs
from specbench.results.lines import CostLine
from specbench.results.results import load_results
from specbench.results.stats import ratio_text, verdict
from specbench.results.store import RunStore
from specbench.rows import Condition, LoadedName, Row
from specbench.specs.drafters import DrafterSpec, SmallModel, parse_drafter
from specbench.specs.models import ModelSpec, parse_model
from specbench.specs.policies import parse_policy

if TYPE_CHECKING:
    from specbench.decoding.drafts import Draft, StepOutcome
    from specbench.decoding.protocols import Decoding, Drafter

PLAIN, X, ITSELF, SLOWED = "plain", "x", "itself", "slowed"
COVERED, SLOWER = 17 / 20, 18 / 20
PROMPTS, REPEATS, GAMMA, PAUSE = 8, 3, 2, 0.1
"""Of a sweep: prompts, repeats, draft length, and the share of a step's time that is added."""


class Slowed:
    """A drafter that ends every step with a pause in proportion to the time the step has taken so far."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._began: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *arguments: Any) -> Decoding[Draft]:
        self._began = time.perf_counter()  # the loop asks for a proposal first
        return self.drafter.propose(*arguments)

    def update(self, outcome: StepOutcome) -> None:
        self.drafter.update(outcome)  # and this is the last thing it asks for in a step
        if self._began is None:  # nothing was proposed: the target has read the prompt
            return
        now = time.perf_counter()
        pause(now + PAUSE * (now - self._began))
        self._began = None


def pause(until: float) -> None:
    """Sleep until ``time.perf_counter()`` reads ``until``, the last half millisecond awake: sleep alone oversleeps."""
    while (left := until - time.perf_counter()) > 0:
        if left > 0.0005:
            time.sleep(left - 0.0005)


class WithoutCosts:
    """An engine that times no single passes: nothing here is predicted."""

    def __init__(self, engine: BenchEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def measure_costs(self, *_: object) -> list[CostLine]:
        raise RunError("No single passes are timed here.")


def make_sweep(number: int, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> Sweep:
    """Return the sweep of that number, with its own prompts, order and seed."""
    options = SweepOptions(
        gammas=(GAMMA,),
        decoding=DecodingOptions(max_new_tokens=arguments.tokens, ignore_eos=True),
        repeats=REPEATS,
        turns=1,
        seed=number,
    )
    asked = random.Random(f"0/{number}").sample(list(prompts), PROMPTS)
    rows = (_row(name, arguments.target) for name in (PLAIN, X, ITSELF, SLOWED))
    return Sweep(options, tuple(asked), tuple(rows))


def _row(name: str, target: str) -> Row:
    recipe = Recipe(parse_model(target))
    if name == PLAIN:
        return Row(recipe, Condition())
    policy = parse_policy(f"fixed:gamma={GAMMA}")
    drafter = _spec(SLOWED if name == SLOWED else X)
    return Row(replace(recipe, drafter=drafter, policy=policy), Condition(), LoadedName(name))


def _spec(name: str) -> DrafterSpec:
    """Return a drafter of a name, which stands for the one that is measured."""
    return SmallModel(ModelSpec("hub", name))


def run_one(sweep: Sweep, engine: BenchEngine, target: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one sweep and judge it.

    Args:
        sweep: One with the configuration ``x``.
        engine: Knows what its configurations decode with.
        target: The field ``target`` of ``run.json``.
        folder: Where its results go.

    Returns:
        For X again and X slowed: ``ratio, low, high, verdict``; the number of ``failed`` generations, and ``warnings``.
    """
    without_costs: Any = WithoutCosts(engine)
    with RunStore.create(folder, describe_run(sweep, target, {})) as store:
        Session(sweep, store, without_costs).run_all()
    results = load_results(folder)
    part: dict[str, Any] = {"failed": int((results.generations["status"] == "failed").sum())}
    ids = {config.drafter: config.id for config in sweep.configs}
    for name in (ITSELF, SLOWED):
        row = compare_runs(results, results, a=ids[name], b=ids[X]).rows[0]
        part[name] = {
            "ratio": row.ratio.value,
            "low": row.ratio.low,
            "high": row.ratio.high,
            "verdict": verdict(row.ratio),  # the interval's, also on a machine too busy for a verdict
        }
    part["warnings"] = sorted({warning for each in results.generations["warnings"] for warning in each})
    return part


def line_of(number: int, part: Mapping[str, Any]) -> str:
    """Return one sweep as a line of text."""
    itself = _estimate(part[ITSELF])
    covers = "MISSES 1" if itself.overlaps(1.0) is False else "covers 1"
    line = f"{number + 1:3}  itself {ratio_text(itself):26} {covers:9}"
    line += f" slowed {ratio_text(_estimate(part[SLOWED])):26} {part[SLOWED]['verdict']:12}"
    return (line + " ".join(part["warnings"])).rstrip()


def _estimate(judged: Mapping[str, Any]) -> Estimate:
    return Estimate(judged["ratio"], judged["low"], judged["high"], 0, "prompts")


def summary(sweeps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all sweeps."""
    slowed = [part[SLOWED] for part in sweeps]
    itself = [part[ITSELF] for part in sweeps]
    # One that is too wide to be given has no ends.
    widths = sorted(math.inf if each["low"] is None else each["high"] / each["low"] for each in itself)
    median = widths[len(widths) // 2] if widths else math.inf
    return {
        "sweeps": len(sweeps),
        "covered": sum(each["low"] is None or each["low"] <= 1.0 <= each["high"] for each in itself),
        "mean_itself": _mean_ratio(itself),
        "median_width": round(median, 4) if math.isfinite(median) else None,
        "failed_generations": sum(part["failed"] for part in sweeps),
        "slower": sum(each["verdict"] == "slower" for each in slowed),
        "slowed_called_faster": sum(each["verdict"] == "faster" for each in slowed),
        "mean_slowed": _mean_ratio(slowed),
    }


def _mean_ratio(judged: Sequence[Mapping[str, Any]]) -> float:
    """Return their geometric mean; NaN without any."""
    logs = [math.log(each["ratio"]) for each in judged]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else math.nan


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parts.parser(__doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="lookup", help="X's")
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--load", action="store_true", help="another process keeps one core busy")
    return parser.parse_args(arguments)


_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(100_000): pass"


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with another process, which ends with this one in any case."""
    child = subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())])
    try:
        yield
    finally:
        child.terminate()
        child.wait()


def load(arguments: argparse.Namespace) -> ModelEngine:
    """Load the models, with the drafters under the names of the configurations."""
    engine = load_engine(Recipe(parse_model(arguments.target)), (parse_drafter(arguments.drafter),))
    (loaded,) = engine.drafters
    both = {X: loaded.drafter, SLOWED: Slowed(loaded.drafter)}
    engine.drafters = tuple(LoadedDrafter(name, _spec(name), drafter) for name, drafter in both.items())
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    given = parse(arguments)
    engine, prompts = load(given), load_prompts(["all"])
    target, done = engine.describe_target(DecodingOptions()), list[dict[str, Any]]()
    with busy_core() if given.load else nullcontext():
        for number in range(given.sweeps):
            with tempfile.TemporaryDirectory() as folder:
                done.append(run_one(make_sweep(number, prompts, given), engine, target, Path(folder)))
            print(line_of(number, done[-1]), flush=True)
    result = summary(done)
    print(json.dumps({"benchmark": "aa", **vars(given), **result}))
    good = result["covered"] >= COVERED * given.sweeps and result["slower"] >= SLOWER * given.sweeps
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
