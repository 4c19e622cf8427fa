"""The OpenAI protocol: bodies of requests as values, and bodies of answers.

https://platform.openai.com/docs/api-reference/chat and /completions. Fields that others added (``top_k``, ``min_p``,
``min_tokens``, ``repetition_penalty``, ``ignore_eos``) have vLLM's names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from specbench.base.errors import UsageError
from specbench.base.record import Json, not_json
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
    "cache_prompt": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "tools": ([],),
}
"""Fields that are accepted with these values only."""

_IGNORED_FIELDS = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
"""Fields that do not change the text."""

_MAX_STOPS = 16

_SEEDS = 2**64

MAX_NAME = 60
"""Characters of an unknown field or model that an error repeats."""


class _FirstErrorOnly(FailFast):
    __hash__ = object.__hash__  # unions keep their members in sets


_Item = TypeVar("_Item")
_List = Annotated[list[_Item], _FirstErrorOnly()]
"""A list that is checked up to its first wrong item: a body has room for a million."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        """Leave out what is null: clients send fields like this that they have not set, also ones unknown here."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class _StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: bool | None = None  # padding, which our stream does not have


class _JsonSchema(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    content: dict[str, Any] | None = Field(None, alias="schema")


class _ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @property
    def schema_text(self) -> str:
        """The JSON Schema of the answer; of any text, that of any object."""
        content = self.json_schema.content if self.type == "json_schema" and self.json_schema else None
        return json.dumps({"type": "object"} if content is None else content)


class SpeculationOptions(_Body):
    """How much is drafted for a request: a draft length, or a draft policy as ``--draft-policy`` takes it."""

    gamma: int | None = Field(None, ge=1, le=1024)
    policy: str | None = Field(None, max_length=200)


class BaseRequest(_Body):
    """Fields of both kinds of requests; ``None`` means the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | _List[str] | None = None
    seed: int | None = Field(None, ge=-_SEEDS // 2, lt=_SEEDS)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    ignore_eos: bool | None = None
    response_format: _ResponseFormat | None = None
    speculation: Literal["off"] | SpeculationOptions | None = None

    id_prefix: ClassVar[str]
    kind: ClassVar[str]

    @property
    def sampling_seed(self) -> int | None:
        """Seed of the sampling, not negative; the protocol has negative ones too."""
        return None if self.seed is None else self.seed % _SEEDS

    @property
    def max_new_tokens(self) -> int | None:
        """Limit on the output's length."""
        return self.max_tokens

    @property
    def decoding(self) -> DecodingKeywords:
        """Decoding options that are given."""
        every: Json = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_tokens,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "ignore_eos": self.ignore_eos,
        }
        given: Any = {name: value for name, value in every.items() if value is not None}
        form = self.response_format
        if form is not None and form.type != "text":  # in place of the server's own format
            given = {"min_new_tokens": 0, **given, "format": f"json-schema={form.schema_text}"}
        return cast("DecodingKeywords", given)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def transforms(self) -> Json:
        """Sampling options that are given, by the names of ``Sampling``."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:  # all tokens, for some clients
            given["top_k"] = 0
        return given


class _Part(BaseModel):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "not_text", "only text is read, and no {kind}", {"kind": excerpt(kind, MAX_NAME)}
            )
        return data


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _List[_Part]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: None = None

    def to_dict(self) -> Json:
        """Return the message as chat templates take it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: Json = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        thoughts = self.reasoning_content or self.reasoning  # the field's older and newer name
        if self.role == "assistant" and thoughts:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        return message


class ChatRequest(BaseRequest):
    """A conversation to answer."""

    messages: _List[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    reasoning_effort: str | None = Field(None, max_length=MAX_NAME)
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=32)

    id_prefix: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is told.

        Raises:
            UsageError: It sets a variable that the conversation sets.
        """
        return TemplateOptions.of(self.chat_template_kwargs or {}, self.reasoning_effort)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TextRequest(BaseRequest):
    """A text, or its token ids, to continue."""

    prompt: str | _List[str] | _List[int] | _List[_List[int]]

    id_prefix: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"

    @property
    def single_prompt(self) -> str | list[int]:
        """The one prompt.

        Raises:
            UsageError: There are several, or none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if tokens and len(tokens) == len(prompt):
            return tokens
        if len(prompt) != 1:
            raise UsageError(f"prompt: there are {len(prompt)}.", "Send one in each request.")
        only = prompt[0]
        assert not isinstance(only, int)
        return only


def parse(body: bytes, kind: type[ChatRequest] | type[TextRequest]) -> ChatRequest | TextRequest:
    """Parse the body of a request.

    Raises:
        UsageError: The first thing that is wrong with it.
    """
    try:
        data = json.loads(body, parse_constant=not_json)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 as well
        raise UsageError("The body is not JSON.", "Send one object.") from error
    if not isinstance(data, dict):
        raise UsageError("The body is not a JSON object.", "Send one object.")
    if data.get("tools"):
        raise UsageError(
            "Tool calls are not supported.",
            "Leave tools out, or take an engine that parses them, such as vLLM.",
        )
    given = {}
    for name, value in data.items():
        if value is None or name in _IGNORED_FIELDS:
            continue
        if (allowed := _FIXED_FIELDS.get(name)) is not None:
            if not any(type(value) is type(each) and value == each for each in allowed):  # true is not 1
                raise UsageError(f"{name} can only be {json.dumps(allowed[0])} here.", "Leave it out.")
        elif name not in kind.model_fields:
            raise UsageError(f"{excerpt(name, MAX_NAME)}: this field does not exist.", "Leave it out.")
        else:
            given[name] = value
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        worst = max(found, key=lambda each: len(each["loc"]))  # of alternatives, the one that fits furthest
        place = ".".join(str(part) for part in worst["loc"])
        raise UsageError(f"{f'{one_line(place)}: ' if place else ''}{one_line(worst['msg'])}.") from error
    if len(request.decoding.get("stop") or ()) > _MAX_STOPS:
        raise UsageError(f"stop: there are more than {_MAX_STOPS}.", "Send fewer.")
    return request


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    """Return the body of an error, whose message is shortened to a printable line."""
    return {"error": {"message": excerpt(message), "type": kind, "param": None, "code": code}}


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
    """Makes the bodies of the answer to one request; ``created`` is in seconds since the epoch."""

    request: ChatRequest | TextRequest
    id: str
    created: int
    model: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, thinking: str, text: str, finish_reason: FinishReason, usage: Usage) -> Json:
        """Return the answer without a stream."""
        message = {"role": "assistant", "content": text}
        message |= {"reasoning_content": thinking} if thinking else {}
        content: Json = {"message": message} if self.is_chat else {"text": text}
        return {**self._body(self.request.kind, content, finish_reason), **usage.fields()}

    def chunk(self, delta: Json, finish_reason: FinishReason | None = None) -> Json:
        """Return a chunk of a stream; ``delta`` is that of a chat, of which texts have only the ``content``."""
        content: Json = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        usage = {"usage": None} if self.request.wants_usage else {}
        return {**self._body(self._chunk_kind, content, finish_reason), **usage}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last chunk, for clients that ask for the usage."""
        return {**self._body(self._chunk_kind), **usage.fields()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else self.request.kind

    def _body(
        self, kind: str, content: Json | None = None, finish_reason: FinishReason | None = None
    ) -> Json:
        reason = None if finish_reason is None else _FINISH_REASONS[finish_reason]
        choice = {"index": 0, **(content or {}), "logprobs": None, "finish_reason": reason}
        choices = [] if content is None else [choice]
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
