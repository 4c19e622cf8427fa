"""The notation of drafters and draft policies, and options declared as fields."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.base.errors import UsageError
from specbench.drafters.lookup import LookupDrafter
from specbench.drafters.ngram import NGramDrafter
from specbench.drafters.suffix import SuffixDrafter
from specbench.specs.drafters import Lookup, NGram, Suffix, parse_drafter
from specbench.specs.notation import (
    Spec,
    dashed,
    option,
    read_options,
    split_spec,
    with_defaults,
)


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
def test_split(spec, word, options):
    assert split_spec(spec) == (word, options)


@pytest.mark.parametrize(
    "spec", ["ngram:", "ngram:,", "ngram:order=3,,sample", "ngram:order=", "ngram:=3", "a: "]
)
def test_split_refuses_empty_options(spec):
    with pytest.raises(UsageError, match="An option is empty"):
        split_spec(spec)


_KEYS = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)


@given(st.dictionaries(_KEYS, st.just(True) | st.from_regex(r"[a-z0-9]{1,4}", fullmatch=True)))
def test_joining_is_the_inverse_of_splitting(options):
    items = [key if value is True else f"{key}={value}" for key, value in options.items()]
    assert split_spec(f"word{':' if items else ''}{','.join(items)}") == ("word", options)


@dataclass(frozen=True)
class Declared(Spec):
    word = "x"

    n: int | None = option(
        3,
        "n=N (or any)",
        "how many",
        least=1,
        most=9,
        parse=lambda text: None if text == "any" else int(text),
    )
    most: int = option(2, "most=N", "most of them", most=lambda spec: spec.n or 9, before_model=8)
    on: bool = option(False, "on", "whether")
    skip: tuple[int, ...] = option((), "skip=I-J", "without", parse=dashed, expected="list of numbers")
    other: int = 7


OPTIONS = Declared.options()


def read(**given: str | bool) -> dict[str, object]:
    return read_options("x", given, OPTIONS)


def test_options_are_the_fields_that_declare_them():
    assert [(each.name, each.key, each.default) for each in OPTIONS] == [
        ("n", "n", 3), ("most", "most", 2), ("on", "on", False), ("skip", "skip", ()),
    ]  # fmt: skip


def test_values_have_types_and_are_written_as_they_are_read():
    assert read(n="7", on=True, skip="3-7-11") == {"n": 7, "on": True, "skip": (3, 7, 11)}
    assert read(n="any") == {"n": None}
    assert read(skip="4") == {"skip": (4,)}
    n, most, on, skip = OPTIONS
    written = [n.write(None), n.write(4), most.write(2), on.write(True), skip.write((3, 7))]
    assert written == ["n=any", "n=4", "most=2", "on", "skip=3-7"]


def test_defaults_go_no_further_than_other_options_allow():
    alone = with_defaults({}, OPTIONS)
    assert alone == {"n": 3, "most": 2, "on": False, "skip": ()}
    assert with_defaults({}, OPTIONS, before_model=True)["most"] == 3
    assert with_defaults({"n": None}, OPTIONS, before_model=True)["most"] == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speed": "9"}, "x has no option 'speed'. Options of x: n=N (or any), most=N, on, skip=I-J."),
        ({"skp": "9"}, "x has no option 'skp'. Did you mean 'skip'? Options of x"),
        ({"n": True}, "The option 'n' of x needs a value."),
        ({"on": "yes"}, "The option 'on' of x takes no value, and was given 'yes'."),
        *(
            ({"n": value}, f"The option 'n' of x is {value!r}, which is no whole number. Options of x: n=N")
            for value in ("", "three", "1.5", "0x10", "9" * 5000)
        ),
        *(
            ({"skip": value}, f"The option 'skip' of x is {value!r}, which is no list of numbers.")
            for value in ("-3", "3-", "3--4", "a-b", "1.5", "9" * 5000)
        ),
    ],
)
def test_what_cannot_be_read_is_refused(given, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        read(**given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "The option 'n' of x is 0. Give 1 to 9."),
        ("n", 10, "The option 'n' of x is 10. Give 1 to 9."),
        ("most", 4, "The option 'most' of x is 4. Give at most 3."),
    ],
)
def test_what_is_out_of_range_is_refused(name, value, message):
    each = next(each for each in OPTIONS if each.name == name)
    with pytest.raises(UsageError, match=re.escape(message)):
        each.check(value, "x", Declared(3))
    each.check(3, "x", Declared(3))


def test_control_characters_are_not_echoed():
    with pytest.raises(UsageError) as caught:
        read_options("x", {"\x1b[31m": True}, ())
    assert "\x1b" not in str(caught.value)


FREE: dict[type, type] = {Lookup: LookupDrafter, NGram: NGramDrafter, Suffix: SuffixDrafter}


@pytest.mark.parametrize(
    "text",
    [
        "lookup", "lookup:n=2", "lookup:n=any", "lookup:n=5,min=2", "lookup:min=3", "ngram",
        "ngram:order=2,keep,top-k=4,sample", "suffix", "suffix:n=8,min=2,keep", "suffix+self:int8",
        "suffix:min=1+self:int8", "lookup:n=any|lookup+self:int8|org/small", "grammar", "grammar+lookup",
        "grammar+lookup:n=5+self:int8",
    ],
)  # fmt: skip
def test_a_drafter_is_named_as_it_is_written(text):
    spec = parse_drafter(text)
    assert str(spec) == text
    assert spec.keeps_state == ("keep" in text)
    if type(spec) in FREE:
        assert FREE[type(spec)](spec).traits.name == text


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("lookup", "n=0 n=65 min=0 min=65,n=any min=4 n n=many min=any order=3"),
        ("ngram", "order=1 order=17 order order=two top-k=0 keep=yes gamma=4"),
        ("suffix", "n=0 n=65 min=5,n=4 min=0 order=3"),
    ],
)
def test_options_that_a_drafter_has_not_are_named(word, options):
    for each in options.split():
        with pytest.raises(UsageError, match=each.partition("=")[0]):
            parse_drafter(f"{word}:{each}")
    for text in ("lookup|none", "lookup|lookup", "lookup|"):
        with pytest.raises(UsageError):
            parse_drafter(text)
