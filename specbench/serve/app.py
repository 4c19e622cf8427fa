"""The ASGI application: the OpenAI protocol in front of an engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

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
from specbench.decoding.thinking import ThinkingSplit
from specbench.drafters.plain import NoDraft
from specbench.generate import GenerationRun, encode_messages, encode_prompt, shown_tokens
from specbench.policies import build_policy
from specbench.serve.engine import BusyError, Engine, StoppedError
from specbench.serve.metrics import CONTENT_TYPE, metrics_text
from specbench.serve.protocol import (
    MAX_NAME,
    ChatRequest,
    Reply,
    SpeculationOptions,
    TextRequest,
    Usage,
    error_body,
    parse,
)
from specbench.specs.policies import default_policy, parse_policy

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from transformers import PreTrainedTokenizerBase

    from specbench.decoding.protocols import DraftPolicy
    from specbench.decoding.records import FinishReason, Prefill, Step
    from specbench.decoding.schedule import Event
    from specbench.decoding.thinking import Labeled
    from specbench.recipe import Recipe
    from specbench.serve.engine import Job

_T = TypeVar("_T")

_MAX_BODY_BYTES = 4 * 2**20
_BODY_TIMEOUT_S = 60.0

_MAX_OPEN = 64
"""Requests that may be open in addition to the engine's: they send their bodies or read their answers."""

_CLIENT_CLOSED = 499  # the status that servers log for a client that did not wait


def application(
    engine: Engine, recipe: Recipe, *, seed: int | None = None, hosts: Sequence[str] = ("*",)
) -> Starlette:
    """Return the application of an engine, which the caller must stop.

    Args:
        engine: The engine.
        recipe: What a request leaves open; without a draft policy, that is the default of the request's sampling.
        seed: The seed of requests without one; ``None`` draws one for each.
        hosts: Allowed host names of requests. They stop DNS rebinding: a web page can make its own host name resolve to
            this machine, but the browser still sends that name, not ``localhost``.

    Raises:
        UsageError: The target has no tokenizer.
    """
    api = _Api(engine, recipe, seed)
    routes = [
        Route("/v1/chat/completions", partial(api.answer, kind=ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(api.answer, kind=TextRequest), methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/metrics", api.metrics),
        Route("/health", api.health),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
            Middleware(_OpenRequestLimit, limit=engine.max_requests + _MAX_OPEN),
        ],
        exception_handlers={
            SpecbenchError: _error_response,
            ClientDisconnect: _disconnect_response,
            HTTPException: _error_response,
            Exception: _error_response,
        },
    )


class _Api:
    """The endpoints."""

    def __init__(self, engine: Engine, recipe: Recipe, seed: int | None) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        self._engine, self._recipe, self._seed = engine, recipe, seed
        self._default_policy = None if recipe.policy is None else build_policy(recipe.policy)
        self._tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self._model: Json = {
            "id": target.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "specbench",
            "speculation": {"drafter": engine.drafter.traits.name},
        }

    async def models(self, request: Request) -> Response:  # noqa: ARG002 - an endpoint's signature
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        return PlainTextResponse(metrics_text(self._engine), media_type=CONTENT_TYPE)

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok"})

    async def answer(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        # In a thread: parsing a large body takes a second, in which others have to be answered.
        parsed, run = await run_in_threadpool(self._parse, await _read_body(request), kind)
        records = _RecordStream(self._engine, run, splits=kind is ChatRequest)
        reply = Reply(
            parsed, f"{kind.id_prefix}-{secrets.token_hex(12)}", int(time.time()), self._model["id"]
        )
        # A failure before the first record has a status of its own, in streams too.
        try:
            first = await _unless_disconnected(request, anext(records))
            if parsed.stream:
                return _EventStream(_events(reply, records, first), records)
            return JSONResponse(await _unless_disconnected(request, _whole(reply, records, first)))
        except BaseException:
            records.close()
            raise

    def _parse(
        self, body: bytes, kind: type[ChatRequest] | type[TextRequest]
    ) -> tuple[ChatRequest | TextRequest, GenerationRun]:
        """Parse a request; return it with the generation that answers it.

        Raises:
            UsageError, _ProtocolError: The request is invalid.
        """
        parsed = parse(body, kind)
        self._check_model(parsed.model)
        recipe, limit = self._recipe, self._engine.max_tokens
        prompt = self._prompt(parsed)
        if limit is not None and len(prompt) >= limit:
            raise UsageError(
                f"The prompt has {len(prompt)} tokens; prompt and output together are limited to {limit}.",
                "Shorten the prompt.",
            )
        decoding = recipe.decoding.with_changes(**parsed.decoding)
        if limit is not None:
            decoding = decoding.with_changes(max_new_tokens=min(decoding.max_new_tokens, limit - len(prompt)))
        seed = self._seed if parsed.sampling_seed is None else parsed.sampling_seed
        sampling = Sampling(**{**recipe.sampling.transforms, **parsed.transforms})
        run = GenerationRun(
            prompt,
            self._engine.target,
            NoDraft() if parsed.speculation == "off" else self._engine.drafter,
            policy=self._policy(parsed.speculation, sampling) or self._default_policy,
            sampling=sampling,
            seed=secrets.randbits(63) if seed is None else seed,
            decoding=decoding,
        )
        return parsed, run

    def _policy(
        self, asked: Literal["off"] | SpeculationOptions | None, sampling: Sampling
    ) -> DraftPolicy | None:
        """Return the draft policy that a request asks for; ``None`` for the server's.

        Raises:
            UsageError: There is no such policy, it has no draft length, or it does not apply to the drafter.
        """
        if not isinstance(asked, SpeculationOptions) or (asked.gamma, asked.policy) == (None, None):
            return None
        default = default_policy(greedy=sampling.greedy, gamma=asked.gamma)
        spec = default if asked.policy is None else parse_policy(asked.policy)
        replace(self._recipe, policy=spec).check()
        return build_policy(spec.with_gamma(asked.gamma))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model["id"]:
            model = excerpt(name, MAX_NAME)
            message = f"There is no model {model!r} here. Ask for {self._model['id']!r}, or leave it out."
            raise _ProtocolError(404, message, "model_not_found")

    def _prompt(self, parsed: ChatRequest | TextRequest) -> list[int]:
        if isinstance(parsed, TextRequest):
            prompt = parsed.single_prompt
            return encode_prompt(self._tokenizer, prompt, chat=False) if isinstance(prompt, str) else prompt
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError("The model has no chat template.", "Use /v1/completions.")
        try:
            messages = [message.to_dict() for message in parsed.messages]
            return encode_messages(self._tokenizer, messages, template=parsed.template)
        except UsageError as error:  # whose hint is for a command line
            raise UsageError(error.message, "Send other messages.") from error


class _ProtocolError(HTTPException):
    """An error with its body."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(status)
        self.body = error_body(message, code=code)


class _RecordStream(AsyncIterator["Prefill | Step"]):
    """The records of a request as they are decoded, in the event loop that created the stream.

    Attributes:
        splits: Whether its thinking is told from its answer.

    Raises:
        SpecbenchError: The engine refuses the request, or decoding fails.
    """

    def __init__(self, engine: Engine, run: GenerationRun, *, splits: bool) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._engine, self.run, self.splits = engine, run, splits

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
        """Cancel the request if it has not ended."""
        if not self._ended:
            self._engine.cancel(self._job)


class _EventStream(StreamingResponse):
    """Server-sent events; a client that disconnects cancels its request."""

    def __init__(self, events: AsyncGenerator[str], records: _RecordStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events, self._records = events, records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._records.close()


class _OpenRequestLimit:
    """Limit on the number of open requests; further ones are refused before their bodies are read.

    The engine's own limit counts a request until its last step. This one counts it until the answer has been sent, so
    that slow clients cannot fill the memory.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit, self._open = app, limit, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._open >= self._limit:
            busy = BusyError(f"{self._open} requests are open.", "Try again later.")
            await _response_to(busy)(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


async def _pieces(
    records: _RecordStream, first: Prefill | Step, usage: Usage
) -> AsyncGenerator[tuple[str, str, FinishReason | None]]:
    """Yield the thinking and the text that become final with each record, and its finish reason."""
    run, tokenizer = records.run, records.run.target.tokenizer
    stream = run.text_stream()
    assert stream is not None
    assert tokenizer is not None
    split = ThinkingSplit(tokenizer, run.prompt) if records.splits else None
    record: Prefill | Step | None = first
    while record is not None:
        ended = record.finish_reason is not None
        tokens = shown_tokens(usage.add(record), record.finish_reason)
        labeled: Labeled = [(token, "answer") for token in tokens]
        if split is not None:
            labeled = [each for token in tokens for each in split.push(token)]
            labeled += split.finish() if ended else []
        pieces = [piece for token, part in labeled for piece in stream.push(token, part)]
        if ended:
            pieces += stream.finish("answer")
        thinking, text = (
            "".join(text for of, text in pieces if of == part) for part in ("thinking", "answer")
        )
        yield thinking, text, record.finish_reason
        record = await anext(records, None)


async def _whole(reply: Reply, records: _RecordStream, first: Prefill | Step) -> Json:
    usage = Usage()
    thoughts, texts, reasons = zip(*[each async for each in _pieces(records, first, usage)], strict=True)
    return reply.whole("".join(thoughts), "".join(texts), reasons[-1], usage)


async def _events(reply: Reply, records: _RecordStream, first: Prefill | Step) -> AsyncGenerator[str]:
    usage = Usage()
    if reply.is_chat:
        yield _event(reply.chunk({"role": "assistant", "content": ""}))
    try:
        async with aclosing(_pieces(records, first, usage)) as pieces:
            async for thinking, text, reason in pieces:
                if thinking:
                    yield _event(reply.chunk({"reasoning_content": thinking}))
                if text:
                    yield _event(reply.chunk({"content": text}))
                if reason is not None:
                    yield _event(reply.chunk({}, reason))
        if reply.request.wants_usage:
            yield _event(reply.usage_chunk(usage))
    except Exception as error:  # the status has been sent
        yield _event(_status_and_body(error)[1])
        return
    yield "data: [DONE]\n\n"


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, allow_nan=False)}\n\n"


async def _read_body(request: Request) -> bytes:
    """Read the body of a JSON request.

    Raises:
        _ProtocolError: The body is not JSON, too large, or does not arrive in time.
        ClientDisconnect: The client disconnects before it has sent the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also for safety: any page in a browser may send other kinds here by themselves.
        message = "The body has to be JSON: send the header 'Content-Type: application/json'."
        raise _ProtocolError(415, message)
    too_large = _ProtocolError(413, f"The body has more than {_MAX_BODY_BYTES} bytes.")
    if int(request.headers.get("content-length", 0)) > _MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise _ProtocolError(408, f"The body did not arrive within {_BODY_TIMEOUT_S:.0f} seconds.") from error
    return bytes(body)


async def _unless_disconnected(request: Request, coming: Awaitable[_T]) -> _T:
    """Wait for a result, unless the client disconnects first.

    Raises:
        ClientDisconnect: The client disconnects.
    """
    answer, gone = asyncio.ensure_future(coming), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _status_and_body(error: Exception) -> tuple[int, Json]:
    if isinstance(error, UsageError):
        return 400, error_body(str(error))
    if isinstance(error, BusyError):
        return 429, error_body(str(error), "rate_limit_error")
    if isinstance(error, StoppedError):
        return 503, error_body(str(error), "server_error")
    if isinstance(error, RunError):
        return 500, error_body(str(error), "server_error")
    return 500, error_body(f"{type(error).__name__}: decoding failed.", "server_error")


def _response_to(error: Exception) -> Response:
    if isinstance(error, _ProtocolError):
        return JSONResponse(error.body, error.status_code)
    if isinstance(error, HTTPException):
        return JSONResponse(error_body(f"{error.detail}."), error.status_code, error.headers)
    status, body = _status_and_body(error)
    return JSONResponse(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


async def _error_response(request: Request, error: Exception) -> Response:  # noqa: ARG001 - a handler's signature
    return _response_to(error)


async def _disconnect_response(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=_CLIENT_CLOSED)
