"""`specbench tune` in this process, on tiny models, with times as the tests want them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Result, write_prompts
from scripted_engine import cost_lines, taking, verifying
from stored_runs import run_json
from test_outside import MINE

import specbench.bench.engines.own
import specbench.bench.prompts
import specbench.findings.review
import specbench.tune.answer
from specbench.base.record import NO_FIGURE, Estimate
from specbench.bench.engines.own import ModelEngine
from specbench.cli import run
from specbench.predict import here
from specbench.predict.here import Prediction
from specbench.results.lines import CostLine, Generation
from specbench.results.results import Results, load_results
from specbench.results.store import read_run
from specbench.results.summary import Summary
from specbench.rows import Row
from specbench.show.answer import find_answers
from specbench.specs.drafters import Lookup
from specbench.tune import candidates, loading
from specbench.tune.candidates import GAMMAS, drafters_to_try

Tune = Callable[..., Result]


@pytest.fixture
def tune(cli, models, tmp_path, monkeypatch) -> Tune:
    """The command with two short prompts in a folder of its own; `lookup` with `auto` is twice as fast as all else.

    Of the drafters without a model only `lookup` is tried, and no cascades, unless all are asked for.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    write_prompts(
        tmp_path / "mine.jsonl", {f"{('talk', 'chat')[n % 2]}-{n}": [f"Hello {n}"] for n in range(4)}
    )
    speeds(monkeypatch, {"lookup@auto": 2.0})
    monkeypatch.setattr(specbench.findings.review, "warn_at_start", lambda _: [])
    monkeypatch.setattr(loading, "is_available", lambda: False)  # native products, and with them int4
    few = lambda given, forms, **_: list(dict.fromkeys([Lookup(), *forms, *given]))  # noqa: E731

    def call(*arguments: object, drafters: Any = few, factors: dict[str, float] | None = None) -> Result:
        if factors is not None:
            speeds(monkeypatch, factors)
        monkeypatch.setattr(loading, "drafters_to_try", drafters)
        few = ("--dtype", "float32", "-n", 4, "--minutes", 5, "--prompts", "./mine.jsonl")
        return cli("tune", "--target", models / "target", *few, *arguments)

    return call


def speeds(monkeypatch: pytest.MonkeyPatch, factors: dict[str, float], *, seconds: float = 0.01) -> None:
    """Have every generation take what is said, whatever it does, and every pass as long; all that there is is raced."""
    generate = ModelEngine.generate

    def timed(self: Any, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
        outcome = generate(self, config, prompt, *options, **named)
        tokens = max(1, len(outcome.token_ids) - 1)
        took = seconds * tokens / factors.get(config.id, 1.0) * (1 + prompt[-1] % 5 / 100)
        return taking(outcome, took, steps=verifying(outcome.steps, [seconds] * len(outcome.steps.drafted)))

    def costs(self: Any, prompt: Sequence[int], widths: Sequence[int], *_: object) -> list[CostLine]:
        return cost_lines(
            {n: [seconds] for n in widths}, {each.name: [seconds / 10] for each in self.drafters}, 256
        )

    monkeypatch.setattr(ModelEngine, "generate", timed)
    monkeypatch.setattr(ModelEngine, "measure_costs", costs)
    monkeypatch.setattr(candidates, "MIN_SHARE", 0.0)


def test_a_drafter_from_a_file_can_win(tune, tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    said = tune("--drafter", "./mine.py:Last", factors={"mine.py:Last@auto": 2.0})
    assert said.code == 0, said.err
    assert said.out.startswith("Yes: mine.py:Last auto, 2.00× [2.00, 2.00] over plain decoding")


def test_from_nothing_to_a_configuration(tune, tmp_path, models):
    said = tune("--drafter", models / "small", drafters=drafters_to_try)
    assert said.code == 0, said.err
    assert said.out.startswith("Yes: lookup auto, 2.00× [2.00, 2.00] over plain decoding")
    (folder,) = (tmp_path / "results").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-target-tune", folder.name)
    stored = run_json(folder)
    assert stored["options"]["tune"] is True
    assert "lookup@auto" in stored["tuning"]["raced"]
    assert stored["finished"]
    tried = {row.drafter for row in read_run(folder).configs} - {"none"}
    assert tried == {
        "lookup", "suffix", "self:int8", "small (int8)", "lookup+self:int8", "suffix+self:int8",
        "lookup+small (int8)", "suffix+small (int8)",
    }  # fmt: skip
    df = load_results(folder)
    assert (df.generations["status"] == "ok").all()
    assert (
        len(df.generations[df.generations["config"] == "plain"])
        == len(df.generations[df.generations["config"] == "lookup@auto"])
        == 6
    )
    assert (folder / "summary.md").read_text().startswith("**Yes: lookup auto, 2.00")
    assert "config,label" in (folder / "summary.csv").read_text()
    assert str(models) not in json.dumps(stored) + (folder / "summary.md").read_text()


def test_above_temperature_0_chains_are_verified_together_too(tune, tmp_path):
    speeds_of = {"self:int8@auto:verification=block,t=1": 2.0}
    said = tune("--temperature", 1, factors=speeds_of)
    assert said.code == 0, said.err
    assert said.out.startswith("Yes: self:int8 auto:verification=block, 2.00")
    assert "--draft-policy auto:verification=block" in said.out
    rows = _rows(tmp_path / "results")
    assert not any("block" in row.draft_policy for row in rows if row.drafter == "lookup")


def test_what_is_printed_runs(tune, tmp_path, capsys):
    said = tune("--verbose", factors={"lookup@auto": 2.0, **{f"lookup@{gamma}": 1.5 for gamma in GAMMAS}})
    (deploy,) = (line for line in said.out.splitlines() if line.startswith("Deploy:  "))
    command = deploy.removeprefix("Deploy:  specbench serve with these options, or specbench export ")
    command, _, others = command.partition("  (or ")
    assert others == "another engine)"
    assert run(["export", *shlex.split(command)]) == 0
    assert "lookup" in capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    assert run(["compare", f"{folder}:lookup@auto", f"{folder}:plain"]) == 0
    assert run(["export", str(folder), "--to", "mlx-lm"]) == 2
    assert "Measure one of these with `specbench sweep --drafter`" in capsys.readouterr().err


def test_the_command_of_the_answer_names_models_as_they_were_typed(
    tune, tmp_path, models, monkeypatch, capsys
):
    """A cascade behind a drafter that was given has its folder too; nothing stored has any."""
    small, target = f"{models / 'small'}/", str(models / "target")
    monkeypatch.setattr(sys, "argv", ["specbench", "tune", "--target", target, "--drafter", small])
    factors = {"lookup+small (int8)@auto": 2.0}
    said = tune("--drafter", small, "--quiet", drafters=drafters_to_try, factors=factors)
    assert said.code == 0, said.err
    (line,) = (line for line in said.out.splitlines() if line.startswith("Decode:  specbench generate"))
    words = shlex.split(line)[2:]
    assert words[:3] == ["generate", "--drafter", f"lookup+{small}"]
    assert words[words.index("--target") + 1] == f"{target}:dtype=float32"
    capsys.readouterr()
    assert run([*words, "-n", "3"]) == 0
    (folder,) = (tmp_path / "results").iterdir()
    df = load_results(folder)
    (answer,) = find_answers(Summary(df))
    assert "--drafter lookup+/path/to/small " in answer.command
    assert "--target /path/to/target:dtype=float32 " in answer.command
    for path in folder.iterdir():
        assert str(models).encode() not in path.read_bytes()


@pytest.mark.smoke
def test_json(tune):
    facts = tune("--json", "--quiet").json()
    assert (facts["winner"], facts["verdict"]) == ("lookup@auto", "faster")
    assert facts["speedup"] == pytest.approx(2.0)
    assert facts["export"].startswith("specbench export results/")


def test_where_speculation_does_not_pay(tune, tmp_path, monkeypatch):
    speeds(
        monkeypatch, {"plain": 1.5, "lookup@auto": 0.5}
    )  # by the factor of the fixture too, one half and 1.5
    said = tune()
    assert said.code == 0, said.err
    assert said.out.startswith("No, speculation does not pay here: ")
    assert "Decode:  specbench generate --drafter none " in said.out
    assert "specbench export" not in said.out


def test_an_interrupted_search_goes_on(tune, tmp_path, monkeypatch):
    generate, calls = ModelEngine.generate, 0

    def stop(self: Any, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return generate(self, config, prompt, *options, **named)

    with monkeypatch.context() as patch:
        patch.setattr(ModelEngine, "generate", stop)
        said = tune()
    assert said.code == 130
    (folder,) = (tmp_path / "results").iterdir()
    assert f"--out results/{folder.name} --resume" in said.err
    lines = (folder / "generations.jsonl").read_text().splitlines()
    assert len(lines) == 6
    tune("--out", folder).refused(2, "holds results already", "--resume")
    said = tune("--resume")
    assert said.code == 0, said.err
    assert f"Continuing results/{folder.name}." in said.err
    assert said.out.startswith("Yes: lookup auto, 2.00")
    assert (folder / "generations.jsonl").read_text().splitlines()[:6] == lines
    tune("--resume").refused(2, "no unfinished run of `specbench tune`")
    assert tune("--resume", "--out", folder).code == 0


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--drafter", "ngram:keep"), ("ngram:keep", "Leave keep out")),
        (("--max-new-tokens", "1"), ("new tokens is 1", "at least 2")),
        (("--minutes", "-1"), ("--minutes is -1",)),
        (("--drafter", "lookup|suffix"), ("lookup|suffix cannot be predicted", "sweep --until sure")),
        (("--resume",), ("no unfinished run of `specbench tune` in results/",)),
    ],
)
def test_bad_input(tune, tmp_path, arguments, fragments):
    tune(*arguments).refused(2, *fragments)
    assert not (tmp_path / "results").exists()


def differing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what drafts be much faster on some prompts and slower on others."""
    generate = ModelEngine.generate

    def noisy(self: Any, config: Row, prompt: Sequence[int], *options: Any, **named: Any) -> Generation:
        outcome = generate(self, config, prompt, *options, **named)
        factor = (0.4, 3.0)[sum(prompt) // 2 % 2]  # both in either category
        return outcome if config.kind == "plain" else taking(outcome, outcome.decode_s * factor)

    monkeypatch.setattr(ModelEngine, "generate", noisy)


def test_on_a_machine_too_busy_to_decide_the_setting_is_provisional(
    tune, tmp_path, models, monkeypatch, capsys
):
    """Others use the machine all along, and 12 blocks do not tell what is fast on some prompts only."""
    differing(monkeypatch)
    faster = Prediction(Estimate(1.5, None, None, 4), NO_FIGURE)
    monkeypatch.setattr(
        here,
        "predict_rows",
        lambda _, sweep, *__: ({row.id: faster for row in sweep.configs[1:]}, {}),
    )
    said = "Verdicts are provisional: other programs used the processor during 9 of 9 generations."
    monkeypatch.setattr(Results, "disturbance", said)
    said = tune("-v")
    assert said.code == 0, said.err
    headline, *details = said.out.split("\n\n")[0].splitlines()
    assert headline.startswith("Not known yet: the provisional choice is lookup auto, ")
    assert (
        "Other programs used the processor during 9 of 9 generations. A quiet machine needs less time"
        in " ".join(details)
    )
    assert "specbench export" not in said.out
    (folder,) = (tmp_path / "results").iterdir()
    assert run_json(folder)["tuning"]["answer"]["headline"] == headline


def _rows(folder: Path) -> list[Row]:
    return [row for path in folder.glob("*/run.json") for row in read_run(path.parent).configs]
