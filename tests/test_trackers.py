"""Trackers: what they are given of a sweep and of a training, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from specbench.base.errors import RunError, UsageError
from specbench.base.trackers import open_tracker
from specbench.train.settings import Measured, TrainingProgress
from specbench.train.tracking import TrackedTraining


class Recorder:
    """A tracker, or a tracker's module, that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def __getattr__(self, name: str):
        return lambda *arguments, **options: self.calls.append((name, arguments, options))

    def values(self) -> list[tuple[dict, int]]:
        return [arguments for name, arguments, _ in self.calls if name == "log"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio(name, monkeypatch):
    module = Recorder()
    monkeypatch.setitem(sys.modules, name, module)
    tracker = open_tracker(name, "run", {"target": "t"})
    tracker.log({"lookup γ=2/speedup": 1.5}, 3)
    tracker.end()
    begun, logged, ended = module.calls
    assert begun[2]["project"] == "specbench"
    assert (begun[2]["name"], begun[2]["config"]["target"]) == ("run", "t")
    assert logged == ("log", ({"lookup γ=2/speedup": 1.5},), {"step": 3})
    assert ended[0] == "finish"


def test_mlflow_allows_few_characters_in_names(monkeypatch):
    module = Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    tracker = open_tracker("mlflow", "run", {"target": "t"})
    tracker.log({"lookup+self:int8 γ=2/speedup": 1.5}, 3)
    tracker.end()
    assert [name for name, _, _ in module.calls] == [
        "set_experiment",
        "start_run",
        "log_params",
        "log_metrics",
        "end_run",
    ]
    assert module.calls[3][1:] == (({"lookup and self_int8 gamma_2/speedup": 1.5},), {"step": 3})


def test_what_is_not_there_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        open_tracker("wandb", "run", {})

    def refuse(**_: object) -> None:
        raise ValueError("no key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    with pytest.raises(RunError, match=r"wandb cannot begin a run \(ValueError: no key\)"):
        open_tracker("wandb", "run", {})


def test_a_sweep_gives_its_measurements(cli, models, tmp_path, monkeypatch):
    module = Recorder()
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.chdir(tmp_path)
    arguments = (
        "--target",
        models / "target",
        "--drafter",
        "lookup",
        "--gamma",
        2,
        "--draft-policy",
        "fixed",
    )
    sizes = ("--dtype", "float32", "--limit", 2, "-n", 6, "--repeats", 1, "--warmup", 1, "--ignore-eos", "-q")
    said = cli("sweep", *arguments, *sizes, "--out", "run", "--log-to", "trackio")
    assert said.code == 0, said.err
    assert [module.calls[0][0], module.calls[-1][0]] == ["init", "finish"]
    logged = [(values[0], step["step"]) for name, values, step in module.calls if name == "log"]
    assert [step for _, step in logged] == [1, 2, 3, 4]
    names = {name for values, _ in logged for name in values}
    assert names == {
        *(f"plain/{each}" for each in ("tokens_per_second", "ttft_s", "tokens_per_step")),
        *(f"lookup γ=2/{each}" for each in ("tokens_per_second", "ttft_s", "tokens_per_step", "speedup")),
    }


def sweep_of(models, *more):
    what = ("--target", models / "target", "--drafter", "lookup", "--gamma", 2, "--draft-policy", "fixed")
    sizes = ("--dtype", "float32", "--limit", 1, "-n", 4, "--repeats", 1, "--warmup", 0, "--ignore-eos", "-q")
    return ("sweep", *what, *sizes, "--out", "run", "--log-to", "wandb", *more)


def test_a_sweep_outlives_its_tracker(cli, models, tmp_path, monkeypatch):
    calls = []

    def fail(*_: object, **__: object) -> None:
        calls.append(1)
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: None, log=fail, finish=fail))
    monkeypatch.chdir(tmp_path)
    said = cli(*sweep_of(models))
    assert said.code == 0, said.err
    assert said.err.count("warning: wandb takes no more values (ConnectionError: no network).") == 1
    assert len(calls) == 2  # a value, and the end
    assert len((tmp_path / "run" / "generations.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("command", ["sweep", "train"])
def test_a_tracker_that_cannot_begin_is_refused_before_anything_is_loaded(
    cli, models, tmp_path, monkeypatch, command
):
    from specbench.bench.engines import own
    from specbench.models import prepare

    def refuse(**_: object) -> None:
        raise ValueError("no key")

    def load(*_: object, **__: object) -> None:
        raise AssertionError("loads")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    monkeypatch.setattr(own, "load_engine", load)
    monkeypatch.setattr(prepare, "prepare", load)
    monkeypatch.chdir(tmp_path)
    training = (
        "train",
        "--target",
        models / "target",
        "--minutes",
        1,
        "--out",
        "head",
        "--log-to",
        "wandb",
        "-q",
    )
    said = cli(*(sweep_of(models) if command == "sweep" else training))
    said.refused(1, "wandb cannot begin a run (ValueError: no key)")
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_stored(
    cli, models, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    said = cli(*sweep_of(models))
    assert said.code == 2
    assert "wandb is not installed" in said.err
    assert not (tmp_path / "run").exists()


def test_a_training_gives_its_steps_and_is_still_shown():
    tracker, shown = Recorder(), Recorder()
    progress: TrainingProgress = TrackedTraining(tracker, shown)
    progress.report_writing(10, 20, None)
    progress.report_step(1, 9, 2.5, 60.0)
    progress.report_measurement(Measured(1, 1024, 2.5, 1.4, (0.5, 0.2), {"chat": 1.3}), best=True)
    assert tracker.values() == [
        ({"loss": 2.5}, 1),
        (
            {
                "tokens": 1024.0, "tokens_per_step": 1.4, "accepted/1": 0.5, "accepted/2": 0.2,
                "tokens_per_step/chat": 1.3,
            },
            1,
        ),
    ]  # fmt: skip
    assert [name for name, _, _ in shown.calls] == ["report_writing", "report_step", "report_measurement"]
