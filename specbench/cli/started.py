"""Servers of another engine that are started here: their models, their settings, and the engine that measures them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import one_line
from specbench.bench.engines.launched import LaunchedEngine
from specbench.bench.engines.processes import end_left
from specbench.bench.engines.servers import ServerEngine
from specbench.bench.grid import SweepOptions, server_rows
from specbench.bench.manifest import command_line
from specbench.cli.console import say
from specbench.export.registry import load_engine
from specbench.export.start import (
    PLAIN,
    EngineDrafter,
    EngineSetting,
    StartedEngine,
    parse_engine_drafter,
    settings_of,
)
from specbench.rows import Row
from specbench.specs.drafters import SmallModel
from specbench.specs.models import ModelSpec, parse_model
from specbench.specs.servers import EngineSpec, ServerSpec, parse_engine

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.cli.sweep_options import ChosenPrompts, ServerOptions
    from specbench.options import DecodingOptions

_KEY = "--api-key"


def started_engine(name: str) -> StartedEngine:
    """Return an engine whose servers can be started."""
    engine = load_engine(name)
    assert isinstance(engine, StartedEngine)
    return engine


def engine_drafters(
    engine: StartedEngine, texts: Sequence[str], *, usual: bool, elsewhere: bool
) -> list[EngineDrafter]:
    """Return the drafters to try with an engine, if ``usual`` its usual kinds of n-grams too.

    If the server may run ``elsewhere``, on another machine, paths need not exist here.
    """
    found = [EngineDrafter(name) for name in engine.ngrams] if usual else []
    for text in dict.fromkeys(texts):
        try:
            spec = parse_engine_drafter(engine, text)
        except UsageError:
            if not elsewhere:
                raise
            spec = SmallModel(_model(text, elsewhere=True))
        if isinstance(spec, str):
            found.append(EngineDrafter(spec))
            continue
        model = spec.model_spec
        if model is None:
            found += [] if spec.is_plain else [EngineDrafter(spec)]
            continue
        from specbench.models.heads import find_head

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


def engine_configs(options: SweepOptions, settings: Sequence[EngineSetting]) -> list[Row]:
    """Return the configurations of settings: at every temperature and batch size of the options."""
    return server_rows(options, [(each.name, each.gamma or None) for each in settings])


@dataclass(frozen=True)
class EngineServers:
    """The servers of a run: what is started, and how it is started and asked.

    Attributes:
        spec, engine, name, target, drafters, settings: What is started; ``name`` is the target's in results.
        options: The user's options for starting servers and for requests.
        arguments: The user's own words for every server.
        decoding, temperature: Options that the first request to each server tests.
    """

    spec: EngineSpec
    engine: StartedEngine
    name: str
    target: ModelSpec
    drafters: Sequence[EngineDrafter]
    settings: Sequence[EngineSetting]
    options: ServerOptions
    arguments: Sequence[str]
    decoding: DecodingOptions
    temperature: float

    @classmethod
    def of(
        cls,
        target: str,
        drafters: Sequence[str],
        options: ServerOptions,
        arguments: Sequence[str],
        decoding: DecodingOptions,
        temperature: float,
        *,
        usual: bool,
        **compared: Any,
    ) -> EngineServers:
        """Return the servers of a target with drafters, both as the command line has them; ``compared``: for
        ``settings_of``.
        """
        assert options.engine is not None
        spec, elsewhere = parse_engine(options.engine), bool(options.engine_command)
        engine = started_engine(spec.name)
        named = _model(target, elsewhere=elsewhere)
        model = placed(engine, named)
        tried = engine_drafters(engine, drafters, usual=usual, elsewhere=elsewhere)
        settings = settings_of(engine, model, tried, temperature=temperature, **compared)
        made = spec, engine, one_line(named.name), model, tried, settings
        return cls(*made, options, arguments, decoding, temperature)

    def sweep_options(self, **measured: Any) -> SweepOptions:
        """Return the options of a sweep over the settings; ``measured``: those that decide how they are measured."""
        return SweepOptions(
            gammas=(),
            policies=(),
            decoding=self.decoding,
            warmup=0,  # every server warms up when it starts
            servers=tuple(each.name for each in self.settings),
            **measured,
        )

    def sources(self, chosen: ChosenPrompts) -> dict[str, Any]:
        """Return what ``run.json`` says about the models, the engine and the prompts."""
        return {
            "target": self.name,
            "engine": self.engine.name,
            "engine_options": command_line(self.arguments),
            "drafters": [str(each.spec) for each in self.drafters],
            **chosen.sources,
        }

    @contextmanager
    def launched(self, logs: Path, progress: Progress | None) -> Iterator[LaunchedEngine]:
        """Return the engine that starts and measures the servers, with plain decoding started; end them all afterwards.

        What earlier runs have left is ended before. Sentences on both go to stderr.
        """
        for sentence in end_left():
            say(sentence)
        made = LaunchedEngine(
            {each.name: partial(self._command, each) for each in self.settings},
            logs,
            self._connect,
            limit=self.spec.servers,
            start_timeout_s=self.spec.start_timeout,
            progress=progress,
        )
        try:
            made.server(PLAIN)
            yield made
        finally:
            for sentence in made.close():
                say(sentence)

    def _connect(self, spec: ServerSpec) -> ServerEngine:
        key = next((key for word, key in pairwise(self.arguments) if word == _KEY), None)
        return ServerEngine(
            [spec],
            keys={} if key is None else {spec.name: key},
            decoding=self.decoding,
            temperature=self.temperature,
        )

    def _command(self, setting: EngineSetting, port: int) -> list[str]:
        """Return the command line that starts the server of a setting on a port."""
        wrapper = self.options.engine_command
        return self.engine.command_line(self.target, setting.options, port, self.arguments, wrapper)
