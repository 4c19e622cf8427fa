"""Files that programs read, with every field in turn replaced by what it cannot be: used, or refused in a sentence."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
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


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where a value has a field, however deep; of lists the first element."""
    inner: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    for name, each in enumerate(value[:1]) if isinstance(value, list) else inner:
        yield (name,)
        yield from ((name, *rest) for rest in places(each))


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


@pytest.mark.parametrize("at", range(4))
def test_a_trace_with_an_ill_typed_field_is_shown_or_refused(at):
    events = [*map(to_dict, (header(), prefill(), event(REJECTION), SUMMARY))]
    shown, refused = 0, []
    for place, value in itertools.product(places(events[at]), WRONG):
        changed = [*events[:at], put(events[at], place, value), *events[at + 1 :]]
        text = "".join(json.dumps(each) + "\n" for each in changed)
        view = TraceView(Console(file=StringIO()))
        try:
            for each in parse_trace(BytesIO(text.encode()), "trace"):
                view.show(each)
            shown += 1
        except SpecbenchError as error:
            refused.append(str(error))
    assert shown
    assert not [each for each in refused if "\n" in each]


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


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
def test_ill_typed_fields_of_a_model(model_folder, tmp_path, name, field, value, said):
    """Those that once ended in an error that should not happen, or in memory that ran out."""
    shutil.copytree(model_folder, tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(SpecbenchError) as caught:
        autoregressive_generate("Hi", load_target(str(file.parent)), max_new_tokens=1)
    assert said in caught.value.message
