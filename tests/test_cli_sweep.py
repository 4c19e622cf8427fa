"""`specbench sweep` in this process, on tiny models."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runs import Cli, Result, write_prompts
from scripted_engine import ScriptedEngine, make_sweep, new_store, prompts
from stored_runs import run_json
from tiny import save_tiny

import specbench.base.load
import specbench.bench.engines.own
import specbench.bench.environment
import specbench.models.prepare
from specbench.base.errors import RunError
from specbench.bench.grid import Sweep
from specbench.bench.session import Session
from specbench.cli.sweep_display import show_cell
from specbench.results.results import load_results


@pytest.fixture
def sweep(cli, models, tmp_path, monkeypatch) -> Cli:
    """The command with a small grid and two short prompts, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "mine.jsonl", {"chat-a": ["Hello there"], "talk-b": ["One", "Two"]})

    def call(*arguments: object) -> Result:
        few = ("--target", models / "target", "--dtype", "float32", "--prompts", "./mine.jsonl", "-n", 6)
        grid = ("--draft-policy", "fixed", "--gamma", "2", "--repeats", 1, "--drafter", "self:int8")
        return cli("sweep", *few, *grid, *arguments)

    return call


@pytest.mark.smoke
def test_a_sweep_from_beginning_to_end(sweep, tmp_path, models):
    code, out, err = sweep(
        "--drafter", models / "small", "--baseline", "transformers", "--baseline", "assisted"
    )
    assert code == 0, err
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-target", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock", "costs.jsonl", "generations.jsonl", "run.json", "summary.csv", "summary.md",
    ]  # fmt: skip
    frame = load_results(folder)
    labels = [
        "plain", "self:int8 γ=2", "small (int8) γ=2", "transformers generate", "transformers prompt lookup",
        "transformers assisted, small (int8)",
    ]  # fmt: skip
    assert frame.generations["label"].value_counts().to_dict() == dict.fromkeys(labels, 3)
    assert (frame.generations["status"] == "ok").all()
    # float32 and greedy: everybody says the same.
    assert (
        frame.generations.groupby(["prompt", "turn"])["token_ids"]
        .agg(lambda c: len({tuple(each) for each in c}))
        .eq(1)
        .all()
    )
    run_fields = run_json(folder)
    assert run_fields["differences"] == []
    assert run_fields["finished"]
    assert set(run_fields["costs"]["drafter_pass_s"]) == {"self:int8", "small (int8)"}
    assert str(tmp_path) not in json.dumps(run_fields)
    assert str(models) not in (folder / "generations.jsonl").read_text() + json.dumps(run_fields)
    assert run_fields["command"][:3] == ["sweep", "--target", "target"]
    for label in labels[:4]:
        assert label in out
        assert label in (folder / "summary.csv").read_text()
        assert label in (folder / "summary.md").read_text()
    (answer, *_) = (folder / "summary.md").read_text().split("\n\n")
    assert " ".join(out.split()).startswith(re.sub(r"\\(.)", r"\1", answer.strip("*")))
    assert f"specbench report results/{folder.name}" in err
    assert "few prompts" not in err
    assert "warning: 2 prompts say little about others." in err


def test_a_stopped_sweep_goes_on(sweep, tmp_path, monkeypatch):
    generate = specbench.bench.engines.own.ModelEngine.generate
    calls = 0

    def stop(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:  # of these two for predictions
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(specbench.bench.engines.own.ModelEngine, "generate", stop)
        code, out, err = sweep()
    assert code == 130
    (folder,) = (tmp_path / "results").iterdir()
    assert f"Interrupted. 2 of 6 generations are in results/{folder.name}" in err
    assert f"--out results/{folder.name} --resume" in err
    assert "plain" in out  # the table so far
    assert "goodput" not in out, "no limits are given"
    assert run_json(folder)["finished"] is None

    code, out, err = sweep("--resume")  # finds the unfinished run by itself
    assert code == 0, err
    assert f"Continuing results/{folder.name}: 2 of 6 generations are there." in err
    assert len(load_results(folder).generations) == 6
    assert len(list((tmp_path / "results").iterdir())) == 1

    sweep("--out", folder).refused(2, "holds results already", "Add --resume")
    sweep("--out", "nosuch", "--resume").refused(2, "There is no run in nosuch")
    assert sweep("--out", folder, "--resume")[0] == 0
    assert sweep()[0] == 0
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_a_run_goes_on_with_its_own_options(sweep, cli, models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "target")  # a run keeps no paths
    assert sweep("--out", "run").code == 0
    lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "generations.jsonl").write_text("".join(lines[:-3]))
    again = cli("sweep", "--out", "run", "--resume")
    assert again.code == 0, again.err
    assert "3 of 6 generations are there" in again.err
    assert cli("sweep", "--out", "run", "--resume", "--gamma", "2,3").code == 0
    assert load_results("run").generations["config"].nunique() == 3
    described = run_json(tmp_path / "run")
    for word, value in (("--engine-command", "rm"), ("--drafter", "./mine.py:Mine")):
        (tmp_path / "run" / "run.json").write_text(
            json.dumps({**described, "command": ["sweep", word, value]})
        )
        cli("sweep", "--out", "run", "--resume").refused(2, f"made with {word} {value}", "Give it again")


def test_a_run_may_grow_but_not_with_what_cannot_be_compared(sweep, tmp_path, models, monkeypatch):
    drafter, out = tmp_path / "small", tmp_path / "out"
    shutil.copytree(models / "small", drafter)
    asked = ("--out", out, "--drafter", drafter)
    assert sweep(*asked)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(specbench.bench.environment, "processor_name", lambda: "Another CPU")
        sweep(*asked, "--resume").refused(2, "is Another CPU now", "Give another --out")
    for more, fragment in (
        (("--dtype", "bfloat16"), "target's dtype"),
        # Of pairs of longer and shorter outputs, each stored once, every one would count as a difference.
        (("-n", 12, "--gamma", "3"), "--max-new-tokens of this run was 6, and is 12 now"),
        (("--ignore-eos", "--gamma", "3"), "--ignore-eos of this run was False"),
        (("--cache", "preallocated"), "cache of plain of this run was dynamic"),
    ):
        sweep(*asked, "--resume", *more).refused(2, fragment, "Give another --out")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    code, _, err = sweep(*asked, "--resume", "--gamma", "2,3")
    assert code == 0, err
    names = ("plain", *(f"{name}@{gamma}" for name in ("self:int8", "small (int8)") for gamma in (2, 3)))
    assert load_results(out).generations["config"].value_counts().to_dict() == dict.fromkeys(names, 3)
    shutil.rmtree(drafter)
    save_tiny(drafter, seed=2, layers=1)
    sweep(*asked, "--resume").refused(2, "drafter of small (int8) γ=2", "Give another --out")


def test_failures_are_told_and_tried_again(sweep, tmp_path, monkeypatch):
    generate = specbench.bench.engines.own.ModelEngine.generate

    def untimed(*_: Any, **__: Any) -> Any:
        raise RunError("no room")

    def fail(self: Any, config: Any, *arguments: Any, **options: Any) -> Any:
        if config.id != "plain":
            raise RunError("There was not enough memory for this configuration.")
        return generate(self, config, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(specbench.bench.engines.own.ModelEngine, "generate", fail)
        patch.setattr(specbench.bench.engines.own.ModelEngine, "measure_costs", untimed)
        code, _, err = sweep()
    assert code == 1
    assert err.count("Single forward passes could not be timed: no room") == 1
    (out,) = (tmp_path / "results").iterdir()
    assert "3 generations failed; to measure them again, add --resume." in err
    assert "generations of self:int8 γ=2 failed: There was not enough memory for this configuration." in err
    assert sweep("--resume")[0] == 0  # finds the run by itself
    assert (load_results(out).generations["status"] == "ok").all()


def test_several_baselines_are_rows_of_a_sweep(sweep, tmp_path):
    asked = [
        "--out",
        tmp_path / "run",
        *["--baseline", "transformers", "--baseline", "beam:2", "--baseline", "beam:3"],
    ]
    code, _, err = sweep(*asked)
    assert code == 0, err
    assert "tokens differ" not in err
    frame = load_results(tmp_path / "run")
    beams = [f"transformers beam search, {count} beams" for count in (2, 3)]
    labels = ["plain", "self:int8 γ=2", "transformers generate", *beams]
    assert frame.generations["label"].value_counts().to_dict() == dict.fromkeys(labels, 3)
    assert (frame.generations["status"] == "ok").all()
    rated = frame.generations[frame.generations["log_probability"].notna()]
    assert {*rated["label"]} == {"plain", *beams}
    assert (rated["log_probability"] < 0).all()
    summary = frame.table().set_index("label")
    assert summary["identical_share"].notna().to_dict() == {
        **dict.fromkeys(labels, True), **dict.fromkeys(["plain", *beams], False)
    }  # fmt: skip
    assert summary["log_probability"].notna().sum() == 3
    assert "searches for more probable answers" in (tmp_path / "run" / "summary.md").read_text()
    lines = (tmp_path / "run" / "generations.jsonl").read_text().splitlines()
    (tmp_path / "run" / "generations.jsonl").write_text("".join(f"{line}\n" for line in lines[:-4]))
    other_order = ("--baseline", "beam:3", "--baseline", "beam:2", "--baseline", "transformers")
    code, _, err = sweep(*asked[:2], "--resume", *other_order)
    assert code == 0, err
    assert len(load_results(tmp_path / "run").generations) == 15


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--gamma", "8..1"), ("not a range of γ",)),
        (("--resume",), ("no run of `specbench sweep` in results/. Name one with --out",)),
        (("--temperature", "-1"), ("temperature is -1.0",)),
        (("--prompts", "nowhere.jsonl"), ("no prompt set or file",)),
        (("--dtype", "int8", "--baseline", "transformers"), ("The target is int8",)),
        (("--drafter", "ngram:keep"), ("ngram:keep", "Leave keep out")),
        (
            ("--baseline", "beam:4", "--temperature", "1"),
            ("Beam search needs temperature 0", "--temperature 0"),
        ),
    ],
)
def test_bad_input(sweep, tmp_path, arguments, fragments):
    sweep(*arguments).refused(2, *fragments)
    assert not (tmp_path / "results").exists()


# -- what is measured --------------------------------------------------------------------------------


@pytest.fixture
def planned(cli, models, tmp_path, monkeypatch) -> Callable[..., Sweep]:
    """What a sweep with a default target would measure."""
    found: list[Sweep] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "specbench.cli.sweep_run.run_session", lambda session, *_, **__: found.append(session.sweep)
    )

    def plan(*arguments: object) -> Sweep:
        result = cli("sweep", "--target", models / "target", *arguments)
        assert result.code == 0, result.err
        return found[-1]

    return plan


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [((), 12), (("--limit", "5"), 5), (("--prompts", "code"), 13), (("--prompts", "chat"), 12)],
)
def test_twelve_prompts_are_taken_unless_sets_are_named(planned, arguments, prompts):
    assert len(planned(*arguments).prompts) == prompts


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        ((), "plain, lookup auto, lookup γ=1, lookup γ=2"),
        (("--temperature", "0.8"), "plain, T=0.8, lookup γ=1, T=0.8"),
        (("-t", "0", "-t", "0.8"), "plain, lookup auto, lookup γ=1"),
        (("--cache", "bit-exact", "-g", "3"), "plain, lookup auto, lookup γ=3"),
        (("--draft-policy", "auto:max=4"), "plain, lookup auto:max=4"),
    ],
)
def test_what_generate_does_by_default_is_measured(planned, arguments, rules):
    assert ", ".join(config.label for config in planned(*arguments).configs).startswith(rules)


# -- the display -----------------------------------------------------------------------------------


def test_progress_is_shown(tmp_path):
    shown: list[str] = []
    progress = SimpleNamespace(update=lambda stage, done, total, note: shown.append(f"{stage} {done} {note}"))
    sweep = make_sweep(prompts(2, conversations=1), repeats=2)
    engine = ScriptedEngine(fails=lambda c, p: RunError("no") if c.id == "d@2" and len(p) > 7 else None)
    with new_store(tmp_path, sweep) as store:
        session = Session(sweep, store, engine)
        for doing in session.run():
            show_cell(session, doing, progress)  # type: ignore[arg-type]
    assert any("warming up: d γ=1" in text for text in shown)
    assert shown[-1] == "measuring 30 30 of 30, 2 failed"
    assert not session.problem
