"""Which runs the folders on a command line mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbench.base.textsafe import terminal_safe

if TYPE_CHECKING:
    from specbench.results.run import Run


def named_runs(paths: Sequence[Path], having: Sequence[str] = ()) -> list[Path]:
    """The runs that are meant. A folder that holds several stands for the newest in which something was measured;
    which one is said on stderr, and which newer ones are not taken.

    Args:
        paths: Runs, files in one, or folders with runs in them.
        having: Ids or labels of configurations: a run in which they all were measured goes before one where not, and
            that goes before one that has not all of them.

    Raises:
        UsageError: A path does not exist, or no run is there.
    """
    from specbench.results.store import find_runs, stored_runs

    found: dict[Path, None] = {}
    for path in paths:
        runs = find_runs(path)
        readable = stored_runs(path) if len(runs) > 1 else []
        if readable:
            runs = [_taken(path, readable, having)]
        found.update(dict.fromkeys(runs))
    return list(found)


def _taken(path: Path, readable: Sequence[tuple[Path, Run]], having: Sequence[str]) -> Path:
    """The run of a folder that is meant, which is said on stderr."""
    from specbench.results.store import measured_configs

    named = [each for each in readable if _ids(each[1], having) is not None]
    with_these = f" with {' and '.join(having)}" if having and named else ""
    passed: list[Path] = []
    taken = (named or readable)[0][0]
    for folder, run in named or readable:
        measured = measured_configs(folder)
        others = {config.id for config in run.configs if config.id != config.baseline}
        if (_ids(run, having) or set()) <= measured if with_these else measured & others:
            taken = folder
            break
        passed.append(folder)
    else:
        passed = []
    words = f"of the {len(readable)} runs in {str(path)!r} the newest{with_these}, {str(taken)!r}."
    if passed:
        skipped = ", ".join(repr(str(folder)) for folder in passed)
        words += f" Newer, but with no finished measurement of it: {skipped}." if with_these else ""
        words += (
            "" if with_these else f" Newer, but with no finished measurement beside the baseline: {skipped}."
        )
    typer.echo(f"specbench: {terminal_safe(words)} For another name its own folder.", err=True)
    return taken


def _ids(run: Run, having: Sequence[str]) -> set[str] | None:
    """The ids of these configurations; ``None`` if the run has not all of them."""
    ids = {getattr(config, field): config.id for field in ("label", "id") for config in run.configs}
    return {ids[name] for name in having} if all(name in ids for name in having) else None
