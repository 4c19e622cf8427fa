"""`specbench plot`: figures of finished or unfinished runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.console import say
from specbench.cli.named_runs import ResultsArgument, for_each_run

if TYPE_CHECKING:
    from specbench.show.plots import Look


def _names() -> str:
    """Of all figures, from the text of their modules, since importing those takes too long for a help text."""
    modules = (Path(__file__).parents[1] / "show" / "plots").glob("*.py")
    text = "".join(module.read_text("utf-8") for module in modules)
    return ", ".join(sorted(re.findall(r'^@figure\(\s*"([^"]+)"', text, re.M)))


def plot(
    results: ResultsArgument,
    image_format: Annotated[
        Literal["png", "svg", "pdf"] | None,
        typer.Option("--format", help="File format. Default: png (pdf with --paper).", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help=f"Figure to draw; repeatable: {_names()}. Default: all."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Output folder. Default: plots/ in the run's folder."),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Figures for a paper: no title, no footer, pdf.")
    ] = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="LENGTH",
            help="Width of figures: 3.3in, 84mm, 8.4cm or 240pt. Panels of narrow figures are stacked.",
        ),
    ] = None,
    font_size: Annotated[
        float, typer.Option("--font-size", metavar="POINTS", help="Font size of figures.")
    ] = 8.0,
) -> None:
    """Draw the figures of runs: speedup, acceptance, where the time goes, prediction, categories."""
    from specbench.show.plots import Look

    if not 4 <= font_size <= 24:
        raise UsageError(f"--font-size is {font_size:g}.", "Give points from 4 to 24.")
    look = Look(None if width is None else _inches(width), font_size, framed=not paper)
    kind = image_format or ("pdf" if paper else "png")
    written: list[Path] = []

    def draw(run: Path, folder: Path) -> None:
        written.extend(_draw(run, folder, kind, only, look))

    for_each_run(results, out, "plots", draw)
    if not written:
        raise UsageError("There is nothing to plot.", "Name the folder of a run.")


_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72, "": 1.0}


def _inches(length: str) -> float:
    """Return a length in inches; a number without a unit is one."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt|)", length.strip().lower())
    inches = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1.5 <= inches <= 20:
        raise UsageError(
            f"--width is {length!r}.", "Give 1.5 to 20 inches, such as 3.3in, 84mm, 8.4cm or 240pt."
        )
    return inches


def _draw(run: Path, folder: Path, kind: str, only: list[str] | None, look: Look) -> list[Path]:
    """Draw the figures of one run: paths go to stdout, reasons for missing ones to stderr."""
    from specbench.base.files import file_errors, refuse_link
    from specbench.results.results import load_results
    from specbench.show.plots import draw_figures, save_figure

    results = load_results(run)
    for problem in results.problems:
        say(problem)
    drawn = draw_figures(results, only, look)
    if folder == run / "plots":  # in a folder that somebody else may have made
        refuse_link(folder)
    with file_errors(f"{str(folder)!r} cannot be made", "Give another --out."):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in drawn.figures.items():
        path = folder / f"{name}.{kind}"
        save_figure(figure, path)
        typer.echo(terminal_safe(str(path)))
        written.append(path)
    if only:
        for name, reason in drawn.skipped.items():
            say(f"{run.name}: no figure {name!r}: {reason}.")
    elif drawn.skipped:
        say(f"{run.name} has no data for other figures; --only NAME says why: {', '.join(drawn.skipped)}.")
    return written
