"""Kill a sweep with SIGKILL at random moments, resume it each time, and compare the end with an undisturbed run.

    python benchmarks/kill_resume.py [--kills 25] [--seed 0]

The sweep uses a scripted engine, so that kills hit everything around the models: starting, locking, writing,
synchronizing. After every kill the results must be readable. At the end every key is there once, in the same order
and with the same tokens. Prints one line of JSON at the end; exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS, PAUSE_S = "24", "0.02"
CHILD = Path(__file__).parents[1] / "tests" / "killed_sweep.py"


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """Return what each line measured, and its tokens."""
    lines = (folder / "generations.jsonl").read_text(encoding="ascii").splitlines()
    names = ("config", "prompt", "turn", "repeat", "warmup", "order", "token_ids")
    return [tuple(json.loads(line)[name] for name in names) for line in lines]


def main() -> int:
    """Run the benchmark and return the exit code."""
    from specbench.results.results import load_results
    from specbench.results.store import RunStore

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place) / "whole", Path(place) / "killed"
        began = time.perf_counter()
        subprocess.run([sys.executable, str(CHILD), str(whole), REPEATS, PAUSE_S], check=True)
        took = time.perf_counter() - began
        seen = []
        for _ in range(arguments.kills):
            child = subprocess.Popen([sys.executable, str(CHILD), str(killed), REPEATS, PAUSE_S])
            # Starting Python takes long; what matters more happens after it.
            if moments.random() < 0.7:
                before = size(killed)
                while child.poll() is None and size(killed) == before:
                    time.sleep(0.0005)
                time.sleep(moments.uniform(0, 0.25))
            else:
                time.sleep(moments.uniform(0, min(took, 2.0)))
            child.send_signal(signal.SIGKILL)
            child.wait()
            if RunStore.exists(killed):
                seen.append(len(load_results(killed).generations))
        subprocess.run([sys.executable, str(CHILD), str(killed), REPEATS, PAUSE_S], check=True)
        same = rows(killed) == rows(whole)
        problems = load_results(killed).problems
        result = {
            "kills": arguments.kills,
            "lines": len(rows(whole)),
            "generations_seen_after_kills": seen,
            "same_as_undisturbed": same,
            "problems": problems,
        }
    print(json.dumps(result))
    return 0 if same and not problems else 1


def size(folder: Path) -> int:
    """Return the bytes of results."""
    file = folder / "generations.jsonl"
    return file.stat().st_size if file.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
