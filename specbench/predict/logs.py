"""Answers from logs: JSON lines with what clients of servers send, receive and store.

A line holds a request and its response, or both in one object: the chat and completion forms of OpenAI's protocol, or
simply ``{"prompt": ..., "answer": ...}``. A line that cannot be used is counted by its kind of problem, for which
``REASONS`` has a sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.base.errors import UsageError
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import special_tokens
from specbench.generate import encode_messages, encode_prompt
from specbench.models.pairing import token_bytes
from specbench.models.tokenizers import end_of_turn
from specbench.options import TemplateOptions
from specbench.predict.law import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.record import Json
    from specbench.predict.law import Floats

REASONS: Mapping[str, str] = {
    "form": "holds no answer in a form that is known",
    "prompt": "has no prompt of text: store the request with the response",
    "short": "has an answer of fewer than two tokens, which takes no step",
    "cut": "has an answer that was cut off, or fewer log probabilities than tokens",
    "tokenizer": "has tokens that the tokenizer does not: give the target's own with --tokenizer",
    "template": "has a conversation that the chat template refuses: give the target's tokenizer with --tokenizer",
    "hidden": "calls tools or thinks, and what the model wrote for that is not in it: log with token ids or logprobs",
    "temperature": "does not say its temperature: give it, as in --temperature 0.7",
    "kind": "was sampled at another temperature than 1 or with cuts: log probabilities are those before them",
}
"""Why a line is left out, as the rest of a sentence."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "continue_final_message": (False,), "frequency_penalty": (0,), "min_tokens": (0,), "presence_penalty": (0,),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"), "echo": (False,),
    "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (), "grammar": (),
    "json_schema": (), "logit_bias": (), "structured_outputs": (), "suffix": (), "truncate_prompt_tokens": (),
    "allowed_token_ids": (), "bad_words": (), "regex": (), "ebnf": (),
}  # fmt: skip
"""Fields that change what a prompt or an answer is, with values at which they do not; nor do empty ones."""

_KNOWN = (
    "temperature top_k top_p min_p repetition_penalty messages prompt prompt_token_ids tools chat_template_kwargs"
    " reasoning_effort max_tokens max_completion_tokens body extra_body custom_id id method url model user metadata n"
    " seed stop stop_token_ids ignore_eos stream stream_options logprobs top_logprobs prompt_logprobs return_token_ids"
    " return_tokens_as_token_ids n_probs post_sampling_probs skip_special_tokens spaces_between_special_tokens"
    " include_stop_str_in_output parallel_tool_calls store service_tier timeout priority request_id cache_prompt"
    " cache_salt id_slot timings_per_token"
)
"""Fields of requests that are read, or that change neither the prompt nor the distribution of the answer's tokens."""
_HARMLESS = frozenset(_KNOWN.split())

_HOLDERS = ("message", "text", "answer", "token_ids", "logprobs")
"""What holds an answer."""


class UnusableError(Exception):
    """A line cannot be used; its argument is a key of ``REASONS``, or it has "field" and a name."""


@dataclass
class Log:
    """What a log holds.

    Attributes:
        answers: Those that can be used.
        left_out: Numbers of the lines that cannot, from 1, by the key of ``REASONS``, or "field" and the field's name.
        unread: Whether there are more, beyond the limit.
    """

    answers: list[Answer] = field(default_factory=list)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    unread: bool = False

    def notes(self) -> list[str]:
        """Return sentences on what was not read, and on each kind of line that is left out."""
        sentences = [f"The first {len(self.answers)} answers were read; --limit reads more."] * self.unread
        for kind, lines in self.left_out.items():
            word, _, name = kind.partition(" ")
            changes = f"has the field {name!r}, which may change its prompt or its answer"
            listed = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
            what = "1 line is" if len(lines) == 1 else f"{len(lines)} lines are"
            reason = changes if name else REASONS[word]
            sentences.append(f"{what} left out ({listed}): such a line {reason}.")
        return sentences


def read_log(
    lines: Iterable[bytes],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: Mapping[str, float] | None = None,
    limit: int | None = None,
) -> Log:
    """Read the answers of a log.

    Args:
        lines: JSON lines.
        tokenizer: The target's.
        sampling: Arguments of ``Sampling`` where a line does not say them.
        limit: How many answers to read.
    """
    log, reader = Log(), _Reader(tokenizer, sampling or {})
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(log.answers) >= limit:
            log.unread = True
            break
        try:
            log.answers += reader.answers(json.loads(line), str(number))
        except UnusableError as error:
            log.left_out.setdefault(" ".join(error.args), []).append(number)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):  # another shape
            log.left_out.setdefault("form", []).append(number)
    return log


class _Reader:
    """Reads lines; for the arguments see ``read_log``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Mapping[str, float]) -> None:
        self._tokenizer, self._default_sampling = tokenizer, sampling
        self._ids = {text.encode(): token for text, token in special_tokens(tokenizer).items()}
        for token, text in token_bytes(tokenizer).items():
            self._ids.setdefault(text, token)
        self._size = max(tokenizer.get_vocab().values(), default=-1) + 1
        turn = end_of_turn(tokenizer)
        self._end: int | None = tokenizer.eos_token_id if turn is None else turn

    def answers(self, record: Json, name: str) -> list[Answer]:
        """Return the answers of a line: of several choices each is one."""
        response = record.get("response", record)
        response = response.get("body", response)
        choices = response.get("choices", [response])
        if not any(choice.get(name) for choice in choices for name in _HOLDERS):
            raise UnusableError("form")
        asked = record.get("request", {})
        asked = asked.get("body", asked)
        asked = {**asked, **asked.get("extra_body", {})}
        unknown = (name for name in asked if asked[name] and name not in _HARMLESS and name not in _NEUTRAL)
        if field_name := next(unknown, None):
            raise UnusableError("field", field_name)
        request = {**record, **asked}
        for field_name, neutral in _NEUTRAL.items():
            if request.get(field_name) not in (None, "", [], {}, *neutral):
                raise UnusableError("field", field_name)
        sampling, prompt = self._sampling(request), self._prompt(response, request)
        name = str(record.get("id", record.get("custom_id", name)))
        if len(choices) > 1:  # their tokens are counted together
            response = {**response, "usage": {}}
        return [self._answer(choice, response, request, prompt, sampling, name) for choice in choices]

    # -- the request -------------------------------------------------------------------------------

    def _sampling(self, request: Json) -> Sampling:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: request[name] for name in names if request.get(name) is not None}
        given = {**self._default_sampling, **given}
        if "temperature" not in given:
            raise UnusableError("temperature")
        if given["temperature"] <= 0:  # what is cut away then does not matter
            given = {"temperature": 0.0, "repetition_penalty": given.get("repetition_penalty", 1.0)}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        try:
            return Sampling(**given)
        except UsageError:
            raise UnusableError("field", ", ".join(given)) from None

    def _prompt(self, response: Json, request: Json) -> list[int]:
        for ids in (
            response.get("prompt_token_ids"),
            request.get("prompt_token_ids"),
            request.get("prompt"),
        ):
            if isinstance(ids, list) and ids:
                return _ids(ids)
        messages, text = request.get("messages"), request.get("prompt")
        if not (messages or text):
            raise UnusableError("prompt")
        try:
            if messages:
                variables = request.get("chat_template_kwargs") or {}
                template = TemplateOptions.of(variables, request.get("reasoning_effort"))
                tools = request.get("tools") or ()
                return encode_messages(self._tokenizer, list(map(_message, messages)), tools, template)
            ids, bos = encode_prompt(self._tokenizer, str(text), chat=False), self._tokenizer.bos_token_id
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids  # the text can have its own
        except UsageError:
            raise UnusableError("template") from None

    # -- the response ------------------------------------------------------------------------------

    def _answer(
        self, choice: Json, response: Json, request: Json, prompt: list[int], sampling: Sampling, name: str
    ) -> Answer:
        finish, count = choice.get("finish_reason"), (response.get("usage") or {}).get("completion_tokens")
        entries = _entries(choice)
        given = choice.get("token_ids")
        tokens = _ids(given) if given else self._listed(entries) or self._encoded(choice, count)
        if max((*prompt, *tokens), default=0) >= self._size:
            raise UnusableError("tokenizer")
        if finish not in (None, "stop", "length", "tool_calls") or (
            count is not None and len(tokens) < count - 1
        ):
            raise UnusableError("cut")
        stopped = choice.get("stop_reason")  # vLLM's: a token or a stop string, none for its usual end token
        end = stopped if type(stopped) is int else self._end if stopped is None else None
        if finish == "stop" and count == len(tokens) + 1 and sampling.greedy and end is not None:
            tokens = [*tokens, end]  # which is not listed
        if len(tokens) < 2:
            raise UnusableError("short")
        probabilities = None
        if entries and not sampling.greedy:
            probabilities = _probabilities(entries, len(tokens), sampling)
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        limit = len(tokens) if finish == "length" else max(limit, len(tokens)) if limit else None
        timings = response.get("timings") or {}  # llama.cpp's
        took = None if timings.get("draft_n") else timings.get("predicted_per_token_ms")
        return Answer(
            prompt, tokens, sampling, probabilities, limit, name,
            took / 1000 if took else None,
        )  # fmt: skip

    def _listed(self, entries: Sequence[Json]) -> list[int]:
        """Return the tokens of entries; vLLM tells the text of a split character with its last token alone."""
        tokens, empty = list[int](), 0
        for entry in entries:
            if entry.get("token") == "" and "id" not in entry:
                empty += 1
                continue
            ids = self._tokenizer(entry["token"], add_special_tokens=False)["input_ids"] if empty else ()
            if len(ids) != empty + bool(empty):
                raise UnusableError("tokenizer")
            tokens += ids or [self._token(entry)]
            empty = 0
        return tokens

    def _token(self, entry: Json) -> int:
        """Return the id of a token by that, its text, or the bytes of it."""
        text, written = entry.get("token", ""), entry.get("bytes")
        if "id" in entry or text.startswith("token_id:"):
            return int(entry.get("id", text.removeprefix("token_id:")))
        token = self._ids.get(bytes(text.encode() if written is None else written))
        if token is None:
            raise UnusableError("tokenizer")
        return token

    def _encoded(self, choice: Json, count: int | None) -> list[int]:
        """Return the tokens of an answer that is text alone."""
        message = choice.get("message", choice)
        if any(message.get(name) for name in ("tool_calls", "reasoning_content", "reasoning")):
            raise UnusableError("hidden")
        text = next((message[name] for name in ("content", "text", "answer") if message.get(name)), None)
        if text is None:
            raise UnusableError("form")
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if count is not None and abs(len(tokens) - count) > max(2, count // 20):
            raise UnusableError("tokenizer")
        return tokens


def _probabilities(entries: Sequence[Json], count: int, sampling: Sampling) -> Floats:
    """Return the probabilities of the first tokens after the transforms."""
    probabilities = [math.exp(min(0.0, entry["logprob"])) for entry in entries[:count]]
    if len(probabilities) < count or min(probabilities) == 0.0:  # vLLM says -9999 where it does not know
        raise UnusableError("cut")
    if sampling != Sampling(temperature=1.0):
        raise UnusableError("kind")
    return np.array(probabilities)


def _ids(values: Sequence[Any]) -> list[int]:
    if any(type(value) is not int or value < 0 for value in values):
        raise UnusableError("form")
    return list(values)


def _message(message: Json) -> Json:
    """Return a message as chat templates take it: with text, and the arguments of calls as objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any("text" not in part for part in content):
            raise UnusableError("prompt")
        content = "".join(part["text"] for part in content)
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"].get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _entries(choice: Json) -> list[Json]:
    """Return the tokens of an answer with their log probabilities, in the form of the chat; empty without any."""
    logprobs = choice.get("logprobs") or {}
    if listed := logprobs.get("tokens"):  # the completions' own form
        pairs = zip(listed, logprobs["token_logprobs"], strict=True)
        return [{"token": text, "logprob": -9999.0 if value is None else value} for text, value in pairs]
    return list(logprobs.get("content") or ())
