"""`specbench export`: a setting in the words of the engine it is deployed on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import terminal_safe
from specbench.cli.options import (
    DEFAULT_TARGET,
    JsonOption,
    TracebackOption,
    complete_configurations,
    default_drafter,
)
from specbench.cli.watchers import write_out
from specbench.specs.rules import default_rule

if TYPE_CHECKING:
    from specbench.export.engine import Export, ExportEngine
    from specbench.export.setting import Setting

EngineName = Literal["transformers", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "mlx-lm", "openvino"]


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of results, of several runs the newest; or a specbench.toml.",
        ),
    ],
    to: Annotated[EngineName, typer.Option("--to", metavar="ENGINE", help="What to deploy on.")],
    setting: Annotated[
        str | None,
        typer.Option(
            "--setting",
            metavar="NAME",
            autocompletion=complete_configurations,
            help="Of a run: a setting by its name in the tables or its id. Default: the fastest that the engine has.",
        ),
    ] = None,
    gamma: Annotated[
        int | None,
        typer.Option(
            "--gamma",
            "-g",
            min=1,
            metavar="N",
            help="γ, where the engine takes a fixed one. Default: what the run says.",
        ),
    ] = None,
    json_output: JsonOption = False,
    traceback: TracebackOption = False,  # noqa: ARG001 - see TracebackOption
) -> None:
    """Write the command or program that switches a measured setting on in another engine.

    ENGINE is transformers, vllm, sglang, llama.cpp, tensorrt-llm, mlx-lm or openvino. Where it does not have the
    fastest setting of a run, the fastest that it has is written, with by how much that is slower. What it has no
    counterpart of, what means something else there, and how to see that it is on, stand in comments.
    """
    from specbench.export.engines import ENGINES, as_file, as_json

    engine = ENGINES[to]
    found, made, name = _exported(engine, source, setting, gamma)
    if json_output:
        write_out(json.dumps(as_json(engine, found, made, name), allow_nan=False) + "\n")
    else:
        write_out(terminal_safe(as_file(engine, found, made, name), sys.stdout.encoding or "utf-8"))
        if found.replaces is not None:
            what = f"{found.measured}, {found.replaces}"
            note = f"{engine.title} does not have the fastest setting of {name}; exported is {what}."
            typer.echo(f"specbench: {terminal_safe(note)}", err=True)


def _exported(
    engine: ExportEngine, source: Path, wanted: str | None, gamma: int | None
) -> tuple[Setting, Export, str]:
    """The setting that is meant, its export, and what it is from."""
    from specbench.config import PROVISIONAL, read_config
    from specbench.export.engines import export_fastest, export_setting
    from specbench.export.setting import setting_of_config, setting_of_run, settings_of_run

    if source.suffix == ".toml":
        if wanted is not None:
            raise UsageError("A configuration holds one setting.", "Leave --setting out.")
        config = read_config(source)
        if config.provisional:
            typer.echo(f"specbench: {source.name} {PROVISIONAL}", err=True)
        rule = None if config.rule is not None else str(default_rule(greedy=True))
        target = config.target or DEFAULT_TARGET
        whole = replace(
            config,
            target=target,
            drafter=config.drafter or default_drafter(target),
            length_policy=rule or config.length_policy,
        )
        setting = setting_of_config(whole, gamma)
        return setting, export_setting(engine, setting), source.name
    from specbench.cli.named_runs import named_runs
    from specbench.results.results import load_results

    (folder,) = named_runs([source], [wanted] if wanted else [])[:1]
    name = folder.resolve().name
    results = load_results(folder)
    if wanted is not None:
        setting = setting_of_run(results, wanted, gamma, name=name)
        return setting, export_setting(engine, setting), name
    return *export_fastest(engine, settings_of_run(results, gamma, name=name), results), name
