"""Files that programs read, with every field in turn replaced by what it cannot be: used, or refused in a sentence."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console
from scripted_engine import ScriptedEngine, describe, make_sweep, measure, new_store, prompts
from test_trace import REJECTION, SUMMARY, event, header, prefill
from tiny import save_tiny

from specbench.base.errors import SpecbenchError, UsageError
from specbench.base.record import to_dict
from specbench.bench.manifest import merge_runs, refuse_other
from specbench.bench.passes import pass_costs
from specbench.bench.session import Session
from specbench.generate import autoregressive_generate
from specbench.models.target import load_target
from specbench.results.compare import compare_configs, compare_runs
from specbench.results.lines import CostLine, TreeTimes
from specbench.results.results import load_results
from specbench.results.store import RunStore, read_lines, read_run
from specbench.results.summary import summarize
from specbench.results.trace import parse_trace
from specbench.rows import Row
from specbench.show import report as content
from specbench.show.document import to_markdown
from specbench.show.html import to_html
from specbench.show.report import make_report
from specbench.show.trace import TraceView

MISSING = type("Missing", (), {"__repr__": lambda self: "(missing)"})()
WRONG = (MISSING, None, "x", ["x"], {"x": 1}, True, -1.5, 10**400, 1e308, math.nan)


def variants(whole: Any) -> Iterator[tuple[str, Any]]:
    """``whole`` without one field, however deep, or with wrong values there; of lists the first element."""

    def places(value: Any) -> Iterator[tuple[Any, ...]]:
        inner = (
            enumerate(value[:1])
            if isinstance(value, list)
            else value.items()
            if isinstance(value, dict)
            else ()
        )
        for name, each in inner:
            yield (name,)
            yield from ((name, *rest) for rest in places(each))

    draw, found = random.Random(0), [*places(whole)]
    for place in found:
        for wrong in draw.sample(
            WRONG, 2 if len(found) > 50 else len(WRONG)
        ):  # of many fields most are alike
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
def stored(tmp_path, monkeypatch) -> Stored:
    """The folder of a run with everything that a run can hold."""
    monkeypatch.setattr(content, "_figures", lambda df, folder: ([], ""))
    with new_store(tmp_path / "run", SWEEP) as store:
        Session(SWEEP, store, ScriptedEngine(spoils=lambda config: config.gamma == 2, tie=False)).run_all()
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
            if path.name != name and path.read_text() != text:
                path.write_text(text)
        lines = self.lines(name)
        (self.folder / name).write_text("\n".join([*lines[:at], json.dumps(value), *lines[at + 1 :]]) + "\n")

    def read(self) -> None:
        load_results(self.folder)
        with RunStore.open(self.folder) as store:
            pass_costs(store.costs())
            refuse_other(store.run, describe(SWEEP))
            merge_runs(store.run, describe(SWEEP))

    def use(self) -> None:
        """What `report`, `compare` and `sweep --resume` do; figures take too long."""
        self.use_read_only()
        frame = load_results(self.folder)
        compare_configs(frame, "d@2", "plain")
        other = replace(frame, run=structs.replace(frame.run, run_id="other"))
        compare_runs(frame, other, ("a", "b"))
        measure(self.folder, SWEEP)

    def use_read_only(self) -> None:
        """What `report` does."""
        report = make_report(load_results(self.folder), "run", self.folder)
        to_html(report.name, report.parts), to_markdown(*report.parts)


@pytest.mark.parametrize("name", ["run.json", "generations.jsonl", "costs.jsonl"])
def test_ill_typed_results(stored, name):
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
    some = random.Random(0).sample(accepted, 4)  # each takes a while
    assert not complaints(some, use)[1]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("configs", 1, "condition", "batch"), "2"),
        (("differences", 0, "config"), "x"),
        (("differences", 0, "gap"), None),
        (("costs",), 7),
        (("costs", "target_pass_s"), {"x": 1}),
        (("costs", "target_pass_s", "1"), 0),
    ],
)
def test_ill_typed_fields_of_a_run(stored, place, value):
    """Those that once ended in an error that should not happen."""

    def use(changed: Any) -> None:
        stored.replace("run.json", 0, changed)
        stored.read()
        stored.use()

    changed = put(json.loads(stored.lines("run.json")[0]), place, value)
    assert not complaints([("", changed)], use)[1]


NUMBERS = (0, 0.0, -1.0, 1e300, math.nan, math.inf)


def spoiled(value: Any) -> Iterator[tuple[float, Any]]:
    """Numbers that a clock or a division may give, each with a copy of ``value`` that has it in one place."""
    if isinstance(value, msgspec.Struct):
        parts = [(name, getattr(value, name)) for name in value.__struct_fields__ if name != "schema"]
        for name, part in parts:
            for number, changed in spoiled(part):
                with suppress(ValueError):  # no such record can be made
                    yield number, structs.replace(value, **{name: changed})
    elif isinstance(value, Row):
        for number, changed in spoiled(value.condition):
            yield number, Row(value.decoder, changed, value.loaded)
    elif isinstance(value, dict):
        yield from ((number, {**value, key: each}) for key in value for number, each in spoiled(value[key]))
    elif isinstance(value, list) and value:
        yield from ((number, [each, *value[1:]]) for number, each in spoiled(value[0]))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from ((number, type(value)(number) if number == 0 else number) for number in NUMBERS)


def test_whatever_is_stored_is_read_back(stored):
    """Every number of every stored type: zeros as they are; what no shape takes is left out, named, and alone."""
    folder, count = stored.folder, 0
    before = read_run(folder)
    measured = next(each for each in read_lines(folder, []) if each.result is not None)
    stored.replace("run.json", 0, to_dict(before))
    with RunStore.open(folder) as store:
        for number, run in spoiled(before):
            store.left_out.clear()
            with suppress(ValueError):  # one that nothing can do without: the file stays
                store.replace(run)
                assert not math.isfinite(number) or (read_run(folder) == run) == (not store.left_out)
                assert number != 0 or not store.left_out
                count += 1
        kept = len(store.costs())
        for number, line in (each for kind in store.costs()[:9] for each in spoiled(kind)):
            store.left_out.clear()
            store.append_costs([line])
            kept += not store.left_out
            assert len(store.costs()) == kept
            assert number != 0 or not store.left_out
        for repeat, (number, result) in enumerate(spoiled(measured.result), 1000):
            line = structs.replace(measured.line, repeat=repeat)
            found = store.append(replace(measured, line=line, result=result))
            assert (found.result == result) or (found.result is None and number != 0)
        assert count >= 150
        assert len([*store.measurements()]) > 100
    assert load_results(folder).problems == []


class InstantEngine(ScriptedEngine):
    """A clock that does not move while a pass runs."""

    def measure_costs(self, *args: Any) -> list[CostLine]:
        lines = [structs.replace(line, seconds=[0.0]) for line in super().measure_costs(*args)]
        return [*lines, TreeTimes(drafter="d", nodes=1, seconds=[0.0], context_tokens=256)]


@pytest.mark.parametrize("field", ["costs", "environment", "options", None])
def test_a_run_with_one_bad_field_gives_the_rest(stored, field):
    """``None``: none is bad, but all passes took 0 seconds."""
    run = json.loads(stored.lines("run.json")[0])
    if field is None:
        stored.replace("run.json", 0, run)
        lines = InstantEngine().measure_costs((), (1, 3))
        with RunStore.open(stored.folder) as store:
            store.update(costs=pass_costs(lines))
    elif field == "costs":
        run["costs"]["drafter_rows_s"] = {"d": {"1": -1.0}}
        stored.replace("run.json", 0, run)
    else:
        stored.replace("run.json", 0, {**run, field: 7 if field == "options" else {"cores": -1}})
    if field == "options":
        with pytest.raises(UsageError, match="options"):
            load_results(stored.folder)
        return
    results = load_results(stored.folder)
    assert len(results.done)
    assert [field in each for each in results.problems] == [True] * (field is not None)
    assert results.run.costs is not None
    assert summarize(results).rows
    stored.use_read_only()


# -- traces ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4))
def test_ill_typed_traces(at):
    events = [*map(to_dict, (header(), prefill(), event(REJECTION), SUMMARY))]

    def show(changed: Any) -> None:
        lines = [json.dumps(each) + "\n" for each in (*events[:at], changed, *events[at + 1 :])]
        view = TraceView(Console(file=StringIO()))
        for each in parse_trace(BytesIO("".join(lines).encode()), "trace"):
            view.show(each)

    accepted, wrong = complaints(variants(events[at]), show)
    assert accepted
    assert not wrong


# -- models ----------------------------------------------------------------------------------------

MORE_SETTINGS: dict[str, dict[str, Any]] = {
    "config.json": {
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "eos_token_id": [1, 2],
        "output_hidden_states": False,
        "num_labels": 2,
    },
    "generation_config.json": {
        "eos_token_id": [1, 2],
        "suppress_tokens": [3],
        "forced_eos_token_id": 4,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
    },
    "tokenizer_config.json": {"chat_template": "{{ messages }}", "model_input_names": ["input_ids"]},
}
"""Settings of a model's files that `save_tiny` leaves out."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def decode_with(folder: Path, name: str) -> Callable[[Any], None]:
    """What loads a model folder with another file of this name, and decodes a token; the file is then as before."""
    file = folder / name

    def use(changed: Any) -> None:
        before = file.read_text()
        file.write_text(json.dumps(changed))
        try:
            target = load_target(str(folder))
            assert len(autoregressive_generate("Hi", target, max_new_tokens=1).token_ids) == 1
        finally:
            file.write_text(before)

    return use


@pytest.mark.parametrize("name", MORE_SETTINGS)
def test_ill_typed_files_of_a_model(model_folder, name):
    """Some of the cases, for every one loads a model."""
    raw = json.loads((model_folder / name).read_text())
    whole = raw | {key: value for key, value in MORE_SETTINGS[name].items() if key not in raw}
    # Only one setting beside those the folder has, so that they do not hide one another.
    cases = [
        (
            f"{key}{what}",
            raw | {key: changed[key]} if key in changed else {k: raw[k] for k in raw if k != key},
        )
        for key in whole
        for what, changed in variants({key: whole[key]})
    ]
    accepted, wrong = complaints(
        random.Random(0).sample(cases, min(40, len(cases))), decode_with(model_folder, name)
    )
    assert not wrong
    assert accepted


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("config.json", "architectures", 7, "config.json' is damaged: architectures has"),
        ("config.json", "sliding_window", [], "config.json' is damaged: sliding_window has"),
        ("config.json", "sliding_window", -1.5, "sliding_window has"),
        ("config.json", "sliding_window", math.nan, "sliding_window has"),
        ("config.json", "sliding_window", 10**12, "sliding_window has"),
        ("config.json", "num_hidden_layers", -1, "num_hidden_layers has"),
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is too large"),
        ("config.json", "num_labels", 10**9, "num_labels is too large"),
        ("config.json", "vocab_size", 10**400, "vocab_size is too large"),
        ("generation_config.json", "eos_token_id", "x", "eos_token_id is neither a token id nor a list"),
        ("generation_config.json", "eos_token_id", [math.nan], "eos_token_id is neither"),
        ("generation_config.json", "eos_token_id", {}, "eos_token_id is neither"),
        ("generation_config.json", "forced_eos_token_id", True, "generation settings cannot be applied"),
        ("tokenizer_config.json", "model_max_length", "x", "its model_max_length is no number"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_ill_typed_fields_of_a_model(model_folder, name, field, value, said):
    """Those that once ended in an error that should not happen, or in memory that ran out."""
    raw = json.loads((model_folder / name).read_text())
    with pytest.raises(SpecbenchError) as caught:
        decode_with(model_folder, name)(raw | {field: value})
    assert said in caught.value.message


def test_a_configuration_of_lists_within_lists(model_folder):
    file = model_folder / "config.json"
    before = file.read_text()
    for depth in (900, 100_000):
        file.write_text('{"model_type": "llama", "x": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(SpecbenchError, match="is damaged"):
            load_target(str(model_folder))
    file.write_text(before)
