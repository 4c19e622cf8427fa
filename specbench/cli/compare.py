"""`specbench compare`: two runs, or two configurations of one, side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import RunError, UsageError
from specbench.base.textsafe import counted
from specbench.cli.console import say
from specbench.cli.options import output
from specbench.options import panel

if TYPE_CHECKING:
    from specbench.results.compare import Compared

_option = panel("Options")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Two folders of runs, A and B, or one with --a and --b. A folder of several runs stands for the"
            " newest one.",
        ),
    ],
    a: Annotated[
        str | None, _option("--a CONFIG", "Configuration A, by its name in the tables or its id.")
    ] = None,
    b: Annotated[str | None, _option("--b CONFIG", "Configuration B.")] = None,
    measure: Annotated[
        Literal["auto", "speed", "speedup"],
        _option(
            "--measure WHAT",
            "Quantity to compare: speed (tokens/s), speedup (over the baseline of the same run), or auto: speed if"
            " both runs are from the same kind of machine.",
        ),
    ] = "auto",
    fail_below: Annotated[
        float | None,
        _option(
            "--fail-below RATIO",
            "Exit with code 1 if the 95% interval of A / B, over all prompts, is wholly below RATIO for any"
            " configuration. Ratios without an interval pass; so do all if other programs used the processor most"
            " of the time.",
        ),
    ] = None,
    markdown: Annotated[bool, output("--markdown", "Print a Markdown table.")] = False,
    as_json: Annotated[bool, output("--json", "Print JSON.")] = False,
) -> None:
    """Compare two runs, or two configurations of one: A / B with its 95% interval, and whether A is faster."""
    if fail_below is not None and not (math.isfinite(fail_below) and fail_below > 0):
        raise UsageError(f"--fail-below is {fail_below:g}.", "Give a ratio above 0, such as 0.95.")

    from specbench.results.compare import to_json
    from specbench.show.compare import comparison_parts, to_markdown
    from specbench.show.document import show

    compared = _comparison(runs, a, b, measure)
    if as_json:
        typer.echo(json.dumps(to_json(compared, fail_below), indent=1, allow_nan=False))
    elif markdown:
        typer.echo(to_markdown(compared), nl=False)
    else:
        from rich.console import Console

        show(Console(highlight=False), *comparison_parts(compared))
    if fail_below is None:
        return
    unjudged = sum(row.ratio.basis != "prompts" for row in compared.overall)
    if compared.disturbance:
        say(f"{compared.disturbance} --fail-below does not judge.")
    elif unjudged:
        what = f"{unjudged} of {counted(len(compared.overall), 'ratio')} without an interval over prompts"
        say(f"--fail-below does not judge {what}.")
    below = compared.below(fail_below)
    if below:
        from specbench.results.stats import ratio_text

        slow = "; ".join(f"{row.label}: {ratio_text(row.ratio)}" for row in below)
        raise RunError(f"Ratios with the whole interval below {fail_below:g}: {slow}.")


def _comparison(
    runs: list[Path], a: str | None, b: str | None, measure: Literal["auto", "speed", "speedup"]
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
            (folders[0].resolve().name, folders[1].resolve().name),
            a=a,
            b=b,
            measure=None if measure == "auto" else measure,
        )
    if a is None or b is None:
        raise UsageError(
            "One run is named, without two configurations of it.", "Add --a and --b, or name a second run."
        )
    if measure == "speedup":
        raise UsageError(
            "Two configurations of one run are compared in speed.", "Leave out --measure speedup."
        )
    return compare_configs(measured[0], a, b)
