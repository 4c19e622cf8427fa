from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import (
    BASE,
    ScriptedEngine,
    cost_lines,
    describe,
    grid_of,
    make_sweep,
    measure,
    new_store,
    prompts,
    quiet,
)
from stored_runs import read_lines, run_json

from specbench.base.errors import RunError, UsageError
from specbench.base.load import LoadSnapshot, load_snapshot
from specbench.bench.axes import parse_baselines, parse_gammas
from specbench.bench.grid import SweepOptions
from specbench.bench.manifest import command_line, merge_runs, refuse_other
from specbench.bench.session import Session
from specbench.options import CacheOptions, DecodingOptions
from specbench.results.lines import CostLine
from specbench.results.results import load_results
from specbench.results.store import RunStore, read_run
from specbench.rows import OtherLibrary, conditions_of
from specbench.specs.sweeps import Closed
from specbench.sweeps import sweep

# -- γ, options, grid ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gammas"),
    [
        ("5", [5]),
        ("1,2,4", [1, 2, 4]),
        ("1..10..4", [1, 5, 9]),
        (" 1 .. 3 , 8", [1, 2, 3, 8]),
        ("4,2,2..5,256", [2, 3, 4, 5, 256]),
    ],
)
def test_ranges_of_gamma(text, gammas):
    assert parse_gammas(text) == gammas


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,,2",
        "1...8",
        "1.5",
        "1..999999999999",
        "١..٣",
        "8..1",
        "1..8..0",
        "0..4",
        "1..257",
    ],
)
def test_ranges_of_gamma_that_are_none(text):
    with pytest.raises(UsageError, match="is not a range of γ"):
        parse_gammas(text)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (SweepOptions, {"repeats": 0}, "repeats is 0"),
        (SweepOptions, {"decoding": DecodingOptions(max_new_tokens=1)}, "new tokens is 1"),
        (SweepOptions, {"warmup": -1}, "warm-ups is -1"),
        (SweepOptions, {"turns": 0}, "turns is 0"),
        (
            SweepOptions,
            {"conditions": conditions_of(temperature=[0.5]), "others": parse_baselines(["beam:4"])},
            "Beam search needs temperature 0",
        ),
        (conditions_of, {"temperature": [0.0, 0.0]}, "--temperature is given twice"),
        (conditions_of, {"arrivals": [Closed(2)]}, "needs a batch"),
    ],
)
def test_options_and_conditions_that_are_refused(make, values, message):
    with pytest.raises(UsageError, match=message):
        make(**values)


@pytest.mark.parametrize(
    ("given", "what"),
    [({"drafters": [object()]}, "drafter"), ({"drafters": [{}]}, "drafter"), ({"drafters": "lookup"}, "drafter"),
     ({"draft_policy": [object()]}, "draft_policy"), ({"target": object()}, "target")],
)  # fmt: skip
def test_a_sweep_takes_names_and_no_objects(tmp_path, given, what):
    with pytest.raises(UsageError, match=what):
        sweep(**({"target": "smollm2-135m", "drafters": ["lookup"], "out": tmp_path / "run"} | given))


def test_the_grid_has_plain_decoding_at_every_temperature():
    options = SweepOptions(
        conditions_of(temperature=(0.0, 0.7)),
        gammas=(2, 4),
        others=parse_baselines(["transformers", "assisted"]),
    )
    base = replace(BASE, caching=CacheOptions(cache="preallocated"))
    configs = grid_of(options, "none", "lookup", "small (int8)", base=base, **{"small (int8)": "f1"})
    assert [config.id for config in configs[:8]] == [
        "plain", "lookup@2", "lookup@4", "small (int8)@2", "small (int8)@4", "transformers", "transformers:lookup",
        "transformers:small (int8)",
    ]  # fmt: skip
    assert [config.id for config in configs[8:10]] == ["plain,t=0.7", "lookup@2,t=0.7"]
    assert len({config.id for config in configs}) == len({config.label for config in configs}) == 16
    assert {config.baseline for config in configs[8:]} == {"plain,t=0.7"}
    assert [config.gamma for config in configs[:8]] == [None, 2, 4, 2, 4, None, 10, None]
    assert configs[3].fingerprint == "f1"
    assert configs[1].fingerprint is None
    assert Counter(config.cache for config in configs) == {"preallocated": 10, "dynamic": 6}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], ()),
        (["beam:4", "assisted"], (OtherLibrary("assisted"), OtherLibrary("beam", 4))),
        (
            ["beam:8", "transformers", "beam:2", "transformers"],
            (OtherLibrary("transformers"), OtherLibrary("beam", 2), OtherLibrary("beam", 8)),
        ),
        (["beam"], "no baseline 'beam'"),
        (["Transformers"], "no baseline 'Transformers'"),
        (["beam:1"], "has 1 beam"),
        (["beam:65"], "has 65 beams"),
    ],
)
def test_baselines(names, found):
    if isinstance(found, str):
        with pytest.raises(UsageError, match=found):
            parse_baselines(names)
    else:
        assert parse_baselines(names) == found


# -- the plan --------------------------------------------------------------------------------------


def test_the_plan_is_a_function_of_its_arguments():
    sweep = make_sweep(prompts(3, conversations=1), repeats=3, warmup=2)
    assert sweep.plan() == sweep.plan()
    other = make_sweep(prompts(3, conversations=1), repeats=3, warmup=2, seed=1)
    assert [cell.key for cell in sweep.plan()] != [cell.key for cell in other.plan()]
    assert {cell.key for cell in sweep.plan()} == {cell.key for cell in other.plan()}


def test_the_plan_holds_every_combination_once_in_blocks():
    sweep = make_sweep(prompts(2, conversations=1), repeats=2, warmup=2)
    cells = sweep.plan()
    measured = [cell for cell in cells if not cell.warmup]
    assert len(measured) == 3 * 2 * (2 + 3)  # configurations × repeats × turns of all prompts
    assert len(cells) - len(measured) == 3 * 2
    assert all(cell.warmup for cell in cells[:6])
    assert len({cell.key for cell in cells}) == len(cells)
    for start in range(0, len(measured), 3):
        block = measured[start : start + 3]
        assert {cell.config for cell in block} == {config.id for config in sweep.configs}
        assert len({(cell.prompt, cell.turn, cell.repeat, cell.seed) for cell in block}) == 1
        assert [cell.order for cell in block] == [0, 1, 2]
    assert len({cell.seed for cell in measured}) == len(measured) / 3
    places = [(cell.prompt, cell.turn) for cell in measured[::3]]
    assert places[:5] == [("one-0", 0), ("one-1", 0), ("many-0", 0), ("many-0", 1), ("many-0", 2)]


def test_more_repeats_leave_the_plan_of_the_first_ones_as_it_was():
    few, many = make_sweep(repeats=2), make_sweep(repeats=4)
    assert few.plan() == many.plan()[: len(few.plan())]


# -- carrying it out -------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_sweep_measures_everything_and_tells_of_it(tmp_path):
    sweep = make_sweep(warmup=1)
    engine = ScriptedEngine()
    with new_store(tmp_path, sweep) as store:
        run = Session(sweep, store, engine, snapshot=quiet)
        told = [run.measured for _ in run.run()]
    assert (run.measured, run.failed, run.found) == (18, 0, 0)
    assert [row["config"] for row in read_lines(tmp_path)] == [cell.config for cell in sweep.plan()]
    assert [row["order"] for row in read_lines(tmp_path)] == [cell.order for cell in sweep.plan()]
    assert [row["warmup"] for row in read_lines(tmp_path)] == [True] * 3 + [False] * 18
    assert told == [0] * 3 + list(range(19))
    assert engine.cost_calls == [(1, 2, 3)] * 6  # between the six blocks
    written = run_json(tmp_path)
    assert written["costs"] == {
        "target_pass_s": {"1": 0.101, "2": 0.102, "3": 0.103},
        "drafter_pass_s": {"d": 0.02},
        "context_tokens": 256,
    }
    assert written["finished"] is not None
    assert written["differences"] == []
    assert len((tmp_path / "costs.jsonl").read_text().splitlines()) == 4 * 6


def test_times_of_passes_add_up_when_a_run_goes_on(tmp_path):
    class Dearer(ScriptedEngine):
        def measure_costs(self, *_: Any) -> list[CostLine]:
            return cost_lines({1: [0.09]}, {"e": [7.0]}, 256)

    few, many = make_sweep(prompts(1), repeats=1), make_sweep(prompts(1), repeats=2)
    measure(tmp_path, few)
    with (tmp_path / "costs.jsonl").open("a") as file:
        file.write('{"kind": "tar')  # a crash
    measure(tmp_path, many, Dearer())
    costs = run_json(tmp_path)["costs"]
    assert costs["target_pass_s"] == {"1": 0.0955, "2": 0.102, "3": 0.103}  # of 0.01, 0.09, 0.101 and 0.3
    assert costs["drafter_pass_s"] == {"d": 0.02, "e": 7.0}


def test_each_configuration_goes_on_from_its_own_answers(tmp_path):
    sweep = make_sweep(prompts(0, conversations=1), repeats=1, warmup=0)
    engine = ScriptedEngine(spoils=lambda config: config.id == "d@2")
    measure(tmp_path, sweep, engine)
    answers: dict[str, list[int]] = {}
    rows = iter(read_lines(tmp_path))
    for config, prompt, _ in engine.calls:
        row = next(rows)
        assert row["config"] == config
        history = answers.setdefault(config, [])
        assert list(prompt[row["turn"] + 1 :]) == history
        history += row["token_ids"]
    assert answers["plain"] == answers["d@1"] != answers["d@2"]


def test_resuming_measures_what_is_missing_on_the_same_history(tmp_path):
    sweep = make_sweep(prompts(1, conversations=1), repeats=2)
    measure(tmp_path / "whole", sweep)
    expected = [
        (row["config"], row["prompt"], row["turn"], row["repeat"], row["token_ids"])
        for row in read_lines(tmp_path / "whole")
    ]
    whole = (tmp_path / "whole" / "generations.jsonl").read_bytes()
    for cut in random.Random(0).sample(range(len(whole)), 6):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({**run_json(tmp_path / "whole"), "finished": None}))
        (folder / "generations.jsonl").write_bytes(whole[:cut])
        engine = ScriptedEngine()
        with RunStore.open(folder) as store:
            found = len(store.done_keys())
            result = Session(sweep, store, engine).run_all()
        assert [
            (r["config"], r["prompt"], r["turn"], r["repeat"], r["token_ids"]) for r in read_lines(folder)
        ] == expected
        warmups = 0 if result.measured == 0 else 3
        assert result.found + result.measured == 24
        assert len(engine.calls) == warmups + result.measured
        assert len(expected) - found == result.measured + max(0, 3 - found)


@pytest.mark.parametrize(
    "error", [RunError("There was not enough memory.", "Use less."), ValueError("/home/me/x.bin broke")]
)
def test_a_configuration_that_fails_is_recorded_and_the_rest_goes_on(tmp_path, error):
    sweep = make_sweep()
    engine = ScriptedEngine(fails=lambda config, prompt: error if config.id == "d@2" else None)
    result = measure(tmp_path, sweep, engine)
    assert (result.measured, result.failed) == (18, 6)
    failed = [row for row in read_lines(tmp_path) if row["status"] == "failed"]
    assert {row["config"] for row in failed} == {"d@2"}
    assert not any("/home" in row["error"] for row in failed)
    assert "failed.all" in [finding.id for finding in result.findings]
    frame = load_results(tmp_path)
    assert (frame.generations["status"] == "failed").sum() == 6

    with RunStore.open(tmp_path) as store:
        again = Session(sweep, store, ScriptedEngine()).run_all()
    assert (again.measured, again.failed, again.found) == (6, 0, 12)
    frame = load_results(tmp_path)
    assert (frame.generations["status"] == "ok").all()
    assert len(frame.generations) == 18


def test_a_conversation_ends_with_its_first_failure(tmp_path):
    sweep = make_sweep(prompts(0, conversations=1), repeats=1, warmup=0)
    engine = ScriptedEngine(
        fails=lambda config, prompt: RunError("no") if config.id == "d@1" and len(prompt) == 7 else None
    )
    assert measure(tmp_path, sweep, engine).failed == 2
    assert [row["error"] for row in read_lines(tmp_path) if row["config"] == "d@1"] == [
        None, "no", "An earlier turn failed, so the conversation cannot continue.",
    ]  # fmt: skip
    assert measure(tmp_path, sweep).failed == 0
    frame = load_results(tmp_path)
    turns = frame.generations.sort_values("turn").set_index("config")["token_ids"].map(list)
    assert turns["d@1"].tolist() == turns["plain"].tolist()


def test_costs_that_cannot_be_measured_stop_nothing(tmp_path):
    class NoCosts(ScriptedEngine):
        def measure_costs(self, *_: Any) -> Any:
            raise RunError("no room")

    sweep = make_sweep(prompts(1), repeats=1)
    with new_store(tmp_path, sweep) as store:
        session = Session(sweep, store, NoCosts(), snapshot=quiet).run_all()
    assert session.problem == "no room"
    assert len(read_lines(tmp_path)) == 6
    assert run_json(tmp_path)["costs"] is None


@pytest.mark.parametrize(("tie", "severity"), [(True, "note"), (False, "problem"), (None, "warning")])
def test_outputs_that_differ_from_plain_decoding_are_told(tmp_path, tie, severity):
    sweep = make_sweep(prompts(1, conversations=1), temperature=(0.0, 0.7))
    engine = ScriptedEngine(spoils=lambda config: config.gamma == 2, tie=tie)
    result = measure(tmp_path, sweep, engine)
    differences = run_json(tmp_path)["differences"]
    places = [(each["config"], each["prompt"], each["turn"], each["repeat"]) for each in differences]
    assert places == [("d@2", "many-0", 0, 0), ("d@2", "one-0", 0, 0)]
    assert {each["position"] for each in differences} == {4}
    assert {each["numerical_tie"] for each in differences} == {tie}
    found = [finding for finding in result.findings if finding.topic == "tokens-differ"]
    assert [finding.severity for finding in found] == [severity]


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="signals of POSIX")
@pytest.mark.parametrize("stops", [1, 2, 1000])
def test_a_generation_during_which_the_process_was_stopped_is_measured_again(tmp_path, stops):
    """Once: a process that is stopped all along ends, and its lines say so."""

    def stop(*_: Any) -> None:
        if len(engine.calls) <= stops:
            os.kill(os.getpid(), signal.SIGCONT)  # what a process is sent that goes on behind SIGSTOP

    sweep, engine = make_sweep(prompts(1), repeats=2, warmup=0), ScriptedEngine(fails=stop)
    always = stops == 1000
    result = measure(tmp_path, sweep, engine, snapshot=load_snapshot)
    rows = read_lines(tmp_path)
    planned = len(sweep.plan())
    assert len(rows) == result.measured == planned
    assert len(engine.calls) == (2 * planned if always else planned + 1)
    marked = [number for number, row in enumerate(rows) if "stopped" in row["warnings"]]
    assert marked == (list(range(planned)) if always else [0] if stops == 2 else [])


def test_disturbances_are_noted_line_by_line(tmp_path):
    looks = 0

    def busy() -> LoadSnapshot:
        """Every second core second goes to others, 1% is stolen."""
        nonlocal looks
        looks += 1
        return LoadSnapshot(2, 3.0, looks * 1.0, looks * 0.02, looks * 2.0, 0.0, 2000.0, 100, 90, 0)

    sweep = make_sweep(prompts(1), repeats=1, warmup=0)
    result = measure(tmp_path, sweep, snapshot=busy)
    assert [row["warnings"] for row in read_lines(tmp_path)] == [["machine-busy"]] * 3
    row = read_lines(tmp_path)[0]
    assert (row["busy_elsewhere"], row["steal_share"], row["load_average"]) == (1.0, 0.01, 3.0)
    assert {"machine-busy", "few-prompts"} <= {finding.id for finding in result.findings}
    assert run_json(tmp_path)["warnings"][0]["id"] == "few-prompts"


# -- going on with another run ---------------------------------------------------------------------


def test_a_resumed_run_grows(tmp_path):
    few, more = make_sweep(prompts(2), repeats=1), make_sweep(prompts(3), gammas=(2, 3), repeats=2)
    measure(tmp_path, few)
    with RunStore.open(tmp_path) as store:
        new = describe(more)
        refuse_other(store.run, new)
        store.replace(merge_runs(store.run, new))
        result = Session(more, store, ScriptedEngine()).run_all()
    assert (result.found, result.measured) == (4, 14)
    frame = load_results(tmp_path)
    assert Counter(frame.generations["config"]) == {"plain": 6, "d@1": 2, "d@2": 6, "d@3": 6}
    assert frame.problems == []
    run = run_json(tmp_path)
    assert [row.id for row in read_run(tmp_path).configs] == ["plain", "d@1", "d@2", "d@3"]
    assert "4" in run["costs"]["target_pass_s"]


def test_command_lines_lose_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    given = [
        "sweep", "--target", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "--drafter", "models/mine", "--drafter=self:layers=4",
        "--out=/home/me/results/x", "--prompts", "../secret/own.jsonl", "--prompts", "sets/own.jsonl", "~/me",
        "-g", "1..8", "C:\\Users\\me\\model", "org/model@main",
    ]  # fmt: skip
    assert command_line(given) == [
        "sweep", "--target", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "--drafter", "mine", "--drafter=self:layers=4",
        "--out=x", "--prompts", "own.jsonl", "--prompts", "own.jsonl", "me", "-g", "1..8", "model", "org/model@main",
    ]  # fmt: skip
