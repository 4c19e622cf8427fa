from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import UsageError
from specbench.specs.notation import Options, join_spec, split_spec


@pytest.mark.parametrize(
    ("spec", "word", "options"),
    [
        ("ngram", "ngram", {}),
        ("self:int8", "self", {"int8": True}),
        ("ngram:order=3,sample", "ngram", {"order": "3", "sample": True}),
        (" ngram : order = 3 , top_k=2 ", "ngram", {"order": "3", "top-k": "2"}),
        ("self:layers=a=b:c", "self", {"layers": "a=b:c"}),
    ],
)
def test_split(spec: str, word: str, options: dict[str, str | bool]) -> None:
    assert split_spec(spec) == (word, options)


@pytest.mark.parametrize(
    "spec", ["ngram:", "ngram:,", "ngram:order=3,,sample", "ngram:order=", "ngram:=3", "a: "]
)
def test_split_refuses_empty_options(spec: str) -> None:
    with pytest.raises(UsageError, match="An option is empty"):
        split_spec(spec)


def test_split_refuses_an_option_given_twice() -> None:
    with pytest.raises(UsageError, match="'top-k' is given twice"):
        split_spec("ngram:top-k=2,top_k=3")


_KEYS = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)


@given(st.dictionaries(_KEYS, st.just(True) | st.from_regex(r"[a-z0-9]{1,4}", fullmatch=True)))
def test_joining_is_the_inverse_of_splitting(options: dict[str, str | bool]) -> None:
    assert split_spec(join_spec("word", options, dict.fromkeys(options))) == ("word", options)


def test_joining_leaves_defaults_out() -> None:
    defaults = {"order": 4, "window": None, "sample": False}
    assert (
        join_spec("ngram", {"order": 4, "window": 512, "sample": True}, defaults) == "ngram:window=512,sample"
    )
    assert join_spec("ngram", defaults, defaults) == "ngram"


def test_values_have_types_and_defaults() -> None:
    options = Options("x", {"n": "-7", "on": True}, {"n": "n=N", "m": "m=N", "on": "on", "off": "off"})
    assert options.integer("n", 1) == -7
    assert options.integer("m", None) is None
    assert options.flag("on") is True
    assert options.flag("off") is False


def test_unknown_options_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        Options("x", {"speed": "9"}, {"n": "n=N", "on": "on"})
    assert str(caught.value) == "x has no option 'speed'. Options of x: n=N, on."
    with pytest.raises(UsageError, match="none has no options"):
        Options("none", {"n": "1"}, {})


@pytest.mark.parametrize("value", ["", "three", "1.5", "0x10", "9" * 5000])
def test_no_whole_number(value: str) -> None:
    with pytest.raises(UsageError, match="no whole number") as caught:
        Options("x", {"n": value}, {"n": "n=N"}).integer("n", 1)
    assert caught.value.hint == "Options of x: n=N."


def test_a_number_without_value_and_a_flag_with_one() -> None:
    options = Options("x", {"n": True, "on": "yes"}, {"n": "n=N", "on": "on"})
    with pytest.raises(UsageError, match="'n' of x needs a value"):
        options.integer("n", 1)
    with pytest.raises(UsageError, match="'on' of x takes no value"):
        options.flag("on")


def test_control_characters_are_not_echoed() -> None:
    with pytest.raises(UsageError) as caught:
        Options("x", {"\x1b[31m": True}, {"n": "n=N"})
    assert "\x1b" not in str(caught.value)


def test_whole_numbers_with_dashes_between_them() -> None:
    options = Options(
        "x", {"skip": "3-7-11", "one": "4", "none": True}, dict.fromkeys(["skip", "one", "none", "no"], "")
    )
    assert options.integers("skip") == (3, 7, 11)
    assert options.integers("one") == (4,)
    assert options.integers("no") == ()
    with pytest.raises(UsageError, match="'none' of x needs a value"):
        options.integers("none")
    for bad in ("-3", "3-", "3--4", "a-b", "1.5", "9" * 5000):
        with pytest.raises(UsageError, match="not whole numbers with dashes between them"):
            Options("x", {"skip": bad}, {"skip": "skip=I-J"}).integers("skip")
