"""Running `specbench tune`, of specbench's own configurations or of an engine's: from options to the answer."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, cast

import msgspec
import typer

from specbench.base.errors import UsageError
from specbench.base.files import file_errors, require_writable
from specbench.base.load import load_snapshot
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, terminal_safe
from specbench.bench.grid import SweepOptions
from specbench.bench.manifest import command_line
from specbench.cli.console import broken, duration, write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_options import MINUTES
from specbench.cli.sweep_run import RunJob
from specbench.config import config_from_recipe, write_config
from specbench.experiment import Experiment, opened
from specbench.export.registry import load_engine
from specbench.models.find import require_models
from specbench.options import quantized
from specbench.recipe import Recipe
from specbench.rows import conditions_of
from specbench.specs.drafters import Several, parse_drafter
from specbench.tune.candidates import GAMMAS, rules_to_try, with_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from specbench.base.load import LoadSnapshot
    from specbench.base.record import Json
    from specbench.bench.engines.launched import LaunchedEngine
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.session import Session
    from specbench.cli.sweep_options import SearchOptions, ServerOptions
    from specbench.decoding.theory import PassCosts
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions
    from specbench.results.run import Tuning, TuningAnswer
    from specbench.results.summary import Summary
    from specbench.tune.race import Race
    from specbench.tune.search import Search

_REPEATS = 3
"""Times that a prompt is decoded at most."""

_ENDING_S, _ENDING_SHARE = 3.0, 0.03
"""Seconds, and share of the time, for what comes after the race."""


def tune_models(
    target: str,
    search: SearchOptions,
    template: TemplateOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Find the fastest configuration, write and print it; for the arguments see ``specbench.cli.tune``."""
    quiet, clock, start = search.quiet, perf_counter, load_snapshot()
    began = clock()
    with file_errors(f"{str(search.out)!r} cannot be written", "Give another --out.", kind=UsageError):
        require_writable(search.out.parent)
    given = [spec for spec in map(parse_drafter, dict.fromkeys(search.drafter)) if not spec.is_plain]
    only = None if search.for_engine is None else load_engine(search.for_engine)
    for spec in given:
        if only is not None and not only.supports(spec):
            supported = f"Supported: {only.describe_drafters()}."
            raise UsageError(f"{only.title} does not support the drafter {spec}.", supported)
        if isinstance(spec, Several):
            raise UsageError(
                f"The drafter {spec} cannot be predicted.", "Measure it with `specbench sweep --until sure`."
            )
    base = Recipe.of_target(target, models, decoding, template)
    require_models(base.target, *(part.model for spec in given for part in spec.models))
    options = SweepOptions(
        conditions_of(temperature=[search.temperature]),
        gammas=GAMMAS,
        policies=rules_to_try(greedy=search.temperature == 0, chained=quantized(models.dtype) is not None),
        decoding=decoding,
        repeats=_REPEATS,
        warmup=0,
        turns=1,
        template=template,
    )
    with ExitStack() as stack:
        with starting(quiet) as progress, quiet_transformers():
            from specbench.decoding.sampling import Sampling
            from specbench.models.default import default_drafter
            from specbench.tune.loading import Candidates, asked_for

            Sampling(temperature=search.temperature)  # refuses one that is no temperature
            asked = Experiment(
                systems=Candidates(base, given, only), options=options, prompts=search.prompts, tuned=True
            )
            session = stack.enter_context(_opened(asked, search, progress))
            from specbench.cli.setting import drafter_notes
            from specbench.predict.here import predict_rows
            from specbench.tune import predicted

        engine, configs = cast("ModelEngine", session.engine), session.sweep.configs
        if search.minutes is not None or search.resume:  # they are for what comes after loading
            began = clock()

        def predict(
            outputs: Mapping[str, Sequence[int]], costs: PassCosts, report: Callable[..., None]
        ) -> tuple[dict[str, float], dict[str, str]]:
            found, failed = predict_rows(engine, session.sweep, configs[0], outputs, costs, report)
            return with_policies(configs, {name: each.speedup.value for name, each in found.items()}), failed

        notes = [*session.notes, *drafter_notes(each.outcome for each in engine.drafters)]
        job = TuneJob(session, search, start, notes)
        job.run(
            partial(predicted.choose, predict=predict, longer=search.minutes is None),
            {row.id: row.drafter for row in configs},
            asked_for(configs, engine, given, default_drafter(base)),
            began,
            60 * (search.minutes or MINUTES),
            stack.enter_context(StageProgress(quiet, animated=False)),
        )
    written = job.write_configuration()
    lines = [f"Decode:  {command}"] if (command := job.command()) else []
    facts: Json = {"configuration": str(search.out) if written else None}
    if job.search.race.verdict == "faster":
        words = ("specbench", "export", str(job.folder), "--to", search.for_engine or "vllm")
        facts["export"] = shlex.join(words)
        other = "" if search.for_engine else "  (or another engine)"
        lines.append(f"Deploy:  specbench serve, or {facts['export']}{other}")
    provisional = " (provisional)" if job.answer.provisional else ""
    commands = "generate, chat, serve, sweep and check"
    saved = f"Saved: {search.out}{provisional}, which {commands} read in this folder or with --config."
    job.show(lines, facts, [saved] if written else [])


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
    from specbench.started import Started

    clock, start, quiet = perf_counter, load_snapshot(), search.quiet
    began = clock()
    assert servers.engine is not None
    with starting(quiet), quiet_transformers():
        planned = Started.of(
            servers.engine, target, search.drafter, decoding, search.temperature,
            command=servers.engine_command, arguments=arguments, usual=True,
        )  # fmt: skip
    options = SweepOptions(
        conditions_of(temperature=[search.temperature]), repeats=_REPEATS, turns=1, template=template
    )
    asked = Experiment(
        systems=replace(planned, eager=False), options=options, prompts=search.prompts, tuned=True
    )
    with StageProgress(quiet, animated=False) as progress, _opened(asked, search, progress) as session:
        from specbench.tune import tries

        settings = dict(zip((row.id for row in session.sweep.configs), planned.settings, strict=True))
        named: dict[str, list[str]] = {}
        for name, each in settings.items():
            if each.family and each.family not in planned.engine.ngrams:
                named.setdefault(each.family, []).append(name)
        made = cast("LaunchedEngine", session.engine)
        job = TuneJob(session, search, start)
        job.run(
            partial(tries.choose, settings=settings), {name: each.family for name, each in settings.items()},
            named, began, 60 * search.minutes, progress, made,
        )  # fmt: skip
        said = made.summary()
    chosen = settings[job.answer.choice]
    command, needs = planned.start_command(chosen), list(chosen.needs)
    facts = {"engine": planned.engine.name, "command": command, "needs": needs}
    job.show([*needs, f"Start:  {shlex.join(command)}"], facts, [said] if said else [])


def _opened(
    asked: Experiment, search: SearchOptions, progress: StageProgress
) -> AbstractContextManager[Session]:
    command = command_line(sys.argv[1:])
    return opened(asked, search.results, resume=search.resume, command=command, progress=progress)


def race_state(race: Race, labels: Mapping[str, str], left_s: float) -> str:
    """Return a line on the running candidates of the race."""
    from specbench.results.stats import decimals

    lead = labels[race.leader]
    if race.leader != race.plain:
        lead += f" {decimals(race.ratio(race.leader, race.plain).value)}× plain"
    blocks, left = counted(race.blocks, "block"), f"{duration(max(0.0, left_s))} left"
    return f"{blocks}, {left}, {'decided' if race.decided else f'first of {len(race.running)}'}: {lead}"


class TuneJob(RunJob):
    """A search for the fastest configuration. After ``run`` it has the search, its answer, and the run's summary."""

    search: Search
    answer: TuningAnswer
    summary: Summary

    def __init__(
        self, session: Session, asked: SearchOptions, start: LoadSnapshot, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(session, asked.quiet)
        self.asked = asked
        self.say_at_start(start, notes, "" if asked.resume else None)

    def run(
        self,
        choose: Callable[[Search], Tuning],
        families: Mapping[str, str],
        needed: Mapping[str, Collection[str]],
        began: float,
        seconds: float,
        progress: StageProgress,
        servers: LaunchedEngine | None = None,
    ) -> None:
        """Search, show the race, and store the answer in the run for reports and exports.

        After an interrupt, a race with a complete block gives the best so far.
        """
        from specbench.results.results import load_results
        from specbench.results.summary import Summary
        from specbench.tune.answer import find_answer
        from specbench.tune.search import Search

        until = began + seconds - max(_ENDING_S, _ENDING_SHARE * seconds)
        sweep, store = self.session.sweep, self.session.store
        labels, ended = {config.id: config.label for config in sweep.configs}, False
        self.search = Search(
            sweep, store, self.session.engine, choose, families, clock=perf_counter, seconds=seconds, until=until,
            asked=needed, servers=servers, progress=progress,
        )  # fmt: skip
        try:
            for race in self.search.measure():
                progress.update("racing", 0, None, note=race_state(race, labels, self.search.left_s))
            ended = self.search.race.ending != "interrupted"
        finally:
            if not ended:
                self.say(
                    f"Measurements are in {self.folder}; to continue, run the same command with --results"
                    f" {shlex.quote(str(self.folder))} --resume."
                )
        self.answer = find_answer(self.search, load_results(self.folder))
        assert store.run.tuning is not None
        store.update(tuning=msgspec.structs.replace(store.run.tuning, answer=self.answer))
        self.summary = Summary(load_results(self.folder))

    def command(self) -> str:
        """Return the command that decodes with the winner, with models as the user typed them."""
        from specbench.show.answer import find_answers

        (answer,) = find_answers(self.summary, self.recipes)
        return answer.command

    def write_configuration(self) -> bool:
        """Write the configuration file; return whether the answer can be expressed in one."""
        from specbench.tune.answer import fixed_gamma

        recipe, out = self.recipes[self.answer.choice], self.asked.out
        gamma = fixed_gamma(self.search, self.answer.choice)
        usual = "dynamic" if quantized(recipe.models.dtype) is None else "preallocated"
        try:
            config, note = config_from_recipe(recipe, provisional=self.answer.provisional, fixed_gamma=gamma)
        except UsageError as error:
            self.say(f"note: {out} is not written: {error}")
            return False
        hint = f"Measurements are in {str(self.folder)!r}; give another --out with --resume."
        with file_errors(f"{str(out)!r} cannot be written", hint):
            write_config(out, config.without("cache") if recipe.caching.cache == usual else config)
        if note:
            self.say(f"note: {note}")
        return True

    def show(self, lines: Sequence[str], facts: Json, said: Sequence[str]) -> None:
        """Write and print the answer with more lines, or as JSON with more facts; then what is ``said`` at the end.

        Raises:
            typer.Exit: The search was interrupted.
        """
        from specbench.show.document import to_markdown
        from specbench.show.tables import summary_sheet
        from specbench.tune.answer import answer_parts, answer_text, as_json

        answer, search = self.answer, self.search
        kept = [] if self.recipes else lines  # commands name the folders of models
        parts = [to_markdown(*answer_parts(answer, search)), *kept, to_markdown(summary_sheet(self.summary))]
        self.write_summary(self.summary, "\n\n".join(parts))
        if self.asked.json_output:
            write_json({**as_json(answer, search), **facts, "results": str(self.folder)})
        else:
            text = answer_text(answer, search, lines, verbose=self.asked.verbose)
            write_out(broken(terminal_safe(text), sys.stdout))
        for warning in search.warnings:
            self.warn(warning)
        shown = f"Results: {self.folder}; specbench report {shlex.quote(str(self.folder))} shows them."
        for line in (*said, shown):
            self.say(line)
        if search.race.ending == "interrupted":
            raise typer.Exit(exit_code_of_interrupt())
