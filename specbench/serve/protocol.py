"""The OpenAI protocol: bodies of requests as values, and bodies of answers.

https://platform.openai.com/docs/api-reference/chat and /completions. Fields that others added (``top_k``, ``min_p``,
``min_tokens``, ``repetition_penalty``, ``ignore_eos``, ``return_token_ids``) have vLLM's names.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from specbench.base.errors import UsageError
from specbench.base.record import Count, Json, Record, Size
from specbench.base.textsafe import excerpt, one_line
from specbench.decoding.records import FinishReason, Prefill, Step
from specbench.options import DecodingKeywords, TemplateOptions

_FINISH_REASONS: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop-string": "stop",
    "length": "length",
    "context-limit": "length",
}

_FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "tools": ([],),
}
"""Fields that are accepted with these values only."""

_IGNORED_FIELDS = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
"""Fields that do not change the text."""

_Limit = Annotated[int, Meta(ge=1)]


class _StreamOptions(Record, forbid_unknown_fields=True):
    include_usage: bool | None = None


class _ResponseFormat(Record):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Json | None = None


class BaseRequest(Record, forbid_unknown_fields=True):
    """Fields of both kinds of requests; ``None`` means the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    min_tokens: Count | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Count | None = None
    temperature: Size | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, lt=1e18)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    response_format: _ResponseFormat | None = None
    speculation: Literal["off"] | None = None

    @property
    def decoding(self) -> DecodingKeywords:
        """Decoding options that are given."""
        every: Json = {
            "max_new_tokens": self.max_completion_tokens or self.max_tokens,
            "min_new_tokens": self.min_tokens,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "ignore_eos": self.ignore_eos,
        }
        given: Any = {name: value for name, value in every.items() if value is not None}
        form = self.response_format
        if form is not None and form.type != "text":  # in place of the server's own format
            schema = (form.json_schema or {}).get("schema") or {"type": "object"}
            given = {"min_new_tokens": 0, **given, "format": f"json-schema={json.dumps(schema)}"}
        return cast("DecodingKeywords", given)

    @property
    def transforms(self) -> Json:
        """Sampling options that are given, by the names of ``Sampling``."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:  # all tokens, for some clients
            given["top_k"] = 0
        return given


class _Part(Record):
    type: Literal["text"]
    text: str


class _Message(Record):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: None = None

    def to_dict(self) -> Json:
        """Return the message as chat templates take it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        thinking = self.reasoning_content or self.reasoning  # the field's older and newer name
        role = "system" if self.role == "developer" else self.role
        every = {
            "role": role,
            "content": text,
            "name": self.name,
            "reasoning_content": thinking,
            "reasoning": thinking,
        }
        return {name: value for name, value in every.items() if value is not None}


class ChatRequest(BaseRequest):
    """A conversation to answer."""

    messages: Annotated[list[_Message], Meta(min_length=1)]
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is told.

        Raises:
            UsageError: It sets a variable that the conversation sets.
        """
        return TemplateOptions.of(self.chat_template_kwargs or {}, self.reasoning_effort)


class TextRequest(BaseRequest):
    """A text, or its token ids, to continue."""

    prompt: str | list[int]


def parse(body: bytes, kind: type[ChatRequest] | type[TextRequest]) -> ChatRequest | TextRequest:
    """Parse the body of a request.

    Raises:
        UsageError: The first thing that is wrong with it.
    """
    try:
        data = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError("The body is not a JSON object.", "Send one.") from error
    if data.get("tools"):
        raise UsageError(
            "Tool calls are not supported.",
            "Leave tools out, or take an engine that parses them, such as vLLM.",
        )
    given = {}
    for name, value in data.items():
        if value is None or name in _IGNORED_FIELDS:
            continue
        if (allowed := _FIXED_FIELDS.get(name)) is None:
            given[name] = value
        elif not any(type(value) is type(each) and value == each for each in allowed):  # true is not 1
            raise UsageError(f"{name} can only be {json.dumps(allowed[0])} here.", "Leave it out.")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{excerpt(one_line(str(error)))}.") from error


@dataclass
class Usage:
    """Token counts of a generation so far, or of several: prompt, output including an end token, drafted (for a tree,
    its depth), accepted, in the longest draft; and steps, with those that drafted by how many tokens were accepted.
    """

    prompt: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0
    longest: int = 0
    steps: int = 0
    steps_by_accepted: Counter[int] = field(default_factory=Counter)

    def add(self, record: Prefill | Step) -> Sequence[int]:
        """Count a record and return its tokens."""
        if isinstance(record, Prefill):
            self.prompt += record.prompt_tokens
        else:
            self.steps += 1
            self.drafted += record.gamma
            self.accepted += record.accepted
            if record.drafted:
                self.longest = max(self.longest, record.gamma)
                self.steps_by_accepted[record.accepted] += 1
        self.completion += len(record.tokens)
        return record.tokens

    def fields(self) -> Json:
        """Return the fields of an answer: ``usage`` in the form of the protocol, which calls draft tokens predicted
        tokens, and ``metrics`` under vLLM's names, with a histogram of the steps with 0, 1, ... accepted tokens.
        """
        steps = self.steps_by_accepted
        usage = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }
        drafts = {
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "acceptance_histogram": [steps[count] for count in range(self.longest + 1)] if steps else [],
        }
        return {"usage": usage, "metrics": {"speculative_decoding": drafts}}


@dataclass(frozen=True)
class Reply:
    """Makes the bodies of the answer to one request to a model."""

    request: ChatRequest | TextRequest
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(
        self,
        thinking: str,
        text: str,
        finish_reason: FinishReason | None,
        usage: Usage,
        tokens: Sequence[int],
    ) -> Json:
        """Return the answer without a stream."""
        message = {"role": "assistant", "content": text}
        message |= {"reasoning_content": thinking} if thinking else {}
        content: Json = {"message": message} if self.is_chat else {"text": text}
        return {**self._body("", content | self._named(tokens), finish_reason), **usage.fields()}

    def chunk(
        self, delta: Json, finish_reason: FinishReason | None = None, tokens: Sequence[int] = ()
    ) -> Json:
        """Return a chunk of a stream; ``delta`` is that of a chat, of which texts have only the ``content``."""
        content: Json = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self._body(".chunk", content | self._named(tokens), finish_reason)

    def _named(self, tokens: Sequence[int]) -> Json:
        return {"token_ids": list(tokens)} if self.request.return_token_ids else {}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk, for clients that ask for the usage."""
        return {**self._body(".chunk"), **usage.fields()}

    def _body(
        self, suffix: str, content: Json | None = None, finish_reason: FinishReason | None = None
    ) -> Json:
        reason = None if finish_reason is None else _FINISH_REASONS[finish_reason]
        choice = {"index": 0, **(content or {}), "logprobs": None, "finish_reason": reason}
        return {
            "id": f"chatcmpl-{self.id}" if self.is_chat else f"cmpl-{self.id}",
            "object": f"chat.completion{suffix}" if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [] if content is None else [choice],
        }
