"""`specbench trace`: show a step trace from its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def trace(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Trace that --trace-file wrote; - reads standard input.")
    ],
) -> None:
    """Show a step trace that `specbench generate --trace-file` wrote."""
    from rich.console import Console

    from specbench.results.trace import parse_trace, read_trace
    from specbench.show.trace import TraceView

    view = TraceView(Console())
    events = parse_trace(sys.stdin.buffer, "Standard input") if str(file) == "-" else read_trace(file)
    for event in events:
        view.show(event)
