"""The benchmark scripts on tiny and scripted models: they run, continue where they stopped, and their figures fit."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import aa
import aa_servers
import auto_regret
import batch
import crowd
import engines
import gpu
import many
import overhead
import parts
import passes
import pytest
import soak
import torch
import verdicts
import vs_transformers
from footprint import Footprint
from scripted import enumerate_outcomes
from scripted_engine import TARGET, ScriptedEngine
from scripted_server import Manner, ScriptedServer
from tiny import save_tiny, tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode

from specbench.backends.torch.kernels.surgery import pack_linears
from specbench.base.errors import UsageError
from specbench.bench.engines.engine import Outcome
from specbench.bench.grid import SweepConfig
from specbench.bench.prompts import load_prompts
from specbench.decoding.distributions import Scores
from specbench.decoding.drafts import Draft, GrowingTree, StepOutcome
from specbench.decoding.protocols import run_to_end
from specbench.decoding.sampling import Greedy, Randomness
from specbench.decoding.verdicts import METHODS, Method, without_replacement
from specbench.drafters.plain import NoDraft
from specbench.export.start import EngineDrafter
from specbench.models.target import load_target
from specbench.options import DecodingOptions, LoadOptions
from specbench.policies import FixedLength
from specbench.results.results import load_results
from specbench.specs.drafters import parse_drafter


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


def test_the_gpu_benchmark_goes_on_where_a_drafter_fails(capsys, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise UsageError("It does not fit.")

    monkeypatch.setattr(gpu, "wrap_drafter", fails)
    monkeypatch.setattr(gpu, "BATCHES", (2,))
    sizes = ["--tokens", "8", "--prompt-tokens", "8", "--rounds", "1"]
    assert gpu.main(["--device", "cpu", "--tiny", "--target", "7b", *sizes]) == 0
    found = last_json(capsys)
    assert "γ=4 with 0.5b, static cache (It does not fit.)" in found["skipped"]["7b"]
    assert "γ=4 with head, batch 2" in {row["side"] for row in found["sides"]}


def test_the_gpu_benchmark_names_what_it_has_no_time_for(capsys):
    assert gpu.main(["--device", "cpu", "--tiny", "--target", "7b", "--minutes", "0"]) == 0
    assert "plain, static cache (no time left)" in last_json(capsys)["skipped"]["7b"]
    if not torch.cuda.is_available():
        assert gpu.main([]) == 1
        assert "no GPU that torch sees" in capsys.readouterr().err


# --- Passes ---------------------------------------------------------------------------------------


def test_passes_over_several_requests_are_timed_against_single_ones(models, capsys):
    sizes = ["--dtype", "float32", "--contexts", "24", "--rounds", "2", "--requests", "1", "3"]
    assert batch.main(["--target", str(models / "target"), *sizes]) == 0
    rows = last_json(capsys)["passes"]
    assert [(row["requests"], row["rows"]) for row in rows] == [(1, 1), (1, 5), (3, 1), (3, 5)]
    for row in rows:
        assert row["slotted_ratio"] == pytest.approx(row["separate_ms"] / row["slotted_ms"], rel=0.1)


def test_ways_to_decode_many_prompts_are_timed_in_turn(models, capsys):
    arguments = (
        "--dtype float32 --drafter ngram --sets chat --prompts 4 --tokens 6 --batch 3 --group 2 --rounds 1"
    )
    more = ["--spread", "0.5", "--rules", "auto", "fixed:gamma=2"]
    assert many.main(["--target", str(models / "target"), *arguments.split(), *more]) == 0
    found = last_json(capsys)
    assert found["parted"] == 0
    assert found["tokens_per_second"].keys() == {*many.WAYS, "auto", "fixed:gamma=2"}
    assert found["ratios"].keys() == {
        "one / alone", "plain / one", "plain / transformers", "auto / plain", "fixed:gamma=2 / plain",
    }  # fmt: skip
    assert found["requests"]["auto"].keys() == {"all", "chat"}


def test_a_soak_accounts_for_every_request(models, capsys):
    arguments = ["--target", str(models / "target"), "--drafters", "none", "lookup", "self:layers=1"]
    sizes = ["--minutes", "0", "--requests", "25", "--rate", "500", "--sigterm", "0", "--cancel", "0.02"]
    assert soak.main([*arguments, *sizes, "--prompts", "6"]) == 0
    found = last_json(capsys)
    assert found["rounds"] == 1
    assert sum(found["ends"][kind] for kind in ("done", "cancelled", "failed")) == 25
    assert found["ends"]["compared"] > 5


def test_a_footprint_counts_tensors_but_not_fake_ones():
    before = Footprint.now().tensors
    real = torch.zeros(1 << 20)
    with FakeTensorMode():
        fake = torch.zeros(1 << 20)
    assert Footprint.now().tensors - before == real.nbytes == fake.nbytes


def test_a_crowd_of_clients_leaves_nothing_behind(models, capsys):
    arguments = ["--target", str(models / "target"), "--drafter", "self:layers=1", "--pool-tokens", "2048"]
    assert crowd.main([*arguments, "--requests", "200", "--rounds", "2", "--at-once", "40"]) == 0
    found = last_json(capsys)
    assert found["requests"] == sum(found["ends"].values()) == 200
    assert found["ends"].keys() - {"sent away"} == {
        "whole", "stream", "left", "vanished", "half", "rubbish", "wrong request", "large", "slow", "late"
    }  # fmt: skip
    assert found["engine"].keys() == {"length", "cancelled"}


def test_passes_are_measured_against_memory(models, capsys, monkeypatch):
    monkeypatch.setattr(passes, "BUFFER_BYTES", 1 << 16)
    code = passes.main(
        ["--target", str(models / "target"), "--dtype", "float32", "--contexts", "8", "40", "--rounds", "5"]
    )
    result = last_json(capsys)
    # Two layers of query and output, key and value, gate and up, down; and the head. Four bytes each.
    weights = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + result["vocab_size"] * 32
    assert result["weight_gb"] == round(4 * weights / 1e9, 6)
    assert result["cache_mb"] == {
        "8": round(2 * 2 * 16 * 8 * 4 / 1e6, 3),
        "40": round(2 * 2 * 16 * 40 * 4 / 1e6, 3),
    }
    good = result["share_of_memory_traffic"] >= passes.SHARE and result["longest_over_allowed"] <= 1.0
    assert code == (0 if good else 1)
    assert all(value > 0 for value in (*result["pass_ms"].values(), *result["bandwidth_gb_s"].values()))


@pytest.mark.parametrize("pack", [True, False])
def test_weights_are_counted_once(pack):
    model = tiny_llama(vocab_size=100)
    if pack:
        pack_linears(model)
    assert passes.weight_bytes(model) == 4 * (2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32) + 100 * 32)


# --- Parts ----------------------------------------------------------------------------------------


def test_parts_are_kept_and_a_line_cut_short_is_dropped(tmp_path):
    file = tmp_path / "parts.jsonl"
    parts.Parts(file, {"seed": 1}).add({"n": 1})
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"n": 2')
    again = parts.Parts(file, {"seed": 1})
    assert again.done == [{"n": 1}]
    again.add({"n": 3})
    assert parts.Parts(file, {"seed": 1}).done == [{"n": 1}, {"n": 3}]


def test_parts_of_other_settings_are_refused(tmp_path):
    file = tmp_path / "parts.jsonl"
    parts.Parts(file, {"seed": 1})
    with pytest.raises(SystemExit, match="other settings"):
        parts.Parts(file, {"seed": 2})


def test_the_busy_process_ends_with_its_block():
    import psutil

    mine = psutil.Process()
    before = set(mine.children())
    with parts.busy_core():
        (child,) = set(mine.children()) - before
        assert child.is_running()
    assert not child.is_running()


# --- A/A ------------------------------------------------------------------------------------------


class SlowedEngine(ScriptedEngine):
    """The configuration that is slowed decodes for longer by a share, and all times vary from prompt to prompt."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def generate(
        self, config: SweepConfig, prompt: Sequence[int], decoding: DecodingOptions, *, seed: int
    ) -> Outcome:
        outcome = super().generate(config, prompt, decoding, seed=seed)
        noise = 1.0 + 0.03 * math.sin(len(self.calls) + sum(prompt))
        slower = 1.0 + self.share if config.id == aa.SLOWED else 1.0
        return replace(outcome, decode_s=outcome.decode_s * noise * slower)


@pytest.mark.parametrize(("share", "verdict"), [(0.1, "slower"), (0.0, "cannot tell"), (-0.1, "faster")])
def test_a_slowed_configuration_is_found_and_itself_is_not(tmp_path, share, verdict):
    given = aa.parse(["--tokens", "9"])
    sweep = aa.make_sweep(0, load_prompts(["all"]), given)
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


def test_an_interval_too_wide_to_be_given_misses_nothing():
    wide = {"ratio": 1.5, "low": None, "high": None, "verdict": "cannot tell"}
    part = {aa.ITSELF: wide, aa.SLOWED: wide, "failed": 0, "named": [], "warnings": []}
    figures = aa.summary([part])
    assert (figures["covered"], figures["slower"], figures["median_width"]) == (1, 0, None)
    assert "1.50× [too few to say]" in aa.line_of(0, part)
    assert "covers 1" in aa.line_of(0, part)


def test_sweeps_differ_in_prompts_and_order():
    given = aa.parse([])
    prompts = load_prompts(["all"])
    first, again, second = (aa.make_sweep(number, prompts, given) for number in (0, 0, 1))
    assert first.plan() == again.plan()
    assert [prompt.id for prompt in first.prompts] != [prompt.id for prompt in second.prompts]


def test_a_sweep_that_ran_out_of_time_continues(tmp_path, monkeypatch):
    sweep = aa.make_sweep(
        0, load_prompts(["all"]), aa.parse(["--tokens", "5", "--limit", "2", "--repeats", "2"])
    )
    engine = SlowedEngine(0.1)
    looks = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(aa, "time", SimpleNamespace(monotonic=lambda: next(looks)))
        with pytest.raises(aa.TimeUpError):
            aa.run_one(sweep, engine, TARGET, tmp_path, until=9)  # looks at the clock after each generation
    assert len(engine.calls) == 10
    aa.run_one(sweep, engine, TARGET, tmp_path)
    assert len(load_results(tmp_path).generations) == 16
    assert len(engine.calls) == 16 + 4 + 4  # the warm-ups of a process are its own


def test_the_pause_is_a_share_of_the_step(monkeypatch):
    clock = SimpleNamespace(t=0.0)

    def tick() -> float:
        clock.t += 0.0001  # waiting awake takes time as well
        return float(clock.t)

    def sleep(seconds: float) -> None:
        clock.t += seconds

    monkeypatch.setattr(aa, "time", SimpleNamespace(perf_counter=tick, sleep=sleep))
    slowed = aa.Slowed(NoDraft(), 0.1)
    slowed.begin([1])
    run_to_end(slowed.propose([1], 4, FixedLength(2), Greedy(), Randomness(0)))
    began = clock.t
    clock.t += 5.0
    slowed.update(StepOutcome([1], 0, torch.empty(0)))
    assert clock.t - began == pytest.approx(5.5, abs=0.002)


def test_aa_continues_from_its_file(models, tmp_path, capsys, monkeypatch):
    common = ["--target", str(models / "target"), "--limit", "2", "--tokens", "5", "--repeats", "1",
              "--resume", str(tmp_path / "aa.jsonl")]  # fmt: skip
    assert aa.main([*common, "--sweeps", "1"]) in (0, 1)
    first = last_json(capsys)
    assert first["sweeps"] == 1
    assert first["failed_generations"] == 0
    assert aa.main([*common, "--sweeps", "2"]) in (0, 1)
    second = last_json(capsys)
    assert (second["sweeps"], second["complete"]) == (2, True)
    assert second["mean_slowed"] > 0
    monkeypatch.setattr(aa, "load", lambda _: pytest.fail("everything is measured already"))
    assert aa.main([*common, "--sweeps", "2"]) in (0, 1)
    assert last_json(capsys) == second
    assert [path.name for path in tmp_path.iterdir()] == ["aa.jsonl"]


# --- Exports to engines -----------------------------------------------------------------------------


def test_the_last_step_is_complete_beside_engines_that_draft_beyond_the_end(models):
    target = load_target(str(models / "target"), LoadOptions(dtype="float32", device="cpu"))
    itself = EngineDrafter(parse_drafter(str(models / "target")))
    prompts = load_prompts(("all",), (), 2)
    texts: dict[bool, list[str]] = {False: [], True: []}
    for beyond, kept in ((False, [1, 1, 0, 0]), (True, [1, 1, 1, 1])):
        for each in engines.ours(target, itself, "", prompts, 4, 4, beyond=beyond):
            assert (each.tokens, each.kept_at) == (4, kept)
            texts[beyond].append(each.text)
    assert texts[False] == texts[True]


# --- A/A over servers ------------------------------------------------------------------------------


def test_aa_over_a_server_continues_from_its_file(tmp_path, capsys):
    with ScriptedServer(Manner(owner="llamacpp")) as server:
        common = ["--server", server.url, "--limit", "3", "--tokens", "6", "--repeats", "2",
                  "--resume", str(tmp_path / "aa.jsonl")]  # fmt: skip
        assert aa_servers.main([*common, "--sweeps", "2", "--minutes", "0"]) == 3
        assert not last_json(capsys)["complete"]
        assert aa_servers.main([*common, "--sweeps", "1"]) in (0, 1)
        first = last_json(capsys)
        assert (first["sweeps"], first["failed_generations"]) == (1, 0)
        answers = [body for body in server.asked if body["max_tokens"] == 6 and body.get("ignore_eos")]
        # Warm-ups of a process are its own, and the first one was interrupted after one of them.
        assert len(answers) == 3 * 2 * 2 + 2 + 1
        assert aa_servers.main([*common, "--sweeps", "2"]) in (0, 1)
        second = last_json(capsys)
        assert (second["sweeps"], second["complete"], second["server"]) == (2, True, server.url)
        asked = len(server.asked)
        assert aa_servers.main([*common, "--sweeps", "2"]) in (0, 1)
        assert last_json(capsys) == second
        assert len(server.asked) == asked
    assert [path.name for path in tmp_path.iterdir()] == ["aa.jsonl"]


def test_aa_over_conversations_says_who_is_named(tmp_path, capsys):
    forgets = {"timings": {"draft_n": 0, "draft_n_accepted": 0, "cache_n": 0}}
    arguments = ["--conversations", "--sweeps", "1", "--limit", "3", "--tokens", "6", "--repeats", "1"]
    for facts, quiet in (({}, 1), (forgets, 0)):
        with ScriptedServer(Manner(owner="llamacpp", facts=facts)) as server:
            code = aa_servers.main(["--server", server.url, *arguments])
            assert max(len(body["messages"]) for body in server.asked) > 1
        printed = capsys.readouterr().out.splitlines()
        assert json.loads(printed[-1])["quiet"] == quiet
        assert ("cache-lost" in printed[0]) == (quiet == 0)
        assert quiet or code == 1


def test_aa_over_a_server_that_is_none_is_one_sentence(tmp_path):
    with ScriptedServer(Manner(models=b"<html>")) as server, pytest.raises(SystemExit) as ended:
        aa_servers.main(["--server", server.url, "--sweeps", "1"])
    assert "does not speak the OpenAI protocol" in str(ended.value)


def test_aa_over_servers_counts_intervals_that_cover_1():
    def part(low: float | None, high: float | None, failed: int = 0) -> dict[str, Any]:
        judged = {"ratio": 1.0, "low": low, "high": high, "verdict": "cannot tell"}
        return {aa.ITSELF: judged, "failed": failed, "named": [], "warnings": []}

    figures = aa.coverage([part(0.9, 1.1), part(1.01, 1.2), part(None, None, failed=2)])
    assert (figures["sweeps"], figures["covered"], figures["failed_generations"]) == (3, 2, 2)
    assert "MISSES 1" in aa.line_of(0, part(1.01, 1.2))


def test_a_server_that_is_started_ends_with_its_block():
    import psutil

    says = (
        "import sys; print('as tiny on http://127.0.0.1:81/v1 (Ctrl-C', file=sys.stderr, flush=True); input()"
    )
    before = set(psutil.Process().children())
    with aa_servers.started([sys.executable, "-c", says]) as address:
        assert address == "http://127.0.0.1:81/v1"
        (child,) = set(psutil.Process().children()) - before
    assert not child.is_running()
    refuses = "import sys; sys.exit('specbench: Nothing can listen there.')"
    ended = pytest.raises(SystemExit, match="has not started: specbench: Nothing can listen there")
    with ended, aa_servers.started([sys.executable, "-c", refuses]):
        pytest.fail("it has started")


# --- Overhead -------------------------------------------------------------------------------------


def test_overhead_measures_steps_that_accept_what_they_should(capsys):
    arguments = ["--gammas", "0", "2", "--vocabularies", "300", "--contexts", "20", "60", "--seconds", "0.02"]
    assert overhead.main(arguments) == 0
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


@pytest.fixture
def compared(models, tmp_path) -> list[str]:
    target, small = str(models / "target"), str(models / "small")
    return ["--target", target, "--assistant", small, "--dtype", "float32", "--limit", "2", "--tokens", "8",
           "--drafter-dtype", "float32", "--setting", f"{small}@3", "--setting", "lookup@heuristic",
           "--resume", str(tmp_path / "vs.jsonl")]  # fmt: skip


def test_all_ways_give_the_same_tokens_and_ratios_to_generate(compared, capsys, monkeypatch):
    assert vs_transformers.main(compared) == 0
    result = last_json(capsys)
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {
        "generate", "assisted, defaults", "assisted, 5 and no threshold", "prompt lookup",
        "specbench plain", "specbench lookup@auto", "specbench lookup@heuristic", "specbench small (float32)@3",
    }  # fmt: skip
    assert all((row["identical"], row["tie"], row["differs"]) == (2, 0, 0) for row in rows.values())
    assert rows["generate"]["over_generate"] == [1.0, 1.0, 1.0]
    best = max(rows["assisted, defaults"]["over_generate"][0],
               rows["assisted, 5 and no threshold"]["over_generate"][0])  # fmt: skip
    plain = rows["specbench plain"]
    assert plain["over_best_assisted"][0] == pytest.approx(plain["over_generate"][0] / best, rel=0.01)
    assert "/" not in "".join([result["target"], result["assistant"], *result["setting"]])

    monkeypatch.setattr(
        vs_transformers, "load_ways", lambda *_: pytest.fail("everything is measured already")
    )
    assert vs_transformers.main(compared) == 0
    assert last_json(capsys) == result


def test_the_assistant_is_measured_in_int8_too_and_a_way_can_be_left_out(compared, capsys, monkeypatch):
    quantized: list[Any] = []
    honest = vs_transformers.int8_assistant
    monkeypatch.setattr(
        vs_transformers, "int8_assistant", lambda *given: quantized.append(honest(*given)) or quantized[-1]
    )
    more = ["--limit", "1", "--assistant-int8", "torch", "--without", "prompt lookup"]
    assert vs_transformers.main([*compared[:-2], *more]) == 0
    rows = {row["name"]: row for row in last_json(capsys)["rows"]}
    assert "prompt lookup" not in rows
    assert {name for name in rows if "int8" in name} == {
        "assisted, defaults, torch int8 assistant", "assisted, 5 and no threshold, torch int8 assistant",
    }  # fmt: skip
    # Assisted generation is compared with at its best, in whatever precision that is.
    best = max(row["over_generate"][0] for name, row in rows.items() if name.startswith("assisted"))
    plain = rows["specbench plain"]
    assert plain["over_best_assisted"][0] == pytest.approx(plain["over_generate"][0] / best, rel=0.01)
    (assistant,) = quantized
    linears = [module for module in assistant.modules() if type(module).__name__ == "Linear"]
    assert linears
    assert {type(module).__module__ for module in linears} == {"torch.ao.nn.quantized.dynamic.modules.linear"}


def test_outputs_that_differ_are_reported(compared, capsys, monkeypatch):
    honest = vs_transformers.specbench_way

    def spoilt(target: Any, drafter: str, rule: str, options: Any) -> tuple[str, Any]:
        name, way = honest(target, drafter, rule, options)

        def run(prompt: list[int], count: int) -> Any:
            taken = way(prompt, count)
            return taken._replace(tokens=[*taken.tokens[:-1], (taken.tokens[-1] + 1) % 200])

        return name, run if rule == "heuristic" else way

    monkeypatch.setattr(vs_transformers, "specbench_way", spoilt)
    assert vs_transformers.main(compared) == 1
    rows = {row["name"]: row for row in last_json(capsys)["rows"]}
    assert rows["specbench lookup@heuristic"]["differs"] == 2
    assert rows["specbench plain"]["differs"] == 0


def test_it_stops_when_the_time_is_over(compared, capsys):
    assert vs_transformers.main([*compared, "--minutes", "0"]) == 3
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--setting", "lookup"], ["--peer", "nobody"], ["--without", "generate"]]
)
def test_a_setting_or_peer_that_is_none_is_refused(arguments):
    with pytest.raises(SystemExit) as stopped:
        vs_transformers.parse(arguments)
    assert stopped.value.code == 2


# --- Verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_verdict_keeps_as_many_tokens_as_expected(seed):
    """Against the verdicts themselves, over all tosses of a drawn tree."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(6, 4, generator=generator).mul(1.5).softmax(-1) for _ in range(2))
    for parents in ((-1, 0, 1), (-1, -1, 0, 0, 1)):
        tree, random = GrowingTree(), Randomness(seed)
        for node in range(-1, len(parents)):
            children = parents.count(node)
            if children:
                tree.add(node, without_replacement(Scores(q[node + 1], normalized=True), children, random))
        draft = tree
        for way in ("naive", "recursive", "traversal"):
            found = enumerate_outcomes(partial(_kept_by, METHODS[way], draft, p))
            expected = sum(length * weight for (length,), weight in found.items())
            rows = partial(_row, p)
            assert verdicts.KEPT[way](draft, rows) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_capped_hsd_keeps_exactly_what_block_verification_keeps(length):
    generator = torch.Generator().manual_seed(length)
    for _ in range(20):
        p = torch.randn(length + 1, 5, generator=generator).mul(2).softmax(-1)
        q = torch.randn(length, 5, generator=generator).mul(2).softmax(-1)
        draft = Draft([int(row.multinomial(1, generator=generator)) for row in q], q=q)
        kept = {way: verdicts.KEPT[way](draft, partial(_row, p)) for way in ("hsd", "block")}
        assert kept["hsd"] == pytest.approx(kept["block"], abs=1e-5)
        assert kept["hsd"] <= length


def _row(p: torch.Tensor, node: int) -> torch.Tensor:
    return p[node + 1]


def _kept_by(method: Method, draft: Draft, p: torch.Tensor, dice: Any) -> tuple[int]:
    return (len(method.walk(draft, partial(_row, p), dice).path),)


def test_verdicts_are_compared_on_the_same_drafts(tmp_path, capsys):
    save_tiny(tmp_path / "target")
    save_tiny(tmp_path / "small", seed=1, layers=1)
    arguments = [
        "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "small"), "--tokens", "12", "--gamma", "3",
        "--drafter-dtype", "float32", "--tree", "static-tree:nodes=4,depth=2", "--out", str(tmp_path / "kept"),
    ]  # fmt: skip
    assert verdicts.main([*arguments, "--steps", "6"]) == 0
    first = last_json(capsys)
    assert verdicts.main([*arguments, "--steps", str(first["chain/steps"] + 1)]) == 0
    more = last_json(capsys)
    assert more["prompts"] > first["prompts"]
    assert more["chain/block"]["ratio"] >= 1
    assert more["tree/traversal"]["tokens_per_step"] > more["chain/rejection"]["tokens_per_step"] > 1
    arguments[-1] += "-chain"
    assert verdicts.main([*arguments, "--shape", "chain", "--steps", "6"]) == 0
    assert not any(key.startswith("tree") for key in last_json(capsys))


# --- auto beside fixed draft lengths ----------------------------------------------------------------


def test_auto_is_held_against_each_length_in_rounds_that_can_be_resumed(tmp_path):
    """A step takes 1 s without drafts; of the lengths 2 is best for prompts 0 to 2, and 4 for the last one."""
    seconds = {None: 1.0, "auto": 0.5, "fixed:gamma=2": 0.4, "fixed:gamma=4": 0.6}
    order: list[str | None] = []

    def decode(prompt: Sequence[int], plan: Any) -> Any:
        name = None if plan is None else plan.name
        order.append(name)
        slower = 2.0 if prompt == [3] and name == "fixed:gamma=2" else 1.0
        times = SimpleNamespace(total_s=slower * seconds[name])
        return SimpleNamespace(
            steps=[SimpleNamespace(times=times, tokens=(1, 1), gamma=0 if plan is None else 2)]
        )

    makers = auto_regret.policies((2, 4))
    done = parts.Parts(tmp_path / "rounds.jsonl", {})
    auto_regret.play(done, 2, [[0], [1], [2], [3]], makers, decode, until=-math.inf)
    assert not done.done
    auto_regret.play(done, 1, [[0], [1], [2], [3]], makers, decode)
    again = parts.Parts(tmp_path / "rounds.jsonl", {})
    auto_regret.play(again, 2, [[0], [1], [2], [3]], makers, decode)
    assert [(part["prompt"], part["repeat"]) for part in again.done] == [
        (p, r) for r in (0, 1) for p in range(4)
    ]
    turns = [tuple(order[at : at + 4]) for at in range(0, len(order), 4)]
    assert len(set(turns)) > 1, "the order differs by round"
    assert all(set(turn) == set(seconds) for turn in turns)
    found = auto_regret.summarize(again.done, list(makers))
    assert found["best"] == "γ=2"
    assert found["speedup"]["auto"].value == pytest.approx(2.0)
    assert found["over"]["γ=4"].value == pytest.approx(1.2)
    assert found["over_best"].value == pytest.approx((0.8**3 * 1.6) ** 0.25)
    assert found["over_held_out"].value == pytest.approx((0.8**3 * 1.6) ** 0.25)
    assert "auto over γ=2, the best here: 0.95" in auto_regret.text_of(found)


def test_the_comparison_of_auto_runs_with_real_models(tmp_path, capsys):
    save_tiny(tmp_path / "target")
    sizes = ["--limit", "2", "--tokens", "8", "--rounds", "1", "--gammas", "1,3", "--drafter", "lookup"]
    code = auto_regret.main(["--target", str(tmp_path / "target"), *sizes])
    found = last_json(capsys)
    assert code == (0 if found["over_best"][0] >= 0.97 else 1)
    assert found["rounds"] == 2
    assert set(found["over"]) == {"γ=1", "γ=3"}
    assert auto_regret.main(["--target", str(tmp_path / "none"), *sizes]) == 2
