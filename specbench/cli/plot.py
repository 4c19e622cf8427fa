"""`specbench plot`: figures of finished or unfinished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.console import say
from specbench.cli.named_runs import RunArgument, named_runs
from specbench.show.figures import FIGURES


def plot(
    results: RunArgument,
    image_format: Annotated[
        Literal["png", "svg", "pdf"], typer.Option("--format", help="File format.")
    ] = "png",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help=f"Figure to draw; repeatable: {', '.join(FIGURES)}. Default: all."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Output folder. Default: plots/ in the run's folder."),
    ] = None,
) -> None:
    """Draw the figures of a run: speedup, acceptance, where the time goes.

    Paths go to stdout, reasons for missing figures to stderr.
    """
    from specbench.base.files import file_errors, refuse_link
    from specbench.results.results import load_results
    from specbench.show.plots import draw_figures, save_figure

    (run,) = named_runs([results])
    folder, loaded = out or run / "plots", load_results(run)
    for problem in loaded.problems:
        say(problem)
    if loaded.run.finished is None:
        say(f"{run.name} is unfinished: its figures show what was measured so far.")
    figures, skipped = draw_figures(loaded, only)
    if folder == run / "plots":  # in a folder that somebody else may have made
        refuse_link(folder)
    with file_errors(f"{str(folder)!r} cannot be made", "Give another --out."):
        folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = folder / f"{name}.{image_format}"
        save_figure(figure, path)
        typer.echo(terminal_safe(str(path)))
    if only:
        for name, reason in skipped.items():
            say(f"{run.name}: no figure {name!r}: {reason}.")
    elif skipped:
        say(f"{run.name} has no data for other figures; --only NAME says why: {', '.join(skipped)}.")
    if not figures:
        raise UsageError("There is nothing to plot.", "Name a run with measurements.")
