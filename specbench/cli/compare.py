"""`specbench compare`: two runs, or two rows of them, side by side, or a new one judged by a baseline."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError, unknown
from specbench.base.files import file_errors, write_bytes
from specbench.base.textsafe import counted
from specbench.cli.console import say, write_json, write_parts
from specbench.cli.options import JsonOption
from specbench.options import panel

if TYPE_CHECKING:
    from specbench.results.results import Results

_option = panel("Options")

EXIT_CODES = {"not worse": 0, "worse": 1, "cannot tell": 3}
"""Of ``--worse-than``; 2 is a wrong command line, as everywhere."""


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            metavar="A B",
            help="Two rows as RUN:NAME, by their names in the tables or their ids, or two runs; or a run and a YAML"
            " file of published accepted lengths. A folder of several runs stands for the newest one. B may be the"
            " address of a server: it is measured now, with the prompts and options of the row A.",
        ),
    ],
    metric: Annotated[
        str | None,
        _option(
            "--metric NAME",
            "Figure to compare: tokens_per_second, ttft_s, speedup, speedup_total, tokens_per_step, acceptance_rate,"
            " acceptance_tested or alpha; with --worse-than also several, separated by commas. Default:"
            " tokens_per_second, or speedup if the machines of two runs differ.",
        ),
    ] = None,
    worse_than: Annotated[
        str | None,
        _option(
            "--worse-than PERCENT",
            "Judge B, a new run, by A, its baseline: is any row more than this worse, such as 3%? Exit code 0: none is;"
            " 1: one is; 3: nobody can tell, so measure more prompts.",
        ),
    ] = None,
    junit: Annotated[
        Path | None, _option("--junit FILE", "Also write the judgments of --worse-than as JUnit XML.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs, or two rows: A / B with its 95% interval, and whether A is faster."""
    from specbench.results.compare import COMPARED, Matched, compare_runs, to_json
    from specbench.results.gate import WORDS, judge, outcome
    from specbench.show.compare import comparison_parts, to_junit
    from specbench.specs.sweeps import parse_percent

    if len(sides) == 2 and sides[1].endswith((".yaml", ".yml")):
        if (metric, worse_than, junit) != (None, None, None):
            raise UsageError(
                "Published lengths are only shown.", "Leave out --metric, --worse-than and --junit."
            )
        return _beside_published(sides[0], Path(sides[1]), as_json=as_json)
    metrics = [*dict.fromkeys(name.strip() for name in metric.split(","))] if metric is not None else []
    for name in metrics:
        if name not in COMPARED:
            raise unknown("figure", name, COMPARED, " to compare")
    allowed = None if worse_than is None else parse_percent("--worse-than", worse_than)
    if allowed is None and (junit is not None or len(metrics) > 1):
        what = "--junit writes judgments" if junit is not None else "Several figures are judged, not compared"
        raise UsageError(f"{what}.", "Add --worse-than, such as --worse-than 3%.")
    (a, name_a, row_a), (b, name_b, row_b) = _opened(sides)
    if allowed is None:
        compared = compare_runs(a, b, (name_a, name_b), a=row_a, b=row_b, metric=next(iter(metrics), None))
    else:
        both = Matched(b, a, a=row_b, b=row_a, words=WORDS)
        compared = judge(both, metrics, allowed, (name_b, name_a))
    if as_json:
        write_json(to_json(compared))
    else:
        write_parts(*comparison_parts(compared))
    if junit is not None:
        where = f"The file {str(junit)!r} cannot be written", "Give another --junit."
        with file_errors(*where, kind=UsageError):
            write_bytes(junit, to_junit(compared))
    if allowed is not None and (code := EXIT_CODES[outcome(compared)]):
        raise typer.Exit(code)


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


def _opened(sides: list[str]) -> list[tuple[Results, str, str | None]]:
    """Return the run of each side with its name, and the row of it that is compared, if one is named."""
    from specbench.cli.named_runs import named_runs, split_row
    from specbench.results.results import load_results

    if len(sides) != 2:
        raise UsageError(f"{counted(len(sides), 'side')} given.", "Name two: rows as RUN:NAME, or runs.")
    (path_a, a), (path_b, b) = map(split_row, sides)
    if sides[1].startswith(("http://", "https://")):
        (run,) = named_runs([path_a], [a] if a else [])
        old = load_results(run)
        return [(old, run.resolve().name, a), _measured(old, a, sides[1])]
    if a is not None and b is not None and path_a == path_b:
        (run,) = named_runs([path_a], [a, b])
        results = load_results(run)
        return [(results, run.resolve().name, a), (results, run.resolve().name, b)]
    # A name beside a run stands for a row of both.
    rows = [(path_a, a or b), (path_b, b or a)]
    runs = [named_runs([path], [name] if name else [])[0] for path, name in rows]
    return [(load_results(run), run.resolve().name, name) for run, name in zip(runs, (a, b), strict=True)]


def _measured(old: Results, name: str | None, address: str) -> tuple[Results, str, str]:
    """Measure a row of a run again, on a server, as a new run."""
    from specbench.bench.manifest import command_line
    from specbench.cli.progress import StageProgress
    from specbench.cli.sweep_display import show_cell
    from specbench.experiment import opened
    from specbench.results.results import load_results
    from specbench.results.run import find_config
    from specbench.sweeps import measured_again

    if name is None:
        raise UsageError("No row is named that the server is compared with.", "Name it: RUN:NAME.")
    asked = measured_again(old.run, find_config(old.run, name, "the baseline"), address)
    with (
        StageProgress(False, animated=False) as progress,
        opened(asked, command=command_line(sys.argv[1:]), progress=progress) as session,
    ):
        for doing in session.run():
            show_cell(session, doing, progress)
    results = load_results(session.store.path)
    say(f"Measured: {session.store.path}.")
    return results, session.store.path.name, results.run.configs[0].id
