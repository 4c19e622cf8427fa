"""`benchmarks/race.py`, with programs that stand in for the engines."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import race

STUB = (sys.executable, str(Path(__file__).with_name("engine_process.py")), "--model", "plain.gguf")
DRAFTS = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")


@pytest.fixture
def sides(monkeypatch):
    """Ours accepts 4 of 4 drafts in a step, the other none: it has none."""
    made = {
        "specbench": partial(race._with_port, [*STUB, *DRAFTS, "--port"]),
        "other": partial(race._with_port, [*STUB, "--port"]),
    }
    monkeypatch.setattr(race, "sides_of", lambda _: (made, {"vllm": "no --python vllm=PYTHON"}))


def test_a_race_is_measured_once_and_ours_is_set_against_the_others(sides, models, tmp_path, capsys):
    asked = ["--out", str(tmp_path), "--target", str(models / "target"), "--limit", "3", "-n", "24"]
    asked += ["--lengths", "16", "48", "--batch", "2"]
    assert race.main(asked) == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert "vllm takes no part: no --python vllm=PYTHON." in said
    ratio, *_ = found["single"]["other"]["ours_over_it"]  # it sleeps for each step
    assert ratio > 1
    one, other = (found["single"][name] for name in ("specbench", "other"))
    assert other["whole_over_it"][0] == pytest.approx(one["whole"] / other["whole"], rel=0.01)
    assert other["whole"] < other["tokens_per_second"], "with the time to the first token"
    assert "ours_over_it" not in found["single"]["specbench"]
    assert found["batch"].keys() == found["starts"].keys() == {"specbench", "other"}
    assert found["first_token_ms"]["other"].keys() == {"16 tokens", "48 tokens"}
    assert race.main(asked) == 0  # nothing is measured again
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (again["single"], again["first_token_ms"]) == (found["single"], found["first_token_ms"])


def test_the_sides_of_a_command_line(tmp_path):
    given = race.argparse.Namespace(
        target="smollm2-135m", drafter=None, dtype="bfloat16", gguf=None, draft_gguf=None,
        python=["llama.cpp=/x/python"], options={}, side=["mine=serve --at {port}"],
    )  # fmt: skip
    sides, left_out = race.sides_of(given)
    assert left_out.keys() == {"llama.cpp", "vllm", "transformers"}
    assert sides["mine"](81) == ["serve", "--at", "81"]
    assert sides["specbench plain"](81)[-4:] == ["--drafter", "none", "--port", "81"]
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    given.gguf = str(model)
    sides, _ = race.sides_of(given)
    words = next(line for name, line in sides.items() if name == "llama.cpp plain")(81)
    assert (words[0], words[-1]) == ("/x/python", "81")
    given.python = ["vllm=/y/python"]
    sides, _ = race.sides_of(given)
    assert [*sides["vllm plain"](81)][: 1 + len(race.VLLM.split())] == ["/y/python", *race.VLLM.split()]
