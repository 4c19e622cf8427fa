"""Answers of scripted servers: what came when, how many tokens it is, and every way in which a server goes wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from tiny import tiny_tokenizer

from specbench import RunError
from specbench.servers.client import (
    Chunk,
    ServerClient,
    ServerError,
    SpeculationCounters,
    StreamedAnswer,
    count_tokens,
    speculation_counters,
    text_of,
)

URL = "http://server.test/v1/"
STREAM = {"content-type": "text/event-stream"}


class Script(httpx2.AsyncByteStream):
    """A stream whose events take a second each to come; an exception breaks it off."""

    def __init__(self, events: Sequence[object], clock: list[float]) -> None:
        self._events, self._clock = events, clock

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            self._clock[0] += 1.0
            yield event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"


def client_does(action: Callable[[ServerClient], Awaitable[Any]], handler: Any, **options: Any) -> Any:
    """What an action of a client comes to, whose requests the handler answers."""

    async def done() -> Any:
        client = ServerClient("far", URL, key="secret", transport=httpx2.MockTransport(handler), **options)
        try:
            return await action(client)
        finally:
            await client.close()

    return asyncio.run(done())


def asked(
    *events: object,
    status: int = 200,
    prompt: Any = "x",
    seen: list[httpx2.Request] | None = None,
    headers: Any = STREAM,
    **settings: Any,
) -> StreamedAnswer:
    """What a client makes of a scripted answer."""
    clock = [0.0]

    def handler(request: httpx2.Request) -> httpx2.Response:
        if seen is not None:
            seen.append(request)
        return httpx2.Response(status, headers=headers, stream=Script(events, clock))

    return client_does(lambda client: client.ask("m", prompt, settings), handler, clock=lambda: clock[0])


def said(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


DONE = b"data: [DONE]\n\n"
USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}


def test_what_came_when():
    answer = asked(b": hello\n\n", said("the "), said("king"), said("", "length"), USAGE, DONE)
    assert answer == StreamedAnswer((Chunk(2.0, "the ", None), Chunk(3.0, "king", None)), "length", 4.0, 4, 9)
    assert (answer.text, answer.first) == ("the king", Chunk(2.0, "the ", None))


def test_a_conversation_and_its_thoughts():
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
    ("delta", "text"),
    [
        ({"reasoning": "hm ", "reasoning_content": "hm "}, "hm "),
        ({"reasoning": "hm ", "reasoning_content": None}, "hm "),
        ({"reasoning": "", "reasoning_content": "hm ", "content": "yes"}, "hm yes"),
    ],
)
def test_reasoning_has_two_names_and_one_text(delta, text):
    assert asked({"choices": [{"delta": delta}]}, said("", "stop"), DONE).text == text
    assert text_of({"message": delta}) == text


def test_an_empty_finish_reason_is_none():
    """Neither does it end an answer, nor does it replace the reason of one that has ended."""
    empty = said("the ", "")
    assert asked(empty, said("", "length"), said("", ""), DONE).finish_reason == "length"
    with pytest.raises(ServerError, match="broke off"):
        asked(empty, DONE)


@pytest.mark.parametrize(
    ("more", "drafted", "accepted", "cached"),
    [
        ({"timings": {"draft_n": 30, "draft_n_accepted": 12, "cache_n": 3}}, 30, 12, 3),
        ({"timings": {"predicted_n": 5}}, 0, 0, None),
        (
            {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2},
                       "prompt_tokens_details": {"cached_tokens": 8}}},
            7, 5, 8,
        ),
        ({"metrics": {"speculative_decoding": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4}}}, 9, 4, None),
        ({"meta_info": {"spec_draft_token_num": 8, "spec_accept_token_num": 3, "cached_tokens": 6}}, 8, 3, 6),
        ({"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}},
         None, None, None),
        ({"meta_info": {"spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 3}}, 8, 3, None),
        ({"usage": None, "timings": "none"}, None, None, None),
    ],
)  # fmt: skip
def test_acceptance_is_what_the_server_tells(more, drafted, accepted, cached):
    answer = asked(said("x", "stop") | more, DONE)
    assert (answer.drafted, answer.accepted, answer.cached_tokens) == (drafted, accepted, cached)


def vllm(drafted: int, accepted: int, histogram: Any) -> dict[str, Any]:
    counts = {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
    return {"metrics": {"speculative_decoding": {**counts, "acceptance_histogram": histogram}}}


def sglang(drafted: int, accepted: int, histogram: list[int]) -> dict[str, Any]:
    counts = {"spec_draft_token_num": drafted, "spec_accept_token_num": accepted}
    return {"meta_info": {**counts, "spec_accept_histogram": histogram}}


NEWER = {"spec_num_proposed_drafts": 9, "spec_num_correct_drafts": 0, "spec_correct_drafts_histogram": [3, 0]}


@pytest.mark.parametrize(
    ("more", "places"),
    [
        (vllm(24, 9, [3, 2, 2, 1]), (8, (5, 3, 1))),
        (sglang(6, 2, [1, 2]), (3, (2,))),
        ({"meta_info": NEWER}, (3, (0,))),
        # It counts something else than drafts that were kept, or nothing that can be counted.
        (sglang(6, 2, [0, 1, 2]), None),
        (vllm(4, 1, [1, "1"]), None),
        (vllm(4, 0, {"0": 2}), None),
        ({"meta_info": {"spec_accept_histogram": [1, 2]}}, None),
    ],
)
def test_acceptance_by_place_is_what_the_server_tells(more, places):
    found = asked(said("x", "stop") | more, DONE).speculation
    assert (None if found is None else (found.drafts, found.accepted_at)) == places


def answer_of(
    text: str, used: int | None, ids: int | None = None, reason: str = "length", *, reasoned: bool = False
) -> StreamedAnswer:
    piece = Chunk(0.0, text, None if ids is None else (5,) * ids, reasoned)
    return StreamedAnswer((piece,), reason, 1.0, 1, used)


TEXT = "the king and the queen"
READ = len(tiny_tokenizer()(TEXT)["input_ids"])


@pytest.mark.parametrize(
    ("answer", "checked", "tokens", "source", "problem"),
    [
        (answer_of(TEXT, READ), True, READ, "usage", None),
        (answer_of(TEXT, READ + 1, READ), True, READ, "ids", None),
        (answer_of(TEXT, READ // 2), True, READ, "tokenizer", f"The server reports {READ // 2} tokens"),
        (answer_of(TEXT, 3 * READ), True, READ, "tokenizer", "The server reports"),
        (answer_of(TEXT, READ + 9, reasoned=True), True, READ + 9, "usage", None),
        (answer_of(TEXT, READ + 60, reasoned=True), True, READ, "tokenizer", "The server reports"),
        # A stop string is not shown.
        (answer_of(TEXT, READ + 4, reason="stop"), True, READ + 4, "usage", None),
        (answer_of(TEXT, READ + 9, READ), False, READ + 9, "usage", "The stream has"),
        (answer_of(TEXT, READ + 9, READ), True, READ + 9, "usage", "The stream has"),
        (answer_of(TEXT, READ, READ + 9), False, READ + 9, "ids", "The stream has"),
        (replace(answer_of(TEXT, READ + 40), calls=True), True, READ + 40, "usage", None),
        (answer_of(TEXT, None), True, READ, "tokenizer", "The server does not report"),
        (answer_of(TEXT, None), False, None, "nothing", "The server does not report"),
        (answer_of(TEXT, 5), False, 5, "usage", None),
    ],
)
def test_tokens_are_counted_by_the_best_source(answer, checked, tokens, source, problem):
    found = count_tokens(answer, tiny_tokenizer() if checked else None)
    assert (found.tokens, found.source) == (tokens, source)
    assert (found.problem is None) == (problem is None)
    assert (found.problem or "").startswith(problem or "")


def test_drafts_beyond_the_end_of_an_answer_are_not_accepted():
    """Of 76 tokens 15 rounds drafted, and 5 tokens a step were emitted."""
    told = {"predicted_n": 76, "draft_n": 300, "draft_n_accepted": 210, "draft_rounds": 15}
    last = {**said("x", "stop"), "usage": {"completion_tokens": 76}, "timings": told}
    assert asked(last, DONE).accepted == 60


def test_a_call_of_a_tool_is_noted():
    call = {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"name": "f"}}]}}]}
    assert asked(call, said("x", "length"), DONE).calls
    assert not asked(said("x", "length"), DONE).calls


JSON = {"content-type": "application/json"}
BREAKS_OFF = ([said("x")], [said("x"), DONE], [], [b"<html>\n\n"], [b"data: {\n\n", b"data: 7\n\n"],
              [{"choices": "none"}, {"choices": [3]}, {"choices": [{"text": 5, "delta": 6}]}])  # fmt: skip


@pytest.mark.parametrize(
    ("events", "options", "fragment", "retry"),
    [
        *((events, {}, "broke off", False) for events in BREAKS_OFF),
        ([said("x"), httpx2.ReadError("reset")], {}, "far gave no complete answer: reset", False),
        ([httpx2.ConnectError("refused")], {}, "far cannot be reached: refused", True),
        ([said("x"), httpx2.ReadTimeout("")], {}, "answer: ReadTimeout.", False),
        ([said("x"), {"error": {"message": "out of\n\x1b[31mmemory."}}], {}, "middle of its answer", False),
        ([b'{"error": {"message": "bad key secret"}}'], {"status": 401}, "status 401: bad key ***.", False),
        ([b'{"error": "no such model"}'], {"status": 404}, "status 404: no such model.", False),
        ([b"<html>"], {"status": 500}, "status 500: no reason is given.", False),
        ([b"{}"], {"status": 503}, "status 503", True),
        ([b"{}"], {"status": 429}, "status 429", True),
        ([b""], {"status": 302}, "redirects", False),
        ([b"{}"], {"headers": JSON}, "no complete answer", False),
    ],
)
def test_an_answer_that_goes_wrong_is_one_sentence(events, options, fragment, retry):
    with pytest.raises(ServerError) as caught:
        asked(*events, **options)
    assert fragment in str(caught.value)
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)
    assert caught.value.retry == retry


def test_line_separators_within_a_text_are_text():
    event = ("data: " + json.dumps(said("a\u2028b\x85", "stop"), ensure_ascii=False) + "\n\n").encode()
    assert asked(event, DONE).text == "a\u2028b\x85"


def models(body: Any, status: int = 200) -> dict[str, str]:
    return client_does(ServerClient.models, lambda request: httpx2.Response(status, json=body))


def test_the_models_of_a_server():
    listed = [{"id": "m", "owned_by": "vllm"}, {"id": "n"}, {"id": 5}, 7]
    assert models({"data": listed}) == {"m": "vllm", "n": ""}
    assert models({"data": []}) == {}
    for wrong in ({}, [], {"data": 3}):
        with pytest.raises(ServerError, match="does not speak the OpenAI protocol"):
            models(wrong)
    with pytest.raises(ServerError, match="status 404"):
        models({}, status=404)


def pieces_at(*times: float) -> StreamedAnswer:
    return StreamedAnswer(
        tuple(Chunk(time, "x", None) for time in times), "length", times[-1] if times else 0.0
    )


def test_pieces_right_behind_each_other_are_one_burst():
    assert pieces_at(1.0, 2.0, 3.1, 4.0).bursts == 4, "one by one"
    assert pieces_at(1.0, 2.0, 2.001, 2.002, 3.0, 3.001, 4.0).bursts == 4
    assert pieces_at(1.0).bursts == 1
    assert pieces_at().bursts == 0
    assert pieces_at(1.0, 1.0).bursts == 1, "all at once"


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


def test_counters_are_read_by_their_names():
    found = speculation_counters(VLLM)
    assert found == SpeculationCounters(12, 30, 12, (8, 0, 4))
    assert speculation_counters("llamacpp:requests 3\n") is None
    before = SpeculationCounters(10, 20, 9, (8,))
    assert found.since(before) == SpeculationCounters(2, 10, 3, (0, 0, 4))
    with pytest.raises(RunError, match="decreased"):
        before.since(found)
