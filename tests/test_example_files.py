"""The programs in examples/ run and do what they say, and the notebook's cells too."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
import recordings
from stored_runs import kept_run

ROOT = recordings.ROOT
EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.real, pytest.mark.usefixtures("small_pages")]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_described():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(files) == 6
    assert all(f"]({name})" in text for name in files)
    for name, most in (("regex_drafter.py", 60), ("recycle.py", 60)):
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize(
    ("name", "least", "text"), [("regex_drafter", 4.0, " 5, 6, 7, 8"), ("recycle", 1.1, "")]
)
def test_a_custom_drafter_drafts_what_is_accepted(name, least, text, capsys):
    assert example(name).main() > least
    said = capsys.readouterr().out
    assert "the same: True" in said
    assert said.startswith(text)


def test_a_server_answers():
    pytest.importorskip("uvicorn")
    answer = example("serve").main()
    assert answer["usage"]["completion_tokens"] == 24


def test_a_sweep_gives_a_frame():
    table = example("sweep").main(limit=1)
    assert set(table.index) == {"plain", "lookup auto", "lookup γ=2", "self:int8 auto", "self:int8 γ=2"}
    assert table.loc["plain", "tokens_per_step"] == 1.0


@pytest.mark.slow
def test_the_notebook_runs_and_shows_charts():
    kept_run("qwen2.5-coder-int4")
    stored = json.loads((ROOT / recordings.NOTEBOOK).read_text(encoding="utf-8"))
    today = recordings.run_notebook(ROOT / recordings.NOTEBOOK)

    def kinds(notebook):
        return [
            [sorted(each.get("data", {"text": ""})) for each in cell.get("outputs", [])]
            for cell in notebook["cells"]
        ]

    assert kinds(stored) == kinds(today)
    assert sum("image/png" in kind for cell in kinds(today) for kind in cell) == 2
    assert "Agg" in sys.modules["matplotlib"].get_backend().title()
