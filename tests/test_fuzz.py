"""benchmarks/fuzz.py: some seconds of it find nothing, and it would find something if there were something."""

from __future__ import annotations

import json
from typing import Any

import fuzz
import pytest

CASE = 2
"""One that decodes greedily in float32, several prompts without any stop."""


@pytest.mark.parametrize(
    ("seed", "cases", "more"),
    [
        (0, 12, ()),
        (16, 3, ("--models", "composite")),
        pytest.param(1000, 200, (), marks=pytest.mark.slow, id="many"),
    ],
)
def test_random_cases_find_nothing(seed, cases, more, capsys):
    code = fuzz.main(["--seed", str(seed), "--cases", str(cases), *more])
    shown = capsys.readouterr().out
    assert code == 0, shown
    result = json.loads(shown.splitlines()[-1])
    assert (result["cases"], result["findings"]) == (cases, 0)
    assert result["tokens"] > 8 * cases
    assert result["refused"] < cases / 4, "what is refused shows nothing"


def test_a_wrong_token_is_found(monkeypatch, capsys):
    honest = fuzz.generated

    def spoilt(*given: Any) -> list[int]:
        *tokens, last = honest(*given)
        return [*tokens, (last + 1) % 200]

    monkeypatch.setattr(fuzz, "generated", spoilt)
    assert fuzz.main(["--seed", str(CASE), "--cases", "1"]) == 1
    shown = capsys.readouterr().out
    assert f"FINDING case {CASE}: " in shown
    assert json.loads(shown.splitlines()[-1])["findings"] == 1
