"""Which runs the folders on a command line mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

__all__ = ["named_runs"]


def named_runs(paths: Sequence[Path], having: Sequence[str] = ()) -> list[Path]:
    """The runs that are meant. A folder that holds several stands for the newest of them; which one is said on stderr.

    Args:
        paths: Runs, files in one, or folders with runs in them.
        having: Ids or labels of configurations: a run that has them all goes before a newer one that has not.

    Raises:
        UsageError: A path does not exist, or no run is there.
    """
    from specbench.results.store import find_runs, stored_runs
    from specbench.textsafe import terminal_safe

    found: dict[Path, None] = {}
    for path in paths:
        runs = find_runs(path)
        readable = stored_runs(path) if len(runs) > 1 else []
        if readable:
            names = [{config.get(field) for config in run["configs"] for field in ("id", "label")}
                     for _, run in readable]  # fmt: skip
            fits = [run for (run, _), its in zip(readable, names, strict=True) if its.issuperset(having)]
            runs = [(fits or [run for run, _ in readable])[0]]
            with_these = f" with {' and '.join(having)}" if having and fits else ""
            taken = f"of the {len(readable)} runs in {str(path)!r} the newest{with_these}, {str(runs[0])!r}."
            typer.echo(f"specbench: {terminal_safe(taken)} For another name its own folder.", err=True)
        found.update(dict.fromkeys(runs))
    return list(found)
