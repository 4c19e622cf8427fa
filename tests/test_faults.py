"""Faults, for real: processes that are killed, disks that are full, caches that several share.

What a store, a cache or a stream does about each of them in one process stands in their own test files.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import fault_child
import forked
import pytest
from forked import CONTEXT, PATIENCE_S, Forked
from scripted_engine import ScriptedEngine, make_sweep, new_store
from stored_runs import run_json
from test_builtin import left_in, write_gguf
from tiny import save_tiny, tiny_llama, tiny_tokenizer

from specbench.base.errors import RunError, UsageError
from specbench.bench.session import Session
from specbench.models.builtin import prepare_gguf
from specbench.results.results import load_results
from specbench.results.trace import read_trace

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals, limits and mounts of POSIX")


def wait_for(condition: Callable[[], bool], process: Any = None) -> None:
    """Until it holds, or the process that should bring it about has ended."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.is_alive(), "ended before its time"
        time.sleep(0.002)


class Child(Forked):
    """A function in a process of its own; ``place`` gets its streams."""

    def __init__(
        self, place: Path, function: Callable[..., None], *arguments: Any, **options: Mapping[str, Any]
    ) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        with (place / "stdout").open("wb") as stdout, (place / "stderr").open("wb") as stderr:
            super().__init__(function, *arguments, stdout=stdout, stderr=stderr, **options)

    @property
    def output(self) -> str:
        return (self.place / "stdout").read_text(encoding="utf-8", errors="replace")

    @property
    def errors(self) -> str:
        return (self.place / "stderr").read_text(encoding="utf-8", errors="replace")


@pytest.fixture
def specbench(tmp_path) -> Iterator[Callable[..., Child]]:
    """Starts `specbench` in a process of its own."""
    children: list[Child] = []

    def start(*arguments: object, limits: Mapping[str, int] | None = None, **environment: str) -> Child:
        place = tmp_path / f"child-{len(children)}"
        children.append(
            Child(place, forked.specbench, *map(str, arguments), limits=limits or {}, environment=environment)
        )
        return children[-1]

    yield start
    for child in children:
        if child.is_alive():
            child.kill(signal.SIGKILL)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A model, one that never comes to an end, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "tiny")
    tiny_llama(context=200_000).save_pretrained(folder / "endless")
    tiny_tokenizer().save_pretrained(folder / "endless")
    lines = [{"id": f"p{i}", "category": "chat", "turns": [f"Say {i}", "Go on"]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def sweep_words(models: Path, out: Path) -> list[object]:
    return [
        "sweep", "--target", models / "tiny", "--dtype", "float32", "--device", "cpu",
        "--draft-policy", "fixed", "--gamma", 1, "--draft-policy", "static-tree:nodes=4",
        "--drafter", "suffix", "--prompts", models / "prompts.jsonl", "-n", 24, "--repeats", 1, "--ignore-eos",
        "--quiet", "--out", out,
    ]  # fmt: skip


def rows(folder: Path) -> list[tuple[Any, ...]]:
    """What each line measured, and the tokens that came out."""
    names = ("config", "prompt", "turn", "repeat", "warmup", "order", "token_ids")
    lines = (folder / "generations.jsonl").read_bytes().splitlines()
    return [tuple(json.loads(line)[name] for name in names) for line in lines]


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory) -> list[tuple[Any, ...]]:
    """The lines of the sweep when nothing comes in between."""
    folder = tmp_path_factory.mktemp("undisturbed")
    child = Child(folder, forked.specbench, *map(str, sweep_words(models, folder / "run")))
    assert child.wait() == 0, child.errors
    found = rows(folder / "run")
    assert len(found) == 3 + 4 * 2 * 3  # a warm-up each; prompts, turns, configurations
    lines = (folder / "run" / "generations.jsonl").read_bytes().splitlines()
    drafted = {line["config"] for line in map(json.loads, lines) if any(line["steps"]["nodes"])}
    assert any("tree" in config for config in drafted), drafted
    return found


# -- signals ---------------------------------------------------------------------------------------


def test_a_killed_generation_leaves_its_text_and_its_trace(models, tmp_path, specbench):
    trace = tmp_path / "trace.jsonl"
    child = specbench(
        "generate", "Hello", "--target", models / "endless", "--ignore-eos", "-n", 150_000, "-t", 5,
        "--trace-file", trace,
    )  # fmt: skip
    wait_for(lambda: lines_in(trace) > 20, child)
    assert child.kill(signal.SIGKILL) == -signal.SIGKILL
    assert len(child.output) > 10, "the text was held back"
    events = []
    with suppress(UsageError, RunError):  # of a last line that was cut short
        for event in read_trace(trace):
            events.append(event)  # noqa: PERF402 - what came before an error counts
    assert len(events) >= 20
    assert "Traceback" not in child.errors


@pytest.mark.parametrize(("number", "lines"), [(signal.SIGTERM, 17), (signal.SIGKILL, 5)])
def test_a_sweep_that_was_stopped_ends_as_if_it_had_not_been(
    models, tmp_path, specbench, undisturbed, number, lines
):
    out = tmp_path / "run"
    child = specbench(*sweep_words(models, out))
    wait_for(lambda: lines_in(out / "generations.jsonl") >= lines, child)
    code = child.kill(number)
    assert "Traceback" not in child.errors
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert f"--out {out} --resume" in child.errors
        assert (out / "summary.csv").exists()
    # A line that the disk had not confirmed when Ctrl-C came is taken back; there are three of warm-ups.
    assert lines - 1 <= len(load_results(out).generations) + 3 < len(undisturbed)
    assert run_json(out)["finished"] is None
    again = specbench(*sweep_words(models, out), "--resume")
    assert again.wait() == 0, again.errors
    assert rows(out) == undisturbed
    assert load_results(out).problems == []
    assert run_json(out)["finished"] is not None


def test_two_sweeps_that_begin_at_once_in_one_folder(models, tmp_path, specbench, undisturbed):
    out = tmp_path / "run"
    children = [specbench(*sweep_words(models, out)) for _ in range(2)]
    codes = sorted(child.wait() for child in children)
    assert codes == [0, 2]
    (refused,) = (child for child in children if child.wait() == 2)
    assert "Another sweep is writing" in refused.errors or "holds results already" in refused.errors
    assert len(refused.errors.splitlines()) == 1
    assert rows(out) == undisturbed


# -- disks -----------------------------------------------------------------------------------------


def test_a_sweep_whose_files_cannot_get_longer_goes_on_when_they_can(
    models, tmp_path, specbench, undisturbed
):
    """As on a disk that is full."""
    out = tmp_path / "run"
    child = specbench(*sweep_words(models, out), limits={"RLIMIT_FSIZE": 24_000})
    assert child.wait() == 1
    said = child.errors.splitlines()[-1]
    assert said.startswith("specbench: ")
    assert "File too large" in said
    assert "kept" in said
    assert "Traceback" not in child.errors
    measured = rows(out)
    assert 5 < len(measured) < len(undisturbed)
    assert measured == undisturbed[: len(measured)]
    assert load_results(out).problems == []
    assert not [path for path in out.iterdir() if "partial" in path.name]
    again = specbench(*sweep_words(models, out), "--resume")
    assert again.wait() == 0, again.errors
    assert rows(out) == undisturbed


def test_results_whose_folder_vanishes(tmp_path):
    sweep, calls = make_sweep(), count(1)

    def vanish(config: Any, prompt: Any) -> None:
        if next(calls) == 6:
            shutil.rmtree(tmp_path / "run")

    with (
        new_store(tmp_path / "run", sweep) as store,
        pytest.raises(RunError, match="can no longer be written"),
    ):
        Session(sweep, store, ScriptedEngine(fails=vanish)).run_all()


# -- the cache of prepared models ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


class Preparer(Child):
    """A process that prepares a GGUF file."""

    def __init__(self, gguf: Path, cache: Path, place: Path, begin: Any, stop_at: str | None = None) -> None:
        environment = {"SPECBENCH_CACHE": str(cache)}
        super().__init__(place, fault_child.prepare, gguf, place, begin, stop_at, environment=environment)

    @property
    def stages(self) -> list[str]:
        file = self.place / "stages"
        return list(dict.fromkeys(file.read_text(encoding="utf-8").splitlines())) if file.exists() else []


def test_processes_that_share_a_cache_and_begin_at_once_convert_once(tiny_gguf, own_cache, tmp_path):
    begin = CONTEXT.Event()
    children = [Preparer(tiny_gguf, own_cache, tmp_path / str(i), begin) for i in range(3)]
    wait_for(lambda: all((child.place / "ready").exists() for child in children))
    begin.set()
    assert [child.wait() for child in children] == [0, 0, 0], [child.errors for child in children]
    assert len({(child.place / "folder").read_text() for child in children}) == 1
    assert sum("converting tiny.gguf" in child.stages for child in children) == 1
    assert left_in(own_cache) == [Path((children[0].place / "folder").read_text()).name]
    assert prepare_gguf(tiny_gguf) == Path((children[0].place / "folder").read_text())


def test_a_process_takes_over_from_one_that_was_killed_in_the_middle(tiny_gguf, own_cache, tmp_path):
    begin = CONTEXT.Event()
    begin.set()
    first = Preparer(tiny_gguf, own_cache, tmp_path / "first", begin, stop_at="converting")
    wait_for(lambda: "converting tiny.gguf" in first.stages, first)
    second = Preparer(tiny_gguf, own_cache, tmp_path / "second", begin)
    waiting = "waiting for another process that prepares tiny.gguf"
    wait_for(lambda: waiting in second.stages, second)
    assert any(name.startswith(".") for name in left_in(own_cache)), "nothing was under way"
    first.kill(signal.SIGKILL)
    assert second.wait() == 0, second.errors
    assert second.stages[-1] == "writing the copy of tiny.gguf"
    assert left_in(own_cache) == [Path((second.place / "folder").read_text()).name]
