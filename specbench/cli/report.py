"""`specbench report`: what a run says, as one HTML file and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.options import TracebackOption
from specbench.options import OUTPUT


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Folders of runs, each reported apart; of a folder with several the newest.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to write; default: the run's folder. Several runs get a folder each in there.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    traceback: TracebackOption = False,  # noqa: ARG001 - see TracebackOption
) -> None:
    """Write report.html, one file that needs nothing else, and report.md with its figures in plots/."""
    from specbench.cli.named_runs import named_runs

    runs = named_runs(results)
    failed: UsageError | None = None
    written = False
    for run, folder in zip(runs, _folders(runs, out), strict=True):
        try:
            _write(run, folder)
            written = True
        except UsageError as error:
            if len(runs) == 1:
                raise
            failed = error  # one bad run does not keep the others from being reported
            _hint(f"{run.name}: {error}")
    if failed and not written:
        raise failed


def _folders(runs: list[Path], out: Path | None) -> list[Path]:
    """Where the report of each run goes."""
    if out is None:
        return runs
    if len(runs) == 1:
        return [out]
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        raise UsageError("Two of the runs have the same name.", "Leave --out out, or report them one by one.")
    return [out / name for name in names]


def _write(run: Path, folder: Path) -> None:
    """Report one run: the paths on stdout, the answer on stderr."""
    from specbench.show.report import write_report

    done, paths = write_report(run, folder)
    for path in paths:
        typer.echo(str(path))
    for answer in done.answers:
        _hint(f"{done.name}: {answer.headline}")
    grave = [warning for warning in done.warnings if warning.severity != "info"]
    if grave:
        _hint(f"{done.name}: {len(grave)} warning{'s' * (len(grave) > 1)}; the report says what to do.")


def _hint(message: str) -> None:
    typer.echo(f"specbench: {' '.join(terminal_safe(message).split())}", err=True)
