"""Run A/A tests of sweeps: no difference where there is none, and a 10% slowdown found.

    python benchmarks/aa.py                                   # 20 sweeps, about half an hour on two cores
    python benchmarks/aa.py --load                            # again, while a process keeps a core busy
    python benchmarks/aa.py --resume aa.jsonl --minutes 6     # in parts: repeat until done

Each sweep decodes 8 new prompts × 32 tokens × 3 repeats with four configurations: plain decoding, X, X again under
another id, and X with a pause that makes each step 10% longer. `Session` measures and `compare_runs` judges, as
`specbench compare` does. Goals: the 95% interval of X against itself covers 1 in at least 17 of 20 sweeps, and the
slowed X is called slower in at least 18. Prints one line of JSON at the end; exit code 1 if a goal is missed, 3 if
sweeps are left.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts import Parts, busy_core

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


class Slowed:
    """A drafter that ends every step with a pause in proportion to the time the step has taken so far.

    Args:
        drafter: Does the drafting.
        share: Of the step's time: 0.1 makes it 10% longer.
    """

    def __init__(self, drafter: Drafter, share: float) -> None:
        self.drafter, self.share = drafter, share
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
        pause(now + self.share * (now - self._began))
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
        gammas=(arguments.gamma,),
        decoding=DecodingOptions(max_new_tokens=arguments.tokens, ignore_eos=True),
        repeats=arguments.repeats,
        turns=1,
        seed=arguments.seed + number,
    )
    asked = random.Random(f"{arguments.seed}/{number}").sample(list(prompts), arguments.limit)
    return Sweep(options, tuple(asked), tuple(_row(name, arguments) for name in (PLAIN, X, ITSELF, SLOWED)))


def _row(name: str, arguments: argparse.Namespace) -> Row:
    recipe = Recipe(parse_model(arguments.target))
    if name == PLAIN:
        return Row(recipe, Condition())
    policy = parse_policy(f"fixed:gamma={arguments.gamma}")
    drafter = _spec(SLOWED if name == SLOWED else X)
    return Row(replace(recipe, drafter=drafter, policy=policy), Condition(), LoadedName(name))


def _spec(name: str) -> DrafterSpec:
    """Return a drafter of a name, which stands for the one that is measured."""
    return SmallModel(ModelSpec("hub", name))


class TimeUpError(Exception):
    """Raised when the time limit is reached."""


def run_one(
    sweep: Sweep,
    engine: BenchEngine,
    target: dict[str, Any],
    folder: Path,
    until: float = math.inf,
) -> dict[str, Any]:
    """Run one sweep, or the rest of it, and judge it.

    Args:
        sweep: One with the configuration ``x``.
        engine: Knows what its configurations decode with.
        target: The field ``target`` of ``run.json``.
        folder: Where its results go; what is there already is not measured again, but for what failed.
        until: When to stop, on the clock of ``time.monotonic``; what is measured by then stays in the folder.

    Returns:
        For X again and X slowed: ``ratio, low, high, verdict``; the number of ``failed`` generations, and ``warnings``.

    Raises:
        TimeUpError: It has to stop.
    """
    run = describe_run(sweep, target, {})
    with RunStore.open(folder) if RunStore.exists(folder) else RunStore.create(folder, run) as store:
        without_costs: Any = WithoutCosts(engine)
        measuring = Session(sweep, store, without_costs)
        for _ in measuring.run():
            if time.monotonic() > until:
                raise TimeUpError
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


def summary(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all sweeps."""
    slowed = [part[SLOWED] for part in parts]
    itself = [part[ITSELF] for part in parts]
    # One that is too wide to be given has no ends.
    widths = sorted(math.inf if each["low"] is None else each["high"] / each["low"] for each in itself)
    median = widths[len(widths) // 2] if widths else math.inf
    return {
        "sweeps": len(parts),
        "covered": sum(each["low"] is None or each["low"] <= 1.0 <= each["high"] for each in itself),
        "mean_itself": _mean_ratio(itself),
        "median_width": round(median, 4) if math.isfinite(median) else None,
        "failed_generations": sum(part["failed"] for part in parts),
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="lookup", help="X's; none makes X plain decoding itself")
    parser.add_argument("--gamma", type=int, default=2, help="X's")
    parser.add_argument("--sweeps", type=int, default=20)
    parser.add_argument("--limit", type=int, default=8, help="prompts in a sweep")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", type=float, default=0.1, help="share of a step's time that is added")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from this file")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; --resume continues")
    return parser.parse_args(arguments)


def load(arguments: argparse.Namespace) -> ModelEngine:
    """Load the models, with the drafters under the names of the configurations."""
    engine = load_engine(Recipe(parse_model(arguments.target)), (parse_drafter(arguments.drafter),))
    (loaded,) = engine.drafters
    both = {X: loaded.drafter, SLOWED: Slowed(loaded.drafter, arguments.slow)}
    engine.drafters = tuple(LoadedDrafter(name, _spec(name), drafter) for name, drafter in both.items())
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    given = parse(arguments)
    until = time.monotonic() + 60 * given.minutes
    names = ("target", "drafter", "gamma", "limit", "tokens", "repeats", "slow", "seed", "load")
    settings = {name: getattr(given, name) for name in names}
    parts = Parts(given.resume, settings)
    for number, part in enumerate(parts.done[: given.sweeps]):
        print(line_of(number, part), flush=True)
    if len(parts.done) < given.sweeps:
        engine, prompts = load(given), load_prompts(["all"])
        target = engine.describe_target(DecodingOptions())

        def one(number: int, folder: Path) -> dict[str, Any]:
            return run_one(make_sweep(number, prompts, given), engine, target, folder, until)

        with busy_core(given.load):
            run_all(given.sweeps, parts, one)
    result = summary(parts.done[: given.sweeps])
    complete = result["sweeps"] == given.sweeps
    print(json.dumps({"benchmark": "aa", **settings, "complete": complete, **result}))
    if not complete:
        return 3
    good = result["covered"] >= COVERED * given.sweeps and result["slower"] >= SLOWER * given.sweeps
    return 0 if good else 1


def run_all(sweeps: int, parts: Parts, one: Callable[[int, Path], dict[str, Any]]) -> None:
    """Run the missing sweeps within the time limit.

    Args:
        sweeps: How many there are to be.
        parts: Those that are done, and where the others go.
        one: Runs the sweep of that number in that folder, and judges it; raises ``TimeUpError``.
    """
    with tempfile.TemporaryDirectory() as place:
        for number in range(len(parts.done), sweeps):
            # Beside the file of --resume, so that not even a sweep in progress is lost.
            folder = Path(place) / str(number) if parts.path is None else Path(f"{parts.path}.{number + 1}")
            began = time.monotonic()
            try:
                part = one(number, folder)
            except TimeUpError:
                print(f"{number + 1:3}  not finished: the time is over", flush=True)
                return
            parts.add(part)
            shutil.rmtree(folder)
            took = time.monotonic() - began
            left = took * (sweeps - number - 1)
            print(f"{line_of(number, part)}  [{took:.0f} s, {left / 60:.0f} min left]", flush=True)


if __name__ == "__main__":
    sys.exit(main())
