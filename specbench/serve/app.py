"""The ASGI application: the OpenAI protocol in front of an engine."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from specbench.base.errors import SpecbenchError, UsageError
from specbench.base.record import Json
from specbench.base.textsafe import excerpt
from specbench.decoding.protocols import NoDraft
from specbench.decoding.sampling import Sampling
from specbench.decoding.thinking import ThinkingSplit
from specbench.generate import GenerationRun, encode_messages, encode_prompt, shown_tokens
from specbench.policies import build_policy
from specbench.serve.engine import BusyError, Engine, StoppedError
from specbench.serve.metrics import metrics_text
from specbench.serve.protocol import ChatRequest, Reply, TextRequest, Usage, parse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specbench.decoding.records import FinishReason
    from specbench.decoding.schedule import Event
    from specbench.decoding.thinking import Labeled
    from specbench.recipe import Recipe

_T = TypeVar("_T")

_MAX_BODY_BYTES = 4 * 2**20


def application(engine: Engine, recipe: Recipe, *, hosts: Sequence[str] = ("*",)) -> Starlette:
    """Return the application of an engine, which the caller must stop.

    Args:
        engine: The engine.
        recipe: What a request leaves open; without a draft policy, that is the default of the request's sampling.
        hosts: Allowed host names of requests. They stop DNS rebinding: a web page can make its own host name resolve to
            this machine, but the browser still sends that name, not ``localhost``.

    Raises:
        UsageError: The target has no tokenizer.
    """
    api = _Api(engine, recipe)
    model = {
        "id": engine.target.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "specbench",
        "speculation": {"drafter": engine.drafter.traits.name},
    }
    routes = [
        Route("/v1/chat/completions", partial(api.answer, kind=ChatRequest), methods=["POST"]),
        Route("/v1/completions", partial(api.answer, kind=TextRequest), methods=["POST"]),
        Route("/v1/models", JSONResponse({"object": "list", "data": [model]})),
        Route("/metrics", api.metrics),
        Route("/health", JSONResponse({"status": "ok"})),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers=dict.fromkeys(
            (SpecbenchError, ClientDisconnect, HTTPException, Exception), _error_response
        ),
    )


class _Api:
    """The endpoints."""

    def __init__(self, engine: Engine, recipe: Recipe) -> None:
        target = engine.target
        if target.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        self._engine, self._recipe = engine, recipe
        self._policy = None if recipe.policy is None else build_policy(recipe.policy)
        self._tokenizer: PreTrainedTokenizerBase = target.tokenizer

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002 - an endpoint's signature
        return PlainTextResponse(metrics_text(self._engine))

    async def answer(self, request: Request, kind: type[ChatRequest] | type[TextRequest]) -> Response:
        # In a thread: parsing a large body takes a second, in which others have to be answered.
        parsed, run = await run_in_threadpool(self._parse, await _read_body(request), kind)
        usage = Usage()
        pieces = _pieces(self._engine, run, usage, splits=kind is ChatRequest)
        reply = Reply(parsed, self._engine.target.name)
        # A failure before the first piece has a status of its own, in streams too.
        try:
            first = await _unless_disconnected(request, anext(pieces))
            if parsed.stream:
                return StreamingResponse(
                    _events(reply, first, pieces, usage),
                    media_type="text/event-stream",
                    headers={"Cache-Control": "no-cache"},
                    background=BackgroundTask(pieces.aclose),  # also if the client disconnects
                )
            return JSONResponse(await _unless_disconnected(request, _whole(reply, first, pieces, usage)))
        except BaseException:
            await pieces.aclose()
            raise

    def _parse(
        self, body: bytes, kind: type[ChatRequest] | type[TextRequest]
    ) -> tuple[ChatRequest | TextRequest, GenerationRun]:
        """Parse a request; return it with the generation that answers it.

        Raises:
            UsageError, HTTPException: The request is invalid.
        """
        parsed = parse(body, kind)
        model = self._engine.target.name
        if parsed.model not in (None, model):
            message = f"There is no model {parsed.model!r} here. Ask for {model!r}, or leave it out."
            raise HTTPException(404, message)
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
        run = GenerationRun(
            prompt,
            self._engine.target,
            NoDraft() if parsed.speculation == "off" else self._engine.drafter,
            policy=self._policy,
            sampling=Sampling(**{**recipe.sampling.transforms, **parsed.transforms}),
            seed=secrets.randbits(63) if parsed.seed is None else parsed.seed,
            decoding=decoding,
        )
        return parsed, run

    def _prompt(self, parsed: ChatRequest | TextRequest) -> list[int]:
        if isinstance(parsed, TextRequest):
            prompt = parsed.prompt
            return encode_prompt(self._tokenizer, prompt, chat=False) if isinstance(prompt, str) else prompt
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError("The model has no chat template.", "Use /v1/completions.")
        try:
            messages = [message.to_dict() for message in parsed.messages]
            return encode_messages(self._tokenizer, messages, template=parsed.template)
        except UsageError as error:  # whose hint is for a command line
            raise UsageError(error.message, "Send other messages.") from error


class _Piece(NamedTuple):
    """What becomes final with a record, and the tokens of the record."""

    thinking: str
    text: str
    finish_reason: FinishReason | None
    tokens: Sequence[int]


async def _pieces(
    engine: Engine, run: GenerationRun, usage: Usage, *, splits: bool
) -> AsyncGenerator[_Piece]:
    """Submit a generation and yield its text, counting its records; closing the generator cancels it.

    Args:
        splits: Whether its thinking is told from its answer.

    Raises:
        SpecbenchError: The engine refuses the request, or decoding fails.
    """
    stream, tokenizer = run.text_stream(), run.target.tokenizer
    assert stream is not None
    assert tokenizer is not None
    split = ThinkingSplit(tokenizer, run.prompt) if splits else None
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(event: Event) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(events.put_nowait, event)

    engine.submit(run, deliver)
    try:
        ended = False
        while not ended:
            record = await events.get()
            if isinstance(record, Exception):
                raise record
            ended = record.finish_reason is not None
            tokens = shown_tokens(usage.add(record), record.finish_reason)
            labeled: Labeled = [(token, "answer") for token in tokens]
            if split is not None:
                labeled = [each for token in tokens for each in split.push(token)]
                labeled += split.finish() if ended else []
            found = [piece for token, part in labeled for piece in stream.push(token, part)]
            if ended:
                found += stream.finish("answer")
            thinking = "".join(text for part, text in found if part == "thinking")
            answer = "".join(text for part, text in found if part == "answer")
            yield _Piece(thinking, answer, record.finish_reason, record.tokens)
    finally:
        engine.cancel(run)


async def _whole(reply: Reply, first: _Piece, rest: AsyncIterator[_Piece], usage: Usage) -> Json:
    pieces = [first, *[piece async for piece in rest]]
    thinking, text = "".join(piece.thinking for piece in pieces), "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    return reply.whole(thinking, text, pieces[-1].finish_reason, usage, tokens)


async def _events(
    reply: Reply, first: _Piece, rest: AsyncIterator[_Piece], usage: Usage
) -> AsyncGenerator[str]:
    piece: _Piece | None = first
    if reply.is_chat:
        yield _event(reply.chunk({"role": "assistant", "content": ""}))
    try:
        while piece is not None:
            if piece.thinking:
                yield _event(reply.chunk({"reasoning_content": piece.thinking}))
            if piece.text or reply.request.return_token_ids:
                yield _event(reply.chunk({"content": piece.text}, tokens=piece.tokens))
            if piece.finish_reason is not None:
                yield _event(reply.chunk({}, piece.finish_reason))
            piece = await anext(rest, None)
        options = reply.request.stream_options
        if options is not None and options.include_usage:
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
        HTTPException: The body is not JSON, or too large.
        ClientDisconnect: The client disconnects before it has sent the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also for safety: any page in a browser may send other kinds here by themselves.
        message = "The body has to be JSON: send the header 'Content-Type: application/json'."
        raise HTTPException(415, message)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"The body has more than {_MAX_BODY_BYTES} bytes.")
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
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, SpecbenchError):
        statuses = {UsageError: 400, BusyError: 429, StoppedError: 503}
        status, message = statuses.get(type(error), 500), str(error)
    else:
        status, message = 500, f"{type(error).__name__}: decoding failed."
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    return status, {"error": {"message": excerpt(message), "type": kind, "param": None, "code": None}}


async def _error_response(request: Request, error: Exception) -> Response:  # noqa: ARG001 - a handler's signature
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    status, body = _status_and_body(error)
    return JSONResponse(body, status)
