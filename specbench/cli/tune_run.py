"""Running `specbench tune`: from options to the answer."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from specbench.base.errors import RunError, UsageError
from specbench.base.files import file_errors, reason, require_writable
from specbench.base.load import load_snapshot
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, terminal_safe
from specbench.bench.grid import Sweep, SweepOptions
from specbench.bench.manifest import describe_models
from specbench.bench.prompts import interleave
from specbench.cli.console import broken, duration, write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_options import MINUTES, chosen_prompts
from specbench.cli.sweep_run import RunJob
from specbench.config import config_from_recipe, write_config
from specbench.decoding.clocks import WallClock
from specbench.experiment import FOLDER, new_folder
from specbench.export.registry import ENGINES, load_engine, load_engines
from specbench.options import quantized
from specbench.recipe import Recipe
from specbench.results.store import RunStore, read_run, stored_runs
from specbench.rows import conditions_of
from specbench.specs.drafters import parse_drafter
from specbench.tune.candidates import GAMMAS, MIN_SHARE, rules_to_try

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specbench.bench.engines.own import ModelEngine
    from specbench.cli.sweep_options import SearchOptions
    from specbench.decoding.theory import PassCosts
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions
    from specbench.predict.here import Report
    from specbench.results.results import Results
    from specbench.results.run import TuningAnswer
    from specbench.tune.race import Race
    from specbench.tune.search import StoredSearch

_REPEATS = 3
"""Times that a prompt is decoded at most."""

_ENDING_S, _ENDING_SHARE = 3.0, 0.03
"""Seconds, and share of the time, for what comes after the race."""


def run_tune(
    target: str,
    search: SearchOptions,
    template: TemplateOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Find the fastest configuration, write and print it; for the arguments see ``specbench.cli.tune``."""
    quiet, minutes = search.quiet, search.minutes or MINUTES
    clock, start = WallClock(), load_snapshot()
    began = clock.now()
    if search.out.exists() and not search.overwrite:
        raise UsageError(f"{str(search.out)!r} exists already.", "Add --overwrite, or give another --out.")
    with file_errors(f"{str(search.out)!r} cannot be written", "Give another --out.", kind=UsageError):
        require_writable(search.out.parent)
    given = [spec for spec in map(parse_drafter, dict.fromkeys(search.drafter)) if not spec.is_plain]
    only = None if search.for_engine is None else load_engine(search.for_engine)
    for spec in given:
        if only is not None and not only.supports(spec):
            supported = f"Supported: {only.describe_drafters()}."
            raise UsageError(f"{only.title} does not support the drafter {spec}.", supported)
    with starting(quiet) as progress:
        chosen = chosen_prompts(search, None, progress)
    prompts = tuple(interleave(chosen.prompts))
    base = Recipe.of_target(target, models, decoding, template)
    sources = {**describe_models(base, given), **chosen.sources, "tune": True}
    folder = tune_folder(search, sources["target"])
    stored = read_run(folder) if search.resume and RunStore.exists(folder) else None
    kind: Any = search.cache if stored is None else stored.configs[0].cache
    chained = quantized(models.dtype) is not None
    policies = rules_to_try(greedy=search.temperature == 0, chained=chained)
    options = SweepOptions(
        conditions_of(temperature=[search.temperature]),
        gammas=GAMMAS,
        policies=policies,
        decoding=decoding,
        repeats=_REPEATS,
        warmup=0,
        turns=1,
        seed=search.seed,
        template=template,
    )
    with starting(quiet) as progress, quiet_transformers():
        from specbench.bench.engines.own import check_engine
        from specbench.decoding.sampling import Sampling
        from specbench.tune.loading import configurations, load_candidates

        Sampling(temperature=search.temperature)  # refuses one that is no temperature
        check_engine(base, given, options, progress)
        try:
            RunStore.check_writable(folder)
        except UsageError as error:  # whose advice is that of a sweep
            raise UsageError(error.message, "Give other --search.") from error
        engine, cache, notes = load_candidates(
            base.target, given, models, formatted=decoding.format is not None, cache=kind, only=only,
            progress=progress,
        )  # fmt: skip
    base = replace(base, caching=replace(base.caching, cache=cache))
    configs = tuple(configurations(options, engine, base, only))
    sweep = Sweep(options, prompts, configs, suites=chosen.suites)
    if search.minutes is not None or search.resume:  # they are for what comes after loading
        began = clock.now()
    job = TuneJob(sweep, engine, folder, quiet)
    with job.open_store(sources) as store, StageProgress(quiet, animated=False) as progress:
        from specbench.cli.setting import drafter_notes

        notes += drafter_notes(each.outcome for each in engine.drafters)
        job.say_at_start(start, notes, None if stored is None else "")
        from specbench.tune.loading import asked_for
        from specbench.tune.search import Search

        searching = Search(
            sweep,
            store,
            engine,
            predict=partial(_predict, engine, sweep, progress.update),
            longer=search.minutes is None,
            clock=clock,
            seconds=60 * minutes,
            until=began + 60 * minutes - max(_ENDING_S, _ENDING_SHARE * 60 * minutes),
            asked=asked_for(configs, engine, given, [only] if only else load_engines().values()),
            progress=progress,
        )
        job.watch(searching, progress)
        answer = job.answer(searching, store)
    _show(job, answer, searching, search)
    if searching.race.ending == "interrupted":
        raise typer.Exit(exit_code_of_interrupt())


def tune_folder(search: SearchOptions, target: str) -> Path:
    """Return the folder of the run: the given one, with ``--resume`` the newest unfinished one, or a new one."""
    if search.results is not None:
        if not search.resume:
            RunStore.check_empty(search.results, "other --results")
        return search.results
    if not search.resume:
        return new_folder(target, "-tune")
    for path, run in stored_runs(FOLDER):
        if run.options.get("tune") and not run.finished:
            return path
    raise UsageError(
        f"There is no unfinished run of `specbench tune` in {FOLDER}/.",
        "Name one with --results, or leave --resume out to begin one.",
    )


def race_state(race: Race, labels: Mapping[str, str], left_s: float) -> str:
    """Return a line on the running candidates of the race."""
    from specbench.results.stats import decimals

    lead = labels[race.leader]
    if race.leader != race.plain:
        lead += f" {decimals(race.ratio(race.leader, race.plain).value)}× plain"
    blocks, left = counted(race.blocks, "block"), f"{duration(max(0.0, left_s))} left"
    return f"{blocks}, {left}, {'decided' if race.decided else f'first of {len(race.running)}'}: {lead}"


class TuneJob(RunJob):
    """A search for the fastest configuration."""

    def watch(self, search: StoredSearch[Any], progress: StageProgress) -> None:
        """Run a search, and show its race. After an interrupt, one that has raced something gives the best so far."""
        labels = {config.id: config.label for config in self.sweep.configs}
        ended = False
        try:
            for race in search.measure():
                progress.update("racing", 0, None, note=race_state(race, labels, search.left_s))
            ended = search.race.ending != "interrupted"
        finally:
            if not ended:
                self.say(
                    f"Measurements are in {self.folder}; to continue, run the same command with --results"
                    f" {shlex.quote(str(self.folder))} {search.more}."
                )

    def answer(self, search: StoredSearch[Any], store: RunStore) -> TuningAnswer:
        """Return the answer of the search, after storing it in the run for reports and exports."""
        from specbench.results.results import load_results
        from specbench.tune.answer import find_answer

        answer = find_answer(search, load_results(self.folder))
        assert store.run.tuning is not None
        store.update(tuning=msgspec.structs.replace(store.run.tuning, answer=answer))
        return answer

    def write_answer(self, answer: TuningAnswer, search: StoredSearch[Any], *lines: str) -> Results:
        """Write the answer, lines and the table of all rows into two files; return the results."""
        from specbench.results.results import load_results
        from specbench.results.summary import summarize
        from specbench.show.document import to_markdown
        from specbench.show.tables import summary_sheet
        from specbench.tune.answer import answer_parts

        results = load_results(self.folder)
        summary = summarize(results)
        said = to_markdown(*answer_parts(answer, search))
        parts = [said, *lines, to_markdown(summary_sheet(summary))]
        self.write_summary(summary, "\n\n".join(parts))
        return results

    def say_at_end(self, search: StoredSearch[Any], *lines: str) -> None:
        """Print warnings, lines, and where the measurements are."""
        for warning in search.warnings:
            self.warn(warning)
        for line in (
            *lines,
            f"Results: {self.folder}; specbench report {shlex.quote(str(self.folder))} shows them.",
        ):
            self.say(line)


def _predict(
    engine: ModelEngine, sweep: Sweep, report: Report, outputs: Mapping[str, Sequence[int]], costs: PassCosts
) -> tuple[dict[str, float], dict[str, str]]:
    """Predict speedups from plain outputs, see ``Search``."""
    from specbench.predict.here import predict_rows

    plain = sweep.configs[0]
    found = predict_rows(engine, sweep, plain, outputs, costs, least=MIN_SHARE, report=report)
    return {name: each.speedup.value for name, each in found.rows.items()}, found.failed


def _show(
    job: TuneJob,
    answer: TuningAnswer,
    search: StoredSearch[Any],
    asked: SearchOptions,
) -> None:
    """Write and print the answer."""
    from specbench.tune.answer import answer_text, as_json, exports, exports_json, use_lines

    results, out = job.write_answer(answer, search), asked.out
    written = _write_configuration(job, answer, search, asked)
    exported = None
    if search.race.verdict == "faster":
        engines = [asked.for_engine] if asked.for_engine else ENGINES
        exported = exports(results, job.folder, job.recipes, engines)
    if asked.json_output:
        facts = {
            **as_json(answer, search),
            "configuration": str(out) if written else None,
            "results": str(job.folder),
            "exports": exports_json(exported or []),
        }
        write_json(facts)
    else:
        lines = use_lines(_command(job, results), exported)
        text = answer_text(answer, search, lines, verbose=asked.verbose)
        write_out(broken(terminal_safe(text), sys.stdout))
    provisional = " (provisional)" if answer.provisional else ""
    commands = "generate, chat, serve, sweep and check"
    saved = f"Saved: {out}{provisional}, which {commands} read in this folder or with --config."
    job.say_at_end(search, *([saved] if written else []))


def _command(job: TuneJob, results: Results) -> str:
    """Return the command that decodes with the winner, with models as the user typed them."""
    from specbench.results.summary import categorize, summarize
    from specbench.show.answer import find_answers

    (answer,) = find_answers(results, summarize(results), categorize(results), job.recipes)
    return answer.command


def _write_configuration(
    job: TuneJob, answer: TuningAnswer, search: StoredSearch[Any], asked: SearchOptions
) -> bool:
    """Write the configuration file; return whether the answer can be expressed in one."""
    from specbench.tune.answer import fixed_gamma

    out, cache = asked.out, asked.cache
    recipe = job.recipes[answer.choice]
    usual = "dynamic" if quantized(recipe.models.dtype) is None else "preallocated"
    try:
        config, note = config_from_recipe(
            recipe, provisional=answer.provisional, fixed_gamma=fixed_gamma(search, answer.choice)
        )
    except UsageError as error:
        job.say(f"note: {out} is not written: {error}")
        return False
    try:
        write_config(
            out, config.without("cache") if cache is None and recipe.caching.cache == usual else config
        )
    except OSError as error:
        raise RunError(
            f"{str(out)!r} cannot be written ({reason(error)}).",
            f"Measurements are in {str(job.folder)!r}; give another --out with --resume.",
        ) from error
    if note:
        job.say(f"note: {note}")
    return True
