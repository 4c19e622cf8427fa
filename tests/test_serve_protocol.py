"""The OpenAI protocol as values: what a body may say, and the bodies of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbench import UsageError
from specbench.options import DecodingOptions
from specbench.serve.protocol import BaseRequest, ChatRequest, TextRequest, parse

SAID = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    found = parse(json.dumps({"messages": SAID, **fields}).encode(), ChatRequest)
    assert isinstance(found, ChatRequest)
    return found


def text(**fields: Any) -> TextRequest:
    found = parse(json.dumps({"prompt": "hi", **fields}).encode(), TextRequest)
    assert isinstance(found, TextRequest)
    return found


def test_what_is_given_is_read():
    asked = chat(
        model="m", temperature=1, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, seed=2**64 - 1, stop="x",
        max_tokens=5, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}, user="me",
        n=1, frequency_penalty=0.0, presence_penalty=0, logprobs=False, tools=[], response_format={"type": "text"},
    )  # fmt: skip
    assert asked.transforms == {
        "temperature": 1, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1
    }  # fmt: skip
    assert asked.decoding == {"max_new_tokens": 3, "stop": ["x"]}
    assert (asked.seed, asked.wants_usage) == (2**64 - 1, True)
    assert text(max_tokens=5, stop=["a", "b"], n=None).max_new_tokens == 5
    seeds = [text(seed=seed).sampling_seed for seed in (None, 7, -1, 2**64 - 1)]
    assert seeds == [None, 7, 2**64 - 1, 2**64 - 1]
    assert text(stop=[]).decoding == {"stop": []}
    assert (
        text(max_tokens=None, seed=None, stop=None, stream_options=None, logprobs=None, n=None).max_new_tokens
        is None
    )


@pytest.mark.parametrize(
    "name", ["reasoning_effort", "verbosity", "web_search_options", "user", "n", "tools", "anything"]
)
def test_null_is_not_given(name):
    assert chat(**{name: None}) == chat()
    assert chat(stream_options={name: None, "continuous_usage_stats": None}) == chat(stream_options={})


def test_a_prompt_is_a_text_or_tokens_or_one_of_either():
    for given, found in (("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([5], [5])):
        assert text(prompt=given).single_prompt == found
    for several in (["a", "b"], [[1], [2]], []):
        with pytest.raises(UsageError, match=f"there are {len(several)}"):
            assert text(prompt=several).single_prompt


def test_messages_are_those_of_a_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
            {"role": "assistant", "content": "d", "reasoning_content": "hm", "reasoning": None},
            {"role": "assistant", "content": "e", "reasoning": "so"},
        ]
    )
    assert [each.to_dict() for each in asked.messages] == [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm", "reasoning": "hm"},
        {"role": "assistant", "content": "e", "reasoning_content": "so", "reasoning": "so"},
    ]


WRONG: list[tuple[type[BaseRequest], bytes | dict[str, Any], str]] = [
    (ChatRequest, b"", "not JSON"),
    (ChatRequest, b"{", "not JSON"),
    (ChatRequest, b"\xff\xfe", "not JSON"),
    (ChatRequest, b"[" * 100_000, "not JSON"),
    (ChatRequest, b"[]", "not a JSON object"),
    (ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "not JSON"),
    (ChatRequest, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature: "),
    (ChatRequest, {}, "messages: "),
    (ChatRequest, {"messages": []}, "messages: "),
    (ChatRequest, {"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role: "),
    (ChatRequest, {"messages": [{"role": "user"}]}, "messages.0.content: "),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "and no image_url"),
    (ChatRequest, {"messages": SAID, "temprature": 1}, "temprature: "),
    (ChatRequest, {"messages": SAID, "n": 2}, "n can only be 1"),
    (ChatRequest, {"messages": SAID, "logprobs": True}, "logprobs can only be false"),
    (ChatRequest, {"messages": SAID, "tools": [{}]}, "Tool calls are not supported. Leave tools out, or"),
    (ChatRequest, {"messages": [{**SAID[0], "tool_calls": [{}]}]}, "messages.0.tool_calls: "),
    *(
        (ChatRequest, {"messages": SAID, name: value}, f"{name}: ")
        for name, value in (("temperature", "1"), ("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 1.5),
                            ("seed", -(2**63) - 1), ("seed", 2**64), ("max_tokens", 0), ("max_tokens", True))
    ),
    (ChatRequest, {"messages": [7] * 9999}, "messages.0: "),
    (TextRequest, {"prompt": [7] * 9999 + ["x"]}, "prompt."),
    (ChatRequest, {"messages": SAID, "stop": [1]}, "stop."),
    (ChatRequest, {"messages": SAID, "stop": ["x"] * 17}, "stop: there are more than 16"),
    (ChatRequest, {"messages": SAID, "stream": "yes"}, "stream: "),
    (ChatRequest, {"messages": SAID, "stream_options": {"x": 1}}, "stream_options.x: "),
    (TextRequest, {}, "prompt: "),
    (TextRequest, {"prompt": {"a": 1}}, "prompt."),
    (TextRequest, {"prompt": "x", "echo": True}, "echo can only be false"),
    (TextRequest, {"prompt": "x", "best_of": 3}, "best_of can only be 1"),
    (TextRequest, {"prompt": "x", "logprobs": 5}, "logprobs can only be false"),
    (TextRequest, {"prompt": "x", "messages": SAID}, "messages: "),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "said"), WRONG)
def test_what_is_wrong_is_said_in_one_line(kind, body, said):
    with pytest.raises(UsageError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    message = str(caught.value)
    assert message.startswith(said) or said in message
    assert "\n" not in message
    assert len(message) < 200


def test_text_of_a_request_is_data():
    with pytest.raises(UsageError) as caught:
        parse(json.dumps({"prompt": "x", "a\x1b[31m\nb\ud800": 1}).encode(), TextRequest)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": [1]}}},
            {"enum": [1]},
        ),
    ],
)
def test_a_response_format_is_a_json_schema(given, schema):
    request = parse(json.dumps({"messages": SAID, "response_format": given}).encode(), ChatRequest)
    written = request.decoding.get("format")
    assert (None if written is None else json.loads(written.removeprefix("json-schema="))) == schema
    served = DecodingOptions(min_new_tokens=5).with_changes(**request.decoding)
    assert served.min_new_tokens == (5 if schema is None else 0)
