"""Running `specbench tune --break-even`: from options to the table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.record import finite, to_dict
from specbench.bench.axes import parse_batches
from specbench.bench.grid import SweepOptions, check_batches
from specbench.bench.prompts import interleave
from specbench.cli.console import write_json
from specbench.cli.progress import StageProgress, starting
from specbench.cli.started import EngineServers, engine_configs
from specbench.cli.sweep_options import ENGINE_MINUTES, chosen_prompts
from specbench.decoding.clocks import WallClock
from specbench.options import CacheOptions, quantized
from specbench.recipe import Recipe
from specbench.rows import conditions_of
from specbench.specs.drafters import DrafterSpec, parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import Fixed
from specbench.tune.break_even import GAMMAS, Drafts, break_even_parts, measure, pretending

if TYPE_CHECKING:
    from specbench.cli.sweep_options import EngineOptions, SearchOptions, ServerOptions, TuneResultsOptions
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions


def break_even(
    target: str,
    search: SearchOptions,
    template: TemplateOptions,
    engines: EngineOptions,
    servers: ServerOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    results: TuneResultsOptions,
    arguments: Sequence[str],
) -> None:
    """Measure and print what drafts need to pay; for the arguments see ``specbench.cli.tune``."""
    if not search.drafter:
        raise UsageError("--break-even needs a drafter, for what it costs.", "Name it with --drafter.")
    clock, temperatures = WallClock(), [search.temperature]
    until = clock.now() + 60 * (search.minutes or ENGINE_MINUTES)
    sizes = parse_batches(search.batch or "1")
    alone = conditions_of(temperature=temperatures) if 1 in sizes else ()
    larger = [size for size in sizes if size > 1]
    together = conditions_of(temperature=temperatures, batch=larger) if larger else ()
    options = SweepOptions((*alone, *together), GAMMAS, decoding=decoding, turns=1)
    with starting(results.quiet, every=True) as progress, quiet_transformers():
        chosen = chosen_prompts(search, None, progress)
        check_batches(options, len(chosen.prompts))
    prompts = [each.told(template) for each in interleave(chosen.prompts)]
    engine: Any
    with ExitStack() as stack:
        progress = stack.enter_context(StageProgress(results.quiet, animated=False))
        if engines.engine is None:
            from specbench.bench.engines.own import load_engine
            from specbench.models.load import load_config
            from specbench.models.target import default_cache

            specs = list(map(parse_drafter, dict.fromkeys(search.drafter)))
            _refuse_free(specs)
            model, rounded = parse_model(target), quantized(models.dtype) is not None
            cache = CacheOptions(search.cache or default_cache(load_config(model), quantized=rounded))
            base = Recipe(model, models=models, decoding=decoding, caching=cache)
            engine, in_turn = load_engine(base, specs, options, progress), True
            rows = engine.configs(options, base)
            drafts = {row.id: Drafts(row.drafter, row.gamma) for row in rows if row.gamma is not None}
        else:
            planned = EngineServers.of(
                target, search.drafter, engines, servers, arguments, decoding, search.temperature,
                usual=False, gammas=GAMMAS, policies=[Fixed()],
            )  # fmt: skip
            _refuse_free([each.spec for each in planned.drafters])
            settings, by_name = pretending(planned.engine, planned.settings)
            rows = engine_configs(options, settings)
            drafts = {row.id: by_name[row.drafter] for row in rows if row.drafter in by_name}
            logs = Path(stack.enter_context(TemporaryDirectory()))
            engine = stack.enter_context(replace(planned, settings=settings).launched(logs, progress))
            in_turn = engine.fits([each.name for each in settings])
        found, failed = measure(
            engine, rows, drafts, prompts, decoding,
            in_turn=in_turn, in_time=lambda: clock.now() < until, report=progress.update,
        )  # fmt: skip
    notes = [f"{name} failed: {error}" for name, error in failed.items()]
    notes += [] if in_turn else ["Not all servers fit into memory: they were measured one after the other."]
    if not found:
        raise RunError(
            " ".join(["Nothing could be compared.", *notes]), "Give more --minutes, or other prompts."
        )
    if results.json_output:
        listed = [
            {"drafter": each.drafter, "gamma": each.gamma, "batch": each.batch, "break_even": to_dict(each.tokens),
             "speedup_if_perfect": each.most,
             "measured": [{"tokens_per_step": at, "step": to_dict(step)} for at, step in each.steps.items()]}
            for each in found
        ]  # fmt: skip
        write_json(finite({"rows": listed, "notes": notes}))
        return
    from rich.console import Console

    from specbench.show.document import show

    console = Console(highlight=False)
    show(console, *break_even_parts(found, notes), wrap=console.is_terminal)


def _refuse_free(specs: Sequence[DrafterSpec | str]) -> None:
    for spec in specs:
        if isinstance(spec, str) or not spec.has_logits:
            raise UsageError(
                f"{spec} costs almost nothing, and drafts only what it finds.",
                "Name a model or a trained head with --drafter.",
            )
