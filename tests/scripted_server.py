"""A server that speaks the OpenAI protocol in a thread of this process, and goes wrong as its script says."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tiny import tiny_tokenizer

WORDS = tuple("the king and the queen of the land is in the garden to the end and on".split(" "))  # noqa: SIM905


@dataclass
class Manner:
    """How a server behaves.

    Attributes:
        owner: Whose its models are.
        models: Their names; bytes are the whole answer in place of a list.
        key: The only one it takes; ``None`` asks for none.
        per_piece: Tokens in an event.
        usage: What it says of its tokens: their number, that of its events, or nothing.
        named: Whether it names the ids of its tokens.
        facts: What its last event holds besides, for any body or for each.
        beyond: How many tokens its answers are longer than asked for.
        logprobs: What it says of tokens in an answer without a stream; ``None`` refuses to.
        wrong: What goes wrong with the answer to a body: an ``error`` in its middle, a ``cut`` there, or a status
            before it; ``None`` for nothing.
        another: Whether its answers are other texts than those of other servers.
        metrics: What it counts; empty for a server that does not.
    """

    owner: str = "somebody"
    models: tuple[str, ...] | bytes = ("tiny",)
    key: str | None = None
    per_piece: int = 1
    usage: Literal["right", "events", "none"] = "right"
    named: bool = False
    facts: Mapping[str, Any] | Callable[[dict[str, Any]], Mapping[str, Any]] = field(default_factory=dict)
    beyond: int = 0
    logprobs: Mapping[str, Any] | None = None
    wrong: Callable[[dict[str, Any]], str | int | None] = lambda body: None
    another: bool = False
    metrics: str = ""


tokenizer = cache(tiny_tokenizer)


def prompt_of(body: Mapping[str, Any]) -> str:
    """The text of a request."""
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def answer_ids(body: Mapping[str, Any], manner: Manner) -> list[int]:
    """Tokens that the prompt alone decides."""
    turn = (zlib.crc32(prompt_of(body).encode()) + manner.another) % len(WORDS)
    text = " ".join([*WORDS[turn:], *WORDS[:turn]] * 8)
    return list(tokenizer()(text)["input_ids"])[: body["max_tokens"] + manner.beyond]


def events(body: Mapping[str, Any], manner: Manner) -> Iterator[dict[str, Any] | str]:
    """The stream of an answer; a word ends it, as ``Manner.wrong`` has it."""
    ids, chat = answer_ids(body, manner), "messages" in body
    pieces = [ids[at : at + manner.per_piece] for at in range(0, len(ids), manner.per_piece)]
    wrong = manner.wrong(dict(body))
    for number, piece in enumerate(pieces):
        if number == len(pieces) // 2 and isinstance(wrong, str):
            yield {"error": {"message": "out of memory"}} if wrong == "error" else wrong
            return
        text = tokenizer().decode(piece)
        said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        yield {"choices": [{"index": 0, **said, **({"token_ids": piece} if manner.named else {})}]}
    yield {"choices": [{"index": 0, **({"delta": {}} if chat else {"text": ""}), "finish_reason": "length"}]}
    asked = body.get("stream_options", {}).get("include_usage", True)
    if manner.usage != "none" and asked:
        count = len(ids) if manner.usage == "right" else len(pieces)
        yield {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": count},
            **(manner.facts(dict(body)) if callable(manner.facts) else manner.facts),
        }


def whole(body: Mapping[str, Any], manner: Manner) -> dict[str, Any]:
    """An answer without a stream."""
    text = tokenizer().decode(answer_ids(body, manner))
    said = {"message": {"content": text}} if "messages" in body else {"text": text}
    return {"choices": [{"index": 0, **said, "logprobs": manner.logprobs, "finish_reason": "length"}]}


class Handler(BaseHTTPRequestHandler):
    """Answers as the manner of its server says."""

    protocol_version = "HTTP/1.1"

    def __init__(self, scripted: ScriptedServer, *arguments: Any) -> None:
        self.scripted = scripted
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        manner = self.scripted.manner
        if self.path == "/metrics" and manner.metrics:
            return self._whole(200, manner.metrics.encode())
        if self.path != "/v1/models":
            return self._whole(404, b"{}")
        if not self._knows():
            return None
        if isinstance(manner.models, bytes):
            return self._whole(200, manner.models)
        listed = [{"id": name, "owned_by": manner.owner} for name in manner.models]
        return self._whole(200, json.dumps({"object": "list", "data": listed}).encode())

    def do_POST(self) -> None:
        manner = self.scripted.manner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._knows():
            return None
        self.scripted.asked.append(body)
        if body["model"] not in manner.models:
            return self._refuse(404, f"there is no model {body['model']}")
        wrong = manner.wrong(body)
        if isinstance(wrong, int):
            return self._refuse(wrong, "not now")
        if not body.get("stream"):
            if body.get("logprobs") and manner.logprobs is None:
                return self._refuse(400, "no log probabilities")
            return self._whole(200, json.dumps(whole(body, manner)).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events(body, manner):
            if isinstance(event, str):
                self.close_connection = True
                return None
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _knows(self) -> bool:
        """Whether the key is right; one that is not is repeated, as some servers do."""
        given = self.headers.get("Authorization", "none").removeprefix("Bearer ")
        if self.scripted.manner.key in (None, given):
            return True
        self._refuse(401, f"wrong key: {given}")
        return False

    def _refuse(self, status: int, message: str) -> None:
        self._whole(status, json.dumps({"error": {"message": message}}).encode())

    def _whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


class ScriptedServer:
    """Listens on a free port of this machine until it is left.

    Attributes:
        asked: Bodies of requests for answers, in their order.
        url: Up to and with ``/v1``.
    """

    def __init__(self, manner: Manner | None = None) -> None:
        self.manner = manner or Manner()
        self.asked: list[dict[str, Any]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
