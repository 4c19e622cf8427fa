"""Servers of another engine that are started here: their models, their settings, and the engine that measures them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import SweepOptions, server_rows
from specbench.bench.manifest import command_line
from specbench.experiment import FolderOf, Opened
from specbench.export.registry import load_engine
from specbench.export.start import (
    PLAIN,
    EngineDrafter,
    EngineSetting,
    StartedEngine,
    settings_of,
)
from specbench.specs.drafters import SmallModel, parse_drafter
from specbench.specs.models import ModelSpec, parse_model
from specbench.specs.servers import EngineSpec, ServerSpec, parse_engine

if TYPE_CHECKING:
    from specbench.base.progress import Progress

_KEY = "--api-key"


def started_engine(name: str) -> StartedEngine:
    """Return an engine whose servers can be started."""
    engine = load_engine(name)
    assert isinstance(engine, StartedEngine)
    return engine


def engine_drafters(engine: StartedEngine, texts: Sequence[str], *, elsewhere: bool) -> list[EngineDrafter]:
    """Return the drafters to measure with an engine; without any, its usual kinds of n-grams.

    If the server may run ``elsewhere``, on another machine, paths need not exist here.
    """
    found = [] if texts else [EngineDrafter(name) for name in engine.ngrams]
    for text in dict.fromkeys(texts):
        if text in engine.ngrams:
            found.append(EngineDrafter(text))
            continue
        try:
            spec = parse_drafter(text)
        except UsageError:
            if not elsewhere:
                raise
            spec = SmallModel(_model(text, elsewhere=True))
        model = spec.model_spec
        if model is None:
            found += [] if spec.is_plain else [EngineDrafter(spec)]
            continue
        from specbench.models.head_files import find_head

        files = find_head(model) if model.kind != "folder" or Path(model.source).is_dir() else None
        head = None if files is None else files.training
        found.append(EngineDrafter(spec, placed(engine, model, is_head=head is not None), head))
    return list({(each.spec, each.model): each for each in found}.values())


def _model(text: str, *, elsewhere: bool) -> ModelSpec:
    try:
        return parse_model(text)
    except UsageError:
        if not elsewhere:
            raise
    return ModelSpec("gguf" if text.lower().endswith(".gguf") else "folder", text)


def placed(engine: StartedEngine, spec: ModelSpec, *, is_head: bool = False) -> ModelSpec:
    """Return a model where the engine finds it; one of the hub it fetches itself."""
    if engine.name == "llama.cpp" and spec.kind != "gguf":
        raise UsageError(f"llama.cpp reads GGUF files, and {spec.name} is none.", "Name a .gguf file.")
    if spec.kind == "builtin":
        from specbench.models.builtin import prepare_builtin

        return ModelSpec("folder", str(prepare_builtin(spec.source)))
    if spec.is_path and (is_head or Path(spec.source).exists()):
        return replace(spec, source=os.path.abspath(spec.source))  # noqa: PTH100
    return spec


@dataclass(frozen=True)
class Started:
    """Servers of an engine that are started, one for each setting; see ``Systems``.

    Attributes:
        spec, engine, name, target, drafters, settings: What is started; ``name`` is the target's in results.
        command: Starts a server in place of the usual command.
        arguments: The user's own words for every server.
    """

    spec: EngineSpec
    engine: StartedEngine
    name: str
    target: ModelSpec
    drafters: Sequence[EngineDrafter]
    settings: Sequence[EngineSetting]
    command: str = ""
    arguments: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        engine: str,
        target: str,
        drafters: Sequence[str],
        temperature: float = 0.0,
        *,
        command: str = "",
        arguments: Sequence[str] = (),
        **compared: Any,
    ) -> Started:
        """Return the servers of a target with drafters, all as the command line has them; ``compared``: for
        ``settings_of``.
        """
        spec, elsewhere = parse_engine(engine), bool(command)
        starts = started_engine(spec.name)
        named = _model(target, elsewhere=elsewhere)
        model = placed(starts, named)
        tried = engine_drafters(starts, drafters, elsewhere=elsewhere)
        settings = settings_of(starts, model, tried, temperature=temperature, **compared)
        made = spec, starts, one_line(named.name), model, tried, settings
        return cls(*made, command, arguments)

    @contextmanager
    def opened(
        self, options: SweepOptions, folder_of: FolderOf, progress: Progress | None
    ) -> Iterator[Opened]:
        names, folder = tuple(each.name for each in self.settings), folder_of(self.name)
        # Every server warms up when it starts.
        options = replace(options, gammas=(), policies=(), warmup=0, servers=names)
        rows = server_rows(options, [(each.name, each.gamma or None) for each in self.settings])
        sources = {
            "target": self.name,
            "engine": self.engine.name,
            "engine_options": command_line(self.arguments),
            "drafters": [str(each.spec) for each in self.drafters],
        }
        made = LaunchedEngine(
            {each.name: partial(self._command, each) for each in self.settings},
            folder / "servers",
            partial(self._connect, options),
            limit=self.spec.servers,
            start_timeout_s=self.spec.start_timeout,
            progress=progress,
        )
        with closing(made):
            made.server(PLAIN)
            fits = made.fits(names)
            together = None if fits else made.limit or made.capacity
            notes = [] if fits else [f"{together} servers fit into memory at a time."]
            yield Opened(made, options, rows, folder, sources, notes, together)

    def _connect(self, options: SweepOptions, spec: ServerSpec) -> ServerEngine:
        key = next((key for word, key in pairwise(self.arguments) if word == _KEY), None)
        return ServerEngine(
            [spec],
            keys={} if key is None else {spec.name: key},
            decoding=options.decoding,
            temperature=options.warmest,
        )

    def _command(self, setting: EngineSetting, port: int) -> list[str]:
        """Return the command line that starts the server of a setting on a port."""
        return self.engine.command_line(self.target, setting.options, port, self.arguments, self.command)
