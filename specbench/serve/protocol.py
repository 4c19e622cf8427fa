"""What the OpenAI protocol says: bodies of requests as values, and records of a generation as bodies of answers.

https://platform.openai.com/docs/api-reference/chat and /completions; what others have added to it and is of use here
(``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``) has the names that vLLM gave it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from specbench.base.errors import UsageError
from specbench.base.record import Json, not_json
from specbench.base.textsafe import excerpt, one_line
from specbench.decoding.records import FinishReason, Prefill, Step
from specbench.options import DecodingKeywords

_FINISHED: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop-string": "stop",
    "length": "length",
    "context-limit": "length",
}

_NOTHING_ELSE: Mapping[str, tuple[Any, ...]] = {
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
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Fields whose usual value is all that there is here."""

_NO_MATTER = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that change nothing about the text."""

_MOST_STOPS = 16

_SEEDS = 2**64

LONGEST_NAME = 60
"""Of a field or a model that nobody knows, as it is repeated in an error: in characters."""


class _FirstIsEnough(FailFast):
    __hash__ = object.__hash__  # unions keep their members in sets


_Item = TypeVar("_Item")
_List = Annotated[list[_Item], _FirstIsEnough()]
"""One whose first wrong item is error enough: a body has room for a million."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against listeners, which our stream has none of


class BaseRequest(_Body):
    """What both kinds of requests have; ``None`` where the server's own setting holds."""

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

    id_prefix: ClassVar[str]
    kind: ClassVar[str]

    @property
    def own_seed(self) -> int | None:
        """Of the generator of its draws; the protocol has negative ones too."""
        return None if self.seed is None else self.seed % _SEEDS

    @property
    def most_tokens(self) -> int | None:
        """The output never gets longer."""
        return self.max_tokens

    @property
    def decoding(self) -> DecodingKeywords:
        """What it asks of the decoding."""
        given = DecodingKeywords()
        if self.most_tokens is not None:
            given["max_new_tokens"] = self.most_tokens
        if self.min_tokens is not None:
            given["min_new_tokens"] = self.min_tokens
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.ignore_eos is not None:
            given["ignore_eos"] = self.ignore_eos
        return given

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it has used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def transforms(self) -> Json:
        """What is asked of the sampling, by the names of ``Sampling``."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if given.get("top_k") == -1:  # how some clients say that all tokens may come
            given["top_k"] = 0
        return given


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _List[_Part]

    @property
    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(BaseRequest):
    """A conversation to be answered."""

    messages: _List[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    id_prefix: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TextRequest(BaseRequest):
    """A text, or its tokens, to be continued."""

    prompt: str | _List[str] | _List[int] | _List[_List[int]]

    id_prefix: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"

    @property
    def beginning(self) -> str | list[int]:
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
    """A request's body as values.

    Raises:
        UsageError: It is none; the first thing that is wrong with it.
    """
    try:
        data = json.loads(body, parse_constant=not_json)
    except (ValueError, RecursionError) as error:  # also what is no UTF-8
        raise UsageError("The body is no JSON.", "Send one object.") from error
    if not isinstance(data, dict):
        raise UsageError("The body is no JSON object.", "Send one object.")
    asked = {}
    for name, value in data.items():
        allowed = _NOTHING_ELSE.get(name)
        if allowed is not None:
            if value is not None and not any(_same(value, each) for each in allowed):
                raise UsageError(f"{name} can only be {json.dumps(allowed[0])} here.", "Leave it out.")
        elif name not in _NO_MATTER:
            if name not in kind.model_fields:
                raise UsageError(
                    f"{excerpt(name, LONGEST_NAME)}: there is no such field here.", "Leave it out."
                )
            asked[name] = value
    try:
        found = kind.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{one_line(place)}: {one_line(first['msg'])}.") from error
    if len(found.decoding.get("stop") or ()) > _MOST_STOPS:
        raise UsageError(f"stop: there are more than {_MOST_STOPS}.", "Send fewer.")
    return found


def _same(value: object, other: object) -> bool:
    """Equal, where a truth value is no number."""
    return type(value) is type(other) and value == other


def error_body(message: str, kind: str, code: str | None = None) -> Json:
    """An error as the protocol has it.

    Args:
        message: What is wrong; may hold anything, of which a line is kept.
        kind: ``invalid_request_error``, ``server_error``, ...
        code: For programs.
    """
    return {"error": {"message": excerpt(message), "type": kind, "param": None, "code": code}}


@dataclass
class Usage:
    """What a generation has used and drafted so far, in tokens.

    Attributes:
        prompt: Of the prompt.
        completion: Emitted, an end token among them.
        drafted: Proposed, one behind the other: of a tree its depth.
        accepted: How many of these were kept.
    """

    prompt: int = 0
    completion: int = 0
    drafted: int = 0
    accepted: int = 0

    def take(self, record: Prefill | Step) -> Sequence[int]:
        """Count one more record; its tokens."""
        if isinstance(record, Prefill):
            self.prompt = record.prompt_tokens
            tokens: Sequence[int] = () if record.token is None else (record.token,)
        else:
            self.drafted += record.gamma
            self.accepted += record.accepted
            tokens = record.tokens
        self.completion += len(tokens)
        return tokens

    def body(self) -> Json:
        """As the protocol has it: what was predicted there is what was drafted here."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


@dataclass(frozen=True)
class Reply:
    """Makes the bodies of the answer to one request.

    Args:
        asked: The request.
        id: Of the answer.
        created: When, in seconds of the epoch.
        model: The model's name.
    """

    asked: ChatRequest | TextRequest
    id: str
    created: int
    model: str

    def whole(self, text: str, finish_reason: FinishReason, usage: Usage) -> Json:
        """The answer to who wants it at once."""
        chat = isinstance(self.asked, ChatRequest)
        said: Json = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            **self._head(self.asked.kind),
            "choices": [_choice(said, finish_reason)],
            "usage": usage.body(),
        }

    def opening(self) -> Json | None:
        """The first event of a stream, before any text; ``None`` where it begins with text."""
        return (
            self._chunk({"role": "assistant", "content": ""}, None)
            if isinstance(self.asked, ChatRequest)
            else None
        )

    def piece(self, text: str) -> Json:
        """More text."""
        return self._chunk({"content": text}, None)

    def ending(self, finish_reason: FinishReason) -> Json:
        """Why there is no more text."""
        return self._chunk({}, finish_reason)

    def closing(self, usage: Usage) -> Json:
        """The last event for who asks what was used."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage.body()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if isinstance(self.asked, ChatRequest) else self.asked.kind

    def _chunk(self, delta: dict[str, str], finish_reason: FinishReason | None) -> Json:
        chat = isinstance(self.asked, ChatRequest)
        said: Json = {"delta": delta} if chat else {"text": delta.get("content", "")}
        usage = {"usage": None} if self.asked.wants_usage else {}
        return {**self._head(self._chunk_kind), "choices": [_choice(said, finish_reason)], **usage}

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _choice(said: Mapping[str, Any], finish_reason: FinishReason | None) -> Json:
    reason = None if finish_reason is None else _FINISHED[finish_reason]
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}
