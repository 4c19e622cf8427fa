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
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal

import httpx2

from specbench.base.errors import RunError
from specbench.base.record import Json
from specbench.base.textsafe import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOLERANCE = 0.02
"""Share by which retokenized text may differ from what was generated: other tokens can spell the same text."""

_SAME_BURST = 0.25
"""Share of the usual time between two pieces below which they come from one step."""

_COME_BACK = (429, 502, 503, 504)
"""Statuses of a server that may answer a little later."""


class ServerError(RunError):
    """A server did not answer as it should.

    Attributes:
        status: Of the protocol; ``None`` where none came.
        later: Whether the same request may succeed a little later: nothing of an answer has come.
    """

    def __init__(self, message: str, *, status: int | None = None, later: bool = False) -> None:
        super().__init__(message)
        self.status, self.later = status, later


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one event of a stream has brought.

    Attributes:
        at_s: When it was read, in seconds since the request was sent.
        text: More text, perhaps none.
        ids: The token ids it names; ``None`` if it names none.
    """

    at_s: float
    text: str
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A whole answer.

    Attributes:
        pieces: As they came.
        finish_reason: As the server calls it.
        ended_s: When that came, in seconds since the request was sent.
        prompt_tokens, used_tokens: Of the prompt and of the output, by ``usage``; ``None`` without it.
        cached_tokens: Of the prompt's, those that were not read again; ``None`` if the server does not say.
        drafted, accepted: Tokens drafted and kept; ``None`` if the server does not say.
        steps_by_kept: How many steps that drafted kept 0, 1, 2, ... tokens; ``None`` if the server does not say.
    """

    pieces: tuple[Chunk, ...]
    finish_reason: str
    ended_s: float
    prompt_tokens: int | None = None
    used_tokens: int | None = None
    cached_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps_by_kept: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> tuple[int, ...] | None:
        """All token ids; ``None`` if they are not named throughout."""
        if not self.pieces or any(piece.ids is None and piece.text for piece in self.pieces):
            return None
        return tuple(token for piece in self.pieces for token in piece.ids or ()) or None

    @property
    def speculation(self) -> SpeculationCounters | None:
        """All that was drafted for it, by place too; ``None`` if the server does not say, or its figures disagree."""
        if self.drafted is None or self.accepted is None or self.steps_by_kept is None:
            return None
        kept_at = tuple(sum(self.steps_by_kept[place:]) for place in range(1, len(self.steps_by_kept)))
        if sum(kept_at) != self.accepted:
            return None
        return SpeculationCounters(sum(self.steps_by_kept), self.drafted, self.accepted, kept_at)

    @property
    def first(self) -> Chunk | None:
        """The first piece that brought anything; ``None`` if none did."""
        return next((piece for piece in self.pieces if piece.text or piece.ids), None)

    @property
    def bursts(self) -> int:
        """How many times pieces came, those right behind each other taken together: an estimate of the steps."""
        times = [piece.at_s for piece in self.pieces if piece.text or piece.ids]
        if len(times) < 2:
            return len(times)
        usual = (times[-1] - times[0]) / (len(times) - 1)
        return 1 + sum(later - earlier > _SAME_BURST * usual for earlier, later in pairwise(times))


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens an answer has.

    Attributes:
        tokens: That many; ``None`` if nothing tells.
        source: Who says so: the ids of the stream, ``usage``, or the tokenizer that read the text.
        problem: What does not fit, in a sentence; ``None`` if nothing was found.
    """

    tokens: int | None
    source: Literal["ids", "usage", "tokenizer", "nothing"]
    problem: str | None = None


def count_tokens(answer: StreamedAnswer, tokenizer: PreTrainedTokenizerBase | None) -> TokenCount:
    """Count the tokens of an answer by the best witness there is, and hold the others against it.

    Args:
        answer: Any.
        tokenizer: The target's; ``None`` if it is not at hand, and nothing is checked.
    """
    ids = None if answer.ids is None else len(answer.ids)
    read = None
    if tokenizer is not None:
        read = len(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    said = ids if ids is not None else answer.used_tokens
    source: Literal["ids", "usage"] = "usage" if ids is None else "ids"
    if said is None:
        problem = "The server does not say how many tokens its answer has."
        return TokenCount(read, "nothing" if read is None else "tokenizer", problem)
    if (
        ids is not None and answer.used_tokens is not None and abs(ids - answer.used_tokens) > 1
    ):  # an end token
        return TokenCount(ids, "ids", f"The stream names {ids} tokens, and usage {answer.used_tokens}.")
    if read is not None and _apart(said, read, answer.finish_reason):
        problem = f"The server counts {said} tokens, and its text has {read} by the target's tokenizer."
        return TokenCount(read, "tokenizer", problem)
    return TokenCount(said, source)


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
    """What a server has drafted: since its start, or for an answer.

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
            raise RunError("The server's counters have gone back: it was started anew.")
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


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that a server lists: its name there, and whose it says it is, empty if it does not."""

    name: str
    owner: str


class ServerClient:
    """Asks one server. To be used within one event loop, and closed there.

    Args:
        name: What messages call the server; they hold no address.
        url: Up to and with ``/v1``.
        key: Of the server's user; never part of a message.
        timeout_s: For connecting, and for every piece.
        transport: Sends requests; ``None`` for the network.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 300.0,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self._url, self._key = name, url.rstrip("/"), key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # As many connections as there are requests at a time, which stay open from one to the next.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=timeout_s, transport=transport, limits=limits
        )
        self._clock = clock

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def ask(
        self, model: str, prompt: str | Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> StreamedAnswer:
        """One answer, as a stream. Cancelling it closes the connection, which tells the server to stop.

        Args:
            model: By the server's name for it.
            prompt: A text to continue, or the messages of a conversation.
            settings: Other fields of the request.

        Raises:
            ServerError: It fails, or breaks off.
        """
        chat = not isinstance(prompt, str)
        path = "chat/completions" if chat else "completions"
        body = {
            "model": model,
            "messages" if chat else "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        began = self._clock()
        with self._told():
            async with self._http.stream("POST", f"{self._url}/{path}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refused(response)
                return await self._read(response, began)

    async def models(self) -> list[ListedModel]:
        """What the server lists.

        Raises:
            ServerError: It cannot be reached, refuses, or does not speak the OpenAI protocol.
        """
        with self._told():
            response = await self._http.get(f"{self._url}/models")
        if response.status_code != 200:
            raise self._refused(response)
        listed = _object(response.text).get("data")
        if not isinstance(listed, list):
            raise ServerError(
                f"The server {self.name} does not speak the OpenAI protocol: it lists no models."
            )
        return [
            ListedModel(name, owner if isinstance(owner := each.get("owned_by"), str) else "")
            for each in listed
            if isinstance(each, dict) and isinstance(name := each.get("id"), str) and name
        ]

    async def counters(self) -> SpeculationCounters | None:
        """What the server has drafted since its start; ``None`` if it does not say."""
        try:
            response = await self._http.get(f"{self._url.removesuffix('/v1')}/metrics")
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return None
        return speculation_counters(response.text) if response.status_code == 200 else None

    async def _read(self, response: httpx2.Response, began: float) -> StreamedAnswer:
        pieces: list[Chunk] = []
        facts: Json = {}
        reason, ended_s = None, 0.0
        async for event in httpx2.EventSource(response, max_event_size=None):
            at_s = self._clock() - began
            if event.data == "[DONE]":
                break
            body = _object(event.data)
            if body.get("error"):
                said = self._message(body)
                raise ServerError(f"The server {self.name} failed in the middle of its answer: {said}.")
            choice = _choice(body)
            text, ids = _text_of(choice), _ids_of(choice)
            if text or ids:
                pieces.append(Chunk(at_s, text, ids))
            why = choice.get("finish_reason")
            if isinstance(why, str):
                reason, ended_s = why, at_s
            facts |= _facts(body, choice)
        if reason is None:
            raise ServerError(f"The answer of the server {self.name} broke off before its end.")
        return StreamedAnswer(tuple(pieces), reason, ended_s, **facts)

    def _refused(self, response: httpx2.Response) -> ServerError:
        status, said = response.status_code, self._message(_object(response.text))
        if 300 <= status < 400:
            what = f"The server {self.name} sends requests to another address (status {status})."
            return ServerError(what, status=status)
        return ServerError(
            f"The server {self.name} refuses a request with status {status}: {said}.",
            status=status,
            later=status in _COME_BACK,
        )

    def _message(self, body: Mapping[str, Any]) -> str:
        """What an error's body says, in a line; some servers repeat the key that they refuse."""
        error = body.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        said = said if said is not None else body.get("message", body.get("detail", "no reason is given"))
        text = str(said)
        return excerpt(text.replace(self._key, "***") if self._key else text).rstrip(".")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong on the way as a sentence."""
        try:
            yield
        except httpx2.ConnectTimeout as error:
            raise ServerError(f"The server {self.name} cannot be reached in time.", later=True) from error
        except httpx2.TimeoutException as error:
            raise ServerError(f"The server {self.name} has not answered in time.") from error
        except httpx2.ConnectError as error:
            raise ServerError(
                f"The server {self.name} cannot be reached: {_said(error)}.", later=True
            ) from error
        except httpx2.SSEError as error:
            raise ServerError(f"The server {self.name} does not send its answer as a stream.") from error
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
            raise ServerError(f"The connection to the server {self.name} broke: {_said(error)}.") from error


def _said(error: Exception) -> str:
    """What an error says, to stand before a full stop."""
    return excerpt(error).rstrip(".") or type(error).__name__


def _object(text: str) -> Json:
    """A JSON object; an empty one for whatever is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _choice(body: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = body.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _text_of(choice: Mapping[str, Any]) -> str:
    """What is shown and what is thought: both are generated."""
    delta = choice.get("delta")
    parts = [choice.get("text")]
    if isinstance(delta, dict):
        parts += [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    return "".join(part for part in parts if isinstance(part, str))


def _ids_of(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or any(type(token) is not int or token < 0 for token in ids):
        return None
    return tuple(ids)


def _facts(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Json:
    """What an event tells of counts, by the names of ``StreamedAnswer``.

    ``timings`` are llama.cpp's, ``metrics.speculative_decoding`` vLLM's, ``meta_info`` SGLang's, under older names and
    newer ones.
    """
    usage, timings = (_inner(body, name) for name in ("usage", "timings"))
    details, cached = (_inner(usage, f"{name}_tokens_details") for name in ("completion", "prompt"))
    metrics = _inner(_inner(body, "metrics"), "speculative_decoding")
    meta = _inner(choice, "meta_info") or _inner(body, "meta_info")
    accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
    predicted = accepted + rejected if isinstance(accepted, int) and isinstance(rejected, int) else 0
    nothing = 0 if "predicted_n" in timings else None  # llama.cpp then leaves the drafts out
    drafted_and_kept = (
        (timings.get("draft_n", nothing), timings.get("draft_n_accepted", nothing)),
        (metrics.get("num_draft_tokens"), metrics.get("num_accepted_draft_tokens")),
        (meta.get("spec_draft_token_num"), meta.get("spec_accept_token_num")),
        (meta.get("spec_num_proposed_drafts"), meta.get("spec_num_correct_drafts")),
        (predicted or None, accepted),
    )
    drafted, kept = next((pair for pair in drafted_and_kept if pair[0] is not None), (None, None))
    found = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "used_tokens": usage.get("completion_tokens"),
        "cached_tokens": timings.get("cache_n", meta.get("cached_tokens", cached.get("cached_tokens"))),
        "drafted": drafted,
        "accepted": kept,
    }
    counts: Json = {name: value for name, value in found.items() if type(value) is int and value >= 0}
    steps = (
        metrics.get("acceptance_histogram"),
        meta.get("spec_correct_drafts_histogram"),
        meta.get("spec_accept_histogram"),
    )
    told = next((each for each in steps if isinstance(each, list) and each), [])
    if told and all(type(count) is int and count >= 0 for count in told):
        counts["steps_by_kept"] = tuple(told)
    return counts


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = body.get(name)
    return found if isinstance(found, dict) else {}
