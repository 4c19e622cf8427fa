"""`specbench compare`: two runs, or two rows of them, side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError, unknown
from specbench.base.textsafe import counted
from specbench.cli.console import write_json, write_parts
from specbench.cli.options import JsonOption
from specbench.options import panel

if TYPE_CHECKING:
    from specbench.results.compare import Compared

_option = panel("Options")


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="Two rows as RUN:NAME, by their names in the tables or their ids, or two runs; or a run and a YAML"
            " file of published accepted lengths. A folder of several runs stands for the newest one.",
        ),
    ],
    metric: Annotated[
        str | None,
        _option(
            "--metric NAME",
            "Figure to compare: tokens_per_second, ttft_s, speedup, speedup_total, tokens_per_step, acceptance_rate,"
            " acceptance_tested or alpha. Default: tokens_per_second, or speedup if the machines of two runs differ.",
        ),
    ] = None,
    fail_below: Annotated[
        float | None,
        _option(
            "--fail-below RATIO",
            "Exit with code 1 if the 95% interval of A / B, over all prompts, is wholly below RATIO for any"
            " configuration. Ratios without an interval pass; so do all if other programs used the processor most"
            " of the time.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs, or two rows: A / B with its 95% interval, and whether A is faster."""
    if fail_below is not None and not (math.isfinite(fail_below) and fail_below > 0):
        raise UsageError(f"--fail-below is {fail_below:g}.", "Give a ratio above 0, such as 0.95.")

    if len(sides) == 2 and sides[1].endswith((".yaml", ".yml")):
        if metric is not None or fail_below is not None:
            raise UsageError("Published lengths are only shown.", "Leave --metric and --fail-below out.")
        return _beside_published(sides[0], Path(sides[1]), as_json=as_json)
    from specbench.results.compare import to_json
    from specbench.show.compare import comparison_parts

    compared = _comparison(sides, metric)
    if as_json:
        write_json(to_json(compared))
    else:
        write_parts(*comparison_parts(compared))


def _beside_published(run: str, file: Path, *, as_json: bool) -> None:
    from specbench.base.record import to_dict
    from specbench.cli.named_runs import named_runs
    from specbench.results.published import beside_published, read_published
    from specbench.results.results import load_results
    from specbench.results.summary import Summary
    from specbench.show.compare import published_parts

    published, (folder,) = read_published(file), named_runs([Path(run)])
    rows = beside_published(Summary(load_results(folder)), published)
    if not rows:
        lengths = ", ".join(map(str, sorted({gamma for _, gamma in published.lengths})))
        raise UsageError(
            f"No row of {folder.name} has counts of drafts at a published draft length.",
            f"{file.name} has γ {lengths}.",
        )
    if as_json:
        cells = [
            {**vars(row), "config": row.config.id, "tokens_per_draft": to_dict(row.tokens_per_draft)}
            for row in rows
        ]
        write_json({"model": published.model, "header": published.header, "rows": cells})
    else:
        write_parts(*published_parts(folder.resolve().name, rows, published, file))


def _comparison(sides: list[str], metric: str | None) -> Compared:
    from specbench.cli.named_runs import named_runs, split_row
    from specbench.results.compare import COMPARED, compare_configs, compare_runs
    from specbench.results.results import load_results

    if metric is not None and metric not in COMPARED:
        raise unknown("figure", metric, COMPARED, " to compare")
    if len(sides) != 2:
        raise UsageError(f"{counted(len(sides), 'side')} given.", "Name two: rows as RUN:NAME, or runs.")
    (path_a, a), (path_b, b) = map(split_row, sides)
    if a is not None and b is not None and path_a == path_b:
        (run,) = named_runs([path_a], [a, b])
        return compare_configs(load_results(run), a, b, metric or "tokens_per_second")
    # A name beside a run stands for a row of both.
    rows = [(path_a, a or b), (path_b, b or a)]
    run_a, run_b = (named_runs([path], [name] if name else [])[0] for path, name in rows)
    names = run_a.resolve().name, run_b.resolve().name
    return compare_runs(load_results(run_a), load_results(run_b), names, a=a, b=b, metric=metric)
