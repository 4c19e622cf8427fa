"""Files that programs read, with every field in turn replaced by what it cannot be: used, or refused in a sentence."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_engine import ScriptedEngine, describe, make_sweep, new_store, prompts
from test_trace import REJECTION, SUMMARY, event, header, prefill

import specbench.report
from specbench.compare import compare_configs, compare_runs
from specbench.engine import Costs
from specbench.errors import SpecbenchError
from specbench.report import make_report, to_html, to_markdown
from specbench.runs import changes, merge_runs
from specbench.store import RunStore, load_results
from specbench.sweep import run_sweep
from specbench.trace import TraceView, parse_trace

WRONG = (None, "x", ["x"], {"x": 1}, True, -1.5, 10**400, 1e308, math.nan)
MISSING = type("Missing", (), {"__repr__": lambda self: "(missing)"})()


def variants(whole: Any) -> Iterator[tuple[str, Any]]:
    """``whole`` with one field, however deep, replaced by each wrong value and left out; of lists the first element."""

    def places(value: Any) -> Iterator[tuple[Any, ...]]:
        inner = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value[:1])
            if isinstance(value, list)
            else ()
        )
        for name, each in inner:
            yield (name,)
            yield from ((name, *rest) for rest in places(each))

    for place in places(whole):
        for wrong in (*WRONG, MISSING):
            yield f"{place} = {str(wrong)[:20]}", put(whole, place, wrong)


def put(whole: Any, place: Sequence[Any], value: Any) -> Any:
    """A copy with another value at one place."""
    changed = holder = copy.deepcopy(whole)
    for name in place[:-1]:
        holder = holder[name]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return changed


def complaints(cases: Iterable[tuple[str, Any]], use: Callable[[Any], object]) -> tuple[list[Any], list[str]]:
    """The cases that are accepted, and what is wrong with those that neither work nor are refused in a sentence."""
    accepted, refused, found = [], 0, []
    for what, case in cases:
        try:
            use(case)
            accepted.append((what, case))
        except SpecbenchError as error:
            refused += 1
            if "\n" in str(error):
                found.append(f"{what}: several lines")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
    assert accepted or refused, "there was no case"
    return accepted, found


# -- runs ------------------------------------------------------------------------------------------

SWEEP = make_sweep(prompts(1, 1), gammas=(2,))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The folder of a run with everything that a run can hold."""
    monkeypatch.setattr(specbench.report, "_pictures", lambda df, folder: ([], {}))
    with new_store(tmp_path / "run", SWEEP) as store:
        run_sweep(SWEEP, store, ScriptedEngine(spoils=lambda config: config.gamma == 2, tie=False))
        store.update(
            **merge_runs(store.run, describe(SWEEP, specbench="0.0.1"), ["specbench: 0.1.0 → 0.0.1"])
        )
    return Stored(tmp_path / "run")


class Stored:
    """A run whose files can be replaced one by one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {path: path.read_text() for path in folder.iterdir()}

    def lines(self, name: str) -> list[str]:
        text = self._files[self.folder / name]
        return [text] if name == "run.json" else text.splitlines()

    def replace(self, name: str, at: int, value: Any) -> None:
        """Everything as it was, but for one line."""
        for path, text in self._files.items():
            path.write_text(text)
        lines = self.lines(name)
        (self.folder / name).write_text("\n".join([*lines[:at], json.dumps(value), *lines[at + 1 :]]) + "\n")

    def read(self) -> None:
        load_results(self.folder)
        with RunStore.open(self.folder) as store:
            Costs.of_rows(store.costs()).medians()
            changes(store.run, describe(SWEEP))
            merge_runs(store.run, describe(SWEEP), [])

    def use(self) -> None:
        """What `report`, `compare` and `sweep --resume` do; figures take too long."""
        frame = load_results(self.folder)
        report = make_report(frame, "run", self.folder)
        to_html(report), to_markdown(report)
        compare_configs(frame, "d@2", "plain")
        other = frame.copy()
        other.attrs = {**frame.attrs, "run": {**frame.attrs["run"], "run_id": "other"}}
        compare_runs(frame, other, ("a", "b"), other_target=True)
        with RunStore.open(self.folder) as store:
            run_sweep(SWEEP, store, ScriptedEngine(), retry_failed=True)


@pytest.mark.parametrize("name", ["run.json", "generations.jsonl", "costs.jsonl"])
def test_ill_typed_results(stored: Stored, name: str) -> None:
    lines = stored.lines(name)
    at = next((i for i, line in enumerate(lines) if '"noted"' in line and '"warmup":false' in line), 0)

    def read(changed: Any) -> None:
        stored.replace(name, at, changed)
        stored.read()

    def use(changed: Any) -> None:
        stored.replace(name, at, changed)
        stored.use()

    accepted, wrong = complaints(variants(json.loads(lines[at])), read)
    assert not wrong
    assert len(accepted) > 20
    some = random.Random(0).sample(accepted, 8)  # each takes a while
    assert not complaints(some, use)[1]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("specbench",), MISSING),
        (("configs", 0, "label"), MISSING),
        (("configs", 1, "gamma"), "2"),
        (("configs", 1, "temperature"), "0"),
        (("prompts", 0), 7),
        (("prompts", 0, "turns"), "1"),
        (("changes",), [7]),
        (("changes", 0, "environment"), 7),
        (("differences", 0), 7),
        (("differences", 0, "config"), "x"),
        (("differences", 0, "gap"), None),
        (("costs",), 7),
        (("costs", "target_pass_s"), {"x": 1}),
        (("costs", "target_pass_s", "1"), 0),
    ],
)
def test_ill_typed_fields_of_a_run(stored: Stored, place: tuple[Any, ...], value: Any) -> None:
    """Those that once ended in an error that should not happen."""

    def use(changed: Any) -> None:
        stored.replace("run.json", 0, changed)
        stored.read()
        stored.use()

    changed = put(json.loads(stored.lines("run.json")[0]), place, value)
    assert not complaints([("", changed)], use)[1]


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4))
def test_ill_typed_traces(at: int) -> None:
    events = [header(), prefill(), event(REJECTION), SUMMARY]

    def show(changed: Any) -> None:
        lines = [json.dumps(each) + "\n" for each in (*events[:at], changed, *events[at + 1 :])]
        view = TraceView(Console(file=StringIO()))
        for each in parse_trace(BytesIO("".join(lines).encode()), "trace"):
            view.show(each)

    accepted, wrong = complaints(variants(events[at]), show)
    assert accepted
    assert not wrong
