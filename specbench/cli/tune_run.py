"""Running `specbench tune`: from options to the search, what is shown meanwhile, and its answer."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING

import typer
from msgspec import structs

from specbench.base.load import load_snapshot
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, terminal_safe
from specbench.bench.manifest import command_line
from specbench.cli.console import broken, duration, write_json, write_out
from specbench.cli.progress import StageProgress, starting
from specbench.cli.run_job import RunJob
from specbench.cli.signals import exit_code_of_interrupt
from specbench.experiment import opened
from specbench.recipe import Recipe
from specbench.results import stats
from specbench.results.results import load_results
from specbench.tune.candidates import given_drafters

if TYPE_CHECKING:
    from specbench.base.record import Json
    from specbench.cli.tune_options import SearchOptions
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions
    from specbench.results.run import TuningAnswer
    from specbench.tune.search import Search


def run_tune(
    target: str,
    asked: SearchOptions,
    template: TemplateOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    minutes: float,
) -> None:
    """Find the fastest configuration, write and print it; for the arguments see ``specbench.cli.tune``.

    Raises:
        typer.Exit: The search was interrupted.
    """
    start, began = load_snapshot(), perf_counter()
    base = Recipe.of_target(target, models, decoding, template)
    given = given_drafters(base, asked.drafter)
    with ExitStack() as stack:
        with starting(asked.quiet) as progress, quiet_transformers():
            from specbench.tune.loading import Candidates

            experiment = Candidates(base, given).search(asked.prompts, asked.temperature)
            command = command_line(sys.argv[1:])
            session = stack.enter_context(
                opened(experiment, asked.out, resume=asked.resume, command=command, progress=progress)
            )
            from specbench.tune.predicted import search_models

        if asked.minutes is not None or asked.resume:  # they are for what comes after loading
            began = perf_counter()
        job = RunJob(session, asked.quiet)
        job.say_at_start(start, "" if asked.resume else None)
        progress = stack.enter_context(StageProgress(asked.quiet, animated=False))
        search = search_models(
            session, base, given, began, 60 * minutes, longer=asked.minutes is None, progress=progress
        )
        answer = _run_search(job, search, progress)
    _finish(job, search, answer, asked)
    if search.race.ending == "interrupted":
        raise typer.Exit(exit_code_of_interrupt())


def _race_state(search: Search) -> str:
    """Return a line on the running candidates of the race."""
    race, lead = search.race, search.rows[search.race.leader].label
    if race.leader != race.plain:
        lead += f" {stats.decimals(race.speedup(race.leader).value)}× plain"
    who = "decided" if race.decided else f"first of {len(race.running)}"
    left = duration(max(0.0, search.left_s))
    return f"{counted(race.blocks, 'block')}, {left} left, {who}: {lead}"


def _run_search(job: RunJob, search: Search, progress: StageProgress) -> TuningAnswer:
    """Search, show the race, and store the answer in the run for reports and exports."""
    from specbench.tune.answer import find_answer

    ended, store = False, job.session.store
    try:
        for _ in search.measure():
            progress.update("racing", 0, None, note=_race_state(search))
        ended = search.race.ending != "interrupted"
    finally:
        if not ended:
            job.say(
                f"Measurements are in {job.folder}; to continue, run the same command with --out"
                f" {shlex.quote(str(job.folder))} --resume."
            )
    answer = find_answer(search, load_results(job.folder))
    assert store.run.tuning is not None
    store.update(tuning=structs.replace(store.run.tuning, answer=answer))
    return answer


def _finish(job: RunJob, search: Search, answer: TuningAnswer, asked: SearchOptions) -> None:
    """Write the summary, and print the answer with the commands that follow from it."""
    from specbench.show.answer import find_answers
    from specbench.show.document import to_markdown
    from specbench.show.tables import summary_sheet
    from specbench.tune.answer import answer_parts, answer_text, as_json

    summary = job.summary()
    (stored,) = find_answers(summary, job.recipes)
    facts: Json = {"results": str(job.folder)}
    lines = [f"Decode:  {stored.command}"] * bool(stored.command)
    if search.race.verdict == "faster":
        facts["export"] = shlex.join(("specbench", "export", str(job.folder), "--to", "vllm"))
        lines.append(
            f"Deploy:  specbench serve with these options, or {facts['export']}  (or another engine)"
        )
    parts = to_markdown(*answer_parts(answer, search)), to_markdown(summary_sheet(summary))
    job.write_summary(summary, "\n\n".join(parts))
    if asked.json_output:
        write_json({**as_json(answer, search), **facts})
    else:
        text = answer_text(answer, search, lines, verbose=asked.verbose)
        write_out(broken(terminal_safe(text), sys.stdout))
    for finding in job.session.findings:
        job.say(finding.line)
    job.say(job.where)
