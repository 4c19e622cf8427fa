"""Run a server, and end it with all its processes as soon as the program that wants it is gone, however that ended.

A program of its own, which imports nothing of specbench: ``python guard.py LOG COMMAND...``. Its standard input is a
pipe from its parent. At the end of that pipe, or when it is signaled, it ends the server's process group, and on Linux
also processes that have left the group but have inherited ``MARK``. Exit code: the server's own, 127 if it cannot be
started, ``LEFT`` if some of it could not be ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

MARK = "SPECBENCH_ENGINE"
"""Environment variable of the server, with a value of its own for each."""

LEFT = 120

GRACE_S = 10.0
"""Time to end by itself after SIGTERM."""

_POLL_S = 0.1


def marked(mark: str) -> Iterator[int]:
    """Yield the running processes whose environment has this mark, on Linux; elsewhere none."""
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():  # noqa: PTH112, PTH208
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:  # noqa: PTH123
                if wanted in stream.read().split(b"\0"):
                    yield int(name)


def end(group: int, mark: str) -> list[int]:
    """End a process group and all processes with the mark; return those that are still there.

    They get SIGTERM, and SIGKILL after ``GRACE_S`` seconds.
    """
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 2.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        for process in marked(mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)
        until = time.monotonic() + patience_s
        while (left := _left(group, mark)) and time.monotonic() < until:
            time.sleep(_POLL_S / 2)
        if not left:
            return []
    return left


def _left(group: int, mark: str) -> list[int]:
    if running := list(marked(mark)):
        return running
    if os.path.isdir("/proc/self"):  # noqa: PTH112
        return []
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [group]


def main(arguments: Sequence[str]) -> int:
    """Run the server until it ends or is not wanted any more."""
    log, *command = arguments
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stopped.append(number))
    mark = os.urandom(8).hex()
    with open(log, "ab") as output:  # noqa: PTH123
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, MARK: mark},
            )
        except OSError as error:
            output.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
    while not stopped and server.poll() is None:
        ready, _, _ = select.select([0], [], [], _POLL_S)
        if ready and not os.read(0, 1024):
            break
    code = server.poll()
    return LEFT if end(server.pid, mark) else code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
