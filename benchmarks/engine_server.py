"""The OpenAI protocol around an engine that has no server of its own; see `openvino_server.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol


class Engine(Protocol):
    """What a server asks of an engine, from several threads at a time."""

    name: str

    def chat(self, messages: Sequence[Any]) -> str:
        """Return the prompt of a conversation by the model's template."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens."""

    def tokens(self, prompt: str, length: int, ignore_eos: bool) -> Iterator[list[int]]:
        """Yield the new tokens of a greedy answer as they come."""


class Handler(BaseHTTPRequestHandler):
    """The model's name, completions and chat, always as a stream."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Write no line for each request."""

    def do_GET(self) -> None:
        """List the model; nothing else is there to read."""
        found = self.path == "/v1/models"
        body = json.dumps(
            {"data": [{"id": "m", "object": "model", "owned_by": self.engine.name}]} if found else {}
        )
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        """Answer a request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = "messages" in body
        prompt = self.engine.chat(body["messages"]) if chat else body["prompt"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ids: list[int] = []
        said = ""
        for new in self.engine.tokens(prompt, body["max_tokens"], body.get("ignore_eos", False)):
            ids += new
            text = self.engine.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                piece, said = text[len(said) :], text
                self._send({"delta": {"content": piece}} if chat else {"text": piece})
        reason = "length" if len(ids) >= body["max_tokens"] else "stop"
        self._send({**({"delta": {}} if chat else {"text": ""}), "finish_reason": reason})
        read = len(self.engine.encode(prompt))
        usage = {"prompt_tokens": read, "completion_tokens": len(ids), "total_tokens": read + len(ids)}
        self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")
        self.close_connection = True

    def _send(self, choice: dict[str, Any]) -> None:
        self._event(
            json.dumps({"created": int(time.time()), "model": "m", "choices": [{"index": 0, **choice}]})
        )

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()


def serve(engine: Engine, port: int) -> None:
    """Serve until the process is ended."""
    handler = type("EngineHandler", (Handler,), {"engine": engine})
    print(f"The server listens at http://127.0.0.1:{port}/v1", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()
