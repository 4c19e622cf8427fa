"""The application on a socket, until a signal comes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from specbench.serve.app import Defaults, application

if TYPE_CHECKING:
    from specbench.serve.engine import Engine

_LATE_S = 5.0
"""For answers that nobody reads to their end, once everything has ended."""

_OF_CLIENTS = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
)
"""Beginnings of uvicorn's warnings of requests that are wrong, which their clients are answered."""


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM; what is under way then may go on for a while, and is told why if it is cut.

    Args:
        engine: Decodes; it has ended when ``run`` returns.
        defaults: What holds where a request says nothing else.
        listening: A socket with an address.
        grace_s: How long answers may go on after the signal, in seconds.
    """

    def __init__(self, engine: Engine, defaults: Defaults, listening: socket.socket, grace_s: float) -> None:
        self._engine, self._listening, self._grace_s = engine, listening, grace_s
        configuration = uvicorn.Config(
            application(engine, defaults, hosts=_names(listening)),
            http="h11",  # and none that happens to be installed: slow and broken clients are tried with this one
            loop="asyncio",
            log_config=None,  # the command's own lines are enough; what goes wrong is a warning, which everybody sees
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        super().__init__(configuration)
        logging.getLogger("uvicorn.error").addFilter(_concerns_the_server)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run([self._listening] if sockets is None else sockets)
        finally:
            self._engine.stop(0.0)
            self._engine.join()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop(self._grace_s)
        late = asyncio.get_running_loop().call_later(self._grace_s + _LATE_S, self._hang_up)
        await super().shutdown(sockets)  # behind a second Ctrl-C it waits for nobody
        late.cancel()
        self._engine.stop(0.0)
        self._hang_up()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)

    def _hang_up(self) -> None:
        """Cut all connections: whoever still writes to one or reads from it comes to an end by itself."""
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def _names(listening: socket.socket) -> Sequence[str]:
    """By which it may be called: those of this machine itself if nobody else reaches it, otherwise any."""
    address: str = listening.getsockname()[0]
    if ipaddress.ip_address(address).is_loopback:
        return ("localhost", address, f"[{address}]")
    return ("*",)


def _concerns_the_server(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_OF_CLIENTS)
