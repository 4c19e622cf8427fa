"""`specbench sweep`: measure a grid of drafters and draft lengths against plain decoding."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.progress import starting
from specbench.cli.sweep_options import (
    ComparedOptions,
    ServerOptions,
    StartedArguments,
)
from specbench.options import CacheOptions, DecodingOptions, ModelOptions, TemplateOptions


def sweep(
    ctx: typer.Context,
    *,
    compared: ComparedOptions,
    servers: ServerOptions,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    models: ModelOptions,
    drafting: opt.PoliciesOptions,
    template: Annotated[TemplateOptions, opt.Fields(without=("thinking",))],
    decoding: Annotated[DecodingOptions, opt.Fields(without=("stop",), max_new_tokens=48)],
    caching: CacheOptions,
    out: Annotated[
        Path | None, opt.output("--out -o FOLDER", "Folder of the run. Default: results/DATE-TARGET.")
    ] = None,
    resume: Annotated[
        bool,
        opt.output(
            "--resume",
            "Continue the run in --out, or the newest in results/, with its own options; others add rows.",
        ),
    ] = False,
    verbose: Annotated[bool, opt.output("--verbose -v", "Print all numbers and notes.")] = False,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress.")] = False,
    arguments: StartedArguments = None,
) -> None:
    """Measure drafters and draft lengths against plain decoding: what pays here, and by how much.

    Rows are predicted first. Then every configuration decodes every prompt; each generation is stored as it ends
    (--resume).
    """
    from specbench.base.load import load_snapshot

    start = load_snapshot()
    with ExitStack() as stack:
        with starting(quiet) as progress:
            from specbench.bench.manifest import command_line
            from specbench.experiment import opened
            from specbench.sweeps import experiment

            asked = experiment(
                "" if servers.server and not given(ctx, "target") else target,
                arguments=arguments or (),
                decoding=decoding,
                models=models,
                caching=caching if given(ctx, "cache") else None,
                template=template,
                **vars(compared),
                **vars(servers),
                **vars(drafting),
            )
            command = command_line(sys.argv[1:])
            session = stack.enter_context(
                opened(asked, out, resume=resume, command=command, progress=progress)
            )
        from specbench.cli.sweep_run import run_session

        run_session(session, start, verbose=verbose, quiet=quiet)
