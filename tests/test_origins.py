"""Where tokens came from, shown: on a terminal, and in a word in the interpreter."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny import tiny_tokenizer

from specbench.decoding.records import ORIGINS, Prefill, Step, StepTimes
from specbench.decoding.stops import TextStream
from specbench.show.painted import painted


def step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "index": 3, "position": 9, "drafted": (1, 2, 3), "accepted": 2, "tested": 3, "tokens": (1, 2, 9),
        "closing": "corrected", "expected_acceptance": (), "times": StepTimes(verify_s=0.25),
    }  # fmt: skip
    return Step(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "origins"),
    [
        ({}, ("accepted", "accepted", "corrected")),
        ({"accepted": 3, "closing": "bonus", "tokens": (1, 2, 3, 4)}, ("accepted",) * 3 + ("bonus",)),
        ({"drafted": (), "accepted": 0, "closing": "target", "tokens": (5,)}, ("target",)),
        ({"closing": None, "tokens": (1, 2)}, ("accepted", "accepted")),
    ],
)
def test_every_token_of_a_step_has_an_origin(changes, origins):
    assert step(**changes).origins == origins
    assert len(step(**changes).tokens) == len(origins)


def test_the_first_token_is_the_targets():
    assert Prefill(5, 1, 0.1).origins == ("target",)
    assert Prefill(5, None, 0.1).origins == ()


# -- pieces of a text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("ing the",), ("zebra", "t")])
def test_pieces_have_the_labels_of_their_tokens(stops):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("thing 👩‍👧 and the thing in the ring the end")["input_ids"]
    stream = TextStream[int](tokenizer, stops)
    pieces = [piece for number, token in enumerate(ids) for piece in stream.push(token, number)]
    pieces += stream.finish(len(ids) - 1)
    assert "".join(text for _, text in pieces) == stream.text
    assert [label for label, _ in pieces] == sorted(label for label, _ in pieces)
    whole = TextStream[None](tokenizer)
    own = ["".join(text for _, text in whole.push(token, None)) for token in ids]
    for number, text in pieces:  # a held back stop string does not move text to another token
        assert text in own[number]


# -- as it is shown ------------------------------------------------------------------------------------


def test_painted_text_is_the_text_without_power_when_stripped():
    text = "a\x1b[31m b\n\u202e<c>"
    for origin in ORIGINS:
        for color in (True, False):
            shown = painted(text, origin, color=color)
            assert re.sub("\x1b\\[[0-9;]*m", "", shown) == "a\\x1b[31m b\n\\u202e<c>"
            assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", shown)) is (color and origin != "target")
    assert len({painted("x", origin, color=False) for origin in ORIGINS}) == len(ORIGINS)
    assert painted("", "accepted") == ""
