"""`specbench sweep --engine`: a sweep of an engine's settings, each with a server that is started for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.bench.axes import parse_gammas, parse_policies
from specbench.bench.grid import Sweep
from specbench.cli.conflicts import given
from specbench.cli.progress import StageProgress
from specbench.cli.started import EngineServers, engine_configs
from specbench.cli.sweep_options import prompts_of_sweep
from specbench.cli.sweep_run import SweepJob, run_folder
from specbench.results.store import RunStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from specbench.base.load import LoadSnapshot
    from specbench.cli.options import PoliciesOptions
    from specbench.cli.sweep_options import ComparedOptions, ResultsOptions, ServerOptions
    from specbench.options import DecodingOptions, TemplateOptions


def sweep_engine(
    ctx: typer.Context,
    target: str,
    compared: ComparedOptions,
    drafting: PoliciesOptions,
    servers: ServerOptions,
    template: TemplateOptions,
    decoding: DecodingOptions,
    results: ResultsOptions,
    arguments: Sequence[str],
    start: LoadSnapshot,
) -> None:
    """Measure an engine's settings; for the arguments see ``specbench.cli.sweep``."""
    axes = compared.axes(template)
    planned = EngineServers.of(
        target,
        compared.drafter,
        servers,
        arguments,
        decoding,
        max(at.temperature for at in axes["conditions"]),
        usual=not compared.drafter,
        gammas=parse_gammas(drafting.gamma or "") if given(ctx, "gamma") else None,
        policies=parse_policies(drafting.draft_policy or ["fixed"]),
    )
    options = planned.sweep_options(**axes | {"turns": axes["turns"] or 1})
    with StageProgress(results.quiet) as progress:
        chosen = prompts_of_sweep(compared, options, progress)
    sources = planned.sources(chosen)
    folder = run_folder(results, sources, options)
    configs = tuple(engine_configs(options, planned.settings))
    RunStore.check_writable(folder)
    with StageProgress(results.quiet) as progress, planned.launched(folder / "servers", progress) as made:
        together = None if made.fits(options.servers) else made.limit or made.capacity
        sweep = Sweep(options, chosen.prompts, configs, together, suites=chosen.suites)
        job = SweepJob(sweep, made, folder, results)
        try:
            job.run(
                sources, start, [] if together is None else [f"{together} servers fit into memory at a time."]
            )
        finally:
            job.say(made.summary())
