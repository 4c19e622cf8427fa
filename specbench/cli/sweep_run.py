"""Running a sweep and a search: what is said before, and what is shown and written afterwards."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer
from rich.console import Console
from rich.text import Text

from specbench.base.files import file_errors, write_text
from specbench.base.textsafe import terminal_safe
from specbench.bench.engines.launched import LaunchedEngine
from specbench.cli.progress import StageProgress
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_display import show_cell, show_predicted
from specbench.config import FILE_NAME
from specbench.results import advice
from specbench.results.results import load_results
from specbench.results.store import write_csv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.load import LoadSnapshot
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.session import Session
    from specbench.results.results import Results
    from specbench.results.run import RunWarning
    from specbench.results.summary import Summary


class RunJob:
    """A measurement into the folder of a run, with its models loaded, or its servers reached."""

    def __init__(self, session: Session, quiet: bool) -> None:
        self.session, self.folder, self.quiet = session, session.store.path, quiet
        self.console = Console(stderr=True, highlight=False)
        self.recipes = {each.id: each.recipe for each in session.sweep.configs if each.recipe is not None}
        """The recipes of configurations, with models as they were named."""

    def say_at_start(self, start: LoadSnapshot, notes: Sequence[str], continued: str | None) -> None:
        """Print notes on models and the machine, and that a run is continued (``None``: it begins)."""
        for note in notes:
            self.say(f"note: {note}")
        for warning in advice.warn_at_start(start):
            self.warn(warning)
        if continued is not None and not self.quiet:
            self.say(f"Continuing {self.folder}{continued}.")

    def write_summary(self, summary: Summary, text: str) -> None:
        """Write the table and the answer into two files."""
        problem = f"The summary in {str(self.folder)!r} cannot be written"
        with file_errors(problem, "What was measured is kept."):
            write_csv(summary.table(), self.folder / "summary.csv")
            write_text(self.folder / "summary.md", text)

    def warn(self, warning: RunWarning) -> None:
        """Print a warning on stderr."""
        self.say(f"{warning.severity}: {warning.message} {warning.advice}")

    def say(self, line: str) -> None:
        """Print a line on stderr."""
        text = Text(terminal_safe(line))
        self.console.print(text, soft_wrap=not self.console.is_terminal)


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
    job.say_at_start(start, [*session.notes, *_model_notes(session)], f": {found} there" if found else None)
    interrupted = False
    for problem in store.problems:
        job.say(problem)
    with StageProgress(quiet, animated=False) as progress:
        job.console = progress.console
        try:
            if session.left and not quiet:
                show_predicted(session, progress, job.say)
            for at in session.run():
                show_cell(at, progress, job.say)
        except KeyboardInterrupt:
            interrupted = True
    results = load_results(folder)
    try:
        if len(results.done):
            _show(job, results, verbose=verbose)
    finally:  # also when nobody takes the table
        for warning in session.warnings:
            job.warn(warning)
        if interrupted:
            job.say(
                f"Interrupted. {stored() or f'No {cells} are'} in {folder}; to continue:"
                f" specbench sweep --out {shlex.quote(str(folder))} --resume."
            )
        else:
            job.say(f"Results: {folder}; specbench report {shlex.quote(str(folder))} shows them.")
        if session.failed:
            job.say(f"{session.failed} {cells} failed; to measure them again, add --resume.")
        if isinstance(session.engine, LaunchedEngine):
            job.say(session.engine.summary())
    if interrupted or session.failed:
        raise typer.Exit(exit_code_of_interrupt() if interrupted else 1)


def _model_notes(session: Session) -> list[str]:
    """Return notes on loaded models; none on servers."""
    if session.sweep.options.servers:
        return []
    from specbench.cli.setting import load_notes

    engine = cast("ModelEngine", session.engine)
    return load_notes(engine.target, engine.drafters, session.sweep.options.decoding)


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
        more = ["--config", "none"] if Path(FILE_NAME).is_file() else []
        answers = find_answers(summary, job.recipes, more)
        said = [part for each in answers for part in answer_parts(each)]
        shown = [each if verbose else replace(each, notes=[]) for each in sheets]
        show(Console(highlight=False), *said, *shown)
        if summary.stopping:
            job.say(f"note: {summary.stopping}")
