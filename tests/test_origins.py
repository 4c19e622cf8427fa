"""Where tokens came from, shown: on a terminal, in a notebook, and in a word in the interpreter."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from tiny import tiny_language_model, tiny_tokenizer

from specbench import load_drafter, speculative_generate, wrap_target
from specbench.decoding.origins import ORIGINS, as_html
from specbench.decoding.records import Prefill, Step, StepTimes
from specbench.decoding.stops import LabeledText, TextStream
from specbench.models.target import Target
from specbench.show.painted import painted

PROMPT = [7, 41, 7, 19, 3, 200]


def step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "index": 3, "position": 9, "drafted": (1, 2, 3), "accepted": 2, "tested": 3, "tokens": (1, 2, 9),
        "closing": "corrected", "expected_acceptance": (), "times": StepTimes(verify_s=0.25),
    }  # fmt: skip
    return Step(**fields | changes)


@pytest.fixture(scope="module")
def target() -> Target:
    return wrap_target(tiny_language_model().model, tiny_tokenizer())


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
def test_labeled_text_is_the_stream_with_the_labels_of_its_tokens(stops):
    tokenizer = tiny_tokenizer()
    ids = tokenizer("thing 👩‍👧 and the thing in the ring the end")["input_ids"]
    stream, labeled = TextStream(tokenizer, stops), LabeledText[int](tokenizer, stops)
    pieces: list[tuple[int, str]] = []
    for number, token in enumerate(ids):
        found = labeled.push(token, number)
        assert "".join(text for _, text in found) == stream.push(token)
        pieces += found
    last = labeled.finish(len(ids) - 1)
    assert "".join(text for _, text in last) == stream.finish()
    pieces += last
    assert "".join(text for _, text in pieces) == stream.text
    assert [label for label, _ in pieces] == sorted(label for label, _ in pieces)
    whole = TextStream(tokenizer)
    own = [whole.push(token) for token in ids]
    for number, text in pieces:  # a held back stop string does not move text to another token
        assert text in own[number]


def test_a_generation_knows_which_pieces_of_its_text_were_drafted(target):
    drafter = load_drafter("self:layers=1", target)
    result = speculative_generate(PROMPT, target, drafter, gamma=4, max_new_tokens=40, ignore_eos=True)
    assert result.pieces is not None
    assert "".join(text for _, text in result.pieces) == result.text
    assert {origin for origin, _ in result.pieces} >= {"accepted", "corrected", "target"}
    bare = wrap_target(tiny_language_model().model, None)
    assert speculative_generate(PROMPT, bare, None, max_new_tokens=4).pieces is None


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


def test_a_notebook_shows_the_text_escaped_and_in_the_style_of_its_origins():
    page = as_html([("target", "a<b>&"), ("accepted", "\x1b'\n\u202e")], "2 tokens <i>")
    assert "<b>" not in page
    assert "<i>" not in page
    assert not re.search("[\x00-\x08\x1b\u202e]", page)
    shown = re.findall(r'<span(?: style="([^"]*)")? title="([^"]*)">(.*?)</span>', page, flags=re.DOTALL)
    assert [unescape(text) for _, _, text in shown] == ["a<b>&", "\\x1b'\n\\u202e"]
    assert [title for _, title, _ in shown] == ["the target's own".replace("'", "&#x27;"), "accepted draft"]
    assert (shown[0][0], bool(shown[1][0])) == ("", True)
    for name in ORIGINS.values():
        assert name in unescape(page)


# -- the rule that Python takes ------------------------------------------------------------------------
