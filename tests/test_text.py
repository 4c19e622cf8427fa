"""Text from tokens, one by one: the same as decoding all of them, and never anything that must be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import SPECIAL_TOKENS, TURN_END, tiny_llama, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench.base.errors import UsageError
from specbench.decoding.stops import StopRules, TextStream
from specbench.generate import speculative_generate
from specbench.models.target import wrap_target

PIECES = (
    *("▁", "▁▁", "▁▁▁▁", "▁the", "▁world", "▁a", "▁.", "hello", "world", "a", "b", "c", "ab"),
    *(".", ",", "!", "n't", "é", "\n"),
)
CHARACTERS = ("é", "€", "漢", "😀", "👩‍🚀", "\u0301", "\u00a0", "z")


def pieces_tokenizer(*, metaspace: bool) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes them: a leading space is dropped, rare characters are bytes.

    Args:
        metaspace: Decode with `decoders.Metaspace`, which looks at single tokens; otherwise the way of Llama's, which
            joins them first.
    """
    specials = ("<unk>", "<s>", "</s>")
    names = (*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES)
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=specials[0], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    if metaspace:
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[1],
        eos_token=specials[2],
        clean_up_tokenization_spaces=False,
    )


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return tiny_tokenizer() if kind == "bytes" else pieces_tokenizer(metaspace=kind == "metaspace")


KINDS = ("bytes", "llama", "metaspace")


def ids_of(kind: str, *names: str) -> list[int]:
    return [tokenizer_of(kind).convert_tokens_to_ids(name) for name in names]


def byte_ids(kind: str, data: bytes) -> list[int]:
    """One token per byte."""
    if kind == "bytes":
        return ids_of(kind, *(bytes_to_unicode()[byte] for byte in data))
    return ids_of(kind, *(f"<0x{byte:02X}>" for byte in data))


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stream_of(tokenizer: Any, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """What every token released, and at last ``finish``."""
    stream = TextStream[None](tokenizer, stops)
    released = [*(stream.push(token, None) for token in ids), stream.finish(None)]
    return ["".join(text for _, text in pieces) for pieces in released], stream


def before_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the stop string that is complete first; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def token_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Lists of tokens of all sorts, with any byte after any other; most often those of the stop strings below."""
    tokenizer = tokenizer_of(kind)
    texts = [*(bytes([byte]) for byte in b"(.a \n\xec\xc3\xa9"), *(each.encode() for each in CHARACTERS)]
    words = ("Ġa", "Ġthe", SPECIAL_TOKENS[0]) if kind == "bytes" else ("<unk>", "<s>", "</s>", *PIECES)
    known = [
        *(byte_ids(kind, text) for text in texts),
        *([token] for token in ids_of(kind, "a", "b", "c", *words)),
    ]
    others = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    parts = st.lists(st.sampled_from(known) | others, max_size=25)
    return parts.map(lambda chosen: [token for part in chosen for token in part])


# -- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_decoded_text_up_to_a_stop_string(kind):
    """A stop string ends the output with the token that completes it, also where one more byte would take it back."""
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=250, deadline=None)
    @given(ids=token_lists(kind), stops=st.lists(st.text("(abc .é\n", min_size=1, max_size=4), max_size=3))
    @example(ids=byte_ids(kind, b"\x28\xec"), stops=[])
    @example(ids=byte_ids(kind, "aé".encode() + b"\xff"), stops=[])
    @example(ids=byte_ids(kind, b"a(\xec"), stops=["("])
    @example(ids=byte_ids(kind, b" a"), stops=[" a"])
    def check(ids: list[int], stops: list[str]) -> None:
        texts = [decode(tokenizer, ids[:count]) for count in range(len(ids) + 1)]
        count = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        expected = texts[-1] if count is None else before_stop(texts[count], stops)
        assert StopRules((), stops, tokenizer).cut(ids) == (
            (len(ids), None) if count is None else (count, "stop-string")
        )
        released, stream = stream_of(tokenizer, ids, stops)
        assert "".join(released) == stream.text == expected
        assert all(expected.startswith(shown) for shown in accumulate(released))
        assert stream.stopped == (count is not None)

    check()


def letters(text: str) -> list[int]:
    """One token per character."""
    return byte_ids("bytes", text.encode())


@pytest.mark.parametrize(
    ("text", "stops", "released"),
    [
        ("one STOP two", ["STOP"], ["o", "n", "e", " ", *[""] * 9]),  # over several tokens
        ("STOUT", ["STOP"], ["", "", "", "STOU", "T", ""]),  # kept back, then released
        ("xSTO", ["STOP"], ["x", "", "", "", "STO"]),
        ("ababx", ["abac"], ["", "", "", "ab", "abx", ""]),  # beginnings overlap
        ("\n\nHello", ["\n\n"], [""] * 8),  # at the very start
        ("abab", ["b"], ["a", "", "", "", ""]),  # nothing after it
    ],
)
def test_what_each_letter_releases(text, stops, released):
    found, stream = stream_of(tokenizer_of("bytes"), letters(text), stops)
    assert found == released
    assert stream.text == "".join(released)
    assert stream.stopped is any(stop in text for stop in stops)


@pytest.mark.parametrize("stop", [f"a{TURN_END}", f"{TURN_END}\n", f"{TURN_END}{TURN_END}"])
def test_a_stop_string_that_joins_a_special_token_to_a_text_is_refused(stop):
    with pytest.raises(UsageError, match="joins the special token") as caught:
        StopRules((), [stop], tokenizer_of("bytes"))
    assert TURN_END in caught.value.message


# -- cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("bytes", "the bytes of a text, one token each "),
        ("bytes", "👩‍🚀"),
        ("llama", "👩‍🚀 漢字"),
        ("metaspace", "漢"),
    ],
)
def test_the_cost_grows_with_the_length_alone(kind, pattern, monkeypatch):
    """Also where a model repeats its end token, which shows nothing, and end tokens are ignored."""
    tokenizer, decoded = tokenizer_of(kind), list[int]()
    own = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **more: decoded.append(len(ids)) or own(ids, **more))
    text = byte_ids(kind, pattern.encode()) * 5000
    end = ids_of(kind, SPECIAL_TOKENS[0] if kind == "bytes" else "</s>") * 5000
    for ids, stops in ((text, []), (text, ["never"]), (end, []), ([*ids_of(kind, "a"), *end], [])):
        decoded.clear()
        stream_of(tokenizer, ids[:5000], stops)
        assert sum(decoded) < 10 * 5000


# -- stop rules -----------------------------------------------------------------------------------


(END,) = ids_of("bytes", SPECIAL_TOKENS[0])
SPECIAL = {kind: TURN_END if kind == "bytes" else "</s>" for kind in KINDS}
"""A special token of each tokenizer."""


def with_special(kind: str) -> list[int]:
    return ids_of(kind, "a", "b", SPECIAL[kind], "c")


@pytest.mark.parametrize(
    ("kind", "ends", "stops", "ids", "cut"),
    [
        ("bytes", [7, 9], [], [1, 2, 3], (3, None)),
        ("bytes", [7, 9], [], [1, 9, 7], (2, "eos")),  # an end token belongs to the output
        ("bytes", [7, 9], [], [7], (1, "eos")),
        ("bytes", [7, 9], [], [], (0, None)),
        ("bytes", [], [], [1, 2, 3], (3, None)),
        ("bytes", [], ["STOP"], letters("a STOP b"), (6, "stop-string")),  # with the token that completes it
        ("bytes", [END], ["b"], [*letters("a"), END, *letters("b")], (2, "eos")),  # whichever comes first
        ("bytes", [END], ["b"], [*letters("ab"), END], (2, "stop-string")),
        ("bytes", [], ["a long stop string that never comes", "x"], letters("a long x"), (8, "stop-string")),
        (
            "bytes",
            [],
            [TURN_END],
            letters(f"a{TURN_END}b"),
            (1 + len(TURN_END), "stop-string"),
        ),  # spelled out
        *((kind, [], ["never", SPECIAL[kind]], with_special(kind), (3, "stop-string")) for kind in KINDS),
        *(
            (kind, ids_of(kind, SPECIAL[kind]), [SPECIAL[kind]], with_special(kind), (3, "eos"))
            for kind in KINDS
        ),
        *((kind, [], ["never"], with_special(kind), (4, None)) for kind in KINDS),
    ],
)
def test_where_an_output_is_cut(kind, ends, stops, ids, cut):
    assert StopRules(ends, stops, tokenizer_of(kind)).cut(ids) == cut


@pytest.mark.parametrize("prompt", [[1, 10**6], [-1, 1], [1, 2**70]])
def test_a_prompt_of_tokens_that_the_target_lacks_is_refused(prompt):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    with pytest.raises(
        UsageError, match=f"holds the token {min(prompt) if min(prompt) < 0 else max(prompt)}, "
    ):
        speculative_generate(prompt, target, None, max_new_tokens=2)
