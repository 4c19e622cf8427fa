"""What a server answers while its model is loaded: status 503, after which clients try again."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_MESSAGE = "The model is being loaded. Try again later."
_BODY = {"error": {"message": _MESSAGE, "type": "server_error", "param": None, "code": None}}
_MAX_READ = 4 << 20
_LOOK_S = 0.02  # how often it is looked whether the model is there


class _Refusal(BaseHTTPRequestHandler):
    timeout = 5.0  # seconds that a client has to send something

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # of clients that send no HTTP, or do not wait
            super().handle()

    def do_GET(self) -> None:
        self.rfile.read(min(int(self.headers.get("Content-Length", 0)), _MAX_READ))
        body = json.dumps(_BODY).encode()
        self.send_response(503)
        for name, value in (("Content-Type", "application/json"), ("Retry-After", "1")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def refusing(listening: socket.socket) -> Iterator[None]:
    """Refuse all requests while the context lasts; the socket stays open, and later requests wait."""
    server = ThreadingHTTPServer(listening.getsockname()[:2], _Refusal, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    thread = Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
