"""Running a sweep: what is said before, and what is shown and written afterwards."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from specbench.bench.engines.launched import LaunchedEngine
from specbench.cli.progress import StageProgress
from specbench.cli.run_job import RunJob
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_display import show_cell, show_predicted
from specbench.results.results import load_results

if TYPE_CHECKING:
    from specbench.base.load import LoadSnapshot
    from specbench.bench.session import Session
    from specbench.results.results import Results


def run_session(session: Session, start: LoadSnapshot, *, verbose: bool, quiet: bool) -> None:
    """Measure, then print and write the results so far, even if the sweep was interrupted.

    Raises:
        typer.Exit: Something failed, or Ctrl-C.
    """
    folder, store = session.store.path, session.store
    job = RunJob(session, quiet)
    cells, total = "batches" if session.sweep.options.batches else "generations", len(session.planned)

    def stored() -> str:
        count = total - len(session.left)
        return f"{count} of {total} {cells} are" if count else ""

    found = stored()
    job.say_at_start(start, f": {found} there" if found else None)
    interrupted = False
    for problem in store.problems:
        job.say(problem)
    with StageProgress(quiet, animated=False) as progress:
        job.console = progress.console
        try:
            if session.left and not quiet:
                show_predicted(session, progress, job.say)
            for doing in session.run():
                show_cell(session, doing, progress)
        except KeyboardInterrupt:
            interrupted = True
    results = load_results(folder)
    try:
        if len(results.done):
            _show(job, results, verbose=verbose)
    finally:  # also when nobody takes the table
        if session.problem:
            job.say(f"Single forward passes could not be timed: {session.problem}")
        for finding in session.findings:
            job.say(finding.line)
        if interrupted:
            job.say(
                f"Interrupted. {stored() or f'No {cells} are'} in {folder}; to continue:"
                f" specbench sweep --out {shlex.quote(str(folder))} --resume."
            )
        else:
            job.say(job.where)
        if session.failed:
            job.say(f"{session.failed} {cells} failed; to measure them again, add --resume.")
    if interrupted or session.failed:
        raise typer.Exit(exit_code_of_interrupt() if interrupted else 1)


def _show(job: RunJob, results: Results, *, verbose: bool) -> None:
    """Write the answer and the table into two files, then print them; stdout may be closed."""
    from specbench.results.summary import Summary
    from specbench.show import tables
    from specbench.show.answer import answer_parts, find_answers
    from specbench.show.document import show, to_markdown

    summary = Summary(results)
    sheets = [tables.summary_sheet(summary), *tables.service_sheets(summary).values()]
    answers = find_answers(summary)
    said = [part for each in answers for part in answer_parts(each)]
    try:
        job.write_summary(summary, to_markdown(*said, *sheets))
    finally:
        answers = find_answers(summary, job.recipes)
        said = [part for each in answers for part in answer_parts(each)]
        shown = [each if verbose else replace(each, notes=[]) for each in sheets]
        show(Console(highlight=False), *said, *shown)
        if summary.stopping:
            job.say(f"note: {summary.stopping}")
        engine = job.session.engine
        if isinstance(engine, LaunchedEngine):
            for config in (row.config for row in summary.rows if row.config.id in summary.winners):
                job.say(f"To start {config.label}: {shlex.join(engine.start_command(config.drafter))}")
