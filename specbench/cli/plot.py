"""`specbench plot`: figures of finished or unfinished runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import terminal_safe

if TYPE_CHECKING:
    from specbench.show.plots import Look


def _names() -> str:
    """Of all figures, from the text of their modules, since importing those takes too long for a help text."""
    modules = (Path(__file__).parents[1] / "show" / "plots").glob("*.py")
    text = "".join(module.read_text("utf-8") for module in modules)
    return ", ".join(sorted(re.findall(r'^@figure\(\s*"([^"]+)"', text, re.M)))


def plot(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Folders of runs, each drawn apart; of a folder with several the newest.",
        ),
    ],
    image_format: Annotated[
        Literal["png", "svg", "pdf"] | None,
        typer.Option("--format", help="Of the files; default: png, with --paper pdf.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help=f"Draw this figure only; repeatable: {_names()}."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write; default: plots/ in the run's folder."),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Without title and footer, which a paper says in its caption."),
    ] = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="LENGTH",
            help="Of the figures, such as 3.3in, 84mm, 8.4cm or 240pt; in narrow ones panels stand below each other.",
        ),
    ] = None,
    font_size: Annotated[
        float, typer.Option("--font-size", metavar="POINTS", help="Of the letters in the figures.")
    ] = 8.0,
    show: Annotated[bool, typer.Option("--show", help="Open the files as well; needs a display.")] = False,
) -> None:
    """Draw the figures of runs: speedup, acceptance, where the time goes, prediction, categories."""
    from specbench.cli.named_runs import named_runs
    from specbench.show.plots import Look

    if not 4 <= font_size <= 24:
        raise UsageError(f"--font-size is {font_size:g}.", "Give points from 4 to 24.")
    look = Look(None if width is None else _inches(width), font_size, framed=not paper)
    kind = image_format or ("pdf" if paper else "png")
    if show and not _has_display():
        raise UsageError(
            "--show needs a display, and there is none here.", "Leave it out; the files are written."
        )
    runs = named_runs(results)
    folders = _folders(runs, out)
    written: list[Path] = []
    failed: UsageError | None = None
    for run, folder in zip(runs, folders, strict=True):
        try:
            written += _draw(run, folder, kind, only, look)
        except UsageError as error:
            if len(runs) == 1:
                raise
            failed = error  # one bad run does not keep the others from being drawn
            _hint(f"{run.name}: {error}")
    if not written:
        raise failed or UsageError("There is nothing to plot.", "Name the folder of a run.")
    if show:
        for path in written:
            if typer.launch(str(path)):
                raise RunError(f"Nothing here opens {path.suffix[1:]} files.", "Leave --show out.")


_UNITS = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72, "": 1.0}


def _inches(length: str) -> float:
    """A length with its unit; a number alone is in inches."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt|)", length.strip().lower())
    inches = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 1.5 <= inches <= 20:
        raise UsageError(
            f"--width is {length!r}.", "Give 1.5 to 20 inches, such as 3.3in, 84mm, 8.4cm or 240pt."
        )
    return inches


def _folders(runs: list[Path], out: Path | None) -> list[Path]:
    """Where the figures of each run go."""
    if out is None:
        return [run / "plots" for run in runs]
    if len(runs) == 1:
        return [out]
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        raise UsageError("Two of the runs have the same name.", "Leave --out out, or plot them one by one.")
    return [out / name for name in names]


def _draw(run: Path, folder: Path, kind: str, only: list[str] | None, look: Look) -> list[Path]:
    """Draw one run; the paths on stdout, what is missing on stderr."""
    from specbench.base.files import file_errors, refuse_link
    from specbench.results.results import load_results
    from specbench.show.plots import draw_figures, save_figure

    results = load_results(run)
    for problem in results.problems:
        _hint(problem)
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
    for name, reason in drawn.skipped.items():
        _hint(f"{run.name}: no figure {name!r}: {reason}.")
    return written


def _has_display() -> bool:
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _hint(message: str) -> None:
    typer.echo(f"specbench: {' '.join(terminal_safe(message).split())}", err=True)
