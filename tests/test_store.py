from __future__ import annotations

import errno
import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from record_tables import RECORDS, with_tables
from stored_runs import finished, line_of, measurement, row_of, run_json, run_of, steps_of

from specbench.base.errors import RunError, UsageError
from specbench.base.record import to_dict
from specbench.decoding.records import Step, StepTimes
from specbench.results.lines import STEP_FIGURES, StepLists
from specbench.results.results import load_results
from specbench.results.run import VERSION
from specbench.results.store import RunStore, find_runs

pytestmark = pytest.mark.smoke

FIELDS: dict[str, Any] = {
    "run_id": "abc", "options": {}, "environment": {}, "target": {"name": "tiny"},
    "configs": [row_of("plain").to_json(), row_of("d@2").to_json()], "prompts": [],
}  # fmt: skip


RUN = run_of(FIELDS)


def row(config: str = "d@2", prompt: str = "p", repeat: int = 0, **changed: Any) -> dict[str, Any]:
    """Three steps: two drafts accepted and a bonus, one of two accepted and corrected, nothing drafted."""
    thirds = {name: [0.25, 0.5, 0.25] for name, kind in STEP_FIGURES.items() if kind is float}
    steps = steps_of(
        [2, 2, 0], [2, 1, 0], [3, 2, 1], [], [], expected_acceptance=[[1.0, 0.5], [0.75, 0.25], []],
        policy={"H_norm": [0.5, None, 0.25]},
    )  # fmt: skip
    how = finished(3.0, range(1, 8), {**steps, **thirds}, prompt_tokens=3, peak_memory_bytes=10, started=1.5)
    line = line_of(config, prompt, repeat, run_id="abc", category="chat", warnings=["steal"])
    return {**line, **how, "load_average": None, **changed}


def lines(folder: Path) -> list[bytes]:
    return (folder / "generations.jsonl").read_bytes().splitlines(keepends=True)


def fill(folder: Path, count: int = 3) -> None:
    with RunStore.create(folder, RUN) as store:
        for repeat in range(count):
            store.append(measurement(row(repeat=repeat)))


def append_raw(folder: Path, fields: dict[str, Any]) -> None:
    """A line that need not hold what it should."""
    with (folder / "generations.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


# -- writing ---------------------------------------------------------------------------------------


def test_what_was_appended_is_read_back_and_known(tmp_path):
    fill(tmp_path / "a" / "run")
    with RunStore.open(tmp_path / "a" / "run") as store:
        assert list(store.measurements()) == [measurement(row(repeat=repeat)) for repeat in range(3)]
        assert store.done_keys() == {("d@2", "p", 0, repeat, False) for repeat in range(3)}
        assert store.problems == []
        store.append(measurement(row(repeat=3)))
    assert measurement(json.loads(lines(tmp_path / "a" / "run")[-1])).key == ("d@2", "p", 0, 3, False)


def test_nothing_is_measured_twice_or_half(tmp_path):
    with RunStore.create(tmp_path, RUN) as store:
        store.append(measurement(row()))
        with pytest.raises(ValueError, match="measured already"):
            store.append(measurement(row()))
        whole = measurement(row(repeat=1))
        with pytest.raises(ValueError, match="JSON compliant"):
            store.append(replace(whole, line=structs.replace(whole.line, steal_share=float("nan"))))
        assert store.done_keys() == {measurement(row()).key}
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("kept", [1, 100, -2])
def test_a_line_cut_short_is_ignored_and_measured_again(tmp_path, kept):
    fill(tmp_path)
    file = tmp_path / "generations.jsonl"
    whole = lines(tmp_path)
    file.write_bytes(b"".join(whole[:2]) + whole[2][:kept])
    frame = load_results(tmp_path)
    assert len(frame.generations) == 2
    (problem,) = frame.problems
    assert "Line 3" in problem
    with RunStore.open(tmp_path) as store:
        assert len(store.done_keys()) == 2
        store.append(measurement(row(repeat=2)))
    assert lines(tmp_path) == whole
    assert load_results(tmp_path).problems == []


def test_a_packed_run_reads_the_same_and_is_unpacked_to_continue(tmp_path):
    fill(tmp_path)
    file, packed = tmp_path / "generations.jsonl", tmp_path / "generations.jsonl.gz"
    whole, before = lines(tmp_path), load_results(tmp_path)
    packed.write_bytes(gzip.compress(b"".join(whole)))
    file.unlink()
    assert load_results(tmp_path).generations.astype(str).equals(before.generations.astype(str))
    assert find_runs(packed) == [tmp_path]
    with RunStore.open(tmp_path) as store:
        assert len(store.done_keys()) == 3
        assert not packed.exists()
        store.append(measurement(row(repeat=3)))
    assert lines(tmp_path)[:3] == whole
    assert len(load_results(tmp_path).generations) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(b"x" * 10**6, mtime=0), "is much larger than its size says"),
        (gzip.compress(b"x" * 300, mtime=0)[:-9], "is damaged"),
        (b"no gzip", "is damaged"),
    ],
)
def test_a_packed_run_that_is_damaged_is_refused(tmp_path, content, said):
    fill(tmp_path)
    (tmp_path / "generations.jsonl").unlink()
    (tmp_path / "generations.jsonl.gz").write_bytes(content)
    with pytest.raises(UsageError, match=said):
        load_results(tmp_path)


NO_MEASUREMENTS: list[dict[str, Any]] = [
    {"steps": {**row()["steps"], "drafted": [1]}},
    {"ttft_s": "soon"},
    {"status": "perhaps"},
    {"turn": True},
]


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 40, b"{}", b"\xff\xfe", b"[" * 100_000, b"",
        *(json.dumps(row(repeat=9, **changed)).encode() for changed in NO_MEASUREMENTS),
    ],
)  # fmt: skip
def test_damaged_lines_in_the_middle_cost_nothing_but_themselves(tmp_path, damage):
    fill(tmp_path)
    whole = lines(tmp_path)
    (tmp_path / "generations.jsonl").write_bytes(whole[0] + damage + b"\n" + whole[1] + whole[2])
    frame = load_results(tmp_path)
    assert len(frame.generations) == 3
    (problem,) = frame.problems
    assert "Line 2" in problem


def test_a_failure_is_kept_until_a_success_replaces_it(tmp_path):
    failed = {key: value for key, value in row().items() if key not in ("steps", "token_ids", "ttft_s")}
    failed.update(status="failed", error="out of memory")
    with RunStore.create(tmp_path, RUN) as store:
        store.append(measurement(failed))
        assert store.done_keys() == set()
    frame = load_results(tmp_path)
    assert frame.generations["status"].tolist() == ["failed"]
    assert frame.generations[["ttft_s", "tokens_per_second"]].isna().all(axis=None)
    assert len(frame.steps) == len(frame.generations["token_ids"][0]) == 0
    with RunStore.open(tmp_path) as store:
        store.append(measurement(row()))
        assert [each.line.status for each in store.measurements()] == ["ok"]
    frame = load_results(tmp_path)
    assert frame.generations["status"].tolist() == ["ok"]
    assert frame.problems == []


def test_of_repeated_keys_the_first_counts(tmp_path):
    fill(tmp_path, 1)
    append_raw(tmp_path, row(decode_s=99.0))
    frame = load_results(tmp_path)
    assert frame.generations["decode_s"].tolist() == [3.0]
    assert frame.problems == ["1 generations are there more than once; the first of each is used."]


def test_fields_of_run_json_change_all_or_nothing(tmp_path, monkeypatch):
    with RunStore.create(tmp_path, RUN) as store:
        store.update(finished="today")
        assert run_json(tmp_path)["finished"] == "today"
        before = (tmp_path / "run.json").read_bytes()

        def full(self: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(RunError, match=r"disk is full.*What was measured before is kept"):
            store.update(finished="tomorrow")
    assert (tmp_path / "run.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "generations.jsonl", "run.json"]


# -- a full disk, a locked or read-only folder -----------------------------------------------------


def test_a_write_that_fails_halfway_leaves_nothing_behind(tmp_path, monkeypatch):
    with RunStore.create(tmp_path, RUN) as store:
        store.append(measurement(row()))
        write = os.write
        calls = []

        def half_then_full(file: int, data: bytes) -> int:
            calls.append(len(data))
            if len(calls) > 1:
                raise OSError(errno.ENOSPC, "full")
            return write(file, bytes(data[: len(data) // 2]))

        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(RunError, match=r"disk is full.*kept.*--resume"):
            store.append(measurement(row(repeat=1)))
        monkeypatch.undo()
        assert len(calls) == 2
        assert len(load_results(tmp_path).generations) == 1
        store.append(measurement(row(repeat=1)))
    assert [json.loads(line)["repeat"] for line in lines(tmp_path)] == [0, 1]


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match=r"is not a folder.*--out"):
        RunStore.create(tmp_path / "run", RUN)
    with pytest.raises(UsageError, match="is not a folder"):
        RunStore.create(tmp_path / "run" / "below", RUN)


def test_two_writers_cannot_mix(tmp_path):
    with RunStore.create(tmp_path, RUN):
        for attempt in (RunStore.open, RunStore.check_writable, lambda path: RunStore.create(path, RUN)):
            with pytest.raises(UsageError, match="Another sweep is writing"):
                attempt(tmp_path)
        assert len(load_results(tmp_path).generations) == 0  # readers are never kept out
    with pytest.raises(UsageError, match=r"holds results already.*--resume"):
        RunStore.create(tmp_path, RUN)
    RunStore.open(tmp_path).close()


# -- reading ---------------------------------------------------------------------------------------


def test_the_table_has_figures_configuration_and_steps(tmp_path):
    with RunStore.create(tmp_path, RUN) as store:
        store.append(measurement(row()))
        store.append(measurement(row(repeat=1, warmup=True)))
        plain = row(
            "plain",
            steps={**row()["steps"], "accepted": [0, 0, 0], "drafted": [0, 0, 0], "tested": [0, 0, 0]},
        )
        plain["steps"]["expected_acceptance"] = [[], [], []]
        store.append(measurement(plain))
    frame = load_results(tmp_path)
    assert frame.generations["config"].tolist() == ["d@2", "plain"]
    first, second = frame.generations.iloc[0], frame.generations.iloc[1]
    assert first["tokens_per_second"] == (7 - 1) / 3.0
    assert first[["label", "kind", "drafter", "gamma", "baseline", "target"]].tolist() == [
        "d γ=2", "speculative", "d", 2, "plain", "tiny",
    ]  # fmt: skip
    assert np.isnan(second["gamma"])
    assert np.isnan(first["load_average"])
    assert first["token_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    steps = frame.steps[frame.steps["output"] == 0]
    assert steps["expected_acceptance"].tolist() == [[1.0, 0.5], [0.75, 0.25], []]
    assert steps["alpha_sum"].tolist() == [1.5, 1.0, 0.0]
    assert steps["policy"].tolist() == [{"H_norm": value} for value in (0.5, None, 0.25)]
    assert frame.steps["draft_s"].tolist() == [0.25, 0.5, 0.25] * 2
    assert frame.steps["output"].tolist() == [0, 0, 0, 1, 1, 1]
    assert first["warnings"] == ["steal"]
    assert frame.run.run_id == "abc"


def test_the_drafts_of_a_tree_are_its_depth(tmp_path):
    """A tree of four nodes, of which two are kept, and a step that drafts nothing."""
    steps = (
        Step(
            0, 3, (5, 6, 7, 8), 2, 2, (6, 7, 1), "corrected", (1.0, 0.5), StepTimes(), passes=2,
            parents=(-1, -1, 1, 1), path=(1, 2),
        ),
        Step(1, 6, (), 0, 0, (1,), "target", (), StepTimes()),
    )  # fmt: skip
    lists = to_dict(StepLists.of(steps))
    assert [lists[name] for name in ("drafted", "nodes")] == [[2, 0], [4, 0]]
    RunStore.create(tmp_path, RUN).close()
    append_raw(tmp_path, row(steps=lists))
    assert load_results(tmp_path).steps["nodes"].tolist() == [4, 0]


def test_rows_of_another_run_or_configuration_are_left_out(tmp_path):
    with RunStore.create(tmp_path, RUN) as store:
        store.append(measurement(row()))
        store.append(measurement(row(repeat=1, run_id="other")))
        store.append(measurement(row("unheard-of")))
    frame = load_results(tmp_path)
    assert len(frame.generations) == 1
    assert [problem.split(" of ")[0] for problem in frame.problems] == ["1 lines", "1 lines"]


def test_a_run_without_rows_is_an_empty_table(tmp_path):
    RunStore.create(tmp_path, RUN).close()
    frame = load_results(tmp_path)
    assert len(frame.generations) == 0
    assert len(frame.steps) == 0
    (tmp_path / "generations.jsonl").unlink()
    assert len(load_results(tmp_path).generations) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged: it is not JSON"),
        ('{"x": ' + "[" * 100_000, "is damaged: it is not JSON"),
        ({"kind": "other"}, "does not describe a specbench sweep"),
        ({**FIELDS, "schema": 5}, "schema version 5.*Update specbench"),
        ({**FIELDS, "schema": 2}, "schema version 2.*Measure again"),
        ({**FIELDS, "schema": "1"}, "schema version is '1'"),
        ({}, "damaged: run_id is missing or invalid"),
        ({**FIELDS, "configs": 3}, "damaged: configs is missing or invalid"),
    ],
)
def test_run_json_that_cannot_be_used(tmp_path, content, message):
    if isinstance(content, dict):
        content = json.dumps({"kind": "specbench-sweep", "schema": VERSION} | content)
    (tmp_path / "run.json").write_text(content)
    for read in (load_results, RunStore.open):
        with pytest.raises(UsageError, match=message):
            read(tmp_path)


def test_lines_of_a_newer_version_are_refused(tmp_path):
    fill(tmp_path, 1)
    append_raw(tmp_path, row(repeat=1, schema=5))
    for read in (load_results, RunStore.open):
        with pytest.raises(UsageError, match="Update specbench"):
            read(tmp_path)


def test_where_there_are_no_results(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_results(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="There are no results in"):
        load_results(tmp_path)
    (tmp_path / "generations.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"it has no run\.json"):
        RunStore.open(tmp_path)


# -- derived files ---------------------------------------------------------------------------------


def test_every_record_has_its_table():
    """The page has a line for each; the site has the table there."""
    text = (Path(__file__).parents[1] / "docs" / "results-format.md").read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- (\w+) -->$", text, re.MULTILINE)
    assert sorted(shown) == sorted(name for name in RECORDS if name[0] != "_")
    assert with_tables(text).count("| field | type | meaning |") == len(shown)
