"""Servers that specbench starts: one process group each, which ends with specbench, however that ends.

A guard (``guard.py``) between specbench and each server ends the server when specbench is gone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx2
import psutil

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import one_line
from specbench.servers import guard

_POLL_S = 0.1
_ANSWER_S = 10.0
_SHOWN = 300
"""Characters of a server's last line of output that an error repeats."""


class StartError(RunError):
    """A server ended or said nothing before it was ready."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class EngineProcess:
    """A server that was started, and its guard.

    Args:
        name: For messages.
        command: The words of its command line.
        port: The port of this machine where it will answer.
        log: The file that its output is appended to.

    Raises:
        UsageError: The system has no process groups.
    """

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        if os.name != "posix":
            raise UsageError(
                "Servers can be started on Linux and macOS only.",
                "Start them yourself, and name them with --server.",
            )
        self.name, self.url, self._log = name, f"http://127.0.0.1:{port}", log
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for specbench, which ends its servers in order
        )

    @property
    def exit_code(self) -> int | None:
        """The server's exit code; ``None`` while it runs."""
        return self._guard.poll()

    @property
    def last_words(self) -> str:
        """The last line of the server's output that is not empty."""
        with suppress(OSError), self._log.open(encoding="utf-8", errors="replace") as stream:
            lines = deque((line for line in stream if line.strip()), 1)
            return one_line(lines[0].strip())[-_SHOWN:] if lines else ""
        return ""

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers that it is healthy.

        Raises:
            StartError: It ended, or is not ready after ``seconds``.
        """
        until = time.monotonic() + seconds
        with httpx2.Client(timeout=_ANSWER_S) as client:
            while not self._is_healthy(client):
                if self.exit_code is not None:
                    raise StartError(
                        f"{self.name}: the server ended with code {self.exit_code}: {self.last_words}"
                    )
                if time.monotonic() > until:
                    raise StartError(
                        f"{self.name}: the server was not ready after {seconds:.0f} s: {self.last_words}",
                        "Give it longer: --engine ENGINE:start-timeout=SECONDS.",
                    )
                time.sleep(_POLL_S)

    def _is_healthy(self, client: httpx2.Client) -> bool:
        try:
            status = client.get(f"{self.url}/health").status_code
            if status == 404:
                status = client.get(f"{self.url}/v1/models").status_code
        except httpx2.TransportError:
            return False
        return status in (200, 401, 403)  # one that wants a key is up

    def memory(self) -> int:
        """Return the bytes of memory that the server's processes use, shared ones by their share; 0 if not known."""
        total = 0
        with suppress(psutil.Error, OSError):
            for child in psutil.Process(self._guard.pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    used = child.memory_full_info()
                    total += int(getattr(used, "pss", 0) or used.rss)
        return total

    def stop(self) -> None:
        """End the server, and wait until it is gone.

        Raises:
            RunError: It could not be ended.
        """
        if self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()
        try:
            self._guard.wait(guard.GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self._guard.returncode in (guard.LEFT, -9):
            raise RunError(f"The server {self.name} could not be ended.")
