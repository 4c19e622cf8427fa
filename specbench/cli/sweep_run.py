"""Running a sweep: the folder of its results, what would run, and measuring."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.progress import StageProgress
from specbench.cli.signals import exit_code_of_interrupt
from specbench.cli.sweep_options import ResultsOptions
from specbench.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.bench.engines.engine import BenchEngine
    from specbench.bench.estimate import TimeEstimate
    from specbench.bench.grid import Cell, Sweep, SweepOptions
    from specbench.bench.prompts import Prompt
    from specbench.results.load import LoadSnapshot
    from specbench.results.results import Results
    from specbench.results.run import RunWarning
    from specbench.results.store import RunStore
    from specbench.results.summary import Summary
    from specbench.specs.drafters import DrafterSpec


_FOLDER = Path("results")
_BUSY = 1.25
"""How many times longer a sweep has to take because of others for that to be said."""


def refuse_taken(folder: Path, results: ResultsOptions) -> None:
    """Refuse a folder with results that are not to be gone on with."""
    from specbench.results.store import RunStore

    if not results.resume and RunStore.exists(folder):
        raise UsageError(
            f"The folder {str(folder)!r} holds results already.",
            "Add --resume to go on with them, or give another --out.",
        )


def describe_sources(
    base: Recipe,
    drafters: Sequence[DrafterSpec],
    prompts: Sequence[str],
    categories: Sequence[str],
    limit: int | None,
) -> dict[str, Any]:
    """Where models and prompts come from, without paths: the rest of what ``run.json`` keeps as options."""

    def loading(load_options: Any) -> dict[str, Any]:
        values = asdict(load_options)
        if values["device_map"]:
            values["device_map"] = Path(values["device_map"]).name
        return values

    return {
        "target": str(base.target),
        "drafters": [str(spec) for spec in drafters],
        "target_options": loading(base.models.target),
        "drafter_options": loading(base.models.drafter),
        "prompts": [Path(name).name for name in prompts],
        "categories": list(categories),
        "limit": limit,
    }


def run_folder(results: ResultsOptions, sources: dict[str, Any], options: SweepOptions) -> Path:
    """The folder of the run: the given one, with ``--resume`` the newest unfinished run like this one, or a new one."""
    from specbench.results.store import RunStore

    if results.out is not None:
        return results.out
    if results.resume:
        return _resumed(sources, options, retry_failed=results.retry_failed)
    target = re.sub(r"[^\w.-]+", "-", sources["target"]).strip("-.") or "model"
    name = f"{datetime.now(UTC).astimezone():%Y-%m-%d}-{target}"
    numbers = ("", *(f"-{number}" for number in range(2, 10_000)))
    return next(_FOLDER / (name + end) for end in numbers if not RunStore.exists(_FOLDER / (name + end)))


def _resumed(sources: dict[str, Any], options: SweepOptions, *, retry_failed: bool) -> Path:
    """The newest unfinished run like this one; with ``retry_failed`` a finished one will do."""
    from specbench.bench.manifest import option_changes, stored_options
    from specbench.results.store import stored_runs

    wanted = {**sources, **stored_options(options)}
    other = ""
    for path, run in stored_runs(_FOLDER):
        differing = option_changes(run.options, wanted)
        unfinished = not run.finished
        if not differing and (retry_failed or unfinished):
            return path
        if not differing:
            other = other or f"{path} holds it finished"
        elif unfinished:
            other = other or f"{path} is unfinished, but of another sweep ({'; '.join(differing)})"
    raise UsageError(
        f"There is no unfinished run of this sweep in {_FOLDER}/{f': {other}' if other else ''}.",
        "Name the run to go on with by --out, or leave --resume out to begin.",
    )


def _time_needed(need: TimeEstimate, start: LoadSnapshot) -> str:
    """A time, or a range of times on a machine that others use."""
    from specbench.bench.estimate import slowdown
    from specbench.cli.sweep_display import duration

    longer = slowdown(start.load_average, start.cores)
    if longer < _BUSY:
        return f"takes about {duration(need.seconds)}, {need.source}"
    return (
        f"takes {duration(need.seconds)} to {duration(longer * need.seconds)}, for the machine is busy (a load of"
        f" {start.load_average:.1f} on {start.cores} cores), {need.source}"
    )


def show_dry_run(
    sweep: Sweep, base: Recipe, drafters: Sequence[DrafterSpec], folder: Path, start: LoadSnapshot
) -> None:
    from specbench.bench.engines.own import check_engine
    from specbench.bench.estimate import estimate_memory, estimate_time

    with StageProgress() as progress:
        check_engine(base, drafters, sweep.options, progress)
        need = estimate_time(sweep, base, drafters, folder.parent, progress=progress)
        memory = estimate_memory(sweep, base, drafters, progress=progress)
    lines = [
        *planned(sweep, folder),
        _time_needed(need, start),
        f"memory: {memory.total / 1e9:.1f} GB "
        f"({', '.join(f'{name} {size / 1e9:.1f}' for name, size in memory.parts.items())}); "
        f"{memory.available / 1e9:.1f} GB are free",
    ]
    if memory.total > memory.available:
        lines.append("This does not fit: choose a smaller model or a narrower dtype.")
    for line in lines:
        print_line(line)


def planned(sweep: Sweep, folder: Path) -> list[str]:
    """What would run, and where it would be stored."""
    cells = [cell for cell in sweep.plan() if not cell.warmup]
    categories = dict.fromkeys(prompt.category for prompt in sweep.prompts)
    return [
        f"{len(sweep.configs)} configurations: {', '.join(config.label for config in sweep.configs)}",
        f"{len(sweep.prompts)} prompts: {_categories(sweep.prompts)}" if categories else "",
        f"{_counted_cells(cells)} of up to {sweep.options.decoding.max_new_tokens} tokens "
        f"({sweep.options.repeats} repeats), stored in {folder}",
    ]


def _counted_cells(cells: Sequence[Cell]) -> str:
    requests = sum(len(cell.group.prompts) for cell in cells if cell.group is not None)
    if not requests:
        return f"{len(cells)} generations"
    return f"{len(cells)} groups of requests side by side, {requests} generations"


def _categories(prompts: Sequence[Prompt]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(p.category for p in prompts).items())


def print_line(line: str) -> None:
    """A line to stdout, broken between words on a terminal; names in it are data."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(terminal_safe(line, console.encoding)), soft_wrap=not console.is_terminal)


class RunJob:
    """Something that measures into the folder of a run, with its models loaded, or its servers reached."""

    advice: str
    """What to do about a run in the folder that was made otherwise."""

    def __init__(self, sweep: Sweep, engine: BenchEngine[Any], folder: Path, quiet: bool) -> None:
        from rich.console import Console

        self.sweep, self.engine, self.folder, self.quiet = sweep, engine, folder, quiet
        self.console = Console(stderr=True, highlight=False)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipes of configurations, with models as they were named."""
        return {each.id: each.recipe for each in self.sweep.configs if each.recipe is not None}

    def open_store(self, sources: dict[str, Any], *, accept_changes: bool = False) -> RunStore:
        """A new run, or the stored one if it is the same as this."""
        from specbench.bench.manifest import command_line, open_run

        return open_run(
            self.folder,
            self.sweep,
            target=self.engine.describe_target(self.sweep.options.decoding),
            sources=sources,
            command=command_line(sys.argv[1:]),
            heads=self.engine.heads,
            advice=self.advice,
            accept_changes=accept_changes,
        )

    def say_at_start(self, start: Any, notes: Sequence[str], going_on: str | None) -> None:
        """What the machine is like, what there is to say of models, and that a run goes on (``None``: it begins)."""
        from specbench.results.advice import warn_at_start

        for note in notes:
            self.say(f"note: {note}")
        for warning in warn_at_start(start):
            self.warn(warning)
        if going_on is not None and not self.quiet:
            self.say(f"Going on with {self.folder}{going_on}.")

    def write_summary(self, summary: Summary, text: str) -> None:
        """The table and the answer in two files."""
        from specbench.base.files import write_text
        from specbench.results.store import write_csv

        try:
            write_csv(summary.frame, self.folder / "summary.csv")
            write_text(self.folder / "summary.md", text)
        except OSError as error:
            raise RunError(
                f"The summary in {str(self.folder)!r} cannot be written ({error.strerror}).",
                "What was measured is kept.",
            ) from error

    def warn(self, warning: RunWarning) -> None:
        """A warning to stderr."""
        self.say(f"{warning.severity}: {warning.message} {warning.advice}")

    def say(self, line: str) -> None:
        """A line to stderr."""
        from rich.text import Text

        text = Text(terminal_safe(line, self.console.encoding))
        self.console.print(text, soft_wrap=not self.console.is_terminal)


class SweepJob(RunJob):
    """A sweep."""

    advice = "Restore that, give another --out, or add --accept-changes to go on all the same."

    def going_on(self, store: RunStore, *, retry_failed: bool) -> str | None:
        """For ``say_at_start``: how many are there."""
        found = self.found(store, retry_failed=retry_failed)
        return f": {found} there" if found else None

    def found(self, store: RunStore, *, retry_failed: bool) -> str:
        """How many of the generations that are to be measured are stored; empty if none is."""
        wanted = {cell.key for cell in self.sweep.plan() if not cell.warmup}
        count = len(wanted & store.done_keys(retry_failed=retry_failed))
        return f"{count} of {len(wanted)} {self._cells} are" if count else ""

    @property
    def _cells(self) -> str:
        return "groups of requests" if self.sweep.options.batches else "generations"

    def run(self, store: RunStore, *, retry_failed: bool) -> int:
        """Measure; show and write what there is then, whether it came to its end or not. The exit code."""
        from specbench.bench.runner import run_sweep
        from specbench.cli.sweep_display import SweepDisplay
        from specbench.results.results import load_results

        interrupted, failed = False, 0
        warnings: Sequence[RunWarning] = ()
        for problem in store.problems:
            self.say(problem)
        with SweepDisplay(self.sweep, self.console, quiet=self.quiet) as display:
            try:
                result = run_sweep(
                    self.sweep, store, self.engine, on_event=display.handle, retry_failed=retry_failed
                )
                warnings, failed = result.warnings, result.failed
            except KeyboardInterrupt:
                interrupted = True
        results = load_results(self.folder)
        try:
            if len(results.done):
                self._summarize(results)
        finally:  # also when nobody takes the table
            for warning in warnings:
                self.warn(warning)
            if interrupted:
                self.say(
                    f"Interrupted. {self.found(store, retry_failed=retry_failed) or f'No {self._cells} are'} in"
                    f" {self.folder}; to go on, run the same command with --out {self.folder} --resume."
                )
            else:
                self.say(f"Results are in {self.folder}: summary.csv, summary.md and every generation.")
                self.say(f"Next: specbench plot {self.folder}, specbench report {self.folder}")
            if failed:
                self.say(f"{failed} {self._cells} failed; to try them again, add --resume --retry-failed.")
        if interrupted:
            return exit_code_of_interrupt()
        return 1 if failed else 0

    def _summarize(self, results: Results) -> None:
        """The answer and the table in two files, and then on stdout, which may be closed."""
        from rich.console import Console

        from specbench.cli.sweep_display import show_answer
        from specbench.config import FILE_NAME
        from specbench.results.requests import request_rows
        from specbench.results.summary import categorize, summarize
        from specbench.show import tables
        from specbench.show.answer import answer_parts, find_answers
        from specbench.show.document import Part, show, to_markdown

        summary, categories, requests = summarize(results), categorize(results), request_rows(results)
        shown: list[Part] = [tables.summary_sheet(summary)]
        shown += [tables.request_sheet(requests)] if requests else []
        answers = find_answers(results, summary, categories)
        said = [part for each in answers for part in answer_parts(each)]
        try:
            self.write_summary(summary, to_markdown(*said, *shown))
        finally:
            console = Console(highlight=False)
            more = ["--no-config"] if Path(FILE_NAME).is_file() else []
            for answer in find_answers(results, summary, categories, self.recipes, more):
                show_answer(answer, console)
            show(console, *shown)
