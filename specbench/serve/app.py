"""The ASGI application: an engine behind the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.record import Json
from specbench.base.textsafe import excerpt
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun, encode_messages, encode_prompt, shown_tokens
from specbench.options import DecodingOptions
from specbench.serve.counters import CONTENT_TYPE, metrics_text
from specbench.serve.engine import BusyError, Engine, StoppedError
from specbench.serve.protocol import LONGEST_NAME, ChatRequest, Reply, TextRequest, Usage, error_body, parse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from transformers import PreTrainedTokenizerBase

    from specbench.decoding.records import FinishReason, Prefill, Step
    from specbench.decoding.request import DraftPolicy
    from specbench.decoding.schedule import Event
    from specbench.serve.engine import Job

_T = TypeVar("_T")

_MOST_BYTES = 4 * 2**20
"""Of a request's body."""

_BODY_S = 60.0
"""Seconds in which it has to come."""

_MOST_BESIDE = 64
"""Requests that may be open besides those that are decoded or wait: they send their bodies or read their answers."""

_GONE = 499  # what servers log for a client that did not wait


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing else.

    Attributes:
        policy: How much is drafted, for all; ``None`` for the rule that is the default for a request's sampling.
        sampling: The transforms, by the names of ``Sampling``.
        seed: Of every request that brings none; ``None`` draws one for each.
        decoding: Of an output; ``max_new_tokens`` where a request gives none.
    """

    policy: DraftPolicy | None
    sampling: Json
    seed: int | None
    decoding: DecodingOptions = field(default_factory=DecodingOptions)


def application(engine: Engine, defaults: Defaults, *, hosts: Sequence[str] = ("*",)) -> Starlette:
    """The application.

    Args:
        engine: Decodes. Whoever runs the application ends it.
        defaults: What holds where a request says nothing else.
        hosts: The names by which it may be called. A page in a browser of the same machine can have a name of its own
            point here; it cannot have a request say ``localhost``.

    Raises:
        UsageError: The target has no tokenizer.
    """
    serving = _Serving(engine, defaults)
    routes = [
        Route("/v1/chat/completions", serving.chat, methods=["POST"]),
        Route("/v1/completions", serving.text, methods=["POST"]),
        Route("/v1/models", serving.models),
        Route("/v1/models/{name:path}", serving.model),
        Route("/metrics", serving.metrics),
        Route("/health", serving.health),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(_OpenRequestLimit, most=engine.most + _MOST_BESIDE),
        ],
        exception_handlers={
            SpecbenchError: _explained,
            ClientDisconnect: _left,
            HTTPException: _http_error,
            Exception: _explained,
        },
    )


class _Serving:
    def __init__(self, engine: Engine, defaults: Defaults) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        self._engine, self._defaults = engine, defaults
        self._tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self._model: Json = {
            "id": target.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "specbench",
        }

    async def models(self, request: Request) -> Response:  # noqa: ARG002 - an endpoint's signature
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """The one model, by its name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """What has been done since the start."""
        return PlainTextResponse(metrics_text(self._engine), media_type=CONTENT_TYPE)

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """It is there."""
        return JSONResponse({"status": "ok"})

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        return await self._answer(request, ChatRequest)

    async def text(self, request: Request) -> Response:
        """What continues a text."""
        return await self._answer(request, TextRequest)

    async def _answer(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        # In a thread: of a large body it takes a second, in which others are to be answered.
        asked, run = await run_in_threadpool(self._taken, await _body_of(request), kind)
        ticket = _RecordStream(self._engine, run)
        reply = Reply(asked, f"{kind.id_prefix}-{secrets.token_hex(12)}", int(time.time()), self._model["id"])
        # An answer that fails before it has begun is an error of the protocol, also for who wants a stream.
        try:
            first = await _unless_gone(request, anext(ticket))
            if asked.stream:
                return _EventStream(_events(reply, ticket, first), ticket)
            return JSONResponse(await _unless_gone(request, _whole(reply, ticket, first)))
        except BaseException:
            ticket.close()
            raise

    def _taken(
        self, body: bytes, kind: type[ChatRequest] | type[TextRequest]
    ) -> tuple[ChatRequest | TextRequest, GenerationRun]:
        """A request as values, and what is to be decoded for it.

        Raises:
            UsageError, _ProtocolError: It cannot be had.
        """
        asked = parse(body, kind)
        self._check_model(asked.model)
        return asked, self._run(asked)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model["id"]:
            model = excerpt(name, LONGEST_NAME)
            message = f"There is no model {model!r} here. Ask for {self._model['id']!r}, or leave it out."
            raise _ProtocolError(404, error_body(message, "invalid_request_error", "model_not_found"))

    def _run(self, asked: ChatRequest | TextRequest) -> GenerationRun:
        """What a request asks for.

        Raises:
            UsageError: It cannot be had.
        """
        defaults, target = self._defaults, self._engine.target
        prompt = self._prompt(asked)
        room = self._engine.room
        if room is not None and len(prompt) >= room:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens, and {room} leave no room for an answer.", "Shorten it."
            )
        decoding = defaults.decoding.with_changes(**asked.decoding)
        if room is not None:
            decoding = decoding.with_changes(max_new_tokens=min(decoding.max_new_tokens, room - len(prompt)))
        seed = defaults.seed if asked.own_seed is None else asked.own_seed
        return GenerationRun(
            prompt,
            target,
            self._engine.drafter,
            policy=defaults.policy,
            sampling=Sampling(**{**defaults.sampling, **asked.transforms}),
            seed=secrets.randbits(63) if seed is None else seed,
            decoding=decoding,
        )

    def _prompt(self, asked: ChatRequest | TextRequest) -> list[int]:
        if isinstance(asked, TextRequest):
            beginning = asked.beginning
            if isinstance(beginning, str):
                return encode_prompt(self._tokenizer, beginning, chat=False)
            return beginning
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError("The model has no chat template.", "Use /v1/completions.")
        try:
            return encode_messages(self._tokenizer, [each.for_template for each in asked.messages])
        except UsageError as error:
            # Its advice is for a command line.
            raise UsageError(error.message, "Send other messages.") from error


class _ProtocolError(HTTPException):
    """An error with its body."""

    def __init__(self, status: int, body: Json) -> None:
        super().__init__(status)
        self.body = body


class _RecordStream(AsyncIterator["Prefill | Step"]):
    """The records of a request as they come, in the loop that it was made in.

    Raises:
        SpecbenchError: The engine does not take it, or it fails.
    """

    def __init__(self, engine: Engine, run: GenerationRun) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine, self.run = engine, run

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._job: Job = engine.submit(run, deliver)
        self._ended = False

    async def __anext__(self) -> Prefill | Step:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, Exception):
            self._ended = True
            raise event
        self._ended = event.finish_reason is not None
        return event

    def close(self) -> None:
        """Nobody wants more of it."""
        if not self._ended:
            self._engine.cancel(self._job)


class _EventStream(StreamingResponse):
    """Server-sent events; a client that goes takes its request along."""

    def __init__(self, events: AsyncGenerator[str], ticket: _RecordStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._ticket = events, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._ticket.close()


class _OpenRequestLimit:
    """Lets so many requests be open at a time, and refuses others before their bodies are read.

    The engine's own limit ends with a request's last step. This one holds until the answer has been sent, so that
    clients who send or read slowly cannot fill the memory.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most, self._open = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._open >= self._most:
            await _refusal(BusyError(f"{self._open} requests are open.", "Try again later."))(
                scope, receive, send
            )
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


async def _texts(
    ticket: _RecordStream, first: Prefill | Step, usage: Usage
) -> AsyncGenerator[tuple[str, FinishReason | None]]:
    """The text that every record makes final, and why it is the last one."""
    stream = ticket.run.text_stream()
    assert stream is not None
    record: Prefill | Step | None = first
    while record is not None:
        tokens = shown_tokens(usage.take(record), record.finish_reason)
        pieces = [text for token in tokens for _, text in stream.push(token, "target")]
        if record.finish_reason is not None:
            pieces += [text for _, text in stream.finish("target")]
        yield "".join(pieces), record.finish_reason
        record = await anext(ticket, None)


async def _whole(reply: Reply, ticket: _RecordStream, first: Prefill | Step) -> Json:
    usage = Usage()
    parts = [part async for part in _texts(ticket, first, usage)]
    reason = parts[-1][1]
    assert reason is not None
    return reply.whole("".join(text for text, _ in parts), reason, usage)


async def _events(reply: Reply, ticket: _RecordStream, first: Prefill | Step) -> AsyncGenerator[str]:
    usage = Usage()
    if (opening := reply.opening()) is not None:
        yield _event(opening)
    try:
        async with aclosing(_texts(ticket, first, usage)) as texts:
            async for text, reason in texts:
                if text:
                    yield _event(reply.piece(text))
                if reason is not None:
                    yield _event(reply.ending(reason))
        if reply.asked.wants_usage:
            yield _event(reply.closing(usage))
    except Exception as error:  # the status has been sent
        yield _event(_body_of_error(error)[1])
        return
    yield "data: [DONE]\n\n"


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, allow_nan=False)}\n\n"


async def _body_of(request: Request) -> bytes:
    """A JSON request's body.

    Raises:
        _ProtocolError: It is of another kind, too large, or does not come.
        ClientDisconnect: The client goes before it has sent it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also for safety: any page in a browser may send other kinds here unasked.
        message = "The body has to be JSON: send the header 'Content-Type: application/json'."
        raise _ProtocolError(415, error_body(message, "invalid_request_error"))
    if int(request.headers.get("content-length", 0)) > _MOST_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > _MOST_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        message = f"The body has not come within {_BODY_S:.0f} seconds."
        raise _ProtocolError(408, error_body(message, "invalid_request_error")) from error
    return bytes(body)


def _too_large() -> _ProtocolError:
    message = f"The body has more than {_MOST_BYTES} bytes."
    return _ProtocolError(413, error_body(message, "invalid_request_error"))


async def _unless_gone(request: Request, coming: Awaitable[_T]) -> _T:
    """What comes, unless the client goes before.

    Raises:
        ClientDisconnect: It has.
    """
    answer, gone = asyncio.ensure_future(coming), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _body_of_error(error: Exception) -> tuple[int, Json]:
    """Status and body."""
    if isinstance(error, UsageError):
        return 400, error_body(str(error), "invalid_request_error")
    if isinstance(error, BusyError):
        return 429, error_body(str(error), "rate_limit_error")
    if isinstance(error, StoppedError):
        return 503, error_body(str(error), "server_error")
    if isinstance(error, RunError):
        return 500, error_body(str(error), "server_error")
    return 500, error_body(f"{type(error).__name__}: decoding has failed.", "server_error")


async def _left(request: Request, error: Exception) -> Response:  # noqa: ARG001 - a handler's signature
    return Response(status_code=_GONE)


async def _explained(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return _refusal(error)


def _refusal(error: Exception) -> Response:
    status, body = _body_of_error(error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, HTTPException)
    if isinstance(error, _ProtocolError):
        return JSONResponse(error.body, error.status_code)
    return JSONResponse(
        error_body(f"{error.detail}.", "invalid_request_error"), error.status_code, error.headers
    )
