"""Running a sweep: the folder of its results, what would run, and measuring."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from specbench.base.errors import RunError, UsageError
from specbench.base.files import write_text
from specbench.base.textsafe import terminal_safe
from specbench.bench.manifest import command_line, describe_run, open_run, option_changes, stored_options
from specbench.cli.progress import StageProgress
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_options import ResultsOptions
from specbench.config import FILE_NAME
from specbench.results import advice
from specbench.results.store import RunStore, stored_runs, write_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specbench.base.load import LoadSnapshot
    from specbench.bench.engines.engine import BenchEngine
    from specbench.bench.grid import Sweep, SweepOptions
    from specbench.bench.runner import SweepRun
    from specbench.cli.sweep_display import RunningTable
    from specbench.results.results import Results
    from specbench.results.run import RunWarning
    from specbench.results.summary import Summary


FOLDER = Path("results")


def run_folder(results: ResultsOptions, sources: dict[str, Any], options: SweepOptions) -> Path:
    """Return the folder of the run: the given one, with ``--resume`` the newest run of this sweep, or a new one.

    Raises:
        UsageError: There is no run of this sweep, or the folder holds results that are not to be continued.
    """
    if results.out is not None:
        if not results.resume:
            RunStore.check_empty(results.out)
        elif not RunStore.exists(results.out):
            raise UsageError(f"There is no run in {results.out}.", "Leave --resume out to begin one there.")
        return results.out
    if results.resume:
        return _begun(sources, options)
    return new_folder(sources["target"])


def new_folder(target: str, ending: str = "") -> Path:
    """Return a folder in results/ that holds no run, named after the day and the target."""
    target = re.sub(r"[^\w.-]+", "-", target).strip("-.") or "model"
    name = f"{datetime.now(UTC).astimezone():%Y-%m-%d}-{target}{ending}"
    numbers = ("", *(f"-{number}" for number in range(2, 10_000)))
    return next(FOLDER / (name + end) for end in numbers if not RunStore.exists(FOLDER / (name + end)))


def _begun(sources: dict[str, Any], options: SweepOptions) -> Path:
    """Return the newest run of this sweep."""
    wanted = {**sources, **stored_options(options)}
    other = ""
    for path, run in stored_runs(FOLDER):
        differing = option_changes(run.options, wanted)
        if not differing:
            return path
        if not run.finished:
            other = other or f": {path} is unfinished, but of another sweep ({'; '.join(differing)})"
    raise UsageError(
        f"There is no run of this sweep in {FOLDER}/{other}.",
        "Name a run with --out, or leave --resume out to begin one.",
    )


class RunJob:
    """A measurement into the folder of a run, with its models loaded, or its servers reached."""

    advice: str
    """What to do if the folder holds a run with other options."""

    def __init__(self, sweep: Sweep, engine: BenchEngine[Any], folder: Path, quiet: bool) -> None:
        self.sweep, self.engine, self.folder, self.quiet = sweep, engine, folder, quiet
        self.console = Console(stderr=True, highlight=False)
        self.recipes = {each.id: each.recipe for each in sweep.configs if each.recipe is not None}
        """The recipes of configurations, with models as they were named."""

    def open_store(self, sources: dict[str, Any], *, may_grow: bool = False) -> RunStore:
        """Return a new run, or the stored one if it is the same as this."""
        target = self.engine.describe_target(self.sweep.options.decoding)
        command = command_line(sys.argv[1:])
        run = describe_run(self.sweep, target, sources, command=command, heads=self.engine.heads)
        return open_run(self.folder, run, self.advice, may_grow=may_grow)

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
        try:
            write_csv(summary.frame, self.folder / "summary.csv")
            write_text(self.folder / "summary.md", text)
        except OSError as error:
            raise RunError(
                f"The summary in {str(self.folder)!r} cannot be written ({error.strerror}).",
                "What was measured is kept.",
            ) from error

    def warn(self, warning: RunWarning) -> None:
        """Print a warning on stderr."""
        self.say(f"{warning.severity}: {warning.message} {warning.advice}")

    def say(self, line: str) -> None:
        """Print a line on stderr."""
        text = Text(terminal_safe(line))
        self.console.print(text, soft_wrap=not self.console.is_terminal)


class SweepJob(RunJob):
    """A sweep, which ends after ``minutes`` if it has a rule to end early; ``predict`` predicts its rows before."""

    advice = "Give another --out."

    def __init__(
        self,
        sweep: Sweep,
        engine: BenchEngine[Any],
        folder: Path,
        results: ResultsOptions,
        *,
        minutes: float | None = None,
        predict: Callable[[SweepJob, RunStore, StageProgress], RunningTable | None] | None = None,
    ) -> None:
        super().__init__(sweep, engine, folder, results.quiet)
        self._results, self._minutes, self._predict = results, minutes, predict
        self._cells = "batches" if sweep.options.batches else "generations"

    def run(self, sources: dict[str, Any], start: LoadSnapshot, notes: Sequence[str]) -> None:
        """Measure, then print and write the results so far, even if the sweep was interrupted.

        Raises:
            typer.Exit: Something failed, or Ctrl-C.
        """
        from specbench.bench.runner import SweepRun
        from specbench.cli.sweep_display import show_cell
        from specbench.results.results import load_results

        with self.open_store(sources, may_grow=True) as store:
            found = self._stored(store)
            self.say_at_start(start, notes, f": {found} there" if found else None)
            interrupted = False
            for problem in store.problems:
                self.say(problem)
            with StageProgress(self.quiet, animated=False) as progress:
                self.console = progress.console
                run = SweepRun(self.sweep, store, self.engine, minutes=self._minutes)
                try:
                    table = self._predict(self, store, progress) if self._predict and run.is_missing else None
                    for at in run.cells():
                        show_cell(at, table, progress, self.say)
                    run.finish()
                except KeyboardInterrupt:
                    interrupted = True
            results = load_results(self.folder)
            try:
                if len(results.done):
                    self._show(results)
            finally:  # also when nobody takes the table
                self._say_at_end(run, self._stored(store) if interrupted else None)
        if interrupted or run.failed:
            raise typer.Exit(exit_code_of_interrupt() if interrupted else 1)

    def _stored(self, store: RunStore) -> str:
        """Return how many of the generations to measure are stored; empty if none is."""
        wanted = {cell.key for cell in self.sweep.plan() if not cell.warmup}
        count = len(wanted & store.done_keys())
        return f"{count} of {len(wanted)} {self._cells} are" if count else ""

    def _say_at_end(self, run: SweepRun[Any], interrupted_at: str | None) -> None:
        for warning in run.warnings:
            self.warn(warning)
        if interrupted_at is None:
            self.say(f"Results: {self.folder}; specbench report {shlex.quote(str(self.folder))} shows them.")
        else:
            self.say(
                f"Interrupted. {interrupted_at or f'No {self._cells} are'} in {self.folder}; to continue, run the same"
                f" command with --out {shlex.quote(str(self.folder))} --resume."
            )
        if run.failed:
            self.say(f"{run.failed} {self._cells} failed; to measure them again, add --resume.")

    def _show(self, results: Results) -> None:
        """Write the answer and the table into two files, then print them; stdout may be closed."""
        from specbench.results.summary import categorize, summarize
        from specbench.show import tables
        from specbench.show.answer import answer_parts, find_answers
        from specbench.show.document import show, to_markdown

        summary, categories = summarize(results), categorize(results)
        more_sheets = tables.service_sheets(results, summary, self._results.limits())
        sheets = [tables.summary_sheet(summary), *more_sheets.values()]
        answers = find_answers(results, summary, categories)
        said = [part for each in answers for part in answer_parts(each)]
        try:
            self.write_summary(summary, to_markdown(*said, *sheets))
        finally:
            console = Console(highlight=False)
            more = ["--config", "none"] if Path(FILE_NAME).is_file() else []
            answers = find_answers(results, summary, categories, self.recipes, more)
            said = [part for each in answers for part in answer_parts(each)]
            show(
                console,
                *said,
                *(each if self._results.verbose else replace(each, notes=[]) for each in sheets),
            )
            if summary.stopping:
                self.say(f"note: {summary.stopping}")
