"""Free drafters and the law of the steps on published answers: SpecDecode-Bench's simulator data (arXiv 2601.11580).

    git clone https://github.com/SpecDecode-Bench/simulator
    python benchmarks/predict_published.py simulator/data/llama3.1-8B [--gammas 1 3 5 8] [--limit 300]

Each line of the data has the tokens of a prompt and of Llama-3.1-8B's greedy answer, and for every place how many
tokens a step of EAGLE and of vLLM's n-grams emits that begins there. Printed are tokens per step by γ: of EAGLE and the
n-grams, walked along the data as the simulator does, with how far the law of the steps is off that is given acceptance
alone; and of our ``lookup`` and ``suffix``, asked along the tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench.decoding.sampling import Sampling
from specbench.drafters.free import make_free
from specbench.predict.forecast import forecast
from specbench.predict.law import Answer, Chances, expected_steps
from specbench.specs.drafters import FreeSpec, parse_drafter

DRAFTERS = ("lookup", "suffix")
THEIRS = {"EAGLE": "acc_eagle", "n-grams": "acc_ngram"}


def walked(emitted: Sequence[int], gamma: int) -> tuple[int, int]:
    """Return the tokens and steps of a walk: a step that begins at a place emits so many tokens, at most γ + 1."""
    place = steps = 0
    while place < len(emitted):
        place += min(emitted[place], gamma + 1)
        steps += 1
    return len(emitted), steps


def by_law(emitted: Sequence[int], gammas: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return the tokens and, for each γ, the steps of the law, where the drafts of a step are accepted like this."""
    n, longest = len(emitted) + 1, max(gammas)
    accept = np.zeros((n, longest))
    for i, count in enumerate(emitted, 1):
        accept[i, : count - 1] = 1.0
    room = Answer([], range(n), Sampling()).room()
    law = expected_steps(Chances(accept, np.full(n, longest), np.ones((n, longest))), room, gammas)
    return n - 1, np.array([each.steps for each in law])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 3, 5, 8])
    parser.add_argument("--limit", type=int, default=None, help="answers of each set")
    given = parser.parse_args(arguments)
    gammas: list[int] = given.gammas
    found: dict[str, dict[str, list[float]]] = {}
    off = 0.0
    for file in sorted(given.folder.glob("combined_*.jsonl")):
        name = file.stem.removeprefix("combined_")
        lines: list[dict[str, Any]] = list(map(json.loads, file.read_text(encoding="utf-8").splitlines()))[
            : given.limit
        ]
        rows: dict[str, list[float]] = {}
        for label, key in THEIRS.items():
            lists = [line[key]["acc_len"] for line in lines if key in line and line[key]["acc_len"]]
            walks = [[walked(each, gamma) for each in lists] for gamma in gammas]
            rows[label] = [sum(t for t, _ in each) / sum(s for _, s in each) for each in walks]
            laws = [by_law(each, gammas) for each in lists]
            expected = sum(t for t, _ in laws) / sum(s for _, s in laws)
            off = max(off, float(np.abs(expected / rows[label] - 1.0).max()))
        answers = [
            Answer(line["prompt_token_ids"], line["generated_token_ids"], Sampling(), None, None, str(number))
            for number, line in enumerate(lines)
            if len(line["generated_token_ids"]) > 1
        ]
        for drafter in DRAFTERS:
            spec = parse_drafter(drafter)
            assert isinstance(spec, FreeSpec)
            ours = forecast(make_free(spec), answers, gammas)
            rows[f"our {drafter}"] = [ours.tokens_per_step(row).value for row in ours.rows]
        found[name] = rows
        print(f"\n{name}, {len(answers)} answers: tokens per step at γ = {', '.join(map(str, gammas))}")
        for label, values in rows.items():
            print(f"  {label:16}" + "  ".join(f"{value:5.2f}" for value in values), flush=True)
    print(f"\nThe law of the steps is off by at most {off:.2g}.")
    print(json.dumps({"gammas": gammas, "law_off": off, "sets": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
