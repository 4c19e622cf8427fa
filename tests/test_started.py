"""Servers that are started here: their processes, their command lines, and the sweep over them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_runs import write_prompts
from forked import Forked, specbench
from head_files import eagle_tensors, speculators_settings, write_head

from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.manifest import command_line
from specbench.export.start import EngineDrafter, settings_of
from specbench.servers import guard
from specbench.servers.processes import EngineProcess, StartError, free_port
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.started import engine_drafters, started_engine

STUB = f"{sys.executable} {Path(__file__).with_name('engine_process.py')}"
TARGET = ModelSpec("gguf", "/models/target.gguf")


@pytest.fixture
def models(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Files that stand for a target and a drafter, and a cache folder of the test's own."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_prompts(
        tmp_path / "mine.jsonl", {f"{('talk', 'code')[n % 2]}-{n}": [f"Hello {n}"] for n in range(12)}
    )
    found = tmp_path / "target.gguf", tmp_path / "small.gguf"
    for path in found:
        path.touch()
    return found


def marked() -> list[int]:
    """Guards and processes of servers that were started with the cache folder of this test."""
    return [each.pid for each in psutil.process_iter() if is_ours(each)]


def is_ours(process: psutil.Process) -> bool:
    try:
        words, environment = process.cmdline(), process.environ()
    except (psutil.Error, OSError):
        return False
    started = guard.MARK in environment or guard.__file__ in words
    return started and environment.get("SPECBENCH_CACHE") == os.environ["SPECBENCH_CACHE"]


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def start(name: str, *more: str) -> EngineProcess:
    port = free_port()
    command = [*shlex.split(STUB), "--model", "x", *more, "--port", str(port)]
    process = EngineProcess(name, command, port, Path(f"{name}.log"))
    process.wait_until_ready(20.0)
    return process


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_server_ends_with_its_children(models):
    process = start("one")
    wait_until(lambda: len(marked()) == 3)  # guard, server and its child
    assert process.memory() > 0
    process.stop()
    assert marked() == []


def test_a_server_that_does_not_start_says_why(models):
    with pytest.raises(StartError, match="ended with code 1: error: this kind of drafts is not supported"):
        start("broken", "--spec-type", "x", "--broken", "x")
    port = free_port()
    missing = EngineProcess("missing", ["no-such-program"], port, Path("missing.log"))
    with pytest.raises(StartError, match="code 127: no-such-program: No such file"):
        missing.wait_until_ready(20.0)
    assert marked() == []


def limited(lock: Path | None, *names: str, limit: int | None = None, **more: str) -> LaunchedEngine:
    """An engine over stubs; with a lock only one of them starts at a time."""

    def command(name: str) -> Callable[[int], list[str]]:
        words = ["--alone", str(lock)] if lock is not None else []
        return lambda port: [
            *shlex.split(STUB),
            "--model",
            name,
            *words,
            *more.get(name, "").split(),
            "--port",
            str(port),
        ]

    commands = {name: command(name) for name in names}
    return LaunchedEngine(commands, Path("logs"), lambda spec: ServerEngine([spec], keys={}), limit=limit)


def test_a_server_that_does_not_fit_beside_another_is_tried_alone(models, tmp_path):
    engine = limited(tmp_path / "lock", "a", "b")
    try:
        assert not engine.fits(["a", "b"]) or engine.limit == 1
        engine.server("a")
        engine.server("b")
        assert (engine.limit, [*engine.running]) == (1, ["b"])
        engine.server("a")
        assert [*engine.running] == ["a"]
    finally:
        engine.close()
    assert marked() == []


def test_the_server_that_was_not_used_for_longest_makes_room(models):
    engine = limited(None, "a", "b", "c", limit=2, c="--spec-type x --broken x")
    try:
        assert engine.fits(["a", "b"])
        engine.server("a")
        with pytest.raises(StartError, match="not supported"):
            engine.server("c")
        assert "b" not in engine.running
        with pytest.raises(StartError):  # without another try
            engine.server("c")
        os.kill(engine._running["a"].process._guard.pid, signal.SIGTERM)
        wait_until(lambda: engine._running["a"].process.exit_code is not None)
        assert engine.server("a").servers[0].owner == "llamacpp"  # it has crashed, and was started again
    finally:
        engine.close()


# -- command lines -----------------------------------------------------------------------------------


def lines(name: str, drafter: EngineDrafter, **more: Any) -> list[list[str]]:
    engine = started_engine(name)
    made = settings_of(engine, TARGET, [drafter], gammas=(4,), **more)
    return [engine.command_line(TARGET, each.options, 8000, ("--tp", "2")) for each in made]


@pytest.mark.smoke
def test_command_lines_of_engines():
    small = EngineDrafter(parse_drafter("org/small"), ModelSpec("folder", "/models/small"))
    plain, drafting = lines("vllm", small)
    assert plain == ["vllm", "serve", "/models/target.gguf", "--tp", "2", "--port", "8000"]
    assert drafting[-4:] == ["--per-request-spec-decode-metrics", "detailed", "--port", "8000"]
    assert json.loads(drafting[drafting.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": "/models/small", "num_speculative_tokens": 4
    }  # fmt: skip
    plain, fixed, p_min = lines("llama.cpp", small)
    assert shlex.join(plain) == "llama-server --model /models/target.gguf --tp 2 --metrics --port 8000"
    assert fixed[fixed.index("--spec-draft-p-min") + 1] == "0"
    assert p_min[p_min.index("--spec-draft-p-min") + 1] == "0.6"
    assert p_min[p_min.index("--spec-draft-n-max") + 1] == "4"
    _, chain = lines("sglang", small)
    assert chain[chain.index("--speculative-eagle-topk") + 1] == "1"
    _, ngram = lines("llama.cpp", EngineDrafter("ngram-mod"))
    assert ngram[ngram.index("--spec-ngram-mod-n-max") + 1] == "4"


def test_trained_heads_are_measured_beside_ngrams_and_each_once(tmp_path):
    engine = started_engine("vllm")
    head = str(write_head(tmp_path / "head", speculators_settings(), eagle_tensors()))
    found = engine_drafters(engine, ["ngram", head, head], elsewhere=False)
    assert [(str(each.spec), each.head is not None) for each in found] == [("ngram", False), ("head", True)]
    assert [each.spec for each in engine_drafters(engine, [], elsewhere=False)] == ["ngram", "suffix"]


def test_every_own_option_is_known_to_the_engine():
    known = json.loads(Path(__file__).with_name("engine_options.json").read_text())
    for name in ("vllm", "sglang", "llama.cpp"):
        engine = started_engine(name)
        for kind in engine.ngrams:
            for each in settings_of(engine, TARGET, [EngineDrafter(kind)])[1:]:
                written = {**each.options.get("--speculative-config", {}), **each.options}
                assert written.keys() <= {*known[name]["names"], "--speculative-config"}, kind


def test_keys_are_not_stored():
    assert command_line(["--", "--api-key", "secret", "--tp", "2"]) == ["--", "--api-key", "KEY", "--tp", "2"]


# -- commands ----------------------------------------------------------------------------------------


def test_sweep_measures_a_grid_in_groups(cli, models):
    target, small = models
    result = cli(
        "sweep", "--engine", "llama.cpp:servers=2", "--engine-command", STUB, "--target", target,
        "--drafter", small, "--drafter", "ngram-mod", "--gamma", "2,4", "--draft-policy", "fixed",
        "--prompts", "mine.jsonl", "--limit", 6, "-n", 24, "--out", "run", "--quiet", "--", "--good", 4,
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in Path("run/generations.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 5 * 6 * 2
    configs = [row["config"] for row in rows if row["repeat"] == 0 and not row["warmup"]]
    assert {*configs[:12]} & {*configs[12:]} == set()  # two servers for all prompts, then the next two
    assert "2 servers fit" in result.err
    assert re.search(rf"To start small.gguf@4: .*--model {target} .*{small}.*--good 4", result.err), (
        result.err
    )
    assert marked() == []


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["sweep", "--engine", "vllm:servers=0"], ["option 'servers' of --engine", "Give at least 1"]),
        (["sweep", "--engine", "vlm"], ["no engine 'vlm'", "Choose vllm"]),
        (["sweep", "--engine", "llama.cpp"], ["llama.cpp reads GGUF files", "smollm2-135m"]),
        (["sweep", "--engine", "vllm", "--target", "none/there.gguf"], ["There is no such file"]),
    ],
)
def test_what_does_not_go_together_is_refused(cli, models, words, fragments):
    cli(*words).refused(2, *fragments)


# -- kills -------------------------------------------------------------------------------------------

_KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def kill(models: tuple[Path, Path], number: int, seconds: float) -> None:
    """Kill a sweep after some seconds, and check that nothing of it is left soon after."""
    target, small = models
    words = ["sweep", "--engine", "llama.cpp", "--engine-command", STUB, "--target", str(target)]
    words += ["--drafter", str(small), *f"--prompts mine.jsonl -n 24 --out run-{number}".split()]
    with Path("said").open("w") as said:
        process = Forked(specbench, *words, stdout=said, stderr=said, environment={"PWD": str(Path.cwd())})
        time.sleep(seconds)
        assert process.kill(_KINDS[number % 3]) != 0
    wait_until(lambda: marked() == [])


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_after_a_kill(models, number):
    kill(models, number, 1.5)
