"""Text made safe to show: nothing hidden in a token, nothing that steers a terminal in a stream."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.base.textsafe import terminal_safe, visible

# Also lone surrogates, which the default strategy leaves out.
texts = st.text(
    st.characters(codec=None, exclude_categories=()) | st.sampled_from("\ud800\udfff\x1b\x9b\u202e\u2066")
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "␣the"),
        ("\n\n", "⏎⏎"),
        ("\t}", "⇥}"),
        ("\r\n", "\\r⏎"),
        ("\x00", "\\x00"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("\x7f", "\\x7f"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("\u200bx\u200d\ufeff", "\\u200bx\\u200d\\ufeff"),
        ("\xa0\u3000\u2028", "\\xa0\\u3000\\u2028"),
        ("\u3164\u2800\ufe0f", "\\u3164\\u2800\\ufe0f"),
        ("\ud83d", "\\ud83d"),
        ("\ufffd", "\\ufffd"),
        ("\U000e0041", "\\U000e0041"),
        ("\u0301e", "◌\u0301e"),
        ("e\u0301", "e\u0301"),
        ("[red][/] \\n", "[red][/]␣\\n"),
        ("😀 日本 שלום", "😀␣日本␣שלום"),
        ("", ""),
    ],
)
def test_visible(text, shown):
    assert visible(text) == shown


@given(texts)
def test_visible_is_one_line_of_what_can_be_seen(text):
    shown = visible(text)
    assert shown.isprintable()
    assert not any(character.isspace() for character in shown)
    assert "\ufffd" not in shown
    assert not unicodedata.category(shown[0]).startswith("M") if shown else not text
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[2J\x07\r", "\\x1b[2J\\x07\\r"),
        ("\x00\x7f\x85\x9b", "\\x00\\x7f\\x85\\x9b"),
        ("\u202eabc\u2069", "\\u202eabc\\u2069"),
        ("\ud800x\udc00", "\ufffdx\ufffd"),
        ("👩\u200d👧 ❤\ufe0f שלום\u200f!", "👩\u200d👧 ❤\ufe0f שלום\u200f!"),
        ("[red][/]", "[red][/]"),
    ],
)
def test_terminal_safe(text, safe):
    assert terminal_safe(text) == safe


@given(texts, texts)
def test_terminal_safe_leaves_no_control_however_the_text_is_cut(head, tail):
    safe = terminal_safe(head + tail)
    assert safe == terminal_safe(head) + terminal_safe(tail)
    assert {c for c in safe if unicodedata.category(c) in ("Cc", "Cs")} <= {"\n", "\t"}
    steering = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not {c for c in safe if unicodedata.bidirectional(c) in steering}
