"""`specbench report`: a run as one HTML file and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.console import say
from specbench.cli.named_runs import RunArgument, named_runs
from specbench.cli.options import output


def report(
    results: RunArgument,
    out: Annotated[
        Path | None,
        output(
            "--out DIR",
            "Output folder. Default: the run's own folder.",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        output("--slo LIMITS", "Goodput within limits such as ttft=500ms,tpot=30ms (also e2el=4s)."),
    ] = None,
) -> None:
    """Write report.html, one file that needs nothing else, report.md with plots/, and accepted lengths in lengths/."""
    from specbench.results.summary import parse_limits
    from specbench.show.report import write_report

    limits = {} if slo is None else parse_limits(slo)
    (run,) = named_runs([results])
    done, paths = write_report(run, run if out is None else out, limits)
    for path in paths:
        typer.echo(str(path))
    for answer in done.answers:
        say(f"{done.name}: {answer.headline}")
    grave = [finding for finding in done.findings if finding.severity != "note"]
    if grave:
        say(f"{done.name}: {len(grave)} warning{'s' * (len(grave) > 1)}; the report says what to do.")
