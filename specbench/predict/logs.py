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
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from specbench.predict.answers import Floats

REASONS: Mapping[str, str] = {
    "form": "holds no answer in a form that is known",
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
    "temperature": "does not say its temperature: give it, as in --temperature 0.7",
    "kind": "was sampled at another temperature than 1 or with cuts, which needs log probabilities after these: log"
    " such (vLLM: --logprobs-mode processed_logprobs), and give --processed-logprobs",
}
"""Why a line is left out, as the rest of a sentence."""

_UNSET: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repeat_penalty": (1,), "logit_bias": ({}, []),
    "response_format": ({"type": "text"},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "json_schema": (), "regex": ("",), "ebnf": ("",), "grammar": ("",),
    "dry_multiplier": (0,), "xtc_probability": (0,), "mirostat": (0,), "typical_p": (1,), "dynatemp_range": (0,),
    "top_n_sigma": (-1,),
}  # fmt: skip
"""Settings that change the target's distribution and that drafters do not apply, with what switches them off."""

_CUT = ("abort", "content_filter", "error", "cancelled")
"""Reasons of a finish that are no end of an answer."""


class UnusableError(Exception):
    """A line cannot be used; its argument is a key of ``REASONS``."""


@dataclass
class Log:
    """What a log holds.

    Attributes:
        answers: Those that can be used.
        left_out: Numbers of the lines that cannot, from 1, by the key of ``REASONS``.
        unread: Whether there are more, beyond the limit.
    """

    answers: list[Answer] = field(default_factory=list)
    left_out: dict[str, list[int]] = field(default_factory=dict)
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
    processed: bool = False,
    limit: int | None = None,
) -> Log:
    """Read the answers of a log.

    Args:
        lines: JSON lines.
        tokenizer: The target's; ``None`` if all lines have token ids.
        sampling: Arguments of ``Sampling`` where a line does not say them.
        processed: Whether log probabilities are after temperature and cuts, where a line does not say it.
        limit: How many answers to read.
    """
    log, vocabulary = Log(), None if tokenizer is None else Vocabulary(tokenizer)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if limit is not None and len(log.answers) >= limit:
            log.unread = True
            break
        try:
            log.answers += _Reader(json.loads(line), vocabulary, sampling or {}, processed, number).answers()
        except UnusableError as error:
            log.left_out.setdefault(error.args[0], []).append(number)
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
        ):  # no JSON, or of another shape
            log.left_out.setdefault("form", []).append(number)
    return log


class Vocabulary:
    """The tokens of a tokenizer, by their texts and bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._by_bytes: dict[bytes, int] = {}
        for token, text in token_bytes(tokenizer).items():
            self._by_bytes.setdefault(text, token)
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        turn = end_of_turn(tokenizer)
        self.end: int | None = tokenizer.eos_token_id if turn is None else turn

    def token(self, text: str, written: Sequence[int] | None) -> int:
        """Return the id of a token by its text, and its bytes if they are known."""
        if text.startswith("token_id:"):
            return int(text.removeprefix("token_id:"))
        found = self._special.get(
            text, self._by_bytes.get(bytes(text.encode() if written is None else written))
        )
        if found is None:
            raise UnusableError("tokenizer")
        return found


class Entry(NamedTuple):
    """A token with its log probability.

    Attributes:
        text, bytes, token: The token; ``None`` for what is not known.
        logprob: Natural logarithm of its probability.
        processed: Whether that is known to be after temperature and cuts.
    """

    text: str
    bytes: Sequence[int] | None
    token: int | None
    logprob: float
    processed: bool = False


class _Reader:
    """Reads one line; for the arguments see ``read_log``."""

    def __init__(
        self,
        record: Json,
        vocabulary: Vocabulary | None,
        sampling: Mapping[str, float],
        processed: bool,
        number: int,
    ) -> None:
        self.record, self.processed, self.number = record, processed, number
        self._vocabulary, self._default_sampling = vocabulary, sampling
        response = record.get("response", record)
        if isinstance(response, str):
            response = {"answer": response}
        self.response: Json = response.get("body", response)
        outer = record.get("request") or {}
        settings = (
            record.get("model_parameters"),
            outer,
            outer.get("body"),
            response.get("generation_settings"),
        )
        self.request: Json = dict(record)
        for part in settings:
            self.request |= part or {}

    def answers(self) -> list[Answer]:
        """Return the answers of the line: of several choices each is one."""
        choices = self.response.get("choices", [self.response])
        if not choices:
            raise UnusableError("form")
        sampling, prompt = self._sampling(), self._prompt(choices[0])
        return [self._answer(choice, prompt, sampling) for choice in choices]

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            raise UnusableError("no tokenizer")
        return self._vocabulary

    # -- the request -------------------------------------------------------------------------------

    def _sampling(self) -> Sampling:
        request = self.request
        if any(request.get(name) is not None and request[name] not in off for name, off in _UNSET.items()):
            raise UnusableError("settings")
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
            raise UnusableError("settings") from None

    def _prompt(self, choice: Json) -> list[int]:
        holders = (choice, self.response, self.request)
        ids = _first_ids(*(each.get(name) for each in holders for name in ("prompt_token_ids", "prompt")))
        if ids is not None:
            return ids
        messages, text = self.request.get("messages"), self.request.get("prompt", self.response.get("prompt"))
        if not (messages or text):
            raise UnusableError("prompt")
        tokenizer = self.vocabulary.tokenizer
        try:
            if not messages:
                return encode_prompt(tokenizer, str(text), chat=False)
            told = self.request.get("chat_template_kwargs") or {}
            template = TemplateOptions.of(told, self.request.get("reasoning_effort"))
            tools = self.request.get("tools") or ()
            return encode_messages(tokenizer, list(map(_message, messages)), tools, template)
        except UsageError:
            raise UnusableError("template") from None

    # -- the response ------------------------------------------------------------------------------

    def _answer(self, choice: Json, prompt: Sequence[int], sampling: Sampling) -> Answer:
        response = self.response
        finish = choice.get("finish_reason") or response.get("stop_type")
        count = (response.get("usage") or response).get("completion_tokens", response.get("tokens_predicted"))
        entries = list(_entries(choice, response))
        tokens = _first_ids(choice.get("token_ids"), response.get("tokens"), self.record.get("token_ids"))
        if tokens is None and entries:
            tokens = [
                self.vocabulary.token(each.text, each.bytes) if each.token is None else each.token
                for each in entries
            ]
        elif tokens is None:
            tokens = self._encoded(choice.get("message", choice), count)
        known = self._vocabulary
        if known is not None and max((*prompt, *tokens), default=0) >= known.size:
            raise UnusableError("tokenizer")
        if finish in _CUT or (count is not None and len(tokens) < count - 1):
            raise UnusableError("cut")
        ended = finish in ("stop", "eos") and count == len(tokens) + 1  # by a token that is not listed
        if ended and sampling.greedy and known is not None and known.end is not None:
            tokens = [*tokens, known.end]
        if len(tokens) < 2:
            raise UnusableError("short")
        probabilities = None
        if entries and not sampling.greedy:
            if len(entries) < len(tokens):
                raise UnusableError("cut")
            probabilities = self._probabilities(entries[: len(tokens)], sampling)
        asked = (self.request.get(name) for name in ("max_completion_tokens", "max_tokens", "n_predict"))
        limit = next((max(each, len(tokens)) for each in asked if each is not None and each > 0), None)
        timings = response.get("timings") or {}  # llama.cpp's
        took = None if timings.get("draft_n") else timings.get("predicted_per_token_ms")
        return Answer(
            prompt, tokens, sampling, probabilities,
            len(tokens) if finish in ("length", "limit") else limit,
            str(self.record.get("id", self.record.get("custom_id", self.number))),
            str(self.record.get("category") or ""),
            took / 1000 if took else None,
        )  # fmt: skip

    def _encoded(self, message: Json, count: int | None) -> list[int]:
        """Return the tokens of an answer that is text alone."""
        if message.get("tool_calls"):
            raise UnusableError("tools")
        if message.get("reasoning_content") or message.get("reasoning"):
            raise UnusableError("thinking")
        text = next((message[name] for name in ("content", "text", "answer") if message.get(name)), None)
        if text is None:
            raise UnusableError("form")
        tokens = list(self.vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"])
        if count is not None and abs(len(tokens) - count) > max(2, count // 20):
            raise UnusableError("tokenizer")
        return tokens

    def _probabilities(self, entries: Sequence[Entry], sampling: Sampling) -> Floats:
        """Return the probabilities of tokens after the transforms."""
        if any(each.logprob <= -9999.0 for each in entries):  # stands for "not known"
            raise UnusableError("cut")
        if not (
            self.processed or sampling == Sampling(temperature=1.0) or all(each.processed for each in entries)
        ):
            raise UnusableError("kind")
        return np.exp([min(0.0, each.logprob) for each in entries])


def _first_ids(*values: Any) -> list[int] | None:
    """Return the first list of token ids; ``None`` if there is none."""
    right = (each for each in values if isinstance(each, list) and each)
    return next((each for each in right if all(type(token) is int and token >= 0 for token in each)), None)


def _message(message: Json) -> Json:
    """Return a message as chat templates take it: with text, and the arguments of calls as objects."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any("text" not in each for each in content):
            raise UnusableError("parts")
        content = "".join(each["text"] for each in content)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "content": content, **({"tool_calls": calls} if calls else {})}


def _entries(choice: Json, response: Json) -> Iterator[Entry]:
    """Yield the tokens of an answer with their log probabilities, if it has any."""
    said = choice.get("logprobs") or {}
    if listed := said.get("tokens"):  # the completions' own form
        for text, logprob in zip(listed, said["token_logprobs"], strict=True):
            yield Entry(text, None, None, -9999.0 if logprob is None else logprob)
        return
    for each in said.get("content") or response.get("completion_probabilities") or ():
        post = "prob" in each  # llama.cpp's post_sampling_probs
        value = math.log(max(each["prob"], 1e-30)) if post else float(each["logprob"])
        yield Entry(each.get("token", ""), each.get("bytes"), each.get("id"), value, post)
