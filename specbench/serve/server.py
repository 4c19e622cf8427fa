"""The application on a socket, until a signal stops it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from specbench.serve.app import application

if TYPE_CHECKING:
    from specbench.recipe import Recipe
    from specbench.serve.engine import Engine

_MORE_CONNECTIONS = 64
"""Connections in addition to the requests that the engine takes: they send bodies, read answers, or wait."""

_GRACE_S = 5.0
"""Seconds that clients have at the end to read their answers."""


class Server(uvicorn.Server):
    """Server that runs until SIGINT or SIGTERM, which end running requests with an error.

    Args:
        engine, recipe: See ``application``; the engine has stopped when ``run`` returns.
        listening: A bound socket.
    """

    def __init__(self, engine: Engine, recipe: Recipe, listening: socket.socket) -> None:
        self._engine, self._listening = engine, listening
        configuration = uvicorn.Config(
            application(engine, recipe, hosts=_host_names(listening)),
            http="h11",  # the one that slow and broken clients are tested with
            loop="asyncio",
            limit_concurrency=engine.max_requests + _MORE_CONNECTIONS,
            log_config=None,
            log_level="error",  # clients get as answers what uvicorn warns of
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        super().__init__(configuration)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run([self._listening] if sockets is None else sockets)
        finally:
            self._engine.stop()
            self._engine.join()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.stop()
        late = asyncio.get_running_loop().call_later(_GRACE_S, self._hang_up)
        await super().shutdown(sockets)  # returns immediately after a second Ctrl-C
        late.cancel()
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
    return ("localhost", address, f"[{address}]") if ipaddress.ip_address(address).is_loopback else ("*",)
