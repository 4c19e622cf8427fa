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
from test_trace import REJECTION, SUMMARY, event, header, prefill
from tiny import save_tiny

from specbench.base.errors import SpecbenchError
from specbench.base.record import to_dict
from specbench.generate import autoregressive_generate
from specbench.models.target import load_target
from specbench.results.trace import parse_trace
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


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("config.json", "num_hidden_layers", 10**9, "num_hidden_layers is too large"),
        ("config.json", "num_labels", 10**9, "num_labels is too large"),
        ("config.json", "vocab_size", 10**400, "vocab_size is too large"),
        ("generation_config.json", "eos_token_id", "x", "eos_token_id is neither a token id nor a list"),
        ("generation_config.json", "eos_token_id", [math.nan], "eos_token_id is neither"),
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
