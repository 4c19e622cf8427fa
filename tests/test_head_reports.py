"""What results tell of trained heads: their training, and how they do by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from stored_runs import Drafter, change_run, write_run

from specbench.models.training_metadata import TrainingMetadata
from specbench.results.heads import best_measurement, distinct_trainings, head_rows
from specbench.results.results import Results, load_results
from specbench.results.summary import categorize
from specbench.show import report as content
from specbench.show import tables
from specbench.show.report import write_report

HEAD, FREE = Drafter("head (int8)", 0.4, 0.1, spread=0.2), Drafter("lookup", 0.6, 0.001)
EVIL = "<b>chat</b>"
TRAINING: dict[str, Any] = {
    "kind": "eagle",
    "tokens": 400_000,
    "measured": [
        {"tokens": 0, "tokens_per_step": 1.01, "accepted": [0.01], "categories": {"code": 1.0, EVIL: 1.02}},
        {"tokens": 300_000, "tokens_per_step": 1.5, "accepted": [0.4, 0.3], "categories": {"code": 1.7}},
        {"tokens": 600_000, "tokens_per_step": 1.4, "accepted": [0.35, 0.3], "categories": {"code": 1.6}},
    ],
}


def run_with(path: Path, heads: dict[str, Any] | None) -> Path:
    """A run with a head and without, in three categories."""
    categories = ("code", "story", EVIL)
    write_run(
        path, drafters=(HEAD, FREE), gammas=(2, 4), categories=categories, prompts_per_category=3, tokens=24
    )
    return path if heads is None else change_run(path, heads=heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return run_with(tmp_path_factory.mktemp("results") / "heads", {HEAD.name: TRAINING})


@pytest.fixture(scope="module")
def df(folder) -> Results:
    return load_results(folder)


def test_heads_are_told_by_category(df):
    heads = head_rows(df)
    assert [(row.cell.config.id, row.cell.category) for row in heads] == [
        (f"head (int8)@{gamma}", category) for gamma in (2, 4) for category in ("code", "story", EVIL)
    ]
    steps, rows = df.steps, df.generations
    for row in heads:
        config, category = row.cell.config.id, row.cell.category
        chosen = rows.index[(rows["config"] == config) & (rows["category"] == category)]
        mine = steps.take(pd.Series(steps.row).isin(chosen).to_numpy())
        assert row.cell in categorize(df)
        assert row.cell.tokens_per_step.value == pytest.approx(mine["emitted"].sum() / len(mine))
        assert row.first == pytest.approx((mine["accepted"] > 0).sum() / (mine["tested"] > 0).sum())
        assert row.second == pytest.approx((mine["accepted"] > 1).sum() / (mine["tested"] > 1).sum())
        assert row.trained == 1.7 if category == "code" else pd.isna(row.trained)


def test_the_best_measure_is_that_of_the_head_that_was_kept(df):
    told = distinct_trainings(df.run.heads)
    assert told == {HEAD.name: msgspec.convert(TRAINING, TrainingMetadata)}
    assert best_measurement(told[HEAD.name]).tokens == 300_000
    assert distinct_trainings({"x": TrainingMetadata(kind="eagle")}) == {}


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(content, "_figures", lambda df, folder: ([], ""))


@pytest.mark.usefixtures("no_figures")
def test_the_report_says_where_a_head_loses(df, folder, tmp_path):
    rows, sheet = head_rows(df), tables.drafter_sheets(df)["Trained heads"]
    worst = min((row for row in rows if row.cell.config.id == "head (int8)@2"), key=lambda row: row.first)
    assert f"head (int8) γ=2 drafts worst on {worst.cell.category}: " in "\n".join(sheet.notes)
    slower = {row.cell.config.label for row in rows if row.cell.verdict == "slower"}
    assert {note.partition(" is slower")[0] for note in sheet.notes if " is slower" in note} == slower
    _, (page, markdown) = write_report(folder, tmp_path)
    for text in (page.read_text(encoding="utf-8"), markdown.read_text(encoding="utf-8")):
        assert "Trained heads" in text
        assert "first accepted" in text
        assert EVIL not in text


@pytest.mark.usefixtures("no_figures")
def test_the_figures_of_the_training_stand_in_a_table(df, folder, tmp_path):
    sheet = tables.drafter_sheets(df)["Training"]
    assert sheet.headings == [
        "drafter", "tokens trained on", "tokens/step", "1. accepted", "2. accepted", "3. accepted", "4. accepted",
    ]  # fmt: skip
    assert sheet.rows[1] == ["head (int8)", "300,000", "1.50", "40%", "30%", "–", "–"]
    assert len(sheet.rows) == 3
    assert "head (int8) is the head after 300,000 tokens." in sheet.notes
    _, (page, markdown) = write_report(folder, tmp_path)
    for file in (page, markdown):
        assert "300,000" in file.read_text(encoding="utf-8")


def test_a_head_that_drafts_alone_and_in_a_cascade_is_drawn_once(tmp_path):
    heads = {FREE.name: TRAINING, HEAD.name: TRAINING, "x": {"kind": "eagle3"}}
    sheets = tables.drafter_sheets(load_results(run_with(tmp_path / "run", heads)))
    assert {row[0] for row in sheets["Training"].rows} == {FREE.name}


def test_runs_without_trained_heads_say_nothing_of_them(tmp_path):
    df = load_results(run_with(tmp_path / "run", None))
    assert list(tables.drafter_sheets(df)) == ["Acceptance by position"]


def test_a_damaged_story_is_left_out(tmp_path):
    df = load_results(run_with(tmp_path / "run", {HEAD.name: {**TRAINING, "tokens": -1}}))
    assert ["heads" in each for each in df.problems] == [True]
    assert head_rows(df) == []
    assert len(df.done)
