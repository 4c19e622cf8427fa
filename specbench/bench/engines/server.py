"""Answers of a server that speaks the OpenAI protocol: which text came when, and how many tokens that is.

A piece of a stream is no token: servers send a step, a word or whatever a buffer held. What counts is what a server
says of its tokens (their ids, or ``usage``), held against what the target's tokenizer makes of the text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import httpx2

from specbench.errors import RunError, UsageError
from specbench.textsafe import excerpt, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Answer",
    "Count",
    "Piece",
    "ServerClient",
    "SpeculationCounters",
    "count_tokens",
    "speculation_counters",
]

_TOLERANCE = 0.02
"""Share by which retokenised text may differ from what was generated: other tokens can spell the same text."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream has brought.

    Attributes:
        at_s: When it was read, in seconds since the request was sent.
        text: More text, perhaps none.
        tokens: How many token ids it names; ``None`` if it names none.
    """

    at_s: float
    text: str
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        pieces: As they came.
        finish_reason: As the server calls it.
        ended_s: When the stream ended, in seconds since the request was sent.
        prompt_tokens, used_tokens: Of the prompt and of the output, by ``usage``; ``None`` without it.
        cached_tokens: Of the prompt's, those that were not read again; ``None`` if the server does not say.
        drafted, accepted: Tokens drafted and kept; ``None`` if the server does not say.
    """

    pieces: tuple[Piece, ...]
    finish_reason: str
    ended_s: float
    prompt_tokens: int | None = None
    used_tokens: int | None = None
    cached_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text; ``None`` if there was none."""
        return next((piece.at_s for piece in self.pieces if piece.text), None)


@dataclass(frozen=True, slots=True)
class Count:
    """How many tokens an answer has.

    Attributes:
        tokens: That many; ``None`` if nothing tells.
        source: Who says so: the ids of the stream, ``usage``, or the tokenizer that read the text.
        problem: What does not fit, in a sentence; ``None`` if nothing was found.
    """

    tokens: int | None
    source: Literal["ids", "usage", "tokenizer", "nothing"]
    problem: str | None = None


def count_tokens(answer: Answer, tokenizer: PreTrainedTokenizerBase | None) -> Count:
    """Count the tokens of an answer by the best witness there is, and hold the others against it.

    Args:
        answer: Any.
        tokenizer: The target's; ``None`` if it is not at hand, and nothing is checked.
    """
    ids = None
    if answer.pieces and all(piece.tokens is not None or not piece.text for piece in answer.pieces):
        ids = sum(piece.tokens or 0 for piece in answer.pieces) or None
    read = None
    if tokenizer is not None:
        read = len(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    said = ids if ids is not None else answer.used_tokens
    source: Literal["ids", "usage"] = "usage" if ids is None else "ids"
    if said is None:
        problem = "The server does not say how many tokens its answer has."
        return Count(read, "nothing" if read is None else "tokenizer", problem)
    if (
        ids is not None and answer.used_tokens is not None and abs(ids - answer.used_tokens) > 1
    ):  # an end token
        return Count(ids, "ids", f"The stream names {ids} tokens, and usage {answer.used_tokens}.")
    if read is not None and _apart(said, read, answer.finish_reason):
        problem = f"The server counts {said} tokens, and its text has {read} by the target's tokenizer."
        return Count(read, "tokenizer", problem)
    return Count(said, source)


def _apart(said: int, read: int, finish_reason: str) -> bool:
    """Whether a count is not that of a text which has so many tokens when it is read again.

    A stop string is generated and not shown, so that there is no upper limit then.
    """
    slack = max(1.0, _TOLERANCE * read)
    if said < read - slack:
        return True
    return finish_reason == "length" and said > read + slack + 1


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """What a server has drafted since its start.

    Attributes:
        drafts: Steps that drafted.
        drafted, accepted: Tokens.
        kept_at: How often the draft at each place was kept, from the first one on.
    """

    drafts: int
    drafted: int
    accepted: int
    kept_at: tuple[int, ...] = ()

    def since(self, before: SpeculationCounters) -> SpeculationCounters:
        """What has come in between.

        Raises:
            RunError: There is less than before: the server has begun anew.
        """
        found = SpeculationCounters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip_longest(self.kept_at, before.kept_at, fillvalue=0)),
        )
        if min(found.drafts, found.drafted, found.accepted, *found.kept_at) < 0:
            raise RunError("The server's counters have gone back: it was started anew.", "Measure it again.")
        return found


_SAMPLE = re.compile(r"[a-z_]*:?spec_decode_num_(\w+?)_total(?:\{([^}]*)\})?\s+([0-9.eE+]+)(?:\s.*)?")


def speculation_counters(metrics: str) -> SpeculationCounters | None:
    """What `/metrics` says of speculation; ``None`` if nothing.

    vLLM, llama.cpp and specbench have the same names behind a prefix of their own. Counters of several engines or
    models of one server are added up.
    """
    found: dict[str, float] = {}
    places: dict[int, float] = {}
    for line in metrics.splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None:
            continue
        name, labels, figure = sample[1], sample[2] or "", float(sample[3])
        place = re.search(r'position="(\d+)"', labels)
        if name == "accepted_tokens_per_pos" and place is not None:
            places[int(place[1])] = places.get(int(place[1]), 0) + figure
        else:
            found[name] = found.get(name, 0) + figure
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= found.keys():
        return None
    kept_at = tuple(int(places.get(place, 0)) for place in range(max(places, default=-1) + 1))
    return SpeculationCounters(
        int(found["drafts"]), int(found["draft_tokens"]), int(found["accepted_tokens"]), kept_at
    )


class ServerClient:
    """Asks one server, one request at a time.

    Args:
        url: Up to and with ``/v1``.
        model: By its name; ``None`` for the one that the server lists.
        key: Of the server's user; never part of a message.
        timeout_s: For connecting, and for every piece.
        transport: Sends requests; ``None`` for the network.
        clock: Tells the time in seconds.

    Raises:
        RunError: The server cannot be reached, or speaks otherwise.
        UsageError: It lists several models, and none is named.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx2.BaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx2.Client(headers=headers, timeout=timeout_s, transport=transport)
        self._clock = clock
        self.model = model or self._only_model()

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, prompt: str | Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> Answer:
        """One answer, as a stream.

        Args:
            prompt: A text to continue, or the messages of a conversation.
            settings: Other fields of the request.

        Raises:
            RunError: It fails, or breaks off.
        """
        chat = not isinstance(prompt, str)
        path = "chat/completions" if chat else "completions"
        body = {
            "model": self.model,
            "messages" if chat else "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        began = self._clock()
        with self._told(), self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise self._refused(response)
            return self._read(response, began)

    def models(self) -> list[str]:
        """The names that the server lists."""
        with self._told():
            response = self._http.get(f"{self.url}/models")
            if response.status_code != 200:
                raise self._refused(response)
        listed = _object(response.text).get("data")
        named = (
            [each.get("id") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        )
        return [name for name in named if isinstance(name, str)]

    def _only_model(self) -> str:
        names = self.models()
        if len(names) == 1:
            return names[0]
        if not names:
            raise RunError(
                f"{self.url} lists no model: it does not speak the OpenAI protocol.", "Check its address."
            )
        raise UsageError(
            f"{self.url} lists {len(names)} models: {one_line(', '.join(names[:5]))}.", "Name one behind a #."
        )

    def _read(self, response: httpx2.Response, began: float) -> Answer:
        pieces: list[Piece] = []
        facts: dict[str, int] = {}
        reason: object = None
        for data in _events(response.iter_lines()):
            at_s = self._clock() - began
            if data == "[DONE]":
                break
            body = _object(data)
            if body.get("error"):
                raise RunError(f"{self.url} failed in the middle of its answer: {_message(body)}.")
            choices = body.get("choices")
            choice = (
                choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
            )
            text, tokens = _text_of(choice), _tokens_of(choice)
            if text or tokens:
                pieces.append(Piece(at_s, text, tokens))
            reason = choice.get("finish_reason") or reason
            facts |= _facts(body)
        if not isinstance(reason, str):
            raise RunError(f"The answer of {self.url} broke off before its end.")
        return Answer(tuple(pieces), reason, self._clock() - began, **facts)

    def _refused(self, response: httpx2.Response) -> RunError:
        said = _message(_object(response.text))
        return RunError(f"{self.url} refuses a request with status {response.status_code}: {said}.")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong on the way as a sentence."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise RunError(f"{self.url} has not answered in time.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise RunError(
                f"{self.url} cannot be asked: {excerpt(error) or type(error).__name__}."
            ) from error


def _events(lines: Iterator[str]) -> Iterator[str]:
    """The data of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def _object(text: str) -> dict[str, Any]:
    """A JSON object; an empty one for whatever is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _message(body: Mapping[str, Any]) -> str:
    """What an error's body says, in a line."""
    error = body.get("error")
    said = error.get("message") if isinstance(error, dict) else error
    return excerpt(said if said is not None else body.get("message", "no reason is given")).rstrip(".")


def _text_of(choice: Mapping[str, Any]) -> str:
    """What is shown and what is thought: both are generated."""
    delta = choice.get("delta")
    parts = [choice.get("text")]
    if isinstance(delta, dict):
        parts += [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(part for part in parts if isinstance(part, str))


def _tokens_of(choice: Mapping[str, Any]) -> int | None:
    ids = choice.get("token_ids")
    return len(ids) if isinstance(ids, list) else None


def _facts(body: Mapping[str, Any]) -> dict[str, int]:
    """What an event tells of counts, by the names of ``Answer``."""
    usage, timings = (_inner(body, name) for name in ("usage", "timings"))
    details, cached = (_inner(usage, f"{name}_tokens_details") for name in ("completion", "prompt"))
    accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
    drafted = accepted + rejected if isinstance(accepted, int) and isinstance(rejected, int) else 0
    found = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "used_tokens": usage.get("completion_tokens"),
        "cached_tokens": timings.get("cache_n", cached.get("cached_tokens")),
        "drafted": timings.get("draft_n", drafted or None),
        "accepted": timings.get("draft_n_accepted", accepted if drafted else None),
    }
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, dict) else {}
