"""`specbench check`: are configurations, outputs from elsewhere and running servers lossless?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli import options as opt
from specbench.cli.check_options import CheckedOptions
from specbench.cli.conflicts import given
from specbench.cli.policy import row_recipe, with_cache
from specbench.cli.progress import starting
from specbench.models.default import default_drafter
from specbench.models.find import require_models
from specbench.options import CacheOptions, DecodingOptions, SamplingOptions
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import TakesGamma, default_policy, parse_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.recipe import Recipe


def check(
    ctx: typer.Context,
    *,
    checked: CheckedOptions,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafting: opt.PoliciesOptions,
    decoding: Annotated[
        DecodingOptions,
        opt.Fields(without=("stop", "format"), max_new_tokens=64),
    ],
    caching: CacheOptions,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
) -> None:
    """Check that configurations are lossless: greedy output, sampled distribution, and every step's invariants.

    Each drafter is checked with each draft policy and γ. Exit code 1 if something is wrong. docs/check.md says what is
    checked, and when a difference is a numerical tie. With --server: whether a server samples without bias.
    """
    from specbench.recipe import Recipe

    asked = Recipe.of_target(target, caching, decoding, sampling)
    if checked.server is not None:
        with starting(checked.quiet):
            from specbench.cli.check_server import check_server

        tokens = decoding.max_new_tokens if given(ctx, "max_new_tokens") else None
        code = check_server(checked, asked, tokens, scored=bool(given(ctx, "target")))
    else:
        notes: list[str] = []
        if checked.recipe is not None:
            recipes = [row_recipe(ctx, checked.recipe, asked)]
        else:
            recipes, notes = _requested(with_cache(ctx, asked), checked, drafting)
        with starting(checked.quiet):
            from specbench.cli.check_run import check_finished, check_recipes
        if checked.outputs is not None:
            code = check_finished(checked, recipes[0])
        else:
            code = check_recipes(checked, recipes, notes)
    if code:
        raise typer.Exit(code)


def _requested(
    base: Recipe, checked: CheckedOptions, drafting: opt.PoliciesOptions
) -> tuple[list[Recipe], list[str]]:
    """Return each drafter with each draft policy that applies, once with each γ if it takes one, and notes on others.

    Raises:
        UsageError: A policy applies to no drafter, or is given twice, or none takes a γ.
    """
    from specbench.bench.axes import parse_gammas, refuse_repeated
    from specbench.bench.grid import left_out

    drafters = [*map(parse_drafter, dict.fromkeys(checked.drafter))] or [default_drafter(base)]
    starts: Sequence[int | None] = [None] if drafting.gamma is None else parse_gammas(drafting.gamma)
    usual = default_policy(greedy=base.sampling.greedy, gamma=starts[0])
    words = [*map(parse_policy, drafting.draft_policy)] or [usual]
    if not any(isinstance(policy, TakesGamma) for policy in words):
        words[0].with_gamma(starts[0])  # refuses one
    policies = [
        policy.with_gamma(gamma)
        for policy in words
        for gamma in (starts if isinstance(policy, TakesGamma) and policy.gamma is None else [None])
    ]
    refuse_repeated(policies)
    for policy in policies:
        replace(base, policy=policy).check()
    require_models(base.target, *(part.model for spec in drafters for part in spec.models))
    notes = left_out(base, policies, [drafter for drafter in drafters if not drafter.is_plain])
    recipes = [
        replace(base, drafter=drafter, policy=policy)
        for drafter in drafters
        for policy in (policies[:1] if drafter.is_plain else policies)
        if drafter.is_plain or policy.applies(drafter)
    ]
    return recipes, notes
