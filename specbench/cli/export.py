"""`specbench export`: a measured configuration as the command line of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.textsafe import terminal_safe
from specbench.cli.console import say, write_out
from specbench.cli.named_runs import split_row
from specbench.cli.options import EngineName
from specbench.export.registry import ENGINES
from specbench.options import panel

if TYPE_CHECKING:
    from specbench.export.engine import Export, ExportEngine
    from specbench.export.setting import Setting

_option = panel("Options")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Row of a run as RUN:NAME, by its name in the tables or its id; a folder of results (the newest run of"
            " several), for the fastest row that the engine supports.",
        ),
    ],
    to: Annotated[EngineName, _option("--to ENGINE", f"Engine: {', '.join(ENGINES)}.")],
) -> None:
    """Export the fastest setting your engine supports, as its own command line, with notes on what it cannot express.

    If the engine does not support the fastest setting of a run, the fastest supported one is exported. Comments say
    what is not supported, what differs, and how to verify that speculation is on.
    """
    from specbench.export.output import as_file
    from specbench.export.registry import load_engine

    engine = load_engine(to)
    found, made, name = _exported(engine, *split_row(source))
    write_out(terminal_safe(as_file(engine, found, made, name)))
    if found.instead_of is not None:
        say(f"{engine.title} does not have {found.instead_of}. Exported: {found.measured}.")


def _exported(engine: ExportEngine, source: Path, wanted: str | None) -> tuple[Setting, Export, str]:
    """Return the setting, its export, and the name of its source."""
    from specbench.cli.named_runs import named_runs
    from specbench.export.output import export_fastest
    from specbench.export.setting import RunSettings
    from specbench.results.results import load_results

    (folder,) = named_runs([source], [wanted] if wanted else [])[:1]
    name = folder.resolve().name
    results = load_results(folder)
    settings = RunSettings(results, name)
    if wanted is not None:
        setting = engine.nearest(settings.get(wanted))
        return setting, engine.export(setting), name
    return *export_fastest(engine, settings.all()), name
