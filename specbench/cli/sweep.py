"""`specbench sweep`: measure a grid of drafters and draft lengths against plain decoding."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.policy import is_chosen
from specbench.cli.progress import starting
from specbench.cli.sweep_options import (
    ComparedOptions,
    ResultsOptions,
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
    drafting: Annotated[
        opt.PoliciesOptions,
        opt.Fields(
            words={
                "gamma": "Draft lengths γ of fixed: 1..8 (default), 2..16..2 or 1,2,4.",
                "draft_policy": "Repeatable. Default: fixed with each γ, and auto when greedy.",
            },
        ),
    ],
    template: Annotated[TemplateOptions, opt.Fields(without=("thinking",))],
    decoding: Annotated[DecodingOptions, opt.Fields(without=("stop",), max_new_tokens=48)],
    caching: CacheOptions,
    results: ResultsOptions,
    arguments: StartedArguments = None,
) -> None:
    """Measure drafters and draft lengths against plain decoding: what pays here, and by how much.

    Rows are predicted first. Then every configuration decodes every prompt; each generation is stored as it ends
    (--resume).
    """
    from specbench.base.load import load_snapshot
    from specbench.bench.axes import parse_gammas

    start = load_snapshot()
    with ExitStack() as stack:
        with starting(results.quiet) as progress:
            from specbench.bench.manifest import command_line
            from specbench.experiment import opened
            from specbench.sweeps import experiment

            asked = experiment(
                "" if servers.server and not given(ctx, "target") else target,
                gammas=None if drafting.gamma is None else parse_gammas(drafting.gamma),
                policies=drafting.draft_policy or None,
                servers=servers.server,
                engine=servers.engine,
                engine_command=servers.engine_command,
                engine_arguments=arguments or (),
                decoding=decoding,
                models=models,
                caching=caching if is_chosen(ctx, "cache") else None,
                template=template,
                **compared.values(),
            )
            command = command_line(sys.argv[1:])
            session = stack.enter_context(
                opened(asked, results.out, resume=results.resume, command=command, progress=progress)
            )
        from specbench.cli.sweep_run import run_session

        run_session(session, start, results)
