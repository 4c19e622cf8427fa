"""Answers of scripted servers: what came when, how many tokens it is, and every way in which a server goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import pytest
from tiny import tiny_tokenizer

from specbench import RunError, UsageError
from specbench.bench.engines.server import (
    Answer,
    Piece,
    ServerClient,
    SpeculationCounters,
    count_tokens,
    speculation_counters,
)

URL = "http://server.test/v1"


class Script(httpx2.SyncByteStream):
    """A stream whose events take a second each to come; an exception breaks it off."""

    def __init__(self, events: Sequence[object], clock: list[float]) -> None:
        self._events, self._clock = events, clock

    def __iter__(self) -> Iterator[bytes]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            self._clock[0] += 1.0
            yield event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"


def asked(
    *events: object,
    status: int = 200,
    prompt: Any = "x",
    seen: list[httpx2.Request] | None = None,
    **settings: Any,
) -> Answer:
    """What a client makes of a scripted answer."""
    clock = [0.0]

    def handler(request: httpx2.Request) -> httpx2.Response:
        if seen is not None:
            seen.append(request)
        return httpx2.Response(status, stream=Script(events, clock))

    client = ServerClient(
        URL, "m", key="secret", transport=httpx2.MockTransport(handler), clock=lambda: clock[0]
    )
    with client:
        return client.ask(prompt, settings)


def said(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


DONE = b"data: [DONE]\n\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}


def test_what_came_when() -> None:
    answer = asked(b": hello\n\n", said("the "), said("king"), said("", "length"), USAGE, DONE)
    assert answer == Answer((Piece(2.0, "the ", None), Piece(3.0, "king", None)), "length", 6.0, 4, 9)
    assert (answer.text, answer.ttft_s) == ("the king", 2.0)


def test_a_conversation_and_its_thoughts() -> None:
    seen: list[httpx2.Request] = []
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm "}, {"content": "yes"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    ending = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    answer = asked(*events, ending, DONE, prompt=[{"role": "user", "content": "?"}], seen=seen, temperature=0)
    assert answer.text == "hm yes"
    assert answer.used_tokens is None
    body = json.loads(seen[0].content)
    assert seen[0].url.path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "?"}]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["stream"], body["temperature"], body["model"]) == (True, 0, "m")
    assert seen[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("more", "drafted", "accepted", "cached"),
    [
        ({"timings": {"draft_n": 30, "draft_n_accepted": 12, "cache_n": 3}}, 30, 12, 3),
        ({"timings": {"predicted_n": 5}}, None, None, None),
        (
            {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2},
                       "prompt_tokens_details": {"cached_tokens": 8}}},
            7, 5, 8,
        ),
        ({"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}},
         None, None, None),
        ({"usage": None, "timings": "none"}, None, None, None),
    ],
)  # fmt: skip
def test_acceptance_is_what_the_server_tells(more: Any, drafted: Any, accepted: Any, cached: Any) -> None:
    answer = asked(said("x", "stop") | more, DONE)
    assert (answer.drafted, answer.accepted, answer.cached_tokens) == (drafted, accepted, cached)


def answer_of(text: str, used: int | None, *ids: int, reason: str = "length") -> Answer:
    pieces = (
        [Piece(0.0, text, None)]
        if not ids
        else [Piece(0.0, text if not i else "", n) for i, n in enumerate(ids)]
    )
    return Answer(tuple(pieces), reason, 1.0, 1, used)


def test_tokens_are_counted_by_the_best_witness() -> None:
    tokenizer = tiny_tokenizer()
    text = "the king and the queen"
    read = len(tokenizer(text)["input_ids"])
    fine = count_tokens(answer_of(text, read), tokenizer)
    assert (fine.tokens, fine.source, fine.problem) == (read, "usage", None)
    named = count_tokens(answer_of(text, read + 1, read), tokenizer)
    assert (named.tokens, named.source, named.problem) == (read, "ids", None)
    steps = count_tokens(answer_of(text, read // 2), tokenizer)  # a server that counts its steps
    assert (steps.tokens, steps.source) == (read, "tokenizer")
    assert steps.problem == (
        f"The server counts {read // 2} tokens, and its text has {read} by the target's tokenizer."
    )
    assert count_tokens(answer_of(text, 3 * read), tokenizer).problem
    assert not count_tokens(answer_of(text, read + 4, reason="stop"), tokenizer).problem, (
        "a stop string is not shown"
    )
    parted = count_tokens(answer_of(text, read + 9, read), None)
    assert (parted.tokens, parted.source) == (read, "ids")
    assert parted.problem
    alone = count_tokens(answer_of(text, None), tokenizer)
    assert (alone.tokens, alone.source) == (read, "tokenizer")
    assert alone.problem
    nothing = count_tokens(answer_of(text, None), None)
    assert (nothing.tokens, nothing.source) == (None, "nothing")
    assert not count_tokens(answer_of(text, 5), None).problem, "unchecked"


@pytest.mark.parametrize(
    ("events", "fragment"),
    [
        ([said("x"), httpx2.ReadError("reset")], "cannot be asked: reset"),
        ([said("x"), httpx2.ReadTimeout("")], "not answered in time"),
        ([said("x")], "broke off before its end"),
        ([said("x"), DONE], "broke off before its end"),
        ([], "broke off before its end"),
        ([b"<html>\n\n"], "broke off before its end"),
        (
            [said("x"), {"error": {"message": "out of\n\x1b[31mmemory."}}],
            "in the middle of its answer: out of",
        ),
        ([b"data: {\n\n", b"data: 7\n\n"], "broke off before its end"),
        ([{"choices": "none"}, {"choices": [3]}, {"choices": [{"text": 5, "delta": 6}]}], "broke off"),
    ],
)
def test_an_answer_that_goes_wrong_is_one_sentence(events: list[Any], fragment: str) -> None:
    with pytest.raises(RunError) as caught:
        asked(*events)
    assert fragment in str(caught.value)
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "fragment"),
    [
        (401, b'{"error": {"message": "bad key"}}', "status 401: bad key."),
        (404, b'{"error": "no such model"}', "status 404: no such model."),
        (500, b"<html>", "status 500: no reason is given."),
        (302, b"", "status 302"),
    ],
)
def test_a_refusal_says_why(status: int, body: bytes, fragment: str) -> None:
    with pytest.raises(RunError, match="refuses a request") as caught:
        asked(body, status=status)
    assert fragment in str(caught.value)


def lists(body: Any) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda request: httpx2.Response(200, json=body)


def test_the_one_model_of_a_server_is_taken() -> None:
    def client(body: Any) -> ServerClient:
        return ServerClient(URL + "/", transport=httpx2.MockTransport(lists(body)))

    assert client({"data": [{"id": "m"}]}).model == "m"
    with pytest.raises(UsageError, match="lists 2 models: a, b"):
        client({"data": [{"id": "a"}, {"id": "b"}]})
    for wrong in ({}, [], {"data": 3}, {"data": [{"id": 5}, 7]}):
        with pytest.raises(RunError, match="does not speak the OpenAI protocol"):
            client(wrong)


VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 3.0e1
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 4.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
"""


def test_counters_are_read_by_their_names() -> None:
    found = speculation_counters(VLLM)
    assert found == SpeculationCounters(12, 30, 12, (8, 0, 4))
    assert speculation_counters("llamacpp:requests 3\n") is None
    before = SpeculationCounters(10, 20, 9, (8,))
    assert found.since(before) == SpeculationCounters(2, 10, 3, (0, 0, 4))
    with pytest.raises(RunError, match="gone back"):
        before.since(found)
