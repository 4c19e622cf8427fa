"""A client of servers with the OpenAI API, which records when text arrived and counts its tokens.

A chunk of a stream is not a token: servers send a step, a word or the content of a buffer. The number of tokens is
what a server reports (token ids, or ``usage``), compared with the target's tokenizer run on the text.
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
from specbench.base.textsafe import encodable, excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOLERANCE = 0.02
"""Share by which retokenized text may differ from the generated tokens: other tokens can spell the same text."""

_MOST_TAGS = 16
"""Most tokens of the tags around reasoning text, which are generated, but taken out by the server."""

_SAME_BURST = 0.25
"""Share of the usual time between two chunks below which they come from one step."""

_RETRY_STATUSES = (429, 502, 503, 504)


class ServerError(RunError):
    """A server failed, or gave an invalid answer.

    Attributes:
        status: HTTP status; ``None`` without a response.
        retry: Whether the same request can be sent again, since no part of an answer has arrived.
    """

    def __init__(self, message: str, *, status: int | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream: its time of arrival, in seconds since the request was sent, its text, its token ids
    (``None`` if not reported), and whether it came as reasoning.
    """

    at_s: float
    text: str
    ids: tuple[int, ...] | None
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A whole answer. Counts are ``None`` if the server does not report them.

    Attributes:
        ended_s: When the finish reason arrived, in seconds since the request was sent.
        prompt_tokens, used_tokens: Tokens of the prompt and of the output, according to ``usage``.
        steps_by_kept: Numbers of steps with a draft of which 0, 1, 2, ... tokens were accepted.
        steps: Drafted and accepted tokens of each step with a draft, in their order; empty if not reported.
        calls: Whether it calls a tool, which is not in its text.
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
    steps: tuple[tuple[int, int], ...] = ()
    calls: bool = False

    @property
    def reasoned(self) -> bool:
        """Whether some of the text came as reasoning, without the tags around it."""
        return any(piece.reasoning for piece in self.pieces)

    @property
    def reply(self) -> str:
        """The text without what came as reasoning."""
        return encodable("".join(piece.text for piece in self.pieces if not piece.reasoning))

    @property
    def text(self) -> str:
        """The whole text."""
        return encodable("".join(piece.text for piece in self.pieces))

    @property
    def ids(self) -> tuple[int, ...] | None:
        """All token ids; ``None`` if a chunk does not report its own."""
        if not self.pieces or any(piece.ids is None and piece.text for piece in self.pieces):
            return None
        return tuple(token for piece in self.pieces for token in piece.ids or ()) or None

    @property
    def speculation(self) -> SpeculationCounters | None:
        """Draft counts of the answer, in total and by position; ``None`` if not reported, or if they disagree."""
        if self.drafted is None or self.accepted is None or self.steps_by_kept is None:
            return None
        accepted_at = tuple(sum(self.steps_by_kept[place:]) for place in range(1, len(self.steps_by_kept)))
        if sum(accepted_at) != self.accepted:
            return None
        return SpeculationCounters(sum(self.steps_by_kept), self.drafted, self.accepted, accepted_at)

    @property
    def first(self) -> Chunk | None:
        """The first chunk with any content."""
        return next((piece for piece in self.pieces if piece.text or piece.ids), None)

    @property
    def bursts(self) -> int:
        """The number of bursts of chunks, as an estimate of the number of steps; adjacent chunks are one burst."""
        times = [piece.at_s for piece in self.pieces if piece.text or piece.ids]
        if len(times) < 2:
            return len(times)
        usual = (times[-1] - times[0]) / (len(times) - 1)
        return 1 + sum(later - earlier > _SAME_BURST * usual for earlier, later in pairwise(times))


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of tokens of an answer, the source of this count, and a sentence about counts that disagree."""

    tokens: int | None
    source: Literal["ids", "usage", "tokenizer", "nothing"]
    problem: str | None = None


def count_tokens(answer: StreamedAnswer, tokenizer: PreTrainedTokenizerBase | None) -> TokenCount:
    """Count the tokens of an answer by the best source available, and compare that with all other sources."""
    ids = None if answer.ids is None else len(answer.ids)
    read = None
    if tokenizer is not None:
        read = len(tokenizer(answer.text, add_special_tokens=False)["input_ids"])
    reported = ids if ids is not None else answer.used_tokens
    if reported is None:
        problem = "The server does not report how many tokens its answer has."
        return TokenCount(read, "nothing" if read is None else "tokenizer", problem)
    used = answer.used_tokens
    if ids is not None and used is not None and abs(ids - used) > 1:  # an end token
        # A server may hold ids back, and those that came were generated.
        problem = (
            f"The stream has {ids} token ids, but its usage field reports {used}: the larger one is taken."
        )
        return TokenCount(max(ids, used), "ids" if ids > used else "usage", problem)
    if read is not None and _disagrees(reported, read, answer):
        problem = f"The server reports {reported} tokens, but its text has {read} according to the target's tokenizer."
        return TokenCount(read, "tokenizer", problem)
    return TokenCount(reported, "usage" if ids is None else "ids")


def _disagrees(reported: int, read: int, answer: StreamedAnswer) -> bool:
    """Return whether a reported count disagrees with a text that has ``read`` tokens when it is tokenized again.

    A stop string and a call of a tool are generated but not part of the text, so there is no upper limit if the answer
    has one.
    """
    slack = max(1.0, _TOLERANCE * read)
    most = read + slack + (_MOST_TAGS if answer.reasoned else 1)
    whole = answer.finish_reason == "length" and not answer.calls
    return reported < read - slack or (whole and reported > most)


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """Draft counts of a server, since its start or for one answer.

    They are: steps that drafted, drafted tokens, accepted tokens, and accepted tokens by position in the draft.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...] = ()

    def since(self, before: SpeculationCounters) -> SpeculationCounters:
        """Return the increase since earlier counters.

        Raises:
            RunError: A counter has decreased, which means that the server was restarted.
        """
        increase = SpeculationCounters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip_longest(self.accepted_at, before.accepted_at, fillvalue=0)),
        )
        if min(increase.drafts, increase.drafted, increase.accepted, *increase.accepted_at) < 0:
            raise RunError("The server's counters have decreased: it was restarted.")
        return increase


_SAMPLE = re.compile(
    r"(?:([a-z_]*):)?spec_decode_num_(\w+?)_total(?:\{([^}]*)\})?\s+(\d{1,20}(?:\.\d*)?(?:[eE]\+?\d\d?)?)(?:\s.*)?"
)


def speculation_counters(metrics: str) -> SpeculationCounters | None:
    """Parse the draft counters of `/metrics`; ``None`` if it has none.

    vLLM, llama.cpp and specbench name them equally, except for a prefix, of which the first one is read. If a server
    has several engines or models, their counters are added.
    """
    totals: dict[str, float] = {}
    places: dict[int, float] = {}
    prefix: str | None = None
    for line in metrics.splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None or prefix not in (None, sample[1] or ""):
            continue
        prefix = sample[1] or ""
        name, labels, value = sample[2], sample[3] or "", float(sample[4])
        place = re.search(r'position="(\d{1,3})"', labels)
        if name == "accepted_tokens_per_pos" and place is not None:
            places[int(place[1])] = places.get(int(place[1]), 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    if not {"drafts", "draft_tokens", "accepted_tokens"} <= totals.keys():
        return None
    accepted_at = tuple(int(places.get(place, 0)) for place in range(max(places, default=-1) + 1))
    return SpeculationCounters(
        int(totals["drafts"]), int(totals["draft_tokens"]), int(totals["accepted_tokens"]), accepted_at
    )


class ServerClient:
    """A client of one server, used and closed within one event loop.

    Args:
        name: Name of the server in messages, which contain neither its address nor its key.
        url: Address, including ``/v1``.
        timeout_s: Timeout for connecting, and for each chunk.
        transport: Sends requests; ``None`` for the network.
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
        # One connection per request at a time, kept open from one to the next.
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
        """Request an answer as a stream. Cancelling the call closes the connection, which makes the server stop.

        Args:
            model: The server's name of the model.
            prompt: A text to continue, or the messages of a conversation.
            settings: Other fields of the request.

        Raises:
            ServerError: The server fails, or the answer breaks off.
        """
        path, body = _asked(model, prompt, settings)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began = self._clock()
        with self._explaining_errors():
            async with self._http.stream("POST", f"{self._url}/{path}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._refusal(response)
                return await self._read(response, began)

    async def ask_whole(
        self, model: str, prompt: str | Sequence[Mapping[str, str]], settings: Mapping[str, Any]
    ) -> Json:
        """Request an answer without a stream, and return its body; see ``ask``.

        Raises:
            ServerError: The server fails, or the answer is not a JSON object.
        """
        path, body = _asked(model, prompt, settings)
        with self._explaining_errors():
            response = await self._http.post(f"{self._url}/{path}", json=body)
        answer = _object(response.text)
        if response.status_code != 200 or not answer:
            raise self._refusal(response)
        return answer

    async def models(self) -> dict[str, str]:
        """Return the owners of the server's models by their names; empty if not reported.

        Raises:
            ServerError: The server cannot be reached, refuses, or does not speak the OpenAI protocol.
        """
        with self._explaining_errors():
            response = await self._http.get(f"{self._url}/models")
        if response.status_code != 200:
            raise self._refusal(response)
        listed = _object(response.text).get("data")
        if not isinstance(listed, list):
            raise ServerError(
                f"The server {self.name} does not speak the OpenAI protocol: it lists no models."
            )
        return {
            name: owner if isinstance(owner := model.get("owned_by"), str) else ""
            for model in listed
            if isinstance(model, dict) and isinstance(name := model.get("id"), str) and name
        }

    async def counters(self) -> SpeculationCounters | None:
        """Return the server's draft counts since its start; ``None`` if it does not report them."""
        return speculation_counters(await self.metrics())

    async def metrics(self) -> str:
        """Return the server's page `/metrics`; empty if there is none."""
        return await self._text_at("/metrics")

    async def _text_at(self, path: str) -> str:
        try:
            response = await self._http.get(f"{self._url.removesuffix('/v1')}{path}")
        except (httpx2.HTTPError, httpx2.InvalidURL):
            return ""
        return response.text if response.status_code == 200 else ""

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
                message = self._message(body)
                raise ServerError(f"The server {self.name} failed in the middle of its answer: {message}.")
            choice = choice_of(body)
            text, ids = text_of(choice), ids_of(choice)
            if text or ids:
                pieces.append(Chunk(at_s, text, ids, bool(_reasoning_of(choice))))
            # Some servers write "" for an answer that goes on, or behind the end.
            if isinstance(choice.get("finish_reason"), str) and choice["finish_reason"]:
                reason, ended_s = choice["finish_reason"], at_s
            facts |= facts_of(body, choice)
        if reason is None:
            raise ServerError(f"The answer of the server {self.name} broke off before its end.")
        return StreamedAnswer(tuple(pieces), reason, ended_s, **facts)

    def _refusal(self, response: httpx2.Response) -> ServerError:
        status, message = response.status_code, self._message(_object(response.text))
        if 300 <= status < 400:
            what = f"The server {self.name} redirects requests to another address (status {status})."
            return ServerError(what, status=status)
        return ServerError(
            f"The server {self.name} refuses a request with status {status}: {message}.",
            status=status,
            retry=status in _RETRY_STATUSES,
        )

    def _message(self, body: Mapping[str, Any]) -> str:
        """Return the message of an error as one line, without the API key, which some servers repeat."""
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        if message is None:
            message = body.get("message", body.get("detail", "no reason is given"))
        text = str(message)
        return excerpt(text.replace(self._key, "***") if self._key else text).rstrip(".")

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn errors of the connection into a ``ServerError``."""
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, httpx2.SSEError) as error:
            reason = excerpt(error).rstrip(".")
            unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            what = "cannot be reached" if unreached else "gave no complete answer"
            raise ServerError(
                f"The server {self.name} {what}: {reason or type(error).__name__}.", retry=unreached
            ) from error


def _asked(
    model: str, prompt: str | Sequence[Mapping[str, str]], settings: Mapping[str, Any]
) -> tuple[str, Json]:
    """Return the path and the body of a request for a text or the answer to a conversation."""
    chat = not isinstance(prompt, str)
    path = "chat/completions" if chat else "completions"
    return path, {"model": model, "messages" if chat else "prompt": prompt, **settings}


def _object(text: str) -> Json:
    """Parse a JSON object; return an empty one for anything else. Integers of 16 digits or more are read as floats."""
    try:
        parsed = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 16 else float(digits))
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def choice_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first choice of an answer; an empty one if there is none."""
    choices = body.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice, including reasoning text, since that is generated too."""
    parts = [choice.get("text"), _reasoning_of(choice), _said(choice).get("content")]
    return "".join(part for part in parts if isinstance(part, str))


def _reasoning_of(choice: Mapping[str, Any]) -> str:
    """Return the reasoning text of a choice, which some servers send under both of its names."""
    texts = (_said(choice).get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in texts if isinstance(text, str) and text), "")


def _said(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a choice of a chat says, in a stream or as a whole."""
    return _inner(choice, "delta") or _inner(choice, "message")


def ids_of(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the token ids of a choice; ``None`` if it does not name them."""
    return _counts(choice.get("token_ids"))


def _counts(value: object) -> tuple[int, ...] | None:
    """Return a list of integers from 0; ``None`` if it is anything else."""
    if not isinstance(value, list) or any(type(count) is not int or count < 0 for count in value):
        return None
    return tuple(value)


def facts_of(body: Mapping[str, Any], choice: Mapping[str, Any]) -> Json:
    """Return the counts in an event, by the names of ``StreamedAnswer``.

    llama.cpp reports ``timings``, vLLM ``metrics.speculative_decoding`` and SGLang ``meta_info``, with older and newer
    names.
    """
    usage, timings = (_inner(body, name) for name in ("usage", "timings"))
    details, cached = (_inner(usage, f"{name}_tokens_details") for name in ("completion", "prompt"))
    metrics = _inner(_inner(body, "metrics"), "speculative_decoding")
    meta = _inner(choice, "meta_info") or _inner(body, "meta_info")
    accepted, rejected = (details.get(f"{name}_prediction_tokens") for name in ("accepted", "rejected"))
    predicted = accepted + rejected if isinstance(accepted, int) and isinstance(rejected, int) else 0
    default = 0 if "predicted_n" in timings else None  # llama.cpp then leaves the drafts out
    pairs = (
        (timings.get("draft_n", default), timings.get("draft_n_accepted", default)),
        (metrics.get("num_draft_tokens"), metrics.get("num_accepted_draft_tokens")),
        (meta.get("spec_draft_token_num"), meta.get("spec_accept_token_num")),
        (meta.get("spec_num_proposed_drafts"), meta.get("spec_num_correct_drafts")),
        (predicted or None, accepted),
    )
    drafted, kept = next((pair for pair in pairs if pair[0] is not None), (None, None))
    tokens, rounds = usage.get("completion_tokens"), timings.get("draft_rounds")
    if (
        type(tokens) is int and type(rounds) is int and type(kept) is int
    ):  # mlx-vlm accepts beyond an answer's end
        kept = min(kept, max(0, tokens - 1 - rounds))
    reported = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "used_tokens": usage.get("completion_tokens"),
        "cached_tokens": timings.get("cache_n", meta.get("cached_tokens", cached.get("cached_tokens"))),
        "drafted": drafted,
        "accepted": kept,
    }
    counts: Json = {name: value for name, value in reported.items() if type(value) is int and value >= 0}
    if _said(choice).get("tool_calls"):
        counts["calls"] = True
    by_step = [_counts(metrics.get(f"per_step_{name}")) or () for name in ("drafted", "accepted")]
    if len({*map(len, by_step)}) == 1 and all(
        kept <= drafted for drafted, kept in zip(*by_step, strict=True)
    ):
        counts["steps"] = tuple(zip(*by_step, strict=True))
    histograms = (
        metrics.get("acceptance_histogram"),
        meta.get("spec_correct_drafts_histogram"),
        meta.get("spec_accept_histogram"),
    )
    if steps := _counts(next((each for each in histograms if each), None)):
        counts["steps_by_kept"] = steps
    return counts


def _inner(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = body.get(name)
    return part if isinstance(part, dict) else {}
