"""Options of `specbench sweep` in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from specbench.cli.options import drafters_field, prompts_field
from specbench.options import group

COMPARED = "What is compared"
EXPERIMENT = "Experiment"
_what, _experiment = group(COMPARED), group(EXPERIMENT)
_servers = group("Servers instead of models")


@dataclass(frozen=True)
class ComparedOptions:
    """The axes of the grid other than draft policies, the prompts, and how often they are decoded."""

    drafter: tuple[str, ...] = drafters_field(COMPARED)
    temperature: tuple[float, ...] = _what(
        (), "--temperature -t X", "Temperature; repeatable. Default: 0, greedy decoding."
    )
    baseline: tuple[str, ...] = _what(
        (),
        "--baseline NAME",
        "Repeatable: transformers, assisted (its speculation), beam:N.",
    )
    batch: str | None = _what(
        None,
        "--batch RANGE",
        "Batch sizes, such as 1,2,4,8. Default: one prompt after the other.",
    )
    arrivals: tuple[str, ...] = _what(
        (),
        "--arrivals KIND",
        "Workload of --batch, repeatable: closed:N or poisson:RATE.",
    )
    context: str | None = _what(
        None,
        "--context LENGTHS",
        "Lengths of prompts in tokens, such as 256,1024: text in front of each.",
    )
    thinking: str | None = _what(None, "--thinking WHICH", "Thinking: on, off or on,off.")
    prompts: tuple[str, ...] = prompts_field(EXPERIMENT)
    limit: int | None = _experiment(
        None,
        "--limit N",
        "Number of prompts. Default: all, or 12 if no set is named.",
        min=1,
    )
    turns: int | None = _experiment(
        None,
        "--turns N",
        "Most turns of a conversation. Default: all; with servers 1.",
        min=1,
    )
    repeats: int = _experiment(2, "--repeats -r N", "Repeats of each generation.")
    seed: int = _experiment(0, "--seed N", "Seed of the random order and of sampling.", min=0)
    until: str | None = _experiment(
        None,
        "--until WIDTH",
        "Stop when the fastest is known (sure), or within ±5% (or another share).",
    )
    minutes: float = _experiment(60.0, "--minutes X", "Time limit of --until, without loading.", min=0.0)


@dataclass(frozen=True)
class ServerOptions:
    """Servers to measure instead of models, or an engine whose servers are started, with one setting each."""

    server: tuple[str, ...] = _servers(
        (),
        "--server NAME=URL",
        "OpenAI server; repeatable, the first is the baseline. #MODEL behind the URL is one of its models, --target"
        " names its tokenizer, SPECBENCH_KEY_NAME in the environment its key.",
    )
    engine: str | None = _servers(
        None,
        "--engine ENGINE",
        "Start vllm, sglang or llama.cpp for each setting; NAME:servers=N.",
    )
    engine_command: str = _servers(
        "",
        "--engine-command COMMAND",
        "Starts a server in place of the usual command; {port} is its port.",
    )


StartedArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ENGINE OPTIONS]", help="Options that every server of --engine gets."),
]
