"""Running `specbench tune --break-even`: from options to the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from specbench.base.errors import RunError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.record import finite, to_dict
from specbench.bench.axes import parse_batches
from specbench.bench.grid import SweepOptions, check_batches
from specbench.bench.prompts import interleave
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress, starting
from specbench.cli.started import EngineServers, engine_configs
from specbench.cli.sweep_options import ENGINE_MINUTES, chosen_prompts
from specbench.decoding.clocks import WallClock
from specbench.options import CacheOptions, quantized
from specbench.recipe import Recipe
from specbench.rows import Row, conditions_of
from specbench.specs.drafters import DrafterSpec, parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import Fixed
from specbench.tune.break_even import GAMMAS, Drafts, break_even_parts, measure, pretending

if TYPE_CHECKING:
    from specbench.cli.sweep_options import SearchOptions, ServerOptions
    from specbench.options import DecodingOptions, ModelOptions, TemplateOptions

_Ready: TypeAlias = tuple[Any, Sequence[Row], Mapping[str, Drafts], bool]
"""An engine, its rows, what these draft by id, and whether all can be measured in turn."""


def break_even(
    target: str,
    search: SearchOptions,
    template: TemplateOptions,
    servers: ServerOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    arguments: Sequence[str],
) -> None:
    """Measure and print what drafts need to pay; for the arguments see ``specbench.cli.tune``."""
    if not search.drafter:
        raise UsageError("--break-even needs a drafter, for what it costs.", "Name it with --drafter.")
    clock = WallClock()
    until = clock.now() + 60 * (search.minutes or ENGINE_MINUTES)
    sizes = [[] if size == 1 else [size] for size in parse_batches(search.batch or "1")]
    conditions = [conditions_of(temperature=[search.temperature], batch=size) for size in sizes]
    options = SweepOptions(
        tuple(at for each in conditions for at in each), GAMMAS, decoding=decoding, turns=1
    )
    with starting(search.quiet) as progress, quiet_transformers():
        chosen = chosen_prompts(search, None, progress)
        check_batches(options, len(chosen.prompts))
    prompts = [each.told(template) for each in interleave(chosen.prompts)]
    with StageProgress(search.quiet, animated=False) as progress:
        made = (
            _own(target, search, models, options, progress)
            if servers.engine is None
            else _started(target, search, servers, options, arguments, progress)
        )
        with made as (engine, rows, drafts, in_turn):
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
    if search.json_output:
        listed = [{**to_dict(each), "speedup_if_perfect": each.most} for each in found]
        write_json(finite({"rows": listed, "notes": notes}))
        return
    write_parts(*break_even_parts(found, notes))


def _refuse_free(specs: Sequence[DrafterSpec | str]) -> None:
    for spec in specs:
        if isinstance(spec, str) or not spec.has_logits:
            what = f"{spec} costs almost nothing, and drafts only what it finds."
            raise UsageError(what, "Name a model or a trained head with --drafter.")


@contextmanager
def _own(
    target: str, search: SearchOptions, models: ModelOptions, options: SweepOptions, progress: StageProgress
) -> Iterator[_Ready]:
    """Load specbench's own decoder."""
    from specbench.bench.engines.own import load_engine
    from specbench.models.load import load_config
    from specbench.models.target import default_cache

    specs, model = list(map(parse_drafter, dict.fromkeys(search.drafter))), parse_model(target)
    _refuse_free(specs)
    cache = search.cache or default_cache(load_config(model), quantized=quantized(models.dtype) is not None)
    base = Recipe(model, models=models, decoding=options.decoding, caching=CacheOptions(cache))
    engine = load_engine(base, specs, options, progress)
    rows = engine.configs(options, base)
    yield (
        engine,
        rows,
        {row.id: (row.drafter, row.gamma, None) for row in rows if row.gamma is not None},
        True,
    )


@contextmanager
def _started(
    target: str,
    search: SearchOptions,
    servers: ServerOptions,
    options: SweepOptions,
    arguments: Sequence[str],
    progress: StageProgress,
) -> Iterator[_Ready]:
    """Start servers that pretend two acceptances for each draft length."""
    planned = EngineServers.of(
        target, search.drafter, servers, arguments, options.decoding, search.temperature,
        usual=False, gammas=GAMMAS, policies=[Fixed()],
    )  # fmt: skip
    _refuse_free([each.spec for each in planned.drafters])
    settings, drafts = pretending(planned.engine, planned.settings)
    rows, planned = engine_configs(options, settings), replace(planned, settings=settings)
    with TemporaryDirectory() as logs, planned.launched(Path(logs), progress) as engine:
        in_turn = engine.fits([each.name for each in settings])
        yield engine, rows, {row.id: drafts[row.drafter] for row in rows if row.drafter in drafts}, in_turn
