"""Options of `specbench sweep`, `specbench tune` and `specbench check`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from specbench.cli.options import EngineName, drafters_field, prompts_field, recipe_field
from specbench.export.registry import ENGINES
from specbench.options import DECODING, MODELS, OUTPUT, SamplingOptions, group

_SAME = ("prompts", "limit", "turns", "repeats", "seed", "until", "minutes")
COMPARED = "What is compared"
EXPERIMENT = "Experiment"
_what, _experiment = group(COMPARED), group(EXPERIMENT)
_servers = group("Servers instead of models")
_decoding, _option, _output = group(DECODING), group("Options"), group(OUTPUT)
CHECKED, CHECKED_PROMPTS, SERVER_ANSWERS = "What is checked", 12, 2000
_check = group(CHECKED)


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

    def values(self) -> dict[str, Any]:
        """Return the options by the keywords of ``specbench.sweeps.experiment``.

        Raises:
            UsageError: A value is none.
        """
        from specbench.bench.axes import parse_batches, parse_contexts, parse_thinking

        for value in self.temperature:
            SamplingOptions(value)
        return {
            "drafters": self.drafter or None,
            "temperatures": self.temperature,
            "baselines": self.baseline,
            "batches": [] if self.batch is None else parse_batches(self.batch),
            "arrivals": self.arrivals,
            "contexts": [] if self.context is None else parse_contexts(self.context),
            "thinking": [] if self.thinking is None else parse_thinking(self.thinking),
            **{name: getattr(self, name) for name in _SAME},
        }


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


MINUTES, ENGINE_MINUTES = 1.0, 20.0
"""Time limits of a search."""


@dataclass(frozen=True)
class SearchOptions:
    """What is tried, on which prompts and for how long, and where the answer and the measurements go."""

    drafter: tuple[str, ...] = drafters_field(
        MODELS,
        "Drafter to try as well: a model, a trained head, or a word of `specbench drafters`; repeatable. To measure"
        " given drafters alone: `specbench sweep --until sure`.",
    )
    prompts: tuple[str, ...] = prompts_field()
    temperature: float = _decoding(0.0, "--temperature -t X", "Temperature; 0 for greedy decoding.", min=0.0)
    for_engine: EngineName | None = _option(
        None,
        "--for ENGINE",
        "Only what an engine supports, so that the answer can be exported to it: " + ", ".join(ENGINES) + ".",
    )
    minutes: float | None = _option(
        None,
        "--minutes X",
        f"Time limit for everything; the search can end sooner. Default: {MINUTES:g}, or more for a slow target; with"
        f" --engine {ENGINE_MINUTES:g}.",
    )
    out: Path = _output(Path("specbench.toml"), "--out -o FILE", "File to write the configuration found to.")
    results: Path | None = _output(
        None, "--results FOLDER", "Folder of the run. Default: results/DATE-TARGET-tune."
    )
    resume: bool = _output(
        False,
        "--resume",
        "Continue the run in --results. Without --results: the newest unfinished one of `specbench tune` in"
        " results/.",
    )
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    verbose: bool = _output(False, "--verbose -v", "Print all numbers and notes.")
    quiet: bool = _output(False, "--quiet -q", "No progress.")


@dataclass(frozen=True)
class CheckedOptions:
    """Which outputs are checked, and how closely."""

    prompts: tuple[str, ...] = prompts_field(CHECKED)
    drafter: tuple[str, ...] = drafters_field(MODELS)
    limit: int | None = _check(
        None,
        "--limit N",
        "Number of prompts, taken in turn from the categories, of lines of --outputs, or of a server's answers."
        f" Default: {CHECKED_PROMPTS} prompts, all lines, {SERVER_ANSWERS} answers.",
        min=1,
    )
    outputs: Path | None = _check(
        None,
        "--outputs FILE",
        'Greedy outputs of any engine to check instead: lines of {"prompt": text or ids, "token_ids": [...]}; -'
        " reads standard input.",
    )
    server: str | None = _check(
        None,
        "--server URL",
        "Running server whose sampled output is checked instead (--temperature), by its log probabilities, or by"
        " those of --target if that is given. The key is read from SPECBENCH_KEY_SERVER.",
    )
    against: str | None = _check(
        None,
        "--against URL",
        "Second server, whose output that of --server is compared with; off for the same one without speculation.",
    )
    recipe: str | None = recipe_field()
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    quiet: bool = _output(False, "--quiet -q", "No progress, no notes.")
