"""Finding the runs that a command line names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.cli.console import say

if TYPE_CHECKING:
    from specbench.results.run import Run

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of a run. A folder of several runs stands for the newest one."
    ),
]


def named_row(text: str) -> tuple[Path, str]:
    """Return the run and the row that ``RUN:NAME`` means.

    Raises:
        UsageError: There is no such run, or no row is named.
    """
    folder, name = split_row(text)
    if name is None:
        raise UsageError(f"{text!r} names no row.", "Write RUN:NAME, with a name as the tables have it.")
    (run,) = named_runs([folder], [name])
    return run, name


def split_row(text: str) -> tuple[Path, str | None]:
    """Return the folder and the row of ``RUN:NAME``; without a row, ``None``. Both may hold colons."""
    ends = [at for at, letter in enumerate(text) if letter == ":" and Path(text[:at]).exists()]
    if Path(text).exists() or not ends:
        return Path(text), None
    return Path(text[: ends[0]]), text[ends[0] + 1 :]


def named_runs(paths: Sequence[Path], having: Sequence[str] = ()) -> list[Path]:
    """Return the runs that are meant. A folder of several stands for the newest in which something was measured; stderr
    says which one it is.

    Args:
        paths: Runs, files in one, or folders with runs in them.
        having: Ids or labels of configurations; a run in which all of them were measured goes before others.

    Raises:
        UsageError: A path does not exist, or no run is there.
    """
    from specbench.results.store import find_runs, stored_runs

    found: dict[Path, None] = {}
    for path in paths:
        runs = find_runs(path)
        readable = stored_runs(path) if len(runs) > 1 else []
        if readable:
            measured = (
                folder for names in (having, ()) for folder, run in readable if _has(folder, run, names)
            )
            runs = [next(measured, readable[0][0])]
            say(
                f"{path}: {len(readable)} runs, taken is {runs[0]}. Name a folder of a run to take another one."
            )
        found.update(dict.fromkeys(runs))
    return list(found)


def _has(folder: Path, run: Run, names: Sequence[str]) -> bool:
    """Return whether these configurations were measured; without names, whether any beside the baseline was."""
    from specbench.results.run import find_config
    from specbench.results.store import measured_configs

    with suppress(UsageError):
        wanted = {find_config(run, name, "").id for name in names}
        others = {config.id for config in run.configs if config.id != config.baseline}
        measured = measured_configs(folder)
        return wanted <= measured if wanted else bool(others & measured)
    return False
