"""Logs of answers: every form gives the same answer, and every line that cannot be used says why."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tiny import TURN_END, tiny_tokenizer

from specbench.decoding.sampling import Sampling
from specbench.generate import encode_messages
from specbench.predict.logs import REASONS, Log, read_log

TOKENIZER = tiny_tokenizer()
TEXT = "the king and the queen"
IDS = list(TOKENIZER(TEXT)["input_ids"])
MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = encode_messages(TOKENIZER, MESSAGES)
PLAIN = list(TOKENIZER("Hello")["input_ids"])
LOGPROBS = [-0.1 * place for place in range(len(IDS))]
END = TOKENIZER.convert_tokens_to_ids(TURN_END)


def read(*records: Any, **settings: Any) -> Log:
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in records]
    return read_log(lines, TOKENIZER, **settings)


def content(named: bool = False, **more: Any) -> list[dict[str, Any]]:
    """Log probabilities in the form of the chat."""
    pieces = [TOKENIZER.decode([token]) for token in IDS]
    return [
        {
            "token": piece,
            "logprob": value,
            **({"id": token} if named else {"bytes": list(piece.encode())}),
            **more,
        }
        for piece, value, token in zip(pieces, LOGPROBS, IDS, strict=True)
    ]


def chat(**choice: Any) -> dict[str, Any]:
    """A response of the chat."""
    said = {"message": {"role": "assistant", "content": TEXT}, "finish_reason": "length", **choice}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, **said}],
        "usage": {"completion_tokens": len(IDS)},
    }


ASKED = {"messages": MESSAGES, "temperature": 1.0, "max_tokens": len(IDS)}
TEXT_ASKED = {"prompt": "Hello", "temperature": 1.0, "max_tokens": len(IDS)}
LEGACY = {
    "tokens": [TOKENIZER.decode([token]) for token in IDS], "token_logprobs": LOGPROBS, "text_offset": [],
    "top_logprobs": None,
}  # fmt: skip
FORMS: dict[str, tuple[Any, list[int]]] = {
    "vLLM, chat": ({"request": ASKED, "response": chat(logprobs={"content": content()})}, CHAT),
    "vLLM, token ids": (
        {"request": ASKED, "response": {**chat(logprobs={"content": content()}, token_ids=IDS),
                                        "prompt_token_ids": CHAT}},
        CHAT,
    ),
    "vLLM, tokens as ids": (
        {"request": ASKED, "response": chat(logprobs={"content": [
            {"token": f"token_id:{token}", "logprob": value} for token, value in zip(IDS, LOGPROBS, strict=True)]})},
        CHAT,
    ),
    "llama.cpp, chat": ({"request": ASKED, "response": chat(logprobs={"content": content(named=True)})}, CHAT),
    "SGLang, completions": (
        {"request": TEXT_ASKED,
         "response": {"choices": [{"text": TEXT, "logprobs": LEGACY, "finish_reason": "length"}]}},
        PLAIN,
    ),
    "a batch": (
        {"custom_id": "1", "request": {"method": "POST", "body": ASKED},
         "response": {"status_code": 200, "body": chat(logprobs={"content": content()})}},
        CHAT,
    ),
    "flat": ({**ASKED, **chat(logprobs={"content": content()})}, CHAT),
    "token ids alone": (
        {"prompt": PLAIN, "token_ids": IDS, "temperature": 1.0, "max_tokens": len(IDS),
         "choices": [{"logprobs": {"content": content()}}]},
        PLAIN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_answer(name):
    record, prompt = FORMS[name]
    log = read(record)
    assert not log.left_out
    (answer,) = log.answers
    assert list(answer.prompt) == prompt
    assert list(answer.tokens) == IDS
    assert answer.sampling == Sampling(temperature=1.0)
    assert answer.probabilities == pytest.approx(np.exp(LOGPROBS))
    assert answer.limit == len(IDS)


PLAIN_LINE = {"prompt": "Hello", "answer": TEXT, "id": 7}


def test_plain_lines_have_no_more_than_texts():
    (answer,) = read(PLAIN_LINE, sampling={"temperature": 0.0}).answers
    assert (list(answer.prompt), list(answer.tokens)) == (PLAIN, IDS)
    assert (answer.name, answer.limit, answer.probabilities) == ("7", None, None)
    assert answer.sampling.greedy


@pytest.mark.parametrize(
    ("stopped", "temperature", "end"),
    [({}, 0, [END]), ({}, 1.0, []), ({"stop_reason": 5}, 0, [5]), ({"stop_reason": "queen"}, 0, [])],
)
def test_the_token_that_ended_an_answer_is_added_where_it_was_counted(stopped, temperature, end):
    """Not behind a sampled answer, as its probability is not known, or a stop string."""
    response = chat(finish_reason="stop", **stopped)
    response["usage"]["completion_tokens"] += 1
    (answer,) = read({"request": {**ASKED, "temperature": temperature}, "response": response}).answers
    assert list(answer.tokens) == [*IDS, *end]


def test_a_character_of_several_tokens_is_told_with_its_last_one():
    split = list(TOKENIZER("🙎")["input_ids"])
    assert len(split) > 1
    entries = [{"token": "", "logprob": -0.5, "bytes": []}] * (len(split) - 1)
    entries += [{"token": "🙎", "logprob": -0.5, "bytes": list("🙎".encode())}, *content()]
    (answer,) = read({"request": ASKED, "response": chat(logprobs={"content": entries})}).answers
    assert list(answer.tokens) == [*split, *IDS]
    del entries[0]
    assert read({"request": ASKED, "response": chat(logprobs={"content": entries})}).left_out == {
        "tokenizer": [1]
    }


def test_several_choices_are_several_answers_and_a_limit_holds():
    record = {"request": ASKED, "response": {**chat(), "choices": chat()["choices"] * 3}}
    assert len(read(record).answers) == 3
    record["response"]["usage"] = {"completion_tokens": 3 * len(IDS)}  # those of all together
    assert [list(each.tokens) for each in read(record).answers] == [IDS] * 3
    log = read(record, record, b"", record, limit=4)
    assert (len(log.answers), log.unread) == (6, True)


def changed(**request: Any) -> dict[str, Any]:
    return {"request": {**ASKED, **request}, "response": chat(logprobs={"content": content()})}


BAD: list[tuple[str, Any]] = [
    ("form", b"no JSON"),
    ("form", [1]),
    ("form", {"prompt": "Hello", "temperature": 0}),
    ("form", {"request": ASKED, "response": {"choices": []}}),
    ("form", {"request": ASKED, "response": chat(logprobs={"tokens": ["a"], "token_logprobs": []})}),
    ("prompt", {"temperature": 0, **chat()}),
    ("short", {"prompt": "Hello", "answer": "a", "temperature": 0}),
    ("cut", {"request": ASKED, "response": chat(finish_reason="abort")}),
    ("cut", {"request": ASKED, "response": chat(logprobs={"content": content()[:3]})}),
    (
        "tokenizer",
        {"request": ASKED, "response": chat(logprobs={"content": [{"token": "zebra", "logprob": 0.0}] * 9})},
    ),
    ("tokenizer", {"request": ASKED, "response": {**chat(), "usage": {"completion_tokens": 4}}}),
    ("tokenizer", {"prompt": [1, 2], "token_ids": [5, 99_999], "temperature": 0}),
    ("prompt", {**changed(messages=[{"role": "user", "content": [{"type": "image_url"}]}])}),
    (
        "hidden",
        {"request": ASKED, "response": chat(message={"content": None, "tool_calls": [{"function": {}}]})},
    ),
    ("hidden", {"request": ASKED, "response": chat(message={"content": "a", "reasoning_content": "b"})}),
    ("field frequency_penalty", changed(frequency_penalty=0.5)),
    ("field response_format", changed(response_format={"type": "json_object"})),
    ("field temperature, top_p", changed(top_p=7)),
    ("field continue_final_message", changed(continue_final_message=True)),
    ("field allowed_token_ids", changed(extra_body={"allowed_token_ids": [1]})),
    ("field a_new_one", changed(extra_body={"a_new_one": 2})),
    ("field options", changed(options={"repeat_penalty": 1.1})),
    ("field min_tokens", {**PLAIN_LINE, "temperature": 0, "min_tokens": 3}),
    ("temperature", {"prompt": "Hello", "answer": TEXT}),
    ("kind", changed(temperature=0.7)),
]


@pytest.mark.parametrize(("kind", "record"), BAD)
def test_a_line_that_cannot_be_used_is_counted(kind, record):
    log = read(changed(), record)
    assert len(log.answers) == 1
    assert log.left_out == {kind: [2]}
    (note,) = log.notes()
    name = kind.removeprefix("field ")
    assert note.startswith("1 line is left out (2): such a line ")
    assert (repr(name) if " " in kind else REASONS[kind]) in note


def test_a_prompt_with_its_first_token_written_out_has_it_once(monkeypatch):
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(
        "specbench.predict.logs.encode_prompt",
        lambda _, text, **__: [tokenizer.bos_token_id, *tokenizer(text)["input_ids"]],
    )
    for text in ("Hello", f"{tokenizer.bos_token}Hello"):
        line = json.dumps({"prompt": text, "answer": TEXT, "temperature": 0}).encode()
        (answer,) = read_log([line], tokenizer).answers
        assert list(answer.prompt) == [tokenizer.bos_token_id, *PLAIN]


def test_a_time_comes_from_what_a_plain_server_says():
    timings = {"predicted_n": 9, "predicted_per_token_ms": 20.0}
    (answer,) = read({**changed(), "response": {**chat(), "timings": timings}}).answers
    assert answer.pass_s == 0.02
    (answer,) = read({**changed(), "response": {**chat(), "timings": {**timings, "draft_n": 4}}}).answers
    assert answer.pass_s is None, "it drafted"
