"""Running `specbench tune --engine`: from options to the answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from specbench.base.load import load_snapshot
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import terminal_safe
from specbench.bench.axes import parse_batches
from specbench.bench.grid import Sweep, SweepOptions, check_batches
from specbench.bench.prompts import interleave
from specbench.cli.console import write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_options import chosen_prompts
from specbench.cli.tune_run import TuneJob, tune_folder
from specbench.decoding.clocks import WallClock
from specbench.results.store import RunStore
from specbench.rows import conditions_of
from specbench.started import Started

if TYPE_CHECKING:
    from specbench.cli.sweep_options import SearchOptions, ServerOptions
    from specbench.export.start import EngineSetting
    from specbench.options import DecodingOptions, TemplateOptions
    from specbench.results.run import TuningAnswer
    from specbench.tune.engine_search import EngineSearch

_REPEATS = 2
"""Times that a prompt is decoded at most."""

_ENDING_S = 3.0


def tune_engine(
    target: str,
    search: SearchOptions,
    template: TemplateOptions,
    servers: ServerOptions,
    decoding: DecodingOptions,
    arguments: Sequence[str],
) -> None:
    """Find an engine's fastest setting and print its command line; for the arguments see ``specbench.cli.tune``."""
    assert search.minutes is not None
    clock, start, quiet = WallClock(), load_snapshot(), search.quiet
    began, seconds = clock.now(), 60 * search.minutes
    with starting(quiet) as progress, quiet_transformers():
        chosen = chosen_prompts(search, None, progress)
        prompts = tuple(interleave(chosen.prompts))
        assert servers.engine is not None
        planned = Started.of(
            servers.engine, target, search.drafter, decoding, search.temperature,
            command=servers.engine_command, arguments=arguments, usual=True,
        )  # fmt: skip
    planned = replace(planned, eager=False)
    options = planned.options(
        SweepOptions(
            conditions_of(temperature=[search.temperature]),
            repeats=_REPEATS,
            turns=1,
            seed=search.seed,
            template=template,
        )
    )
    configs = planned.rows(options)
    batches = [batch for batch in parse_batches(search.batch or "1") if batch > 1]
    if batches:
        options = replace(options, conditions=conditions_of(temperature=[search.temperature], batch=batches))
        check_batches(options, len(prompts))
        configs += planned.rows(options)
    sweep = Sweep(options, prompts, tuple(configs), suites=chosen.suites)
    folder = tune_folder(search, planned.name)
    RunStore.check_writable(folder)
    with (
        StageProgress(quiet, animated=False) as progress,
        planned.opened(options, lambda _: folder, progress) as ready,
    ):
        made: Any = ready.engine
        job = TuneJob(sweep, made, folder, quiet)
        alone = [config.id for config in configs if config.condition.batch is None]
        settings = dict(zip(alone, planned.settings, strict=True))
        with job.open_store({**ready.sources, **chosen.sources, "tune": True}) as store:
            job.say_at_start(start, (), "" if search.resume else None)
            from specbench.tune.engine_search import EngineSearch

            named: dict[str, list[str]] = {}
            for name, each in settings.items():
                if each.family and each.family not in planned.engine.ngrams:
                    named.setdefault(each.family, []).append(name)
            until = began + seconds - _ENDING_S
            searching = EngineSearch(
                sweep,
                settings,
                store,
                made,
                clock=clock,
                seconds=seconds,
                until=until,
                asked=named,
                progress=progress,
            )
            job.watch(searching, progress)
            answer = job.answer(searching, store)
        said = made.summary()
    _show(job, planned, settings, answer, searching, said, search)
    if searching.race.ending == "interrupted":
        raise typer.Exit(exit_code_of_interrupt())


def _show(
    job: TuneJob,
    planned: Started,
    settings: Mapping[str, EngineSetting],
    answer: TuningAnswer,
    search: EngineSearch,
    starts: str,
    asked: SearchOptions,
) -> None:
    """Write and print the answer: a sentence, the command line, and the draft lengths by batch size."""
    from specbench.tune.answer import answer_text, as_json, batch_lines, start_command

    command, needs = start_command(
        planned.engine,
        planned.target,
        settings[answer.choice],
        search.batches,
        planned.arguments,
        planned.command,
    )
    lines = [*batch_lines(search.batches), *needs, f"Start:  {shlex.join(command)}"]
    job.write_answer(answer, search, *lines)
    if asked.json_output:
        write_json(
            {
                **as_json(answer, search),
                "engine": planned.engine.name,
                "command": command,
                "needs": needs,
                "results": str(job.folder),
            }
        )
    else:
        text = answer_text(answer, search, lines, verbose=asked.verbose)
        write_out(terminal_safe(text))
    job.say_at_end(search, *([starts] if starts else []))
