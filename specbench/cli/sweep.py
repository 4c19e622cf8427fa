"""`specbench sweep`: measure a grid of drafters and draft lengths against plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.cli import options as opt
from specbench.cli.conflicts import given
from specbench.cli.policy import left_out, with_cache
from specbench.cli.progress import starting
from specbench.cli.sweep_options import (
    ComparedOptions,
    ResultsOptions,
    ServerOptions,
    StartedArguments,
    context_text,
    prompts_of_sweep,
)
from specbench.models.default import default_drafter
from specbench.options import CacheOptions, DecodingOptions, ModelOptions, TemplateOptions
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import Fixed, TakesGamma

if TYPE_CHECKING:
    from specbench.bench.grid import SweepOptions
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec


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
                "gamma": "Draft lengths γ of fixed: 1..8, 2..16..2 or 1,2,4.",
                "draft_policy": "Repeatable. Default: fixed with each γ, and auto when greedy.",
            },
            gamma="1..8",
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

    start, quiet = load_snapshot(), results.quiet
    if servers.server:
        from specbench.cli.sweep_servers import sweep_servers

        sweep_servers(ctx, compared, servers, target, template, decoding, results, start)
        return
    if servers.engine is not None:
        from specbench.cli.sweep_engine import sweep_engine

        what = compared, drafting, servers, template, decoding, results
        sweep_engine(ctx, target, *what, arguments or (), start)
        return
    from specbench.bench.contexts import fitting, text_name
    from specbench.bench.grid import Sweep, check_contexts
    from specbench.bench.manifest import describe_models
    from specbench.cli.sweep_predicted import predict_table
    from specbench.cli.sweep_run import SweepJob, run_folder
    from specbench.recipe import Recipe
    from specbench.results.store import RunStore

    base = with_cache(ctx, Recipe.of_target(target, models, caching, decoding, template))
    options, drafters, notes = _compared_models(ctx, compared, drafting, base)
    with starting(quiet) as progress:
        chosen = prompts_of_sweep(compared, options, progress)
    text = context_text(compared)
    if text is not None:
        options = replace(options, context_text=text_name(text))
    sources = {**describe_models(base, drafters), **chosen.sources}
    folder = run_folder(results, sources, options)
    from specbench.bench.engines.own import check_engine, load_engine
    from specbench.cli.setting import model_notes

    with starting(quiet) as progress:
        check_engine(base, drafters, options, progress)
        RunStore.check_writable(folder)
        engine = load_engine(base, drafters, options, progress)
    model = engine.target.language_model
    outcomes = [each.outcome for each in engine.drafters]
    notes += [*model.notes, *model_notes(engine.target, outcomes, decoding)]
    check_contexts(options, model.context_limit)
    prompts, more = fitting(chosen.prompts, options.contexts, engine.count_tokens)
    notes += more

    configs = engine.configs(options, base)
    sweep = Sweep(options, prompts, tuple(configs), text=text, suites=chosen.suites)
    job = SweepJob(sweep, engine, folder, results, minutes=compared.minutes, predict=predict_table)
    job.run(sources, start, notes)


def _compared_models(
    ctx: typer.Context,
    compared: ComparedOptions,
    drafting: opt.PoliciesOptions,
    base: Recipe,
) -> tuple[SweepOptions, tuple[DrafterSpec, ...], list[str]]:
    """Return a sweep's options, its drafters, and notes on policies that do not apply to them."""
    from specbench.bench.axes import parse_baselines, parse_gammas, parse_policies
    from specbench.bench.grid import SweepOptions

    axes = compared.axes(base.template)
    # `generate` takes auto at temperature 0.
    usual = ["fixed"] if all(at.temperature for at in axes["conditions"]) else ["auto", "fixed"]
    policies = parse_policies(drafting.draft_policy or usual)
    for policy in policies:
        replace(base, policy=policy).check()
    specs = [*map(parse_drafter, dict.fromkeys(compared.drafter))] or [default_drafter(base)]
    drafters = tuple(spec for spec in specs if not spec.is_plain)
    gammas = parse_gammas(drafting.gamma or "")
    if not any(isinstance(policy, Fixed) for policy in policies):
        if given(ctx, "gamma"):
            takes = next((policy for policy in policies if isinstance(policy, TakesGamma)), None)
            other = f"write --draft-policy {takes.word}:gamma=N" if takes else "leave --gamma out"
            raise UsageError(
                "--gamma is for the policy fixed, which is not among the policies.",
                f"Add --draft-policy fixed, or {other}.",
            )
        gammas = []
    if compared.batch is not None and base.caching.cache in ("static", "compiled"):
        raise UsageError(
            "Forward passes of fixed shapes (--cache static and compiled) serve one prompt at a time.",
            "Choose another cache, or leave --batch out.",
        )
    options = SweepOptions(
        gammas=tuple(gammas),
        policies=policies,
        decoding=base.decoding,
        others=parse_baselines(compared.baseline),
        **axes,
    )
    return options, drafters, left_out(policies, drafters)
