"""How long `tune` and `sweep` take to an answer, and what the quick answer of `tune` costs. On a quiet machine.

    python benchmarks/time_to_answer.py --out answers [--target MODEL --drafter MODEL]

Three commands, each in a process of its own: `tune`; `sweep --gamma 1..8`, until its whole table is predicted; and, as
the truth, `sweep` of every drafter and policy that `tune` predicted at all, with all prompts of the race, in turn. The
regret of `tune` is the speed of the fastest row of that sweep over that of its choice (and over plain decoding, if that
is its choice). Goals: the built-in model's `tune` within 60 s and a real pair's within 150 s, `sweep`'s table within
20 s and 60 s, and a regret of at most 1.03. Prints one line of JSON at the end; exit code 1 if a goal is missed.
A second call continues: what is in --out is not measured again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from specbench.results.compare import compare_configs
from specbench.results.results import load_results
from specbench.results.store import read_run
from specbench.results.summary import Summary

_GOALS = {True: (60.0, 20.0), False: (150.0, 60.0)}
"""Seconds of `tune`, and to the predicted table: of the built-in model, and of others."""

_REGRET = 1.03


def called(*words: str) -> list[str]:
    """Return a command line of specbench without the file of an earlier search."""
    command, *rest = words
    return [sys.executable, "-m", "specbench", command, *rest]


def tune(given: argparse.Namespace, models: list[str]) -> dict[str, Any]:
    """Run `tune`, and return its answer with the seconds that it took."""
    kept = given.out / "tune.json"
    if kept.is_file():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    began = time.monotonic()
    words = called("tune", *models, "--out", str(given.out / "tuned.toml"), "--json", "--quiet",
                   "--results", str(given.out / "tune"))  # fmt: skip
    made = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = {**json.loads(made.stdout), "seconds": time.monotonic() - began}
    kept.write_text(json.dumps(answer))
    return answer


def time_to_table(given: argparse.Namespace, models: list[str]) -> float:
    """Return the seconds until `sweep --gamma 1..8` has printed its predicted table."""
    words = called("sweep", "--config", "none", *models, "--gamma", "1..8", "--out", str(given.out / "table"))
    began = time.monotonic()
    running = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert running.stderr is not None
    predicted = 0
    for line in running.stderr:
        predicted += line.rstrip().endswith("predicted")
        if predicted and not line.strip().endswith("predicted"):
            break
    took = time.monotonic() - began
    running.terminate()
    running.wait()
    return took


def regret(given: argparse.Namespace, answer: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Race everything that `tune` predicted; return the best speed over that of its choice, and all speedups."""
    tuned = read_run(given.out / "tune")
    assert tuned.tuning is not None
    rows = [row for row in tuned.configs if row.id in tuned.tuning.predicted and row.recipe is not None]
    folder, drafters = (
        given.out / "truth",
        dict.fromkeys(str(row.recipe.drafter) for row in rows if row.recipe),
    )
    policies = dict.fromkeys(str(row.recipe.policy) for row in rows if row.recipe and row.gamma is None)
    words = called("sweep", "--config", "none", "--target", given.target, "--out", str(folder),
                   *(["--resume"] if folder.exists() else []), "--gamma", "1,2,3,4,6,8", "--limit", str(given.prompts),
                   *(word for each in drafters for word in ("--drafter", each)),
                   *(word for each in ["fixed", *policies] for word in ("--draft-policy", each)))  # fmt: skip
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    results = load_results(folder)
    speedups = {row.config.id: row.speedup.value for row in Summary(results).rows if row.generations}
    best = max(speedups, key=lambda name: speedups[name])
    if best == answer["winner"]:
        return 1.0, speedups
    return compare_configs(results, best, answer["winner"]).rows[0].ratio.value, speedups


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=12, help="of the race that gives the truth")
    parser.add_argument("--no-truth", action="store_true", help="leave that race out")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    models = ["--target", given.target, *(word for each in given.drafter for word in ("--drafter", each))]
    answer = tune(given, models)
    table_s = time_to_table(given, models)
    figures: dict[str, Any] = {
        "target": given.target, "drafters": given.drafter, "tune_s": round(answer["seconds"], 1),
        "table_s": round(table_s, 1), "headline": answer["headline"], "ending": answer["ending"],
        "blocks": answer["blocks"],
    }  # fmt: skip
    tune_goal, table_goal = _GOALS[given.target == "smollm2-135m"]
    missed = answer["seconds"] > tune_goal or table_s > table_goal
    if not given.no_truth:
        figures["regret"], figures["speedups"] = regret(given, answer)
        missed |= figures["regret"] > _REGRET
    print(f"tune {figures['tune_s']} s ({answer['ending']}): {answer['headline']}")
    print(f"predicted table {figures['table_s']} s; regret {figures.get('regret', '–')}")
    print(json.dumps(figures, ensure_ascii=False))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
