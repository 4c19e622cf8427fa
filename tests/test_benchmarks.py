"""The benchmark scripts on tiny and scripted models: they run, continue where they stopped, and their figures fit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import aa
import gpu
import overhead
import pytest
import vs_transformers
from scripted_engine import TARGET, ScriptedEngine, taking

from specbench.bench.prompts import load_prompts
from specbench.options import DecodingOptions
from specbench.results.lines import Generation
from specbench.results.results import load_results
from specbench.rows import Row


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The line of JSON that a benchmark ends with."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


# --- A GPU, dry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "compiled"),
    [("1.5b", False), ("7b", False), pytest.param("1.5b", True, marks=pytest.mark.slow)],
)
def test_every_side_of_the_gpu_benchmark_runs_on_a_cpu(target, compiled, tmp_path, capsys, monkeypatch):
    """``compiled``: what ``torch.compile`` captures is run as it is."""
    monkeypatch.setattr(gpu, "BATCHES", (3,))
    if compiled:
        monkeypatch.setitem(gpu.COMPILERS, "cpu", "eager")
    sizes = ["--tokens", "24", "--prompt-tokens", "8", "--rounds", "1", "--out", str(tmp_path / "gpu.json")]
    assert gpu.main(["--device", "cpu", "--tiny", "--target", target, *sizes]) == 0
    found = last_json(capsys)
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8")) == found
    assert found["skipped"] == {
        target: [] if compiled else ["compiled passes (a CPU has native ones instead)"]
    }
    steps = {row["side"]: row["tokens_per_step"] for row in found["sides"]}
    kinds = ("plain", *(f"γ=4 with {each}" for each in gpu.TARGETS[target]))
    places = [*(f"{cache} cache" for cache in sum(gpu.PHASES, ())[not compiled :]), "batch 3"]
    assert steps.keys() == {
        "transformers generate, dynamic cache", "transformers generate, static cache",
        *(f"{kind}, {place}" for kind in kinds for place in places),
    }  # fmt: skip
    drafted = {side: each for side, each in steps.items() if side.startswith("γ")}
    for side, each in steps.items():
        assert each == (pytest.approx(next(iter(drafted.values()))) if side in drafted else 1.0)
    assert min(drafted.values()) > 2
    assert all(row["draft_ms"] > 0 for row in found["sides"] if row["side"] in drafted and row["batch"] == 1)
    assert set(found["ratios"][target]) >= {"best plain / best generate", f"{kinds[1]}, static cache / plain"}


# --- A/A ------------------------------------------------------------------------------------------


class SlowedEngine(ScriptedEngine):
    """The configuration that is slowed decodes for longer by a share, and all times vary from prompt to prompt."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def generate(
        self, config: Row, prompt: Sequence[int], decoding: DecodingOptions, *, seed: int
    ) -> Generation:
        outcome = super().generate(config, prompt, decoding, seed=seed)
        noise = 1.0 + 0.03 * math.sin(len(self.calls) + sum(prompt))
        slower = 1.0 + self.share if config.drafter == aa.SLOWED else 1.0
        return taking(outcome, outcome.decode_s * noise * slower)


@pytest.mark.parametrize(("share", "verdict"), [(0.1, "slower"), (0.0, "cannot tell"), (-0.1, "faster")])
def test_a_slowed_configuration_is_found_and_itself_is_not(tmp_path, share, verdict):
    sweep = aa.make_sweep(0, load_prompts(["all"]), aa.parse(["--tokens", "9"]))
    judged = aa.run_one(sweep, SlowedEngine(share), TARGET, tmp_path)
    assert judged["itself"]["low"] < 1.0 < judged["itself"]["high"]
    assert judged["slowed"]["verdict"] == verdict
    assert judged["slowed"]["ratio"] == pytest.approx(1 / (1 + share), rel=0.02)
    assert judged["failed"] == 0
    shown = aa.line_of(0, judged)
    assert "covers 1" in shown
    assert verdict in shown
    results = load_results(tmp_path)
    assert len(results.generations) == 8 * 3 * 4
    assert set(results.generations["new_tokens"]) == {9}


# --- Overhead -------------------------------------------------------------------------------------


def test_overhead_measures_steps_that_accept_what_they_should(capsys):
    arguments = "--gammas 0 2 --vocabularies 300 --contexts 20 60 --seconds 0.02"
    assert overhead.main(arguments.split()) == 0
    result = last_json(capsys)
    lines = {(line["mode"], line["gamma"]): line for line in result["steps"]}
    assert set(lines) == {(mode, gamma) for mode in ("greedy", "sampling") for gamma in (0, 2)}
    for (mode, gamma), line in lines.items():
        tokens = line["step_us"] / line["token_us"]
        assert 1.0 - 0.02 <= tokens <= gamma + 1.02
        if mode == "greedy":  # target and drafter agree on every argmax
            assert tokens == pytest.approx(gamma + 1, rel=0.02)
        assert line["floor_us"] > 0
    growth = {(line["drafter"], line["mode"]) for line in result["growth"]}
    assert ("model", "greedy, penalty") in growth
    assert all(len(line["step_us"]) == 2 for line in result["growth"])


# --- Against transformers --------------------------------------------------------------------------


def test_all_ways_give_the_same_tokens_and_ratios_to_generate(models, capsys):
    target, small = str(models / "target"), str(models / "small")
    words = ["--target", target, "--assistant", small, "--dtype", "float32", "--limit", "2", "--tokens", "8",
             "--drafter-dtype", "float32", "--setting", f"{small}@3", "--setting", "lookup@heuristic"]  # fmt: skip
    assert vs_transformers.main(words) == 0
    result = last_json(capsys)
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {
        "generate", "assisted, defaults", "assisted, 5 and no threshold", "prompt lookup",
        "specbench plain", "specbench lookup@auto", "specbench lookup@heuristic", "specbench small (float32)@3",
    }  # fmt: skip
    assert all((row["identical"], row["tie"], row["differs"]) == (2, 0, 0) for row in rows.values())
    assert rows["generate"]["over_generate"] == [1.0, None, None], "two prompts are too few"
    best = max(rows[f"assisted, {way}"]["over_generate"][0] for way in ("defaults", "5 and no threshold"))
    plain = rows["specbench plain"]
    assert plain["over_best_assisted"][0] == pytest.approx(plain["over_generate"][0] / best, rel=0.01)
    assert "/" not in "".join([result["target"], result["assistant"], *result["setting"]])
