"""Options of `specbench sweep` and `specbench tune`, in groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbench.base.errors import UsageError
from specbench.cli.options import (
    drafters_option,
    output,
    prompt_option,
    prompts_option,
    suite_option,
)
from specbench.options import DECODING, MODELS, CacheName, panel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.progress import Progress
    from specbench.bench.contexts import ContextText
    from specbench.bench.grid import SweepOptions
    from specbench.bench.prompts import Prompt
    from specbench.results.run import StoredSuite


_DEFAULT_PROMPTS, _DEFAULT_LIMIT = "all", 12
_GROUPS = 3  # of prompts side by side that an interval takes at least
COMPARED = "What is compared"
EXPERIMENT = "Experiment"
_what, _experiment, _results = panel(COMPARED), panel(EXPERIMENT), panel("Results")
_servers = panel("Servers instead of models")
_engines = panel("Another engine")
StartedName = Literal["vllm", "sglang", "llama.cpp"]
"""Engines whose servers are started."""


@dataclass(frozen=True)
class ComparedOptions:
    """The axes of the grid other than draft policies."""

    drafter: Annotated[tuple[str, ...], drafters_option(COMPARED)] = ()
    temperature: Annotated[
        tuple[float, ...],
        _what("--temperature -t", "X", "Temperature; repeatable. Default: 0, greedy decoding."),
    ] = ()
    baseline: Annotated[
        tuple[str, ...],
        _what(
            "--baseline",
            "NAME",
            "Other baseline; repeatable: transformers (its own generate) or beam:N (its beam search with N beams,"
            " which gives other outputs).",
        ),
    ] = ()
    assisted: Annotated[
        Literal["transformers"] | None,
        _what(
            "--assisted",
            "transformers",
            "Speculative decoding of transformers: its prompt lookup and, for drafter models, assisted generation.",
        ),
    ] = None
    batch: Annotated[
        str | None,
        _what(
            "--batch",
            "RANGE",
            "Batch sizes: 1,2,4,8 or a range as in --gamma. Plain decoding of the same batch is the baseline. Default:"
            " one prompt after the other.",
        ),
    ] = None
    arrivals: Annotated[
        tuple[str, ...],
        _what(
            "--arrivals",
            "KIND",
            "Workload of --batch; repeatable. closed:N: N clients that wait for their answers (default: as many as the"
            " batch); poisson:RATE: random arrivals, RATE per second.",
        ),
    ] = ()
    context: Annotated[
        str | None,
        _what(
            "--context",
            "LENGTHS",
            "Lengths of prompts in tokens: 256,1024,4096,8192. Text stands in front of each question. Plain decoding of"
            " the same length is the baseline. Default: the prompts as they are.",
        ),
    ] = None
    context_file: Annotated[
        Path | None,
        _what("--context-file", "FILE", "Text for --context. Default: pages of specbench's documentation."),
    ] = None


@dataclass(frozen=True)
class ServerOptions:
    """Servers to measure instead of models."""

    server: Annotated[
        tuple[str, ...],
        _servers(
            "--server",
            "NAME=URL[#MODEL]",
            "Server to measure by the OpenAI protocol; repeatable, the first is the baseline. Default of MODEL: the one"
            " it lists. --target names the model for its tokenizer. Keys are read from SPECBENCH_KEY_NAME in the"
            " environment.",
        ),
    ] = ()
    api: Annotated[
        Literal["chat", "completions"],
        _servers("--api", "WHAT", "Endpoint: chat (the server applies its template) or completions."),
    ] = "chat"
    timeout: Annotated[
        float, _servers("--timeout", "SECONDS", "Timeout for each streamed chunk.", min=0.1)
    ] = 300.0
    prompt_cache: Annotated[
        Literal["avoid", "keep"],
        _servers(
            "--prompt-cache",
            "WHAT",
            "Prompt caches of servers: avoid, or keep those of earlier turns in a conversation. keep sends all turns.",
        ),
    ] = "avoid"
    check_outputs: Annotated[
        bool,
        _servers(
            "--check-outputs",
            None,
            "At the end, load --target and use its logits to judge outputs that differ.",
        ),
    ] = False


@dataclass(frozen=True)
class EngineOptions:
    """An engine whose servers are started, with one setting each."""

    engine: Annotated[
        StartedName | None,
        _engines(
            "--engine",
            "ENGINE",
            "Start servers of an engine, one for each setting, and measure them: vllm, sglang or llama.cpp. Options for"
            " the engine follow --.",
        ),
    ] = None
    engine_command: Annotated[
        str,
        _engines(
            "--engine-command",
            "COMMAND",
            "Command that starts the engine's server in place of its usual one, such as docker or ssh; {port} stands"
            " for the port.",
        ),
    ] = ""
    max_servers: Annotated[
        int | None,
        _engines(
            "--max-servers", "N", "Servers that run at a time. Default: as many as fit into memory.", min=1
        ),
    ] = None
    start_timeout: Annotated[
        float, _engines("--start-timeout", "SECONDS", "Timeout for the start of a server.", min=1.0)
    ] = 600.0


StartedArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ENGINE OPTIONS]", help="Options that every server of --engine gets."),
]


@dataclass(frozen=True)
class ExperimentOptions:
    """Prompts, and how often they are decoded."""

    prompts: Annotated[tuple[str, ...], prompts_option(EXPERIMENT)] = ()
    suite: Annotated[
        tuple[str, ...], suite_option(EXPERIMENT, "--limit draws as many prompts of each task, by --seed.")
    ] = ()
    category: Annotated[
        tuple[str, ...], _experiment("--category", "NAME", "Category of prompts; repeatable. Default: all.")
    ] = ()
    limit: Annotated[
        int | None,
        _experiment(
            "--limit",
            "N",
            "Number of prompts, taken in turn from the categories. Default: all of the named sets or categories,"
            f" {_DEFAULT_LIMIT} of a suite or if none is named.",
            min=1,
        ),
    ] = None
    turns: Annotated[
        int | None,
        _experiment(
            "--turns",
            "N",
            "Maximum number of turns of each conversation. Default: all; with servers 1, without --prompt-cache keep.",
            min=1,
        ),
    ] = None
    repeats: Annotated[int, _experiment("--repeats -r", "N", "Repeats of each generation.")] = 2
    warmup: Annotated[
        int, _experiment("--warmup", "N", "Warm-up generations of each configuration, short and not counted.")
    ] = 1
    seed: Annotated[int, _experiment("--seed", "N", "Seed of the random order and of sampling.", min=0)] = 0
    until: Annotated[
        str | None,
        _experiment(
            "--until",
            "WIDTH",
            "Stop as soon as the answer is known: sure (the verdict on the fastest configuration) or 5% (its interval"
            " reaches at most 5% to each side). --limit and --repeats are then upper limits; the default of --limit is"
            " all prompts.",
        ),
    ] = None
    minutes: Annotated[
        float, _experiment("--minutes", "X", "Time limit of --until, without loading.", min=0.0)
    ] = 60.0


@dataclass(frozen=True)
class ResultsOptions:
    """Where results go, and which run is continued."""

    out: Annotated[
        Path | None, _results("--out -o", "FOLDER", "Folder of the run. Default: results/DATE-TARGET.")
    ] = None
    resume: Annotated[
        bool,
        _results(
            "--resume",
            None,
            "Continue the run in --out, or begin one there. Without --out: the newest unfinished run of this sweep in"
            " results/.",
        ),
    ] = False
    accept_changes: Annotated[
        bool,
        _results(
            "--accept-changes",
            None,
            "With --resume, continue even if the machine, versions or options have changed.",
        ),
    ] = False
    retry_failed: Annotated[
        bool, _results("--retry-failed", None, "With --resume, measure failed generations again.")
    ] = False
    dry_run: Annotated[bool, _results("--dry-run", None, "Show the plan, then exit.")] = False


_decoding, _option = panel(DECODING), panel("Options")
MINUTES, ENGINE_MINUTES = 6.0, 20.0
"""Time limits of a search."""


@dataclass(frozen=True)
class TuneResultsOptions:
    """Where the answer and the measurements go."""

    out: Annotated[Path, output("--out -o", "FILE", "File to write the configuration found to.")] = Path(
        "specbench.toml"
    )
    overwrite: Annotated[bool, output("--overwrite", None, "Overwrite --out.")] = False
    results: Annotated[
        Path | None, output("--results", "FOLDER", "Folder of the run. Default: results/DATE-TARGET-tune.")
    ] = None
    resume: Annotated[
        bool,
        output(
            "--resume",
            None,
            "Continue the run in --results. Without --results: the newest unfinished one of `specbench tune` in"
            " results/.",
        ),
    ] = False


@dataclass(frozen=True)
class SearchOptions:
    """What is tried, on which prompts, and for how long."""

    drafter: Annotated[
        tuple[str, ...],
        drafters_option(
            MODELS,
            "Drafter to try as well: a model, a trained head, or a word of `specbench drafters`; repeatable. To measure"
            " given drafters alone: `specbench sweep --until sure`.",
        ),
    ] = ()
    prompts: Annotated[tuple[str, ...], prompts_option()] = ()
    suite: Annotated[tuple[str, ...], suite_option()] = ()
    category: Annotated[
        tuple[str, ...], prompt_option("--category", "NAME", "Category of prompts; repeatable. Default: all.")
    ] = ()
    temperature: Annotated[
        float, _decoding("--temperature -t", "X", "Temperature; 0 for greedy decoding.", min=0.0)
    ] = 0.0
    cache: Annotated[
        CacheName | None,
        _decoding(
            "--cache",
            "KIND",
            "KV cache: dynamic, preallocated, static or none. Default: preallocated where forward passes are faster"
            " with it.",
        ),
    ] = None
    batch: Annotated[
        str | None,
        _option(
            "--batch",
            "RANGE",
            "With --engine: batch sizes to measure at the end, for a schedule of draft lengths.",
        ),
    ] = None
    minutes: Annotated[
        float | None,
        _option(
            "--minutes",
            "X",
            f"Time limit for everything; the search can end sooner. Default: {MINUTES:g}, with --engine"
            f" {ENGINE_MINUTES:g}.",
        ),
    ] = None
    seed: Annotated[int, _option("--seed", "N", "Seed of the random order and of sampling.", min=0)] = 0


@dataclass(frozen=True)
class ChosenPrompts:
    """The prompts of a sweep.

    Attributes:
        prompts: The prompts.
        sources: The options that choose them, without paths, as ``run.json`` has them.
        suites: Public benchmarks that they are from.
    """

    prompts: tuple[Prompt, ...]
    sources: dict[str, Any]
    suites: tuple[StoredSuite, ...] = ()


def choose_prompts(
    options: ExperimentOptions | SearchOptions, limit: int | None, progress: Progress | None = None
) -> ChosenPrompts:
    """Return the prompts of ``--prompts`` or ``--suite``, and where they come from."""
    from specbench.bench.prompts import load_prompts

    if options.suite and options.prompts:
        raise UsageError("--suite and --prompts both name prompts.", "Leave one of them out.")
    named = options.suite or options.prompts or (_DEFAULT_PROMPTS,)
    suites: list[StoredSuite] = []
    if options.suite:
        from specbench.bench.suites import load_suites

        prompts, suites = load_suites(named, options.category, limit, seed=options.seed, progress=progress)
    else:
        prompts = load_prompts(named, options.category, limit)
    sources = {
        "prompts": [Path(name).name for name in named],
        "categories": [*options.category],
        "limit": limit,
    }
    return ChosenPrompts(tuple(prompts), sources, tuple(suites))


def prompts_of_sweep(
    experiment: ExperimentOptions, options: SweepOptions, progress: Progress | None = None
) -> ChosenPrompts:
    """Return the prompts of a sweep, in an order in which it can stop early with ``--until``."""
    from specbench.bench.grid import check_batches
    from specbench.bench.prompts import interleave, shuffled

    limit = experiment.limit
    if limit is None and experiment.until is None and not (experiment.prompts or experiment.category):
        limit = max(_DEFAULT_LIMIT, _GROUPS * max(options.batches, default=1))
    chosen = choose_prompts(experiment, limit, progress)
    if experiment.until is not None:  # the first ones have to stand for all
        chosen = replace(chosen, prompts=tuple(interleave(shuffled(chosen.prompts, experiment.seed))))
    check_batches(options, len(chosen.prompts))
    return chosen


def context_text(compared: ComparedOptions) -> ContextText | None:
    """Return the text in front of prompts; ``None`` without --context."""
    from specbench.bench.contexts import load_context_text

    return None if compared.context is None else load_context_text(compared.context_file)


def checked_temperatures(temperatures: Sequence[float]) -> Sequence[float]:
    from specbench.decoding.sampling import Sampling

    for value in temperatures:
        Sampling(temperature=value)  # raises for what is none
    return temperatures
