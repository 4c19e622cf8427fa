"""Work that could take any amount of memory or time, done by a separate process with limits on both.

The process is started once and answers one request after the other. On Linux it is a fork, which takes milliseconds;
elsewhere it is a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO, NoReturn

import psutil

from specbench.base.errors import RunError

_STARTING = 120.0  # seconds in which the process has to start
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_MAIN = (
    "import sys; sys.path[:] = sys.argv[3:]; from specbench.base.bounded import serve;"
    " serve(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)"
)


class BoundedProcess:
    """A process that answers requests with a function; thread-safe.

    Args:
        what: What it does, for messages.
        function: ``module:function``, which takes a JSON object and returns one; the process imports it.
        memory: Limit in bytes in addition to the process's own memory, where the system has such limits.
        preload: Imports before a fork what another thread could be importing at that time.
    """

    def __init__(self, what: str, function: str, memory: int, preload: Callable[[], object]) -> None:
        self._what, self._function, self._memory, self._preload = what, function, memory, preload
        self._lock = threading.Lock()
        self._owner: int | None = None  # which process started it
        self._ready = False

    def start(self) -> None:
        """Start the process if there is none, without waiting.

        Raises:
            RunError: It cannot be started.
        """
        with self._lock:
            self._start()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return the function's answer; ``None`` if it takes longer, or more memory than allowed.

        The start of the process does not count.

        Raises:
            RunError: The process cannot be started.
        """
        line = json.dumps(request).encode()
        with self._lock:
            try:
                answer = self._answer(line, seconds)
            except BaseException:  # an answer that nobody has read would be taken for the next one's
                self._end()
                raise
            if answer is None:
                self._end()
            return answer

    def _start(self) -> None:
        if self._owner == os.getpid():  # a fork may not talk to its parent's
            return
        if self._owner is None:
            atexit.register(self._end)
        self._preload()
        start = _forked if sys.platform == "linux" else _spawned
        try:
            self._pid, self._requests, self._answers = start(self._function, self._memory)
        except OSError as error:
            raise RunError(f"The process that {self._what} cannot be started: {error}.") from error
        self._owner, self._ready = os.getpid(), False

    def _answer(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        self._start()
        if not self._ready:
            if not self._read(_STARTING):
                raise RunError(f"The process that {self._what} does not start.")
            self._ready = True
        with suppress(OSError):  # it has ended, which reading tells
            self._requests.write(line + b"\n")
            self._requests.flush()
        answer = self._read(seconds)
        return dict(json.loads(answer)) if answer else None

    def _read(self, seconds: float) -> bytes:
        """Read the next line; empty if the process ends first, at the latest after ``seconds``."""
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()
        try:
            return self._answers.readline()
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with suppress(OSError):  # it has ended
            os.kill(self._pid, _KILL)

    def _end(self) -> None:
        """End the process, which would also end when its input is closed."""
        if self._owner == os.getpid():
            self._kill()
            with suppress(OSError):
                self._requests.close()
            self._answers.close()
            with suppress(OSError):
                os.waitpid(self._pid, 0)
        self._owner = None


def _forked(function: str, memory: int) -> tuple[int, BinaryIO, BinaryIO]:
    """Fork; return the process id and the pipes for requests and answers."""
    requests, asking = os.pipe()
    answering, answers = os.pipe()
    with warnings.catch_warnings():
        # It runs Python alone, and nothing of other threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _serve_and_exit(function, memory, requests, answers)
    os.close(requests)
    os.close(answers)
    return pid, open(asking, "wb"), open(answering, "rb")  # noqa: PTH123


def _serve_and_exit(function: str, memory: int, requests: int, answers: int) -> NoReturn:
    """Serve requests in the forked process, with only these two pipes open and without signal handlers."""
    try:
        gc.disable()  # nothing of the parent's is to be ended here
        os.setsid()  # Ctrl-C is for the terminal's program
        for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            signal.signal(caught, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2} - {requests, answers}:
            os.dup2(nothing, number)
        low, high = sorted((requests, answers))
        for first, end in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(first, max(first, end))  # an end of 0 would be read as the highest number there is
        serve(function, memory, open(requests, "rb"), open(answers, "wb"))  # noqa: SIM115
    finally:
        os._exit(0)


def _spawned(function: str, memory: int) -> tuple[int, BinaryIO, BinaryIO]:
    """Start a new interpreter; return the process id and the pipes for requests and answers."""
    if not sys.executable:
        raise OSError("Python does not know its own program")
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, function, str(memory), *filter(None, sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return process.pid, process.stdin, process.stdout  # type: ignore[return-value]


def serve(function: str, memory: int, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests, one per line, until there are no more; for the arguments see ``BoundedProcess``."""
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)
    _bound_memory(memory)
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        answers.flush()


def _bound_memory(memory: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits; the time is bounded there too
        return
    with suppress(OSError, ValueError):
        most = psutil.Process().memory_info().vms + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
