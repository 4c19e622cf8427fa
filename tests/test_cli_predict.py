"""`specbench predict` in this process, on tiny models: logs, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Result
from tiny import save_tiny

TEXT = " and the king of the land and the queen of the land in the land is the king"


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    """Six answers, and a line that holds none."""
    lines: list[Any] = [
        {
            "prompt": f"The king {number} of the land",
            "answer": TEXT,
            "temperature": 0,
        }
        for number in range(6)
    ]
    path = tmp_path_factory.mktemp("logs") / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, [*lines, "nothing"])), encoding="utf-8")
    return path


@pytest.fixture
def predict(cli, models, log) -> Cli:
    def call(*arguments: object) -> Result:
        return cli("predict", "--answers", log, "--tokenizer", models / "small", *arguments)

    return call


@pytest.mark.smoke
def test_a_prediction_says_tokens_and_what_they_need(predict):
    code, out, err = predict("--drafter", "lookup", "--gamma", "1..3", "--target-pass-ms", 20)
    assert (code, err) == (0, "")
    assert "γ=3" in out
    assert "over plain decoding" in out
    assert "pays from a target pass of" in out
    assert "1 line is left out (7)" in " ".join(out.split())
    assert "each further token is taken to add 2%" in " ".join(out.split())


def test_all_figures_are_in_the_json(predict, models):
    drafters = (
        "--drafter",
        models / "small",
        "--drafter",
        f"lookup+{models / 'small'}",
        "--drafter",
        "suffix",
    )
    code, out, err = predict(*drafters, "--gamma", "2,4", "--target-pass-ms", 20, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["answers"], found["left_out"]) == (6, {"form": [7]})
    assert found["target_pass_from"] == "as given"
    assert set(found["costs"]["drafter_pass_s"]) == {"small (int8)", "lookup+small (int8)", "suffix"}
    assert found["costs"]["target_pass_s"] == {"1": 0.02}
    model, cascade, suffix = found["drafters"]
    assert [row["gamma"] for row in model["rows"]] == [2, 4]
    assert suffix["rows"][1]["passes_per_step"] == 0
    for each in found["drafters"]:
        for row in each["rows"]:
            assert 1 <= row["tokens_per_step"]["value"] <= row["gamma"] + 1
            assert len(row["acceptance_by_position"]) == 4
            assert row["speedup"]["value"] > 0
    assert cascade["rows"][1]["passes_per_step"] < model["rows"][1]["passes_per_step"]


def test_without_the_targets_time_there_are_no_speedups(predict):
    code, out, _ = predict("--drafter", "suffix", "--gamma", "2")
    assert code == 0
    assert "speedup" not in out
    assert "pays from a target pass of" in out
    assert "--target-pass-ms" in out


@pytest.mark.parametrize(
    "drafter", ["self:int8", "ngram:keep", "ngram:sample", "lookup|suffix", "grammar+lookup", "none"]
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(predict, drafter):
    predict("--drafter", drafter).refused(2, f"Answers alone do not tell what {drafter} would draft")


def test_a_drafter_with_another_tokenizer_is_refused(predict, tmp_path):
    from tiny import letter_tokenizer

    folder = save_tiny(tmp_path / "letters")
    letter_tokenizer().save_pretrained(folder)
    code, _, err = predict("--drafter", folder)
    assert code == 2
    assert "is not that of the answers" in err


def test_a_log_without_answers_is_refused_with_its_reasons(cli, tmp_path, models, monkeypatch):
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8")
    code, _, err = cli("predict", "--answers", tmp_path / "log.jsonl", "--tokenizer", models / "small")
    assert code == 2
    assert "does not say its temperature" in err
    none = "predict", "--answers", tmp_path / "none.jsonl"
    monkeypatch.setattr("specbench.predict.alone.load_alone", lambda *_: 1 / 0)  # before anything is loaded
    cli(*none, "--tokenizer", models / "small").refused(2, "There is no file")
    cli("predict", "--answers", tmp_path / "log.jsonl").refused(2, "Name it with --tokenizer")
