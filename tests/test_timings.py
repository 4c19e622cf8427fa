"""Timings of the machine that are kept for later starts."""

from __future__ import annotations

import json

import pytest

from specbench.backends.torch.kernels import timings
from specbench.backends.torch.kernels.timings import measured_once
from specbench.models.cache import clear_derived
from specbench.models.timings import kept_timings


@pytest.fixture
def start(own_cache, monkeypatch):
    """A start in a fresh process: measures ``names``, and returns how many it had to."""

    def call(*names: str) -> int:
        monkeypatch.setattr(timings, "measured", {})
        monkeypatch.setattr("specbench.models.timings.measured", timings.measured)
        made = []
        with kept_timings():
            for name in names:
                assert measured_once(name, lambda: made.append(1) or 1.5) == 1.5  # type: ignore[func-returns-value]
        return len(made)

    return call


def test_a_second_start_measures_nothing_again(start):
    assert start("a", "b", "a") == 2
    assert start("a", "b", "c") == 1
    assert start("a", "b", "c") == 0
    clear_derived()
    assert start("a") == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1, "measured": {"a": -1}}', '{"format": 1, "measured": {"a": "x"}}']
)
def test_what_cannot_be_read_is_measured_again(start, own_cache, text):
    start("a")
    (file,) = (own_cache / "timings").iterdir()
    file.write_text(text, encoding="utf-8")
    assert start("a") == 1
    assert json.loads(file.read_text(encoding="utf-8"))["measured"] == {"a": 1.5}


def test_a_folder_that_cannot_be_written_does_no_harm(start, own_cache):
    own_cache.write_text("a file", encoding="utf-8")
    assert start("a") == 1
    assert start("a") == 1
