"""`specbench compare`: two runs, or two configurations of one, held against each other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import RunError, UsageError
from specbench.cli.options import TracebackOption, complete_configurations
from specbench.options import OUTPUT

if TYPE_CHECKING:
    from specbench.results.compare import Compared

_FEW = 4  # configurations up to which the categories of each are shown without being asked for


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Two folders of runs, A and B, or one with --a and --b; of a folder with"
            " several runs the newest.",
        ),
    ],
    a: Annotated[
        str | None,
        typer.Option(
            "--a",
            metavar="CONFIG",
            autocompletion=complete_configurations,
            help="The configuration of A, by its name in the tables or its id.",
        ),
    ] = None,
    b: Annotated[
        str | None,
        typer.Option(
            "--b", metavar="CONFIG", autocompletion=complete_configurations, help="The configuration of B."
        ),
    ] = None,
    measure: Annotated[
        Literal["auto", "speed", "speedup"],
        typer.Option(
            "--measure",
            metavar="WHAT",
            help="speed (tokens/s), speedup (over the baseline of its own run), or auto: speed if both runs were"
            " made on one kind of machine.",
        ),
    ] = "auto",
    other_target: Annotated[
        bool, typer.Option("--other-target", help="Compare although the targets differ.")
    ] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(
            "--fail-below",
            metavar="RATIO",
            help="Leave with exit code 1 if A / B of any configuration, on all prompts, has a 95% interval that lies"
            " wholly below RATIO. An interval that reaches RATIO passes; so does a ratio without one, and all where"
            " others used the processor most of the time.",
        ),
    ] = None,
    categories: Annotated[
        bool | None,
        typer.Option(
            "--categories/--no-categories",
            help=f"Show the categories of each configuration; by default with at most {_FEW} of these.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write a Markdown table.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.", rich_help_panel=OUTPUT)] = False,
    traceback: TracebackOption = False,  # noqa: ARG001 - see TracebackOption
) -> None:
    """Compare two runs, or two configurations of one: A / B with its 95% interval, and whether A is faster."""
    if markdown and as_json:
        raise UsageError("--markdown and --json exclude each other.", "Give one of them.")
    if fail_below is not None and not (math.isfinite(fail_below) and fail_below > 0):
        raise UsageError(f"--fail-below is {fail_below:g}.", "Give a ratio above 0, such as 0.95.")

    compared = _compared(runs, a, b, measure, other_target)
    _show(compared, categories=categories, markdown=markdown, as_json=as_json, fail_below=fail_below)
    if fail_below is None:
        return
    unjudged = sum(row.ratio.basis != "prompts" for row in compared.overall)
    if compared.disturbance:
        typer.echo(f"specbench: {compared.disturbance} --fail-below does not judge.", err=True)
    elif unjudged:
        verb = "has" if unjudged == 1 else "have"
        what = f"{unjudged} of {len(compared.overall)} ratios {verb} no interval over prompts"
        typer.echo(
            f"specbench: {what}, so --fail-below does not judge {'it' if unjudged == 1 else 'them'}.",
            err=True,
        )
    below = compared.below(fail_below)
    if below:
        from specbench.results.stats import ratio_text

        slow = "; ".join(f"{row.label}: {ratio_text(row.ratio)}" for row in below)
        raise RunError(f"Below {fail_below:g} with its whole interval: {slow}.")


def _compared(
    runs: list[Path],
    a: str | None,
    b: str | None,
    measure: Literal["auto", "speed", "speedup"],
    other_target: bool,
) -> Compared:
    from specbench.cli.named_runs import named_runs
    from specbench.results.compare import compare_configs, compare_runs
    from specbench.results.results import load_results

    if len(runs) > 2:
        raise UsageError(f"{len(runs)} runs are named.", "Name two, or one with --a and --b.")
    # Of two runs each has one of the configurations, or both the one that is named.
    sides = [[a or b], [b or a]] if len(runs) == 2 else [[a, b]]
    folders = [
        named_runs([path], [name for name in names if name])[0]
        for path, names in zip(runs, sides, strict=True)
    ]
    measured = [load_results(folder) for folder in folders]
    if len(folders) == 2:
        return compare_runs(
            measured[0],
            measured[1],
            (_name(folders[0]), _name(folders[1])),
            a=a,
            b=b,
            measure=None if measure == "auto" else measure,
            other_target=other_target,
        )
    if a is None or b is None:
        raise UsageError(
            "One run is named, and not which two configurations of it.",
            "Add --a and --b, or name a second run.",
        )
    if measure == "speedup":
        raise UsageError(
            "Two configurations of one run are compared in speed.", "Leave out --measure speedup."
        )
    return compare_configs(measured[0], a, b)


def _name(folder: Path) -> str:
    return folder.resolve().name


def _show(
    compared: Compared, *, categories: bool | None, markdown: bool, as_json: bool, fail_below: float | None
) -> None:
    from specbench.results.compare import to_json
    from specbench.show.compare import render_terminal, to_markdown

    if as_json:
        typer.echo(json.dumps(to_json(compared, fail_below), indent=1, allow_nan=False))
    elif markdown:
        typer.echo(to_markdown(compared), nl=False)
    else:
        from rich.console import Console

        shown = len(compared.overall) <= _FEW if categories is None else categories
        render_terminal(compared, Console(highlight=False), categories=shown)
