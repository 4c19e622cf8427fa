"""`specbench export`: a setting in the words of the engine it is deployed on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.cli.options import (
    DEFAULT_DRAFTER,
    DEFAULT_TARGET,
    JsonOption,
    TracebackOption,
    complete_configurations,
)

if TYPE_CHECKING:
    from specbench.tune.export.setting import Setting

__all__ = ["export"]

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
            help="Of a run: a setting by its name in the tables or its id. Default: the fastest.",
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

    ENGINE is transformers, vllm, sglang, llama.cpp, tensorrt-llm, mlx-lm or openvino. What it has no counterpart of,
    what means something else there, and how to see that it is on, stand in comments.
    """
    from specbench.cli.watchers import write_out
    from specbench.textsafe import terminal_safe
    from specbench.tune.export.engines import ENGINES, as_file, as_json

    found, name = _found(source, setting, gamma)
    engine = ENGINES[to]
    made = engine.export(found)
    if json_output:
        write_out(json.dumps(as_json(engine, found, made, name), allow_nan=False) + "\n")
    else:
        write_out(terminal_safe(as_file(engine, found, made, name), sys.stdout.encoding or "utf-8"))


def _found(source: Path, wanted: str | None, gamma: int | None) -> tuple[Setting, str]:
    """The setting that is meant, and what it is from."""
    from dataclasses import replace

    from specbench.config import read_config
    from specbench.errors import UsageError
    from specbench.specs.rules import default_rule
    from specbench.tune.export.setting import setting_of_config, setting_of_run

    if source.suffix == ".toml":
        if wanted is not None:
            raise UsageError("A configuration holds one setting.", "Leave --setting out.")
        config = read_config(source)
        rule = None if config.rule is not None else str(default_rule(greedy=True))
        whole = replace(
            config,
            target=config.target or DEFAULT_TARGET,
            drafter=config.drafter or DEFAULT_DRAFTER,
            length_policy=rule or config.length_policy,
        )
        return setting_of_config(whole, gamma), source.name
    from specbench.cli.named_runs import named_runs
    from specbench.results.store import load_results

    (folder,) = named_runs([source], [wanted] if wanted else [])[:1]
    name = folder.resolve().name
    return setting_of_run(load_results(folder), wanted, gamma, name=name), name
