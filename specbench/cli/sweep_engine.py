"""`specbench sweep --engine`: a sweep of an engine's settings, each with a server that is started for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench.bench.axes import parse_batches, parse_gammas, parse_policies
from specbench.bench.grid import Sweep, SweepOptions
from specbench.bench.manifest import command_line
from specbench.cli.conflicts import given
from specbench.cli.progress import StageProgress
from specbench.cli.started import (
    EngineServers,
    engine_configs,
    engine_drafters,
    engine_target,
    started_engine,
)
from specbench.cli.sweep_options import checked_temperatures, prompts_of_sweep
from specbench.cli.sweep_run import SweepJob, run_folder, show_plan
from specbench.export.start import PLAIN, settings_of
from specbench.results.store import RunStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from specbench.cli.options import PoliciesOptions
    from specbench.cli.sweep_options import (
        ComparedOptions,
        EngineOptions,
        ExperimentOptions,
        ResultsOptions,
        ServerOptions,
    )
    from specbench.options import DecodingOptions
    from specbench.results.load import LoadSnapshot


def sweep_engine(
    ctx: typer.Context,
    target: str,
    compared: ComparedOptions,
    drafting: PoliciesOptions,
    engines: EngineOptions,
    servers: ServerOptions,
    experiment: ExperimentOptions,
    decoding: DecodingOptions,
    results: ResultsOptions,
    arguments: Sequence[str],
    start: LoadSnapshot,
    *,
    quiet: bool,
    verbose: bool,
) -> None:
    """Measure an engine's settings; for the arguments see ``specbench.cli.sweep``."""
    assert engines.engine is not None
    engine, elsewhere = started_engine(engines.engine), bool(engines.engine_command)
    temperatures = tuple(checked_temperatures(compared.temperature or [0.0]))
    model = engine_target(engine, target, elsewhere=elsewhere)
    drafters = engine_drafters(engine, compared.drafter, usual=not compared.drafter, elsewhere=elsewhere)
    settings = settings_of(
        engine,
        model,
        drafters,
        gammas=parse_gammas(drafting.gamma or "") if given(ctx, "gamma") else None,
        policies=parse_policies(drafting.draft_policy or ["fixed"]),
        temperature=max(temperatures),
        trees=False,
    )
    batches = () if compared.batch is None else tuple(parse_batches(compared.batch))
    options = SweepOptions(
        gammas=(),
        policies=(),
        temperatures=temperatures,
        decoding=decoding,
        repeats=experiment.repeats,
        warmup=0,  # every server warms up when it starts
        turns=1 if experiment.turns is None else experiment.turns,
        seed=experiment.seed,
        cache="none",
        batches=batches,
        arrivals=compared.arrivals,
        servers=tuple(each.name for each in settings),
        api=servers.api,
    )
    with StageProgress(quiet) as progress:
        chosen = prompts_of_sweep(experiment, options, progress)
    sources = {
        "target": model.name,
        "engine": engine.name,
        "engine_options": command_line(arguments),
        "drafters": [str(each.spec) for each in drafters],
        **chosen.sources,
    }
    folder = run_folder(results, sources, options)
    configs = tuple(engine_configs(options, settings))
    if results.dry_run:
        show_plan(Sweep(options, chosen.prompts, configs), folder)
        return
    RunStore.check_writable(folder)
    planned = EngineServers(engine, model, settings, engines, servers, arguments, decoding, max(temperatures))
    with (
        StageProgress(quiet) as progress,
        planned.launched(folder / "servers", progress) as made,
    ):
        made.server(PLAIN)
        together = None if made.fits([each.name for each in settings]) else made.limit or made.capacity
        sweep = Sweep(options, chosen.prompts, configs, together, suites=chosen.suites)
        job = SweepJob(sweep, made, folder, results, quiet=quiet, verbose=verbose)
        try:
            job.run(
                sources, start, [] if together is None else [f"{together} servers fit into memory at a time."]
            )
        finally:
            job.say(made.summary())
