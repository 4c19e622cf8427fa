"""The recipe and the draft policies that a command line asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.base.errors import UsageError
from specbench.cli.conflicts import given
from specbench.cli.options import cache_for
from specbench.options import NO_OPTIONS
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model
from specbench.specs.policies import TakesGamma, default_policy, parse_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from specbench.cli.options import DraftingOptions
    from specbench.options import (
        CacheOptions,
        DecodingOptions,
        ModelOptions,
        SamplingOptions,
        TemplateOptions,
    )
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec
    from specbench.specs.policies import PolicySpec


def parse_recipe(
    ctx: typer.Context,
    drafting: DraftingOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
    template: TemplateOptions = NO_OPTIONS,
) -> Recipe:
    """Return the recipe that a command line requests.

    Raises:
        UsageError: The request is impossible.
    """
    from specbench.recipe import Recipe

    if drafting.recipe is not None:
        return row_recipe(
            ctx, drafting.recipe, drafting.target, models, decoding, caching, sampling, template
        )
    kind = cache_for(ctx, drafting.target, models, caching)
    target, drafter = parse_model(drafting.target), parse_drafter(drafting.drafter)
    greedy = sampling.temperature == 0 and len(drafter.parts) == 1  # several draft chains of one length
    spec = drafting.draft_policy
    policy = parse_policy(spec) if spec else default_policy(greedy=greedy, gamma=drafting.gamma)
    policy = policy.with_gamma(drafting.gamma)
    caching = replace(caching, cache=kind)
    return Recipe(target, drafter, policy, models, caching, decoding, sampling, template)


def row_recipe(
    ctx: typer.Context,
    row: str,
    target: str,
    models: ModelOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
    template: TemplateOptions = NO_OPTIONS,
) -> Recipe:
    """Return the recipe of a row of a run, with the options on the command line in place of its own.

    Raises:
        UsageError: There is no such row, or one of its models is not in this folder.
    """
    from specbench.cli.named_runs import named_row
    from specbench.results.store import read_recipe

    recipe = read_recipe(*named_row(row))
    if given(ctx, "target"):
        recipe = replace(recipe, target=parse_model(target))

    def changed(own: Any, asked: Any) -> Any:
        names = [each.name for each in fields(asked) if given(ctx, each.name)]
        return replace(own, **{name: getattr(asked, name) for name in names})

    recipe = replace(
        recipe,
        models=changed(recipe.models, models),
        caching=changed(recipe.caching, caching),
        decoding=changed(recipe.decoding, decoding),
        sampling=changed(recipe.sampling, sampling),
        template=changed(recipe.template, template),
    )
    return recipe.found_in(Path())


def requested_policies(
    specs: Sequence[str],
    gammas: Sequence[int],
    *,
    greedy: bool,
) -> list[PolicySpec]:
    """Return every requested policy, without ``specs`` the default one; one that takes a γ once with each.

    Raises:
        UsageError: An option that none of the policies takes, or one policy twice.
    """
    starts: Sequence[int | None] = gammas or [None]
    words = [*map(parse_policy, specs)] or [default_policy(greedy=greedy, gamma=starts[0])]
    if gammas and not any(isinstance(policy, TakesGamma) for policy in words):
        words[0].with_gamma(gammas[0])
    policies = [
        policy.with_gamma(gamma)
        for policy in words
        for gamma in (starts if isinstance(policy, TakesGamma) and policy.gamma is None else [None])
    ]
    names = [str(policy) for policy in policies]
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UsageError(f"The draft policy {repeated[0]} is given twice.", "Give each once.")
    return policies


def recipes_of(base: Recipe, drafters: Sequence[DrafterSpec], policies: Sequence[PolicySpec]) -> list[Recipe]:
    """Return a recipe for each drafter with each policy that applies to it; any one where nothing is drafted."""
    return [
        replace(base, drafter=drafter, policy=policy)
        for drafter in drafters
        for policy in (policies[:1] if drafter.is_plain else policies)
        if drafter.is_plain or policy.applies(drafter)
    ]


def left_out(policies: Sequence[PolicySpec], drafters: Sequence[DrafterSpec]) -> list[str]:
    """Return a sentence for each policy that does not apply to a drafter.

    Raises:
        UsageError: One applies to none of them.
    """
    notes = []
    for policy in policies:
        blind = [drafter for drafter in drafters if not policy.applies(drafter)]
        if blind and len(blind) == len(drafters):
            policy.check(blind[0])
        if blind:
            names = ", ".join(map(str, blind))
            why = "it reads the drafter's distribution, and there is none"
            if policy.tree:
                why = "it drafts trees, and only chains can be drafted"
            notes.append(f"{policy} is left out with {names}: {why}.")
    return notes
