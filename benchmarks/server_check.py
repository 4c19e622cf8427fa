"""How often `specbench check --server` finds faults of verifiers, and how often it accuses exact ones.

    python benchmarks/server_check.py                                  # the table of docs/check.md
    python benchmarks/server_check.py --seeds 200 --answers 250 "" "target only"      # false alarms

Servers are simulated (`tests/biased_verifiers.py`): each seed makes a model and a drafter of 60 tokens, two prompts, so
many answers of 8 tokens to each, and both tests of `specbench/check/bias.py`. Prints one line of JSON for each fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from biased_verifiers import Fault, MadeUpModel, ThreeTokens, answers_of, positions_of, sampler

from specbench.check.bias import LEVEL, compare_samples, compare_with_target

PROMPTS, TOKENS = 2, 8


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", default=get_args(Fault), metavar="FAULT")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--three", action="store_true", help="the model of three tokens of vllm#54282")
    given = parser.parse_args()
    for fault in given.faults:
        exact, other = [], []
        for seed in range(given.seeds):
            model = ThreeTokens() if given.three else MadeUpModel(seed)
            answers, plain = (
                answers_of(sampler(model, TOKENS, each), PROMPTS, given.answers, own)
                for each, own in ((fault, seed), ("", seed + given.seeds))
            )
            exact.append(compare_with_target(positions_of(model, answers)).p)
            other.append(compare_samples(answers, plain).p)
        found = {
            name: float(np.mean(np.array(values) <= LEVEL))
            for name, values in (("target", exact), ("server", other))
        }
        print(
            json.dumps({"fault": fault or "none", "answers": PROMPTS * given.answers, "found": found}),
            flush=True,
        )


if __name__ == "__main__":
    main()
