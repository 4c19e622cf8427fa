"""`specbench trace`: show a step trace from its file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli.options import output

if TYPE_CHECKING:
    from specbench.results.trace import Event


def trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Trace that --trace-file wrote; - reads standard input.")
    ],
    html: Annotated[
        Path | None, output("--html FILE", "Write a web page, one file, instead of showing the trace here.")
    ] = None,
) -> None:
    """Show a step trace that `specbench generate --trace-file` wrote, here or as a web page."""
    from rich.console import Console

    from specbench.results.trace import parse_trace, read_trace
    from specbench.show.trace import TraceView

    events = parse_trace(sys.stdin.buffer, "Standard input") if str(file) == "-" else read_trace(file)
    if html is not None:
        _write_page(events, html)
        return
    view = TraceView(Console())
    for event in events:
        view.show(event)


def _write_page(events: Iterable[Event], path: Path) -> None:
    """Write the page of a trace; of a damaged one, that of the events before the damage."""
    from specbench.base.files import file_errors, write_text
    from specbench.show.html import to_html
    from specbench.show.trace import trace_parts

    read: list[Event] = []
    try:
        for event in events:
            read.append(event)  # noqa: PERF402 - those before an error stay
    finally:
        if read:
            with file_errors(
                f"The page {str(path)!r} cannot be written", "Name a file in a folder that exists."
            ):
                write_text(path, to_html("Trace", trace_parts(read)))
            typer.echo(str(path))
