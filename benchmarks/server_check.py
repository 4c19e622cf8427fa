"""How often `specbench check --server` finds faults of verifiers, and how often it accuses exact ones.

    python benchmarks/server_check.py                              # the table of docs/check.md, about half an hour
    python benchmarks/server_check.py 200 150 "" "target only"     # false alarms: seeds, answers and faults
    python benchmarks/server_check.py 20 1000 "three: shared noise"

Servers are simulated (`tests/biased_verifiers.py`): each seed makes a model and a drafter of 60 tokens (or the three of
vllm#54282) and so many answers of 8 tokens to each of two prompts. Both tests of `specbench/check/bias.py` look at them
as the command does, after an eighth, a quarter, half and all. Prints the share called biased, a line for each fault.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import get_args

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from biased_verifiers import Fault, MadeUpModel, ThreeTokens, answers_of, positions_of, sampler

from specbench.check.bias import LOOKS, compare_samples, compare_with_target, level_at

PROMPTS, TOKENS, THREE = 2, 8, "three: "


def main() -> None:
    """Print the table."""
    seeds, answers = (int(word) for word in (sys.argv[1:3] or ("20", "1000")))
    for name in sys.argv[3:] or [*get_args(Fault), THREE + "shared noise"]:
        found = []
        for seed in range(seeds):
            model = ThreeTokens() if name.startswith(THREE) else MadeUpModel(seed)
            fault = next(fault for fault in get_args(Fault) if fault == name.removeprefix(THREE))
            tested = answers_of(sampler(model, TOKENS, fault), PROMPTS, answers, seed)
            plain = answers_of(sampler(model, TOKENS), PROMPTS, answers, seed + seeds)
            biased = np.zeros(2, bool)
            for look, before in zip(LOOKS, (0.0, *LOOKS), strict=False):
                first, second = (
                    [group[: math.ceil(answers * look)] for group in of] for of in (tested, plain)
                )
                p = compare_with_target(positions_of(model, first)).p, compare_samples(first, second).p
                biased |= np.array(p) <= level_at(look, before)
            found.append(biased)
        target, server = np.mean(found, axis=0)
        print(json.dumps({"fault": name, "seeds": seeds, "target": target, "server": server}), flush=True)


if __name__ == "__main__":
    main()
