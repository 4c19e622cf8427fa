"""The suite notices the classical mistakes of speculative decoding; benchmarks/mutation.py plants many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mutation
import pytest

PACKAGE = mutation.ROOT / "specbench"


@pytest.mark.smoke
def test_every_planted_bug_has_one_place_in_the_source():
    lost = []
    for mutant in (mutation.CONTROL, *mutation.MUTANTS):
        try:
            mutation.mutated(mutant, PACKAGE)
        except mutation.LostError as error:
            lost.append(f"{mutant.name}: {error}")
    assert not lost, "\n".join(["benchmarks/mutation.py no longer finds where to plant these:", *lost])


def planted(package: Path, where: str, old: str, new: str) -> str:
    return mutation.mutated(mutation.Mutant("", where, old, new, ()), package)[1]


def test_a_place_is_found_by_name_and_syntax_tree(tmp_path):
    (tmp_path / "new.py").write_text(
        "LIMIT = 3\nclass A:\n    def f(self, a):\n        b = (  # why\n            a + 1)\n        g(b, b)\n",
        encoding="utf-8",
    )
    (tmp_path / "old.py").write_text("def f(a):\n    return a + 1\n", encoding="utf-8")
    assert "b = a - 1" in planted(tmp_path, "old.py:A.f", "a+1", "a - 1")
    assert "LIMIT = 4" in planted(tmp_path, "new.py:LIMIT", "3", "4")
    assert planted(tmp_path, "old.py:f", "return a + 1", "") == "def f(a):\n    pass"
    with pytest.raises(mutation.LostError, match=r"nearest: a \+ 1"):
        planted(tmp_path, "new.py:A.f", "a + 2", "a")
    with pytest.raises(mutation.LostError, match=r"nearest: new\.py:A\.f"):
        planted(tmp_path, "old.py:B.f", "a + 1", "a")
    with pytest.raises(mutation.LostError, match="2 times"):
        planted(tmp_path, "new.py:A", "b", "a")


def test_planted_bugs_are_noticed():
    child = subprocess.run(
        [sys.executable, mutation.__file__, "--fast"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    *table, result = child.stdout.splitlines()
    figures = json.loads(result)
    assert figures["good"]
    assert figures["caught"] == figures["planted"] >= 10
    # A change that changes nothing goes unnoticed, so it is not everything that counts as a bug.
    assert sum(line.startswith("survived  (nothing changed)") for line in table) == 1
