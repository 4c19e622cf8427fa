"""Shared test settings: no hub, and the helper modules of this folder and the benchmarks importable."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # the suite may share its cores; must be set before torch is loaded
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and every core has a worker
sys.path[:0] = [
    str(Path(__file__).parent),
    *(str(Path(__file__).parents[1] / each) for each in ("benchmarks", "docs")),
]

from cli_runs import Cli, Result  # noqa: E402

from specbench.cli import progress  # noqa: E402

progress.PATIENCE_S = float("inf")  # what commands print must not depend on how busy the machine is

SNAPSHOTS = Path(__file__).parent / "snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--snapshot-update", action="store_true", help="write what `snapshot` compares with")


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
def models(tmp_path_factory) -> Path:
    """A folder with a ``target`` and a ``small``er model of its tokenizer, which nobody changes."""
    from tiny import save_tiny  # imports torch, which must find the settings above

    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "target")
    save_tiny(folder / "small", seed=1, layers=1)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with a model called ``tiny``, which nobody changes."""
    from tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def small_pages() -> Iterator[None]:
    """Large weights load in a third of the time where nobody lays them into huge pages."""
    from specbench.kernels import huge_pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "huge_page_setting", lambda: "never")
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """The cache folder, which is the test's own."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cli(capsys, monkeypatch) -> Cli:
    """``cli("sweep", "--gamma", 2)``: a command in this process, its exit code and what it printed. For it the machine
    is quiet, whatever runs beside the tests.
    """
    from specbench.base.load import LoadSnapshot
    from specbench.cli import run

    monkeypatch.setattr(LoadSnapshot, "busy_elsewhere", lambda *_: 0.0)
    monkeypatch.setattr(LoadSnapshot, "steal_share", lambda *_: 0.0)

    def call(*words: object) -> Result:
        capsys.readouterr()  # what a fixture printed
        given = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["specbench", *given])
        return Result(run(given), *capsys.readouterr())

    return call


@pytest.fixture
def snapshot(request) -> Callable[[str], None]:
    """``snapshot(text)``: the text is that of ``snapshots/MODULE/TEST.txt``, but for blanks at ends of lines."""
    name = re.sub(r"\W+", "-", request.node.name.removeprefix("test_")).strip("-")
    file = SNAPSHOTS / request.path.stem.removeprefix("test_") / f"{name}.txt"

    def compare(text: str) -> None:
        text = "".join(line.rstrip() + "\n" for line in text.splitlines())
        if request.config.getoption("--snapshot-update"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"no {file}: --snapshot-update writes it"
        assert text == file.read_text(encoding="utf-8"), f"--snapshot-update renews {file}"

    return compare
