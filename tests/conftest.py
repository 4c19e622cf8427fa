"""Shared test settings: no hub, and the helper modules of this folder and the benchmarks importable."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # the suite may share its cores; must be set before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and every core has a worker
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]

from cli_runs import Cli, Result  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: a collector of garbage that looks through it takes a second every time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``target`` and a ``small``er model of its tokenizer, which nobody changes."""
    from tiny import save_tiny  # imports torch, which must find the settings above

    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "target")
    save_tiny(folder / "small", seed=1, layers=1)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("sweep", "--gamma", 2)``: a command in this process, its exit code and what it printed."""
    from specbench.cli import run

    def call(*words: object) -> Result:
        capsys.readouterr()  # what a fixture printed
        given = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["specbench", *given])
        return Result(run(given), *capsys.readouterr())

    return call
