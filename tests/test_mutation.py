"""The suite notices the classical mistakes of speculative decoding; benchmarks/mutation.py plants many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_planted_bugs_are_noticed() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "mutation.py"
    child = subprocess.run(
        [sys.executable, str(script), "--fast"], capture_output=True, text=True, timeout=500, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    *table, result = child.stdout.splitlines()
    figures = json.loads(result)
    assert figures["good"]
    assert figures["caught"] == figures["planted"] >= 10
    # A change that changes nothing goes unnoticed, so it is not everything that counts as a bug.
    assert sum(line.startswith("survived  (nothing changed)") for line in table) == 1
