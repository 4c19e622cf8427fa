"""Running `specbench tune`, of specbench's own configurations or of an engine's: from options to the answer."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, cast

from specbench.base.errors import UsageError
from specbench.base.files import file_errors, require_writable
from specbench.base.load import load_snapshot
from specbench.base.progress import quiet_transformers
from specbench.bench.manifest import command_line
from specbench.cli.progress import StageProgress, starting
from specbench.cli.run_job import RunJob
from specbench.config import config_from_recipe, write_config
from specbench.experiment import Experiment, opened
from specbench.recipe import Recipe
from specbench.tune.candidates import given_drafters, search_experiment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.record import Json
    from specbench.bench.engines.launched import LaunchedEngine
    from specbench.bench.session import Session
    from specbench.cli.sweep_options import ServerOptions
    from specbench.cli.tune_options import SearchOptions
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions

_READERS = "generate, chat, serve, sweep and check"


def tune_models(
    target: str,
    asked: SearchOptions,
    template: TemplateOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    minutes: float,
) -> None:
    """Find the fastest configuration, write and print it; for the arguments see ``specbench.cli.tune``."""
    start, began = load_snapshot(), perf_counter()
    with file_errors(f"{str(asked.out)!r} cannot be written", "Give another --out.", kind=UsageError):
        require_writable(asked.out.parent)
    base = Recipe.of_target(target, models, decoding, template)
    given, only = given_drafters(base, asked.drafter, asked.for_engine)
    with ExitStack() as stack:
        with starting(asked.quiet) as progress, quiet_transformers():
            from specbench.tune.loading import Candidates

            experiment = search_experiment(
                Candidates(base, given, only),
                asked.prompts,
                asked.temperature,
                decoding,
                template,
                chained=base.chained is not None,
            )
            session = stack.enter_context(_opened(experiment, asked, progress))
            from specbench.cli.tune_display import finish_search, run_search
            from specbench.show.answer import find_answers
            from specbench.tune.answer import fixed_gamma
            from specbench.tune.predicted import search_models

        if asked.minutes is not None or asked.resume:  # they are for what comes after loading
            began = perf_counter()
        job = RunJob(session, asked.quiet)
        job.say_at_start(start, "" if asked.resume else None)
        progress = stack.enter_context(StageProgress(asked.quiet, animated=False))
        search = search_models(
            session, base, given, began, 60 * minutes, longer=asked.minutes is None, progress=progress
        )
        answer = run_search(job, search, progress)
    (stored,) = find_answers(job.summary(), job.recipes)
    recipe, gamma = job.recipes[answer.choice], fixed_gamma(search, answer.choice)
    facts: Json = {"configuration": None}
    lines, ending = [f"Decode:  {stored.command}"] * bool(stored.command), list[str]()
    try:
        config, note = config_from_recipe(recipe, provisional=answer.provisional, fixed_gamma=gamma)
    except UsageError as error:
        ending.append(f"note: {asked.out} is not written: {error}")
    else:
        hint = f"Measurements are in {str(job.folder)!r}; give another --out with --resume."
        with file_errors(f"{str(asked.out)!r} cannot be written", hint):
            write_config(asked.out, config)
        facts["configuration"] = str(asked.out)
        where = f"{asked.out}{' (provisional)' * answer.provisional}"
        ending += [f"note: {note}"] * bool(note)
        ending.append(f"Saved: {where}, which {_READERS} read in this folder or with --config.")
    if search.race.verdict == "faster":
        words = ("specbench", "export", str(job.folder), "--to", asked.for_engine or "vllm")
        facts["export"] = shlex.join(words)
        other = "" if asked.for_engine else "  (or another engine)"
        lines.append(f"Deploy:  specbench serve, or {facts['export']}{other}")
    finish_search(job, search, answer, asked, lines, facts, ending)


def tune_engine(
    target: str,
    asked: SearchOptions,
    template: TemplateOptions,
    servers: ServerOptions,
    decoding: DecodingOptions,
    minutes: float,
    arguments: Sequence[str],
) -> None:
    """Find an engine's fastest setting and print its command line; for the arguments see ``specbench.cli.tune``."""
    start, began = load_snapshot(), perf_counter()
    assert servers.engine is not None
    from specbench.cli.tune_display import finish_search, run_search
    from specbench.started import Started
    from specbench.tune.tries import search_settings

    with starting(asked.quiet), quiet_transformers():
        started = Started.of(
            servers.engine, target, asked.drafter, asked.temperature,
            command=servers.engine_command, arguments=arguments, usual=True,
        )  # fmt: skip
    experiment = search_experiment(
        replace(started, eager=False), asked.prompts, asked.temperature, decoding, template
    )
    with (
        StageProgress(asked.quiet, animated=False) as progress,
        _opened(experiment, asked, progress) as session,
    ):
        job = RunJob(session, asked.quiet)
        job.say_at_start(start, "" if asked.resume else None)
        search = search_settings(session, started, began, 60 * minutes, progress)
        answer = run_search(job, search, progress)
        used = cast("LaunchedEngine", session.engine).summary()
    setting = dict(zip(session.configs, started.settings, strict=True))[answer.choice]
    command, needs = started.start_command(setting), list(setting.needs)
    facts = {"engine": started.engine.name, "command": command, "needs": needs}
    lines = [*needs, f"Start:  {shlex.join(command)}"]
    finish_search(job, search, answer, asked, lines, facts, [used] if used else [])


def _opened(
    experiment: Experiment, asked: SearchOptions, progress: StageProgress
) -> AbstractContextManager[Session]:
    command = command_line(sys.argv[1:])
    return opened(experiment, asked.results, resume=asked.resume, command=command, progress=progress)
