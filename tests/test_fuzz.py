"""benchmarks/fuzz.py: some seconds of it find nothing, and it would find something if there were something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import fuzz
import pytest

CASE = 2
"""One that decodes greedily in float32, several prompts without any stop."""


@pytest.mark.parametrize(
    ("minutes", "seed"), [(0.1, 0), pytest.param(1, 1000, marks=pytest.mark.slow, id="a minute")]
)
def test_random_cases_find_nothing(minutes, seed):
    child = subprocess.run(
        [sys.executable, fuzz.__file__, "--minutes", str(minutes), "--seed", str(seed)],
        capture_output=True, text=True, timeout=500, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stdout + child.stderr
    result = json.loads(child.stdout.splitlines()[-1])
    assert result["findings"] == 0
    assert result["tokens"] > 0  # how many depends on the machine's load
    # What is refused shows nothing: it has to stay the exception.
    assert result["refused"] < result["cases"] / 4


def test_a_case_is_the_same_every_time_and_alone(capsys):
    assert fuzz.draw(CASE) == fuzz.draw(CASE)
    seen = []
    for _ in range(2):
        assert fuzz.main(["--case", str(CASE)]) == 0
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1]
    assert json.loads(seen[0].splitlines()[-1])["cases"] == 1


def test_a_wrong_token_is_found(monkeypatch, capsys):
    honest = fuzz.generated

    def spoilt(*given: Any) -> list[int]:
        *tokens, last = honest(*given)
        return [*tokens, (last + 1) % 200]

    monkeypatch.setattr(fuzz, "generated", spoilt)
    assert fuzz.main(["--case", str(CASE)]) == 1
    shown = capsys.readouterr().out
    assert f"FINDING case {CASE}: " in shown
    assert json.loads(shown.splitlines()[-1])["findings"] == 1


def test_an_error_that_is_no_sentence_is_found(monkeypatch, capsys):
    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("list index out of range")

    monkeypatch.setattr(fuzz, "build_drafter", broken)
    assert fuzz.main(["--case", str(CASE)]) == 1
    assert "IndexError: list index out of range" in capsys.readouterr().out
