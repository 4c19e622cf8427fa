"""Answers from logs: JSON lines with what clients of servers send, receive and store.

A line holds a request and its response, or both in one object: the chat and completion forms of OpenAI's protocol as
vLLM, SGLang, llama.cpp, LiteLLM and ``specbench serve`` have them, llama.cpp's own ``/completion``, or simply
``{"prompt": ..., "answer": ...}``. A line that cannot be used is counted by its kind of problem, for which ``REASONS``
has a sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from specbench.base.errors import UsageError
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import special_tokens
from specbench.generate import encode_messages, encode_prompt
from specbench.models.pairing import token_bytes
from specbench.models.tokenizers import end_of_turn
from specbench.options import TemplateOptions
from specbench.predict.answers import Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.base.record import Json
    from specbench.predict.law import Floats

LogprobKind = Literal["raw", "processed"]

REASONS: Mapping[str, str] = {
    "form": "holds no answer in a form that is known, see docs/predict.md",
    "prompt": "has no prompt: store the request with the response",
    "short": "has an answer of fewer than two tokens, which takes no step",
    "cut": "has an answer that was cut off, or fewer log probabilities than tokens",
    "tokenizer": "has tokens that the tokenizer does not: give the target's own with --tokenizer",
    "no tokenizer": "has text and no token ids: give the target's tokenizer with --tokenizer",
    "template": "has a conversation that the chat template refuses: give the target's tokenizer with --tokenizer",
    "parts": "has a prompt with pictures or sound",
    "tools": "calls tools, and what the model wrote for that is not in it: log with token ids or logprobs",
    "thinking": "has its thoughts cut off from the answer: log with token ids or logprobs",
    "settings": "was decoded with settings that drafters do not apply: penalties, biases, a format or others",
    "temperature": "does not say its temperature: give it, as in --sampling temperature=0.7",
    "kind": "was sampled at another temperature than 1 or with cuts, and does not say whether its log probabilities"
    " are before or after these: give --logprobs raw or processed",
    "raw": "has raw log probabilities of too few tokens for those after its temperature and cuts: log top_logprobs"
    " of 20, or processed ones (vLLM: --logprobs-mode processed_logprobs)",
}
"""Why a line is left out, as the rest of a sentence."""

_UNSET: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repeat_penalty": (1,), "logit_bias": ({}, []),
    "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "json_schema": (), "regex": ("",), "ebnf": ("",), "grammar": ("",),
    "dry_multiplier": (0,), "xtc_probability": (0,), "mirostat": (0,), "typical_p": (1,), "dynatemp_range": (0,),
}  # fmt: skip
"""Settings that change the target's distribution and that drafters do not apply, with what switches them off."""

_CUT = ("abort", "content_filter", "error", "cancelled")
"""Reasons of a finish that are no end of an answer."""

_BOUND = 0.02
"""The largest mean relative uncertainty of an answer's probabilities."""


class UnusableError(Exception):
    """A line cannot be used; its argument is a key of ``REASONS``."""


@dataclass
class Log:
    """What a log holds.

    Attributes:
        answers: Those that can be used.
        left_out: Numbers of the lines that cannot, from 1, by the key of ``REASONS``.
        lines: Lines that were read.
        unread: Whether there are more, beyond the limit.
    """

    answers: list[Answer] = field(default_factory=list)
    left_out: dict[str, list[int]] = field(default_factory=dict)
    lines: int = 0
    unread: bool = False

    def notes(self) -> list[str]:
        """Return sentences on what was not read, and on each kind of line that is left out."""
        found = [f"The first {len(self.answers)} answers were read; --limit reads more."] * self.unread
        for kind, lines in self.left_out.items():
            listed = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
            what = "1 line is" if len(lines) == 1 else f"{len(lines)} lines are"
            found.append(f"{what} left out ({listed}): such a line {REASONS[kind]}.")
        return found


def read_log(
    lines: Iterable[bytes],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sampling: Mapping[str, float] | None = None,
    logprobs: LogprobKind | None = None,
    limit: int | None = None,
) -> Log:
    """Read the answers of a log.

    Args:
        lines: JSON lines.
        tokenizer: The target's; ``None`` if all lines have token ids.
        sampling: Arguments of ``Sampling`` where a line does not say them.
        logprobs: Whether log probabilities are before ("raw") or after ("processed") temperature and cuts, where a line
            does not say it.
        limit: How many answers to read.
    """
    log, vocabulary = Log(), None if tokenizer is None else Vocabulary(tokenizer)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(log.answers) >= limit:
            log.unread = True
            break
        log.lines += 1
        try:
            log.answers += _Reader(_parsed(line), vocabulary, sampling or {}, logprobs, number).answers()
        except UnusableError as error:
            log.left_out.setdefault(error.args[0], []).append(number)
    return log


class Vocabulary:
    """The tokens of a tokenizer, by their bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._by_bytes: dict[bytes, int] = {}
        for token, text in token_bytes(tokenizer).items():
            self._by_bytes.setdefault(text, token)
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        turn = end_of_turn(tokenizer)
        self.end: int | None = tokenizer.eos_token_id if turn is None else turn

    def token(self, entry: Entry) -> int:
        """Return the id of a token whose text is known."""
        if entry.text.startswith("token_id:"):
            return int(entry.text.removeprefix("token_id:"))
        if (special := self._special.get(entry.text)) is not None:
            return special
        found = self._by_bytes.get(entry.text.encode() if entry.bytes is None else bytes(entry.bytes))
        if found is None:
            raise UnusableError("tokenizer")
        return found


class Entry(NamedTuple):
    """A token with its log probability.

    Attributes:
        text, bytes, token: The token; ``None`` for what is not known.
        logprob: Natural logarithm of its probability.
        top: Log probabilities of the most likely tokens at its place, descending.
        processed: Whether they are known to be after temperature and cuts.
    """

    text: str
    bytes: Sequence[int] | None
    token: int | None
    logprob: float
    top: Sequence[float]
    processed: bool = False


def _parsed(line: bytes) -> Json:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableError("form") from None
    if not isinstance(found, dict):
        raise UnusableError("form")
    return found


def _objects(*values: Any) -> Iterator[Json]:
    yield from (value for value in values if isinstance(value, dict))


class _Reader:
    """Reads one line."""

    def __init__(
        self,
        record: Json,
        vocabulary: Vocabulary | None,
        sampling: Mapping[str, float],
        logprobs: LogprobKind | None,
        number: int,
    ) -> None:
        self.vocabulary, self.logprobs, self.number = vocabulary, logprobs, number
        self.default_sampling = sampling
        answer = record.get("response", record)
        if isinstance(answer, str):
            record, answer = {**record, "answer": answer}, record
        body = answer.get("body", answer) if isinstance(answer, dict) else {}
        self.response: Json = body if isinstance(body, dict) else {}
        request: Json = {}
        for part in _objects(record, record.get("model_parameters"), record.get("request")):
            request |= part
            for inner in _objects(part.get("body")):
                request |= inner
        for inner in _objects(self.response.get("generation_settings")):
            request |= inner
        self.request, self.record = request, record

    def answers(self) -> list[Answer]:
        """Return the answers of the line: of several choices each is one."""
        choices = self.response.get("choices")
        if not isinstance(choices, list):
            choices = [self.response if self.response is not self.record else self.record]
        sampling = self._sampling()
        prompt = self._prompt(choices[0] if choices and isinstance(choices[0], dict) else {})
        found = [self._answer(choice, prompt, sampling) for choice in _objects(*choices)]
        if not found:
            raise UnusableError("form")
        return found

    # -- the request -------------------------------------------------------------------------------

    def _sampling(self) -> Sampling:
        request = self.request
        for name, off in _UNSET.items():
            if request.get(name) is not None and request[name] not in off:
                raise UnusableError("settings")
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: request[name] for name in names if isinstance(request.get(name), int | float)}
        given = {**self.default_sampling, **given}
        if "temperature" not in given:
            raise UnusableError("temperature")
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if given["temperature"] <= 0:  # what is cut away then does not matter
            given = {"temperature": 0.0, "repetition_penalty": given.get("repetition_penalty", 1.0)}
        try:
            return Sampling(**given)
        except UsageError:
            raise UnusableError("settings") from None

    def _prompt(self, choice: Json) -> list[int]:
        for holder in (choice, self.response, self.request):
            for name in ("prompt_token_ids", "prompt"):
                ids = _ids(holder.get(name))
                if ids:
                    return ids
        messages, text = self.request.get("messages"), self.request.get("prompt", self.response.get("prompt"))
        if messages is None and text is None:
            raise UnusableError("prompt")
        if self.vocabulary is None:
            raise UnusableError("no tokenizer")
        tokenizer = self.vocabulary.tokenizer
        try:
            if isinstance(messages, list) and messages:
                told = next(_objects(self.request.get("chat_template_kwargs")), {})
                template = TemplateOptions.of(told, self.request.get("reasoning_effort"))
                tools = self.request.get("tools") or ()
                return encode_messages(tokenizer, list(map(_message, messages)), tools, template)
            if isinstance(text, str) and text:
                return encode_prompt(tokenizer, text, chat=False)
        except UsageError:
            raise UnusableError("template") from None
        raise UnusableError("prompt")

    # -- the response ------------------------------------------------------------------------------

    def _answer(self, choice: Json, prompt: Sequence[int], sampling: Sampling) -> Answer:
        finish, response = choice.get("finish_reason") or self.response.get("stop_type"), self.response
        if finish in _CUT:
            raise UnusableError("cut")
        usage = next(_objects(response.get("usage")), {})
        count = usage.get("completion_tokens", response.get("tokens_predicted"))
        entries = list(_entries(choice, response))
        tokens = next(filter(None, map(_ids, (
            choice.get("token_ids"), response.get("tokens"), self.record.get("token_ids"),
        ))), None)  # fmt: skip
        if tokens is None and entries:
            tokens = list(map(self._token, entries))
        elif tokens is None:
            tokens = self._encoded(choice, count)
        assert tokens is not None
        if self.vocabulary is not None and max(*prompt, *tokens) >= self.vocabulary.size:
            raise UnusableError("tokenizer")
        if isinstance(count, int) and len(tokens) < count - 1:
            raise UnusableError("cut")
        ends = finish in ("stop", "eos") and count == len(tokens) + 1
        if ends and sampling.greedy and self.vocabulary is not None and self.vocabulary.end is not None:
            tokens = [*tokens, self.vocabulary.end]
        probabilities = None
        if entries and not sampling.greedy:
            if len(entries) < len(tokens):
                raise UnusableError("cut")
            probabilities = self._probabilities(entries[: len(tokens)], sampling)
        if len(tokens) < 2:
            raise UnusableError("short")
        limit = next((value for name in ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")
                      if isinstance(value := self.request.get(name), int) and value > 0), None)  # fmt: skip
        if finish in ("length", "limit"):
            limit = len(tokens)
        return Answer(
            prompt, tokens, sampling, probabilities,
            None if limit is None else max(limit, len(tokens)),
            str(self.record.get("id", self.record.get("custom_id", self.number))),
            str(self.record.get("category") or ""),
            _pass_seconds(self.record, response, len(tokens)),
        )  # fmt: skip

    def _token(self, entry: Entry) -> int:
        if entry.token is not None:
            return entry.token
        if self.vocabulary is None:
            raise UnusableError("no tokenizer")
        return self.vocabulary.token(entry)

    def _encoded(self, choice: Json, count: Any) -> list[int]:
        """Return the tokens of an answer that is text alone."""
        message = next(_objects(choice.get("message"), choice))
        if message.get("tool_calls"):
            raise UnusableError("tools")
        if message.get("reasoning_content") or message.get("reasoning"):
            raise UnusableError("thinking")
        texts = (message.get(name) for name in ("content", "text", "answer"))
        text = next((each for each in texts if isinstance(each, str)), None)
        if text is None:
            raise UnusableError("form")
        if self.vocabulary is None:
            raise UnusableError("no tokenizer")
        tokens = [
            int(each) for each in self.vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"]
        ]
        if isinstance(count, int) and abs(len(tokens) - count) > max(2, count // 20):
            raise UnusableError("tokenizer")
        return tokens

    def _probabilities(self, entries: Sequence[Entry], sampling: Sampling) -> Floats:
        """Return the probabilities of tokens after the transforms."""
        if any(each.logprob <= -9999.0 for each in entries):  # stands for "not known"
            raise UnusableError("raw")
        untouched = sampling == Sampling(temperature=1.0)
        if untouched or all(each.processed for each in entries) or self.logprobs == "processed":
            return np.exp([min(0.0, each.logprob) for each in entries])
        if self.logprobs is None:
            raise UnusableError("kind")
        bounds = np.array([processed(each, sampling) for each in entries])
        if np.log(bounds[:, 1] / bounds[:, 0]).mean() > _BOUND:
            raise UnusableError("raw")
        middle: Floats = np.sqrt(bounds[:, 0] * bounds[:, 1])
        return middle


def processed(entry: Entry, sampling: Sampling, vocabulary: int = 200_000) -> tuple[float, float]:
    """Return bounds on a token's probability after temperature and cuts, from raw log probabilities.

    Where the cuts keep none but listed tokens, both are the same. Otherwise the other tokens' share at the temperature
    is between that of a tail as concentrated, and one as even, as it can be.

    Args:
        entry: The token, with the log probabilities of the most likely ones.
        sampling: Temperature, top-k, top-p and min-p.
        vocabulary: The most tokens that there can be.

    Raises:
        UnusableError: The list ends before the cuts.
    """
    if not entry.top or sampling.context_dependent:
        raise UnusableError("raw")
    power = 1.0 / sampling.temperature
    raw = np.exp(np.array(sorted({*entry.top, entry.logprob}, reverse=True)))
    tail, least = max(0.0, 1.0 - float(raw.sum())), math.exp(min(entry.top))
    rest = sorted((tail * least ** (power - 1.0), tail**power * vocabulary ** (1.0 - power)))
    weights, own = raw**power, math.exp(entry.logprob) ** power
    if sampling.top_k and sampling.top_k <= len(entry.top):
        weights, rest = weights[: sampling.top_k], [0.0, 0.0]
    if sampling.top_p < 1.0:
        reached = weights.cumsum()
        ends = {int(np.searchsorted(reached, sampling.top_p * (reached[-1] + more))) for more in rest}
        if len(ends) > 1 or max(ends) >= len(weights):
            raise UnusableError("raw")
        weights, rest = weights[: max(ends) + 1], [0.0, 0.0]
    if sampling.min_p > 0.0:
        if rest[1] and weights[-1] >= sampling.min_p * weights[0]:
            raise UnusableError("raw")
        weights, rest = weights[weights >= sampling.min_p * weights[0]], [0.0, 0.0]
    if own < weights[-1] * (1.0 - 1e-6):  # drawn although it was cut away: these are not the raw ones
        raise UnusableError("raw")
    total = float(weights.sum())
    return own / (total + rest[1]), min(1.0, own / (total + rest[0]))


def _ids(value: Any) -> list[int] | None:
    """Return a list of token ids; ``None`` for anything else."""
    right = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return value if right else None


def _message(message: Any) -> Json:
    """Return a message as chat templates take it."""
    if not isinstance(message, dict):
        raise UnusableError("prompt")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in content):
            raise UnusableError("parts")
        content = "".join(each["text"] for each in content)
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    return {**message, "content": content or "", **({"tool_calls": calls} if calls else {})}


def _arguments(written: Any) -> Any:
    try:
        return json.loads(written) if isinstance(written, str) else written
    except ValueError:
        return written


def _entries(choice: Json, response: Json) -> Iterator[Entry]:
    """Yield the tokens of an answer with their log probabilities, if it has any."""
    try:
        said = choice.get("logprobs") or {}
        if listed := said.get("tokens"):  # the completions' own form
            tops = said.get("top_logprobs") or [{}] * len(listed)
            for text, logprob, top in zip(listed, said["token_logprobs"], tops, strict=True):
                yield Entry(
                    text, None, None, -9999.0 if logprob is None else logprob, list((top or {}).values())
                )
            return
        for each in said.get("content") or response.get("completion_probabilities") or ():
            post = "prob" in each
            tops = each.get("top_probs" if post else "top_logprobs") or ()
            value = math.log(max(each["prob"], 1e-30)) if post else each["logprob"]
            top = [math.log(max(one["prob"], 1e-30)) if post else one["logprob"] for one in tops]
            yield Entry(each.get("token", ""), each.get("bytes"), each.get("id"), value, top, processed=post)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError):
        raise UnusableError("form") from None


def _pass_seconds(record: Json, response: Json, tokens: int) -> float | None:
    """Return what a token took, if the server or the client that stored the line says it and nothing was drafted."""
    timings = response.get("timings")
    if isinstance(timings, dict) and not timings.get("draft_n"):
        milliseconds = timings.get("predicted_per_token_ms")
        return milliseconds / 1000 if isinstance(milliseconds, int | float) and milliseconds > 0 else None
    first, end = record.get("completionStartTime"), record.get("endTime")  # LiteLLM's, of a stream
    if isinstance(first, int | float) and isinstance(end, int | float) and end > first:
        return (end - first) / (tokens - 1)
    return None
