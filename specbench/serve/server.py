"""The application on a socket, until a signal stops it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from specbench.serve.app import application

if TYPE_CHECKING:
    from specbench.recipe import Recipe
    from specbench.serve.engine import Engine

_LATE_S = 5.0
"""Extra seconds for answers that clients do not read to the end."""

_CLIENT_WARNINGS = (
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
)
"""Beginnings of uvicorn's warnings of wrong requests, which their clients get as answers."""


class Server(uvicorn.Server):
    """Server that runs until SIGINT or SIGTERM. Running requests then have ``grace_s`` seconds before they end with an
    error.

    Args:
        engine, recipe, seed: See ``application``; the engine has stopped when ``run`` returns.
        listening: A bound socket.
        grace_s: Seconds that running requests have after the signal.
    """

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        listening: socket.socket,
        grace_s: float,
        seed: int | None = None,
    ) -> None:
        self._engine, self._listening, self._grace_s = engine, listening, grace_s
        configuration = uvicorn.Config(
            application(engine, recipe, seed=seed, hosts=_host_names(listening)),
            http="h11",  # the one that slow and broken clients are tested with
            loop="asyncio",
            log_config=None,  # warnings are shown without it
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        super().__init__(configuration)
        logging.getLogger("uvicorn.error").addFilter(_is_about_server)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run([self._listening] if sockets is None else sockets)
        finally:
            self._engine.stop(0.0)
            self._engine.join()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop(self._grace_s)
        late = asyncio.get_running_loop().call_later(self._grace_s + _LATE_S, self._hang_up)
        await super().shutdown(sockets)  # returns immediately after a second Ctrl-C
        late.cancel()
        self._engine.stop(0.0)
        self._hang_up()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)

    def _hang_up(self) -> None:
        """Close all connections, which ends their tasks."""
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def _host_names(listening: socket.socket) -> Sequence[str]:
    """Return the local host names if only this machine can connect, otherwise a pattern for any name."""
    address: str = listening.getsockname()[0]
    if ipaddress.ip_address(address).is_loopback:
        return ("localhost", address, f"[{address}]")
    return ("*",)


def _is_about_server(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_CLIENT_WARNINGS)
