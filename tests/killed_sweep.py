"""A sweep over the scripted engine in a process of its own, to be killed.

python tests/killed_sweep.py FOLDER [REPEATS] [SECONDS PER GENERATION]
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripted_engine import ScriptedEngine, describe, make_sweep, prompts

from specbench.bench.grid import Sweep
from specbench.bench.runner import run_sweep
from specbench.results.store import RunStore


def sweep(repeats: int = 2) -> Sweep:
    """One with conversations, so that going on has to know what was answered."""
    return make_sweep(prompts(2, conversations=2), repeats=repeats)


def main(folder: Path, repeats: int = 2, pause_s: float = 0.002) -> None:
    """Begin the sweep in ``folder``, or go on with it."""
    whole = sweep(repeats)
    store = RunStore.open(folder) if RunStore.exists(folder) else RunStore.create(folder, describe(whole))
    with store:
        run_sweep(whole, store, ScriptedEngine(pause_s=pause_s))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(kind(word) for kind, word in zip((int, float), sys.argv[2:], strict=False)))
