"""Servers that are started here: their processes, their command lines, and the search and the sweep over them."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_runs import Cli, write_prompts
from forked import Forked, specbench
from head_files import eagle_tensors, speculators_settings, write_head
from regret import FakeClock
from scripted_engine import ScriptedEngine, quiet

from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import Sweep, SweepOptions, server_rows
from specbench.bench.manifest import command_line, describe_run, open_run
from specbench.bench.prompts import load_prompts
from specbench.bench.session import Session
from specbench.export.start import EngineDrafter, EngineSetting, StartedEngine, settings_of
from specbench.options import DecodingOptions
from specbench.results.lines import Generation, ServerAnswer
from specbench.results.run import TargetModel
from specbench.rows import Row
from specbench.servers import guard
from specbench.servers.processes import EngineProcess, StartError, free_port
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.started import engine_drafters, started_engine
from specbench.tune.search import Search
from specbench.tune.tries import choose

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
        assert engine.starts["a"].seconds > 0
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


def test_trained_heads_are_tried_beside_ngrams_and_each_once(tmp_path):
    engine = started_engine("vllm")
    head = str(write_head(tmp_path / "head", speculators_settings(), eagle_tensors()))
    found = engine_drafters(engine, ["ngram", head, head], usual=True, elsewhere=False)
    assert [str(each.spec) for each in found] == ["ngram", "suffix", "head"]
    assert [each.head is not None for each in found] == [False, False, True]


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


# -- the search --------------------------------------------------------------------------------------


class TimedEngine(ScriptedEngine):
    """Servers whose speeds are known, on a clock that only they move: ``rate`` is the acceptance of a draft token by
    family, ``limit`` how many servers fit at a time, and ``drift`` slows everything down in a wave over time.
    """

    def __init__(
        self,
        clock: FakeClock,
        settings: Mapping[str, EngineSetting],
        *,
        rate: Mapping[str, float],
        step_s: tuple[float, float] = (0.1, 0.01),
        limit: int | None = None,
        drift: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.clock, self.settings, self.rate, self.step_s = clock, settings, rate, step_s
        self.limit, self.drift = limit, drift
        self.running: dict[str, None] = {}
        self.began: list[str] = []
        self._random = random.Random(seed)

    def fits(self, names: Sequence[str]) -> bool:
        for name in names:
            if self.limit is None or len(self.running) < self.limit:
                self.use(name)
        return all(name in self.running for name in names)

    def use(self, name: str) -> None:
        if name not in self.running:
            self.began.append(name)
            self.clock.seconds += 5.0
        self.running.pop(name, None)
        while self.limit is not None and len(self.running) >= self.limit:
            del self.running[next(iter(self.running))]
        self.running[name] = None

    def start_s(self, name: str) -> float:
        return 0.0 if name in self.running else 5.0

    def encode(self, prompt: Any, answers: Any) -> Any:
        return prompt.id

    def generate(self, config: Row, prompt: Any, decoding: DecodingOptions, *, seed: int) -> Generation:
        self.use(config.drafter)
        setting = self.settings[config.drafter]
        rate, tokens, done, steps = self.rate.get(setting.family, 0.0), decoding.max_new_tokens, 1, 0
        kept, drafted = [0] * setting.gamma, 0
        while done < tokens:
            accepted = 0
            while accepted < setting.gamma and self._random.random() < rate:
                accepted += 1
            accepted = min(accepted, tokens - done - 1)
            for at in range(accepted):
                kept[at] += 1
            done, steps, drafted = done + accepted + 1, steps + 1, drafted + setting.gamma
        seconds = steps * (self.step_s[0] + self.step_s[1] * setting.gamma)
        seconds *= (1.0 + self.drift * (self.clock.seconds % 600 > 300)) * self._random.gauss(1.0, 0.01)
        self.clock.seconds += seconds
        server = ServerAnswer(
            text="", counted_by="usage", pieces=steps, bursts=steps, attempts=1,
            drafted=drafted, accepted=sum(kept), drafts=steps, accepted_at=kept,
        )  # fmt: skip
        return Generation.of(
            (), 0.0, seconds, prompt_tokens=7, new_tokens=tokens, finish_reason="length", server=server
        )


def search(
    folder: Path,
    engine: StartedEngine,
    *,
    minutes: float = 30.0,
    seed: int = 0,
    **more: Any,
) -> tuple[Search, TimedEngine, Sweep]:
    small = EngineDrafter(parse_drafter("org/small"), ModelSpec("gguf", "small.gguf"))
    drafters = [EngineDrafter("ngram-simple"), small]
    made = settings_of(engine, TARGET, drafters)
    prompts = tuple(load_prompts(("all",), 40))
    base = {
        "gammas": (), "policies": (), "decoding": DecodingOptions(max_new_tokens=48), "repeats": 2, "warmup": 0,
        "turns": 1, "seed": seed, "servers": tuple(each.name for each in made),
    }  # fmt: skip
    options = SweepOptions(**base)
    names = [(each.name, each.gamma or None) for each in made]
    sweep = Sweep(options, prompts, tuple(server_rows(options, names)))
    settings = {each.name: each for each in made}
    clock = FakeClock()

    timed = TimedEngine(clock, settings, seed=seed, **more)
    run = describe_run(sweep, TargetModel(name="t"), {"engine": "x"})
    with open_run(folder, run) as store:
        found = Search(
            Session(sweep, store, timed, clock=clock, snapshot=quiet),
            partial(choose, settings=settings),
            {name: each.family for name, each in settings.items() if each.family},
            seconds=60 * minutes, until=60 * minutes,
        )  # fmt: skip
        for _ in found.measure():
            pass
    return found, timed, sweep


def speed(
    setting: EngineSetting, rate: Mapping[str, float], step_s: tuple[float, float] = (0.1, 0.01)
) -> float:
    """The expected tokens per second of a setting."""
    share = rate.get(setting.family, 0.0)
    tokens = sum(share**n for n in range(setting.gamma + 1))
    return tokens / (step_s[0] + step_s[1] * setting.gamma)


RATE = {"org/small": 0.8, "org/small,p=0.6": 0.75, "ngram-simple": 0.2}


@pytest.mark.parametrize(("limit", "drift"), [(None, 0.0), (2, 0.3)])
def test_the_search_finds_the_fastest_setting(tmp_path, limit, drift):
    minutes = 30.0 if limit is None else 240.0
    found, timed, sweep = search(
        tmp_path / "run", started_engine("llama.cpp"), rate=RATE, limit=limit, drift=drift, minutes=minutes
    )
    race = found.race
    best = max(timed.settings.values(), key=lambda each: speed(each, RATE))
    assert race.verdict == "faster"
    assert speed(timed.settings[race.leader], RATE) >= 0.95 * speed(best, RATE)
    assert limit is None or len(timed.running) <= limit
    if limit is None:
        assert len(timed.began) == len({*timed.began})
    else:  # settings are measured together, not one generation after the other
        assert len(timed.began) < len(timed.calls) + sum(map(race.num_blocks, race.names)) / 3
    assert len(found.predicted) == len(sweep.configs) - 1


# -- commands ----------------------------------------------------------------------------------------


def tuned(cli: Cli, models: tuple[Path, Path], *words: object, minutes: float = 0.1) -> Any:
    target, small = models
    given = ["--engine", "llama.cpp", "--engine-command", STUB, "--target", target, "--drafter", small]
    return cli("tune", *given, "--prompts", "mine.jsonl", "-n", 24, "--minutes", minutes, *words)


def test_tune_ends_with_the_command_line(cli, models, monkeypatch):
    result = tuned(cli, models, "--json", "--results", "run", "--", "--good", 4)
    told = result.json()
    assert told["verdict"] in ("faster", "open")  # on a busy machine the time may be too short
    assert told["winner"].startswith("small.gguf@")
    assert "--good" in told["command"]
    assert str(models[1]) in told["command"]
    assert "servers started" in result.err
    assert marked() == []
    again = tuned(cli, models, "--results", "run", "--resume", "--", "--good", 4)
    assert again.code == 0, again.err
    assert "Start:  " in again.out
    assert not told["blocks"] or cli("report", "run").code == 0
    tuned(cli, models, "--results", "run").refused(2, "holds results already")


def test_sweep_measures_a_grid_in_groups(cli, models):
    target, small = models
    result = cli(
        "sweep", "--engine", "llama.cpp:servers=2", "--engine-command", STUB, "--target", target,
        "--drafter", small, "--drafter", "ngram-mod", "--gamma", "2,4", "--prompts", "mine.jsonl", "--limit", 2,
        "--out", "run", "--quiet",
    )  # fmt: skip
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in Path("run/generations.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 5 * 2 * 2
    configs = [row["config"] for row in rows if row["repeat"] == 0]
    assert {*configs[:4]} & {*configs[4:]} == set()  # two servers for all prompts, then the next two
    assert "2 servers fit" in result.err
    assert marked() == []


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["tune", "--engine", "vllm:servers=0"], ["option 'servers' of --engine", "Give at least 1"]),
        (["sweep", "--engine", "vlm"], ["no engine 'vlm'", "Choose vllm"]),
        (["tune", "--engine", "llama.cpp"], ["llama.cpp reads GGUF files", "smollm2-135m"]),
        (["tune", "--engine", "vllm", "--target", "none/there.gguf"], ["There is no such file"]),
    ],
)
def test_what_does_not_go_together_is_refused(cli, models, words, fragments):
    cli(*words).refused(2, *fragments)


# -- kills -------------------------------------------------------------------------------------------

_KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def kill(models: tuple[Path, Path], number: int, seconds: float) -> None:
    """Kill a search after some seconds, and check that nothing of it is left soon after."""
    target, small = models
    words = ["tune", "--engine", "llama.cpp", "--engine-command", STUB, "--target", str(target)]
    words += [
        "--drafter",
        str(small),
        *f"--prompts mine.jsonl -n 24 --minutes 2 --results run-{number}-{seconds}".split(),
    ]
    with Path("said").open("w") as said:
        process = Forked(specbench, *words, stdout=said, stderr=said, environment={"PWD": str(Path.cwd())})
        time.sleep(seconds)
        assert process.kill(_KINDS[number % 3]) != 0
    wait_until(lambda: marked() == [])


@pytest.mark.parametrize("number", [1, 2])
def test_nothing_is_left_after_a_kill(models, number):
    kill(models, number, 1.5)
