"""`specbench report`: a run as one HTML file and as Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specbench.base.errors import UsageError
from specbench.cli.console import say
from specbench.cli.named_runs import for_each_run
from specbench.cli.options import output


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Folders of runs. A folder of several runs stands for the newest one. JSON files of aiperf, guidellm"
            " or `vllm bench serve` are shown next to each run.",
        ),
    ],
    out: Annotated[
        Path | None,
        output(
            "--out",
            "DIR",
            "Output folder. Default: the run's own folder. With several runs, each gets a subfolder.",
        ),
    ] = None,
    latex: Annotated[bool, output("--latex", None, "Also write the tables to tables.tex.")] = False,
) -> None:
    """Write report.html, one file that needs nothing else, and report.md with its figures in plots/."""
    from specbench.results.others import other_file, read_other
    from specbench.show.report import write_report

    files = {path: file for path in results if (file := other_file(path)) is not None}
    others = [
        replace(each, label=f"{each.label} ({path.name})")
        for path, file in files.items()
        for each in read_other(file)
    ]
    runs = [path for path in results if path not in files]
    if not runs:
        raise UsageError(
            "A report is about a run, and only files of other tools are named.",
            "Name a run in addition to them, or compare two files: `specbench compare A B`.",
        )

    def write(run: Path, folder: Path) -> None:
        done, paths = write_report(run, folder, others, latex=latex)
        for path in paths:
            typer.echo(str(path))
        for answer in done.answers:
            say(f"{done.name}: {answer.headline}")
        grave = [warning for warning in done.warnings if warning.severity != "info"]
        if grave:
            say(f"{done.name}: {len(grave)} warning{'s' * (len(grave) > 1)}; the report says what to do.")

    for_each_run(runs, out, "", write)
