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
    """Lists of tokens of all sorts, with any byte after any other."""
    tokenizer = tokenizer_of(kind)
    characters = st.sampled_from(CHARACTERS).map(lambda character: byte_ids(kind, character.encode()))
    others: st.SearchStrategy[int] = st.integers(0, len(tokenizer) - 1)
    if kind != "bytes":  # most of whose tokens are bytes
        others |= st.sampled_from(ids_of(kind, "<unk>", "<s>", "</s>", *PIECES))
    return st.lists(st.one_of(characters, others.map(lambda token: [token])), max_size=25).map(
        lambda parts: [token for part in parts for token in part]
    )


# -- without stop strings -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_decoded_text(kind):
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=100, deadline=None)
    @given(ids=token_lists(kind))
    @example(ids=byte_ids(kind, b"\x28\xec"))
    @example(ids=byte_ids(kind, "aé".encode() + b"\xff"))
    def check(ids: list[int]) -> None:
        released, stream = stream_of(tokenizer, ids)
        assert "".join(released) == decode(tokenizer, ids) == stream.text
        assert not stream.stopped

    check()


# -- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_the_output_with_the_token_that_completes_it(kind):
    """Also where one more byte would take it back; the text is that of the tokens up to there."""
    tokenizer = tokenizer_of(kind)
    pieces = [*(bytes([byte]) for byte in b"(.a \n\xec\xc3\xa9"), "é".encode()]
    parts = [byte_ids(kind, data) for data in pieces]
    words = ("Ġa", "Ġthe", SPECIAL_TOKENS[0]) if kind == "bytes" else ("▁a", "▁", "ab", "<s>", "</s>")
    parts += [[token] for token in ids_of(kind, "a", "b", "c", *words)]
    tokens = st.lists(st.sampled_from(parts), max_size=20).map(
        lambda chosen: [token for part in chosen for token in part]
    )

    @settings(max_examples=200, deadline=None)
    @given(ids=tokens, stops=st.lists(st.text("(abc .é\n", min_size=1, max_size=4), max_size=3))
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_is_a_special_token(kind):
    tokenizer = tokenizer_of(kind)
    name = TURN_END if kind == "bytes" else "</s>"
    (special,) = ids_of(kind, name)
    before, behind = ids_of(kind, "a", "b"), ids_of(kind, "c")
    rules = StopRules((), ["never", name], tokenizer)
    assert rules.cut([*before, special, *behind]) == (3, "stop-string")
    assert StopRules([special], [name], tokenizer).cut([*before, special]) == (3, "eos")
    assert StopRules((), ["never"], tokenizer).cut([*before, special, *behind]) == (4, None)
    if kind == "bytes":  # spelled out it is a text like any other
        spelled = letters(f"a{name}b")
        assert special not in spelled
        assert StopRules((), [name], tokenizer).cut(spelled) == (len(spelled) - 1, "stop-string")


@pytest.mark.parametrize("stop", [f"a{TURN_END}", f"{TURN_END}\n", f"{TURN_END}{TURN_END}"])
def test_a_stop_string_that_joins_a_special_token_to_a_text_is_refused(stop):
    with pytest.raises(UsageError, match="joins the special token") as caught:
        StopRules((), [stop], tokenizer_of("bytes"))
    assert TURN_END in caught.value.message


# -- cost -----------------------------------------------------------------------------------------


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: Sequence[int], **kwargs: Any) -> Any:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **kwargs)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        name: str | None = self.tokenizer.convert_ids_to_tokens(token)
        return name


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("bytes", "the bytes of a text, one token each "),
        ("bytes", "👩‍🚀"),
        ("llama", "👩‍🚀 漢字"),
        ("metaspace", "漢"),
    ],
)
def test_the_cost_grows_with_the_length_alone(kind, pattern):
    """Also where a model repeats its end token, which shows nothing, and end tokens are ignored."""
    text = byte_ids(kind, pattern.encode()) * 5000
    end = ids_of(kind, SPECIAL_TOKENS[0] if kind == "bytes" else "</s>") * 5000
    for ids, stops in ((text, []), (text, ["never"]), (end, []), ([*ids_of(kind, "a"), *end], [])):
        counting = Counting(tokenizer_of(kind))
        stream_of(counting, ids[:5000], stops)
        assert counting.decoded < 10 * 5000


# -- stop rules -----------------------------------------------------------------------------------


(END,) = ids_of("bytes", SPECIAL_TOKENS[0])


@pytest.mark.parametrize(
    ("ends", "stops", "ids", "cut"),
    [
        ([7, 9], [], [1, 2, 3], (3, None)),
        ([7, 9], [], [1, 9, 7], (2, "eos")),  # an end token belongs to the output
        ([7, 9], [], [7], (1, "eos")),
        ([7, 9], [], [], (0, None)),
        ([], [], [1, 2, 3], (3, None)),
        ([], ["STOP"], letters("a STOP b"), (6, "stop-string")),  # with the token that completes it
        ([END], ["b"], [*letters("a"), END, *letters("b")], (2, "eos")),  # whichever comes first
        ([END], ["b"], [*letters("ab"), END], (2, "stop-string")),
        ([], ["a long stop string that never comes", "x"], letters("a long x"), (8, "stop-string")),
    ],
)
def test_where_an_output_is_cut(ends, stops, ids, cut):
    assert StopRules(ends, stops, tokenizer_of("bytes")).cut(ids) == cut


@pytest.mark.parametrize("prompt", [[1, 10**6], [-1, 1], [1, 2**70]])
def test_a_prompt_of_tokens_that_the_target_lacks_is_refused(prompt):
    target = wrap_target(tiny_llama(), tiny_tokenizer())
    with pytest.raises(
        UsageError, match=f"holds the token {min(prompt) if min(prompt) < 0 else max(prompt)}, "
    ):
        speculative_generate(prompt, target, None, max_new_tokens=2)
