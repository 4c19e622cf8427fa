"""Published accepted lengths: reading their files, and saying how a run compares with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Cli, refusal
from stored_runs import Drafter, write_run

from specbench.base.errors import UsageError
from specbench.results.published import read_published, write_lengths
from specbench.results.results import load_results
from specbench.results.summary import Summary

FILE = """\
# Source run: https://example.org/1
# dataset: coding | temperature: 1.0 | output_len: 4096
_metadata:
  draft-model: org/head
model-x:
  thinking_on:
    1: {one}
    2: 2.38
  thinking_off:
    8: 4.06
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "published.yaml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path):
    found = read_published(write(tmp_path, FILE.format(one=1.78)))
    assert found.model == "model-x"
    assert found.lengths == {(True, 1): 1.78, (True, 2): 2.38, (False, 8): 4.06}
    assert found.header[1] == "dataset: coding | temperature: 1.0 | output_len: 4096"


@pytest.mark.parametrize(
    "text",
    [
        "", "[1]", "a: 1", "a: {thinking_on: {}}", "a: {thinking_maybe: {1: 1.5}}", "a: {thinking_on: {1: fast}}",
        "a: {thinking_on: {1: 2.5}}", "a: {thinking_on: {1: .nan}}", "a: {thinking_on: {1: 1.5}}\nb: {}", "a: {",
        "a: !!python/object/apply:os.getcwd []",
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path, text):
    assert "holds no accepted lengths" in refusal(read_published, write(tmp_path, text), kind=UsageError)


def test_a_run_beside_published_lengths(cli: Cli, tmp_path):
    run = write_run(tmp_path / "run", gammas=(1, 2, 4))
    rows = {row.config.label: row for row in Summary(load_results(run)).rows}
    one = next(row for row in rows.values() if row.config.gamma == 1)
    steps = one.steps[one.steps["drafted"] > 0]
    assert one.accepted_per_draft.value == pytest.approx(steps["accepted"].mean())
    length = one.tokens_per_draft.value
    assert length == pytest.approx(1 + steps["accepted"].mean())
    assert rows["plain"].tokens_per_draft.value != rows["plain"].tokens_per_draft.value, "it drafts nothing"

    done = cli("compare", run, write(tmp_path, FILE.format(one=f"{length:.2f}")), "--json")
    found = json.loads(done.out)
    same = [row for row in found["rows"] if row["config"] == one.config.id]
    assert [(row["gamma"], row["thinking"], row["verdict"]) for row in same] == [(1, "on", "no different")]
    assert {row["gamma"] for row in found["rows"]} == {1, 2}, "neither 4 nor 8 is in both"
    done = cli("compare", run, write(tmp_path, FILE.format(one=1.0)))
    assert (done.code, "higher" in done.out, "dataset: coding" in done.out) == (0, True, True)
    cli("compare", run, write(tmp_path, "m: {thinking_on: {16: 3.0}}")).refused(
        2, "published draft length", "γ 16"
    )
    cli("compare", run, tmp_path / "none.yaml").refused(2, "cannot be read")
    written = [Path(line) for line in cli("report", run).out.splitlines() if line.endswith(".yaml")]
    assert [path.parent for path in written] == [run / "lengths"] * len(written)
    own = [read_published(path) for path in written]
    assert {gamma for each in own for _, gamma in each.lengths} == {1, 2, 4}
    assert own[0].lengths[False, 1] == pytest.approx(length, abs=1e-4)
    assert "prompts: " in own[0].header[0]
    assert all("no different" in cli("compare", run, path).out for path in written)
    cli("compare", run, tmp_path / "none.yaml", "--metric", "speedup").refused(2, "Leave out --metric")


def test_names_of_drafters_make_files_of_their_own(tmp_path):
    drafters = tuple(Drafter(name, 0.7, 0.1) for name in ("lookup+self:int8", "lookup|self:int8", "c" * 300))
    run = write_run(tmp_path / "run", drafters=drafters, gammas=(1, 2))
    stored = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**stored, "specbench": "1\nevil: {}"}))
    paths = write_lengths(Summary(load_results(run)), tmp_path / "lengths")
    assert len({*paths}) == len([*(tmp_path / "lengths").iterdir()]) == 3
    assert {len(read_published(path).lengths) for path in paths} == {2}
