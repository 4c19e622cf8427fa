"""The OpenAI protocol as values: what a body may say."""

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


def test_what_is_given_is_read():
    asked = chat(
        model="m", temperature=1, top_p=0.5, top_k=-1, min_p=0.1, repetition_penalty=1.1, seed=2**63 - 1, stop="x",
        max_tokens=5, max_completion_tokens=3, stream=True, stream_options={"include_usage": True}, user="me",
        n=1, frequency_penalty=0.0, presence_penalty=0, logprobs=False, tools=[], response_format={"type": "text"},
        reasoning_effort=None, anything=None,
    )  # fmt: skip
    assert asked.transforms == {
        "temperature": 1, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1
    }  # fmt: skip
    assert asked.decoding == {"max_new_tokens": 3, "stop": ["x"]}
    assert asked.seed == 2**63 - 1
    assert chat(max_tokens=5, stop=["a", "b"]).decoding == {"max_new_tokens": 5, "stop": ["a", "b"]}


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
    *(
        (ChatRequest, body, "not a JSON object")
        for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"temperature": NaN}', b'{"top_p": 1e999}')
    ),
    (ChatRequest, {}, "missing required field `messages`"),
    (ChatRequest, {"messages": []}, "$.messages"),
    (ChatRequest, {"messages": [{"role": "critic", "content": "x"}]}, "'critic' - at `$.messages[0].role`"),
    (ChatRequest, {"messages": [{"role": "user"}]}, "missing required field `content`"),
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
    (ChatRequest, {"messages": [{**SAID[0], "tool_calls": [{}]}]}, "$.messages[0].tool_calls"),
    (ChatRequest, {"tools": [{}]}, "Tool calls are not supported. Leave tools out, or"),
    (TextRequest, {"prompt": [1, "x"]}, "$.prompt[1]"),
    (TextRequest, {"prompt": "x", "echo": True}, "echo can only be false"),
    (TextRequest, {"prompt": "x", "messages": SAID}, "unknown field `messages`"),
    (TextRequest, {"prompt": "x", "a\x1b[31m\nb" * 99: 1}, "unknown field"),
    *(
        (ChatRequest, {"messages": SAID, name: value}, name)
        for name, value in (
            ("temprature", 1), ("n", 2), ("logprobs", True), ("temperature", "1"), ("temperature", -1), ("top_p", 0),
            ("top_p", 1.5), ("top_k", 1.5), ("seed", -1), ("seed", 2**63), ("max_tokens", 0), ("max_tokens", True),
            ("stop", [1]), ("stop", ["x"] * 17), ("stream", "yes"), ("stream_options", {"x": 1}), ("speculation", "on"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body", "said"), WRONG)
def test_what_is_wrong_is_said_in_one_line(kind, body, said):
    with pytest.raises(UsageError) as caught:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    message = str(caught.value)
    assert said in message
    assert message.isprintable()
    assert len(message) < 400


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
    decoding = chat(response_format=given).decoding
    written = decoding.get("format")
    assert (None if written is None else json.loads(written.removeprefix("json-schema="))) == schema
    served = DecodingOptions(min_new_tokens=5).with_changes(**decoding)
    assert served.min_new_tokens == (5 if schema is None else 0)
