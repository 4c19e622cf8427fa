"""The options of `specbench sweep` alone, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbench.base.errors import UsageError
from specbench.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.bench.grid import SweepOptions
    from specbench.bench.prompts import Prompt


_DEFAULT_PROMPTS, _DEFAULT_LIMIT = "all", 12
_GROUPS = 3  # of prompts side by side that an interval takes at least
_what = partial(typer.Option, rich_help_panel="What is compared")
_experiment = partial(typer.Option, rich_help_panel="Experiment")
_results = partial(typer.Option, rich_help_panel="Results")
_servers = partial(typer.Option, rich_help_panel="Servers in place of models")


@dataclass(frozen=True)
class ComparedOptions:
    """What stands in the grid beside draft lengths."""

    drafter: Annotated[tuple[str, ...], opt.several_drafters(rich_help_panel="What is compared")] = ()
    temperature: Annotated[
        tuple[float, ...],
        _what("--temperature", "-t", metavar="X", help="0 (the default) for greedy decoding; repeatable."),
    ] = ()
    baseline: Annotated[
        tuple[str, ...],
        _what(
            "--baseline",
            metavar="NAME",
            help="Measure beside plain decoding: transformers, its own generate; beam:N, its beam search with N beams,"
            " whose answers are others. Repeatable.",
        ),
    ] = ()
    assisted: Annotated[
        Literal["transformers"] | None,
        _what(
            "--assisted",
            metavar="transformers",
            help="Measure its prompt lookup and, with drafter models, its assisted generation too.",
        ),
    ] = None
    batch: Annotated[
        str | None,
        _what(
            "--batch",
            metavar="RANGE",
            help="Decode so many requests at a time: 1,2,4,8 or a range as of --gamma. Plain decoding at the same batch"
            " is the baseline. Without it, one prompt follows the other.",
        ),
    ] = None
    arrivals: Annotated[
        tuple[str, ...],
        _what(
            "--arrivals",
            metavar="KIND",
            help="--batch: how requests come; repeatable. closed:N: from N clients that wait for their answers (as many"
            " as the batch); poisson:RATE: at random, so many per second.",
        ),
    ] = ()


@dataclass(frozen=True)
class ServerOptions:
    """Which servers are measured in place of models, and how."""

    server: Annotated[
        tuple[str, ...],
        _servers(
            "--server",
            metavar="NAME=URL[#MODEL]",
            help="Measure this server, which speaks the OpenAI protocol; repeatable, the first is the baseline. The"
            " model is the one it lists; --target names it here, for its tokenizer to check counts. A key is read from"
            " the environment variable SPECBENCH_KEY_NAME.",
        ),
    ] = ()
    api: Annotated[
        Literal["chat", "completions"],
        _servers(
            "--api", metavar="WHAT", help="What servers are asked: chat, by their template, or completions."
        ),
    ] = "chat"
    timeout: Annotated[
        float,
        _servers("--timeout", min=0.1, metavar="SECONDS", help="Wait so long for every piece of an answer."),
    ] = 300.0
    check_outputs: Annotated[
        bool,
        _servers(
            "--check-outputs",
            help="Load --target at the end, and say by how much it prefers one of two outputs that part.",
        ),
    ] = False


@dataclass(frozen=True)
class ExperimentOptions:
    """Which prompts are decoded, and how often."""

    prompts: Annotated[tuple[str, ...], opt.prompt_sets(rich_help_panel="Experiment")] = ()
    category: Annotated[
        tuple[str, ...], _experiment("--category", metavar="NAME", help="Only these; repeatable.")
    ] = ()
    limit: Annotated[
        int | None,
        _experiment(
            "--limit",
            min=1,
            metavar="N",
            help="Prompts in all, taken in turn from the categories. Default: all of the sets or categories named,"
            f" {_DEFAULT_LIMIT} if none is.",
        ),
    ] = None
    turns: Annotated[
        int | None,
        _experiment(
            "--turns", min=1, metavar="N", help="At most so many turns of a conversation. Default: all."
        ),
    ] = None
    repeats: Annotated[int, _experiment("--repeats", "-r", metavar="N", help="Of everything.")] = 2
    warmup: Annotated[
        int,
        _experiment(
            "--warmup", metavar="N", help="Short generations of each configuration that do not count."
        ),
    ] = 1
    seed: Annotated[
        int, _experiment("--seed", min=0, metavar="N", help="Of the random order and of sampling.")
    ] = 0

    def chosen(self, batches: Sequence[int]) -> tuple[tuple[str, ...], int | None]:
        """The sets that prompts are taken from, and how many."""
        limit = self.limit
        if limit is None and not self.prompts and not self.category:
            limit = max(_DEFAULT_LIMIT, _GROUPS * max(batches, default=1))
        return self.prompts or (_DEFAULT_PROMPTS,), limit


@dataclass(frozen=True)
class ResultsOptions:
    """Where results go, and whether others are gone on with."""

    out: Annotated[
        Path | None,
        _results("--out", "-o", metavar="FOLDER", help="Where results go. Default: results/DATE-TARGET."),
    ] = None
    resume: Annotated[
        bool,
        _results(
            "--resume",
            help="Go on with the results in --out, or begin there; without --out with the newest unfinished run of this"
            " sweep in results/.",
        ),
    ] = False
    accept_changes: Annotated[
        bool,
        _results(
            "--accept-changes",
            help="With --resume: go on although the machine, versions or options have changed.",
        ),
    ] = False
    retry_failed: Annotated[
        bool, _results("--retry-failed", help="With --resume: measure again what failed.")
    ] = False
    dry_run: Annotated[
        bool, _results("--dry-run", help="Say what would run, how long, and in how much memory.")
    ] = False

    def __post_init__(self) -> None:
        if not self.resume and (self.accept_changes or self.retry_failed):
            raise UsageError("--accept-changes and --retry-failed need --resume.", "Add it.")
        if self.accept_changes and self.out is None:
            raise UsageError("--accept-changes needs --out.", "Name the folder of the run to go on with.")


def chosen_prompts(experiment: ExperimentOptions, options: SweepOptions) -> list[Prompt]:
    from specbench.bench.grid import check_batches
    from specbench.bench.prompts import load_prompts

    named, limit = experiment.chosen(options.batches)
    prompts = load_prompts(named, experiment.category, limit)
    check_batches(options, len(prompts))
    return prompts


def checked_temperatures(temperatures: Sequence[float]) -> Sequence[float]:
    from specbench.decoding.sampling import Sampling

    for value in temperatures:
        Sampling(temperature=value)  # raises for what is none
    return temperatures
