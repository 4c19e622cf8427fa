"""What results tell of trained heads: their training, and how they do by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stored_runs import Drafter, change_run, write_run

from specbench.results.results import Results, load_results
from specbench.results.summary import Summary
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
    sheet = tables.drafter_sheets(Summary(df))["Trained heads"]
    assert [row[1] for row in sheet.rows] == ["code", "story", EVIL] * 2
    steps, rows = df.steps, df.generations
    for row in Summary(df).categories:
        chosen = rows.index[(rows["config"] == row.config.id) & (rows["category"] == row.category)]
        mine = steps[steps["output"].isin(chosen)]
        assert row.tokens_per_step.value == pytest.approx(mine["emitted"].sum() / len(mine))
        first, second = ((mine["accepted"] > at).sum() / (mine["tested"] > at).sum() for at in (0, 1))
        assert (row.first_accepted.value, row.second_accepted.value) == pytest.approx((first, second))
    assert [row[3] for row in sheet.rows[:3]] == ["1.70", "–", "–"]


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(content, "_figures", lambda df, folder: ([], ""))


@pytest.mark.usefixtures("no_figures")
def test_the_report_says_where_a_head_loses(df, folder, tmp_path):
    rows, sheet = Summary(df).categories, tables.drafter_sheets(Summary(df))["Trained heads"]
    mine = (row for row in rows if row.config.id == "head (int8)@2")
    worst = min(mine, key=lambda row: row.first_accepted.value)
    assert f"head (int8) γ=2 drafts worst on {worst.category}: " in "\n".join(sheet.notes)
    slower = {row.config.label for row in rows if row.verdict == "slower"}
    assert {note.partition(" is slower")[0] for note in sheet.notes if " is slower" in note} == slower
    _, (page, markdown) = write_report(folder, tmp_path)
    for text in (page.read_text(encoding="utf-8"), markdown.read_text(encoding="utf-8")):
        assert "Trained heads" in text
        assert "first accepted" in text
        assert EVIL not in text


def test_runs_without_trained_heads_say_nothing_of_them(tmp_path):
    df = load_results(run_with(tmp_path / "run", None))
    assert list(tables.drafter_sheets(Summary(df))) == ["Acceptance by position"]


def test_a_damaged_story_is_left_out(tmp_path):
    df = load_results(run_with(tmp_path / "run", {HEAD.name: {**TRAINING, "tokens": -1}}))
    assert ["heads" in each for each in df.problems] == [True]
    assert "Trained heads" not in tables.drafter_sheets(Summary(df))
    assert len(df.done)
