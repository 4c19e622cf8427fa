"""The engine of servers that specbench starts itself: as many at a time as fit, the others when they are needed.

Each server is measured by a ``ServerEngine`` of its own, so everything that holds for servers of others holds here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from specbench.base.errors import RunError, SpecbenchError
from specbench.bench.engines.engine import BenchEngine
from specbench.bench.engines.servers import ServerEngine, ServerPrompt
from specbench.bench.grid import WARMUP_TOKENS
from specbench.bench.prompts import Prompt
from specbench.bench.serving import Workload
from specbench.options import DecodingOptions
from specbench.results.lines import Generation, Group
from specbench.results.run import TargetModel
from specbench.rows import Condition, Row, Server
from specbench.servers.processes import EngineProcess, StartError, free_port
from specbench.specs.servers import ServerSpec

if TYPE_CHECKING:
    from specbench.base.progress import Progress

CommandLine = Callable[[int], Sequence[str]]
"""Returns the words of a server's command line for a port."""

_ROOM = 1.1
"""Another server is started only if this many times the memory of the largest one so far is free."""

_WARM_UP = Prompt(
    id="warm-up",
    category="",
    turns=("Explain in three sentences why the sky is blue at noon and red in the evening.",),
)


@dataclass(frozen=True)
class Start:
    """A server that was started."""

    process: EngineProcess
    engine: ServerEngine


class LaunchedEngine(BenchEngine):
    """The engine of servers that are started when they are first needed. It must be closed.

    A server that does not fit with the others, by the free memory or because it does not start, is tried alone; if
    that works, ``limit`` becomes the number that did run. Then the server that was not used for the longest time makes
    room for another.

    Args:
        commands: Command lines by the servers' names, which are the names of the configurations' drafters.
        logs: The folder for the servers' output.
        connect: Returns the engine of one of them.
        limit: Largest number of servers at a time; ``None`` for as many as fit.
        start_timeout_s: How long a start may take.

    Attributes:
        capacity: The largest number of servers that ran at a time.
    """

    def __init__(
        self,
        commands: Mapping[str, CommandLine],
        logs: Path,
        connect: Callable[[ServerSpec], ServerEngine],
        *,
        limit: int | None = None,
        start_timeout_s: float = 600.0,
        progress: Progress | None = None,
    ) -> None:
        self._commands, self._logs, self._connect, self.limit = commands, logs, connect, limit
        self._start_timeout_s, self._progress = start_timeout_s, progress
        self._running: dict[str, Start] = {}  # the one that was used last comes last
        self._failed: dict[str, SpecbenchError] = {}
        self._model_name = ""
        self._memory = 0  # of the largest server so far, in bytes
        self.capacity = 0

    def close(self) -> None:
        """End all servers; raise ``RunError`` if one could not be ended, after the others."""
        with ExitStack() as stack:
            for each in self._running.values():
                stack.callback(self._stop, each)
            self._running.clear()

    # -- starting ----------------------------------------------------------------------------------

    @property
    def running(self) -> Collection[str]:
        """The names of the servers that run."""
        return self._running.keys()

    def fits(self, names: Sequence[str]) -> bool:
        """Start servers as long as they fit, and return whether all that can be started run now."""
        for name in names:
            if name in self._running or name in self._failed:
                continue
            if not self._has_room():
                return False
            with suppress(SpecbenchError):
                self.server(name)
        return all(name in self._running or name in self._failed for name in names)

    def server(self, name: str) -> ServerEngine:
        """Return the engine of a server, which is started if it does not run.

        Raises:
            RunError: It does not start, or did not the last time.
        """
        if name in self._failed:
            raise self._failed[name]
        there = self._running.pop(name, None)
        if there is not None and there.process.exit_code is not None:
            self._stop(there)  # it has crashed: once more
            there = None
        if there is None:
            while self._running and not self._has_room():
                self._stop_oldest()
            there = self._start_with_room(name)
        self._running[name] = there
        self.capacity = max(self.capacity, len(self._running))
        return there.engine

    def _has_room(self) -> bool:
        if self.limit is not None:
            return len(self._running) < self.limit
        return psutil.virtual_memory().available > _ROOM * self._memory

    def _start_with_room(self, name: str) -> Start:
        """Start a server; if that fails while others run, and never as many have run, start it alone."""
        try:
            return self._start(name)
        except SpecbenchError as error:
            if not self._running or len(self._running) < self.capacity:
                self._failed[name] = error
                raise
        others = len(self._running)
        while self._running:
            self._stop_oldest()
        started = self._start_with_room(name)
        self.limit = others
        return started

    def _start(self, name: str) -> Start:
        port = free_port()
        if self._progress is not None:
            self._progress.update(f"starting {name}", 0, None)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.log"
        process = EngineProcess(name, self._commands[name](port), port, log)
        engine = None
        try:
            process.wait_until_ready(self._start_timeout_s)
            engine = self._connect(ServerSpec(name, f"{process.url}/v1"))
            self._warm_up(name, engine)
        except BaseException as error:
            if engine is not None:
                engine.close()
            process.stop()
            if isinstance(error, StartError | KeyboardInterrupt) or not process.last_words:
                raise
            raise RunError(f"{error} The server's last words: {process.last_words}") from error
        self._model_name = self._model_name or engine.servers[0].model_name
        self._memory = max(self._memory, process.memory())
        return Start(process, engine)

    def _warm_up(self, name: str, engine: ServerEngine) -> None:
        """Let a new server answer something, so that the first measured answer is like the others."""
        decoding = engine.decoding.with_changes(max_new_tokens=WARMUP_TOKENS)
        config = Row(Server(name, name), Condition(engine.temperature))
        engine.generate(
            config, engine.encode(_WARM_UP, []), decoding, seed=random.Random(name).getrandbits(31)
        )

    def _stop_oldest(self) -> None:
        self._stop(self._running.pop(next(iter(self._running))))

    def _stop(self, there: Start) -> None:
        try:
            there.engine.close()
        finally:
            there.process.stop()

    def start_command(self, name: str) -> Sequence[str]:
        """Return the words that start a server at port 8000."""
        return self._commands[name](8000)

    # -- the interface of engines --------------------------------------------------------------------

    def describe_target(self, decoding: DecodingOptions) -> TargetModel:
        return TargetModel(name=self._model_name)

    def encode(self, prompt: Prompt, answers: Sequence[str]) -> ServerPrompt:
        name = next(iter(self._running), next(iter(self._commands)))
        return self.server(name).encode(prompt, answers)

    def generate(
        self, config: Row, prompt: ServerPrompt, decoding: DecodingOptions, *, seed: int
    ) -> Generation:
        return self.server(config.drafter).generate(config, prompt, decoding, seed=seed)

    def generate_group(self, config: Row, workload: Workload, decoding: DecodingOptions) -> Group:
        return self.server(config.drafter).generate_group(config, workload, decoding)
