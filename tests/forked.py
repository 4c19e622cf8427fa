"""Functions in processes of their own that need not import torch and transformers again.

They are forked off a server that has imported both and never computed anything: a signal, an exit code, a limit and a
terminal are a process's own, for a tenth of the seconds that starting an interpreter takes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from typing import IO, Any

PATIENCE_S = 60.0
CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform != "win32" else "spawn")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "transformers",
        "transformers.models.llama.modeling_llama",
        "pandas",
        "specbench.bench.engines.own",
        "specbench.check.run",
        "specbench.models.prepare",
        "specbench.results.store",
    ]
)


class Descriptor:
    """A file descriptor that a process is handed; there it is another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self.number),)


def _detached(handed: Any) -> int:
    return int(handed.detach())


class Forked:
    """``function(*arguments)`` in a process that ends with the exit code it raises.

    Args:
        function: One of a module, for it travels by its name.
        arguments: Of it; they are pickled.
        stdout: Where what it prints goes: a file, or the number of a descriptor.
        stderr: Where its errors go.
        limits: Soft limits by their names in `resource`, set before the call.
        environment: Variables besides those of this process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        stdout: IO[Any] | int,
        stderr: IO[Any] | int,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        streams = [Descriptor(file if isinstance(file, int) else file.fileno()) for file in (stdout, stderr)]
        variables = {**os.environ, **(environment or {})}
        given = (streams, variables, dict(limits or {}), function, arguments)
        self.process = CONTEXT.Process(target=_begin, args=given)
        self.process.start()

    def is_alive(self) -> bool:
        return bool(self.process.is_alive())

    def wait(self) -> int:
        """The exit code, or minus the signal that ended it."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, "did not end"
        return int(self.process.exitcode)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self, number: int) -> int:
        """Send the signal, and wait for the end."""
        self.signal(number)
        return self.wait()


def specbench(*words: str) -> None:
    """The command line; leaves with its exit code."""
    from specbench.cli import main

    sys.argv = ["specbench", *words]
    main(words)


def _begin(
    streams: Sequence[int],
    environment: Mapping[str, str],
    limits: Mapping[str, int],
    function: Callable[..., object],
    arguments: Sequence[Any],
) -> None:
    """Make this process what a shell would have started, and call the function."""
    for number, (handed, name) in enumerate(zip(streams, ("stdout", "stderr"), strict=True), 1):
        os.dup2(handed, number)
        os.close(handed)
        file = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor, for good
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for name, value in limits.items():
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
    import torch

    torch.set_num_threads(1)
    function(*arguments)
