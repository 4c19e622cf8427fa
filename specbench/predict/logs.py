"""Answers from logs: JSON lines with what clients of servers send, receive and store.

A line holds a request and its response, or both in one object: the chat and completion forms of OpenAI's protocol as
vLLM, SGLang, llama.cpp, LiteLLM and ``specbench serve`` have them, llama.cpp's own ``/completion``, or simply
``{"prompt": ..., "answer": ...}``. A line that cannot be used is counted by its kind of problem, for which ``REASONS``
has a sentence.
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
    "prompt": "has no prompt: store the request with the response",
    "short": "has an answer of fewer than two tokens, which takes no step",
    "cut": "has an answer that was cut off, or fewer log probabilities than tokens",
    "tokenizer": "has tokens that the tokenizer does not: give the target's own with --tokenizer",
    "template": "has a conversation that the chat template refuses: give the target's tokenizer with --tokenizer",
    "parts": "has a prompt with pictures or sound",
    "tools": "calls tools, and what the model wrote for that is not in it: log with token ids or logprobs",
    "thinking": "has its thoughts cut off from the answer: log with token ids or logprobs",
    "temperature": "does not say its temperature: give it, as in --temperature 0.7",
    "kind": "was sampled at another temperature than 1 or with cuts, which needs log probabilities after these: log"
    " such (vLLM: --logprobs-mode processed_logprobs), and give --processed-logprobs",
}
"""Why a line is left out, as the rest of a sentence."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "dry_multiplier": (0,),
    "dynatemp_range": (0,), "echo": (False,), "frequency_penalty": (0,), "min_tokens": (0,), "min_new_tokens": (0,),
    "mirostat": (0,), "presence_penalty": (0,), "repeat_penalty": (1,), "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"), "top_n_sigma": (-1,), "typical_p": (1,), "use_beam_search": (False,),
    "xtc_probability": (0,),
    "allowed_token_ids": (), "bad_words": (), "ebnf": (), "format": (), "grammar": (), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "json_schema": (), "logit_bias": (),
    "regex": (), "structured_outputs": (), "suffix": (), "truncate_prompt_tokens": (),
}  # fmt: skip
"""Fields that change what a prompt or an answer is, with values at which they do not; nor do empty ones."""

_KNOWN = (
    # What is read.
    "temperature top_k top_p min_p repetition_penalty messages prompt prompt_token_ids text input_ids tools"
    " chat_template_kwargs reasoning_effort max_tokens max_completion_tokens max_new_tokens n_predict num_predict"
    " token_ids category id custom_id body extra_body options sampling_params"
    # What changes neither the prompt nor the distribution of tokens.
    " model user metadata method url stream stream_options seed stop stop_token_ids n logprobs top_logprobs"
    " return_logprob top_logprobs_num logprob_start_len return_text_in_logprobs return_tokens_as_token_ids"
    " return_token_ids return_tokens prompt_logprobs n_probs post_sampling_probs include_stop_str_in_output"
    " skip_special_tokens spaces_between_special_tokens detokenize parallel_tool_calls store priority"
    " request_id service_tier timeout cache_prompt cache_salt id_slot slot_id keep_alive timings_per_token verbosity"
    " dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_exponent mirostat_tau mirostat_eta"
    " xtc_threshold repeat_last_n n_keep n_discard min_keep grammar_lazy grammar_triggers preserved_tokens"
    " chat_format reasoning_format reasoning_in_content thinking_forced_open backend_sampling num_ctx num_thread"
    " ignore_eos no_stop_trim rid"
)
"""Other fields of requests that are known."""
_HARMLESS = frozenset(_KNOWN.split())

_PARTS = ("body", "extra_body", "options", "sampling_params")
"""What requests hold further fields in."""

_HOLDERS = (
    "message",
    "text",
    "content",
    "answer",
    "token_ids",
    "tokens",
    "logprobs",
    "completion_probabilities",
)
"""What holds an answer."""

_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict", "num_predict")
"""What a request calls the longest answer."""

_CUT = ("abort", "content_filter", "error", "cancelled")
"""Reasons of a finish that are no end of an answer."""


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
        found = [f"The first {len(self.answers)} answers were read; --limit reads more."] * self.unread
        for kind, lines in self.left_out.items():
            word, _, name = kind.partition(" ")
            reason = (
                f"has the field {name!r}, which may change its prompt or its answer"
                if name
                else REASONS[word]
            )
            listed = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
            what = "1 line is" if len(lines) == 1 else f"{len(lines)} lines are"
            found.append(f"{what} left out ({listed}): such a line {reason}.")
        return found


def read_log(
    lines: Iterable[bytes],
    tokenizer: PreTrainedTokenizerBase,
    *,
    sampling: Mapping[str, float] | None = None,
    processed: bool = False,
    limit: int | None = None,
) -> Log:
    """Read the answers of a log.

    Args:
        lines: JSON lines.
        tokenizer: The target's.
        sampling: Arguments of ``Sampling`` where a line does not say them.
        processed: Whether log probabilities are after temperature and cuts, where a line does not say it.
        limit: How many answers to read.
    """
    log, reader = Log(), _Reader(tokenizer, sampling or {}, processed)
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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, sampling: Mapping[str, float], processed: bool
    ) -> None:
        self._tokenizer, self._default_sampling, self._processed = tokenizer, sampling, processed
        self._special, self._by_bytes = special_tokens(tokenizer), dict[bytes, int]()
        for token, text in token_bytes(tokenizer).items():
            self._by_bytes.setdefault(text, token)
        self._size = max(tokenizer.get_vocab().values(), default=-1) + 1
        turn = end_of_turn(tokenizer)
        self._end: int | None = tokenizer.eos_token_id if turn is None else turn

    def answers(self, record: Json, name: str) -> list[Answer]:
        """Return the answers of a line: of several choices each is one."""
        response = record.get("response", record)
        if isinstance(response, str):
            response = {"answer": response}
        response = response.get("body", response)
        choices = response.get("choices", [response])
        if not any(name in choice for choice in choices for name in _HOLDERS if choice.get(name)):
            raise UnusableError("form")
        request = _request(record, response)
        sampling, prompt = self._sampling(request), self._prompt(choices[0], response, request)
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

    def _prompt(self, choice: Json, response: Json, request: Json) -> list[int]:
        holders = (choice, response, request)
        ids = _first_ids(
            *(each.get(name) for each in holders for name in ("prompt_token_ids", "input_ids", "prompt"))
        )
        if ids is not None:
            return ids
        messages, text = request.get("messages"), request.get("prompt", response.get("prompt"))
        if not (messages or text):
            raise UnusableError("prompt")
        try:
            if not messages:
                ids, bos = encode_prompt(self._tokenizer, str(text), chat=False), self._tokenizer.bos_token_id
                return (
                    ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
                )  # llama.cpp's has its own
            told = request.get("chat_template_kwargs") or {}
            template = TemplateOptions.of(told, request.get("reasoning_effort"))
            tools = request.get("tools") or ()
            return encode_messages(self._tokenizer, list(map(_message, messages)), tools, template)
        except UsageError:
            raise UnusableError("template") from None

    # -- the response ------------------------------------------------------------------------------

    def _answer(
        self, choice: Json, response: Json, request: Json, prompt: list[int], sampling: Sampling, name: str
    ) -> Answer:
        finish = choice.get("finish_reason") or response.get("stop_type") or response.get("done_reason")
        count = (response.get("usage") or response).get("completion_tokens")
        count = response.get("tokens_predicted", response.get("eval_count")) if count is None else count
        entries = list(_entries(choice, response))
        tokens = _first_ids(choice.get("token_ids"), response.get("tokens"), request.get("token_ids"))
        if tokens is None:
            tokens = self._listed(entries) or self._encoded(choice.get("message", choice), count)
        if max((*prompt, *tokens), default=0) >= self._size:
            raise UnusableError("tokenizer")
        if finish in _CUT or (count is not None and len(tokens) < count - 1):
            raise UnusableError("cut")
        ended = finish in ("stop", "eos") and count == len(tokens) + 1  # by a token that is not listed
        stopped = choice.get("stop_reason")  # vLLM's: a token or a stop string, none for its usual end token
        end = stopped if type(stopped) is int else self._end if stopped is None else None
        if ended and sampling.greedy and end is not None:
            tokens = [*tokens, end]
        if len(tokens) < 2:
            raise UnusableError("short")
        probabilities = None
        if entries and not sampling.greedy:
            probabilities = self._probabilities(entries, len(tokens), sampling)
        asked = (request.get(name) for name in _LIMITS)
        limit = next((max(each, len(tokens)) for each in asked if each is not None and each > 0), None)
        timings = response.get("timings") or {}  # llama.cpp's
        took = None if timings.get("draft_n") else timings.get("predicted_per_token_ms")
        return Answer(
            prompt, tokens, sampling, probabilities, len(tokens) if finish in ("length", "limit") else limit,
            name, str(request.get("category") or ""), took / 1000 if took else None,
        )  # fmt: skip

    def _listed(self, entries: Sequence[Json]) -> list[int]:
        """Return the tokens of entries; vLLM tells the text of a split character with its last token alone."""
        tokens, empty = list[int](), 0
        for entry in entries:
            if entry.get("token") == "" and "id" not in entry:
                empty += 1
                continue
            told = self._tokenizer(entry["token"], add_special_tokens=False)["input_ids"] if empty else ()
            if len(told) != empty + bool(empty):
                raise UnusableError("tokenizer")
            tokens += told or [self._token(entry)]
            empty = 0
        return tokens

    def _token(self, entry: Json) -> int:
        """Return the id of a token by that, its text, or the bytes of it."""
        text, written = entry.get("token", ""), entry.get("bytes")
        if "id" in entry or text.startswith("token_id:"):
            return int(entry.get("id", text.removeprefix("token_id:")))
        found = self._by_bytes.get(bytes(text.encode() if written is None else written))
        found = self._special.get(text, found)
        if found is None:
            raise UnusableError("tokenizer")
        return found

    def _encoded(self, message: Json, count: int | None) -> list[int]:
        """Return the tokens of an answer that is text alone."""
        if message.get("tool_calls"):
            raise UnusableError("tools")
        if any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking")):
            raise UnusableError("thinking")
        text = next((message[name] for name in ("content", "text", "answer") if message.get(name)), None)
        if text is None:
            raise UnusableError("form")
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if count is not None and abs(len(tokens) - count) > max(2, count // 20):
            raise UnusableError("tokenizer")
        return tokens

    def _probabilities(self, entries: Sequence[Json], count: int, sampling: Sampling) -> Floats:
        """Return the probabilities of the first tokens after the transforms."""
        post = all("prob" in each for each in entries)  # llama.cpp's post_sampling_probs
        found = [each["prob"] if post else math.exp(min(0.0, each["logprob"])) for each in entries[:count]]
        if len(found) < count or min(found) == 0.0:  # vLLM says -9999 where it does not know
            raise UnusableError("cut")
        if not (post or self._processed or sampling == Sampling(temperature=1.0)):
            raise UnusableError("kind")
        return np.array(found)


def _request(record: Json, response: Json) -> Json:
    """Return the fields of a request, those of its parts too.

    Raises:
        UnusableError: One may change the prompt or the answer in a way that is not followed; of the line itself, which
            holds more than a request, only those count that are known to.
    """
    found, parts = dict(record), [record.get("request"), record.get("model_parameters")]
    settings = response.get("generation_settings") or {}
    while parts:
        part = parts.pop(0)
        if not part:
            continue
        found |= part
        parts += [part.get(name) for name in _PARTS]
        strange = (name for name in part if name not in _NEUTRAL and name not in _HARMLESS and part[name])
        if name := next(strange, None):
            raise UnusableError("field", name)
    for holder in (found, settings):
        for name, neutral in _NEUTRAL.items():
            if name in holder and holder[name] not in (None, "", [], {}, *neutral):
                raise UnusableError("field", name)
    return found | settings


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


def _entries(choice: Json, response: Json) -> list[Json]:
    """Return the tokens of an answer with their log probabilities, in the form of the chat; empty without any."""
    said = choice.get("logprobs") or {}
    if listed := said.get("tokens"):  # the completions' own form
        pairs = zip(listed, said["token_logprobs"], strict=True)
        return [
            {"token": text, "logprob": -9999.0 if logprob is None else logprob} for text, logprob in pairs
        ]
    return list(said.get("content") or response.get("completion_probabilities") or ())
