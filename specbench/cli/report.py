"""`specbench report`: a run as one HTML file and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.console import say
from specbench.cli.named_runs import ResultsArgument, for_each_run
from specbench.cli.options import Fields, output
from specbench.cli.sweep_options import ResultsOptions


def report(
    results: ResultsArgument,
    out: Annotated[
        Path | None,
        output(
            "--out DIR",
            "Output folder. Default: the run's own folder. With several runs, each gets a subfolder.",
        ),
    ] = None,
    shown: Annotated[ResultsOptions, Fields("slo")] = ResultsOptions(),  # noqa: B008
) -> None:
    """Write report.html, one file that needs nothing else, and report.md with its figures in plots/."""
    from specbench.show.report import write_report

    def write(run: Path, folder: Path) -> None:
        done, paths = write_report(run, folder, shown.limits())
        for path in paths:
            typer.echo(str(path))
        for answer in done.answers:
            say(f"{done.name}: {answer.headline}")
        grave = [warning for warning in done.warnings if warning.severity != "info"]
        if grave:
            say(f"{done.name}: {len(grave)} warning{'s' * (len(grave) > 1)}; the report says what to do.")

    for_each_run(results, out, "", write)
