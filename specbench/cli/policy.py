"""The recipe that a command line asks for."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.cli.conflicts import given
from specbench.cli.progress import without_collector
from specbench.models.default import default_drafter
from specbench.models.find import require_models
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import split_options
from specbench.specs.policies import default_policy, parse_policy

if TYPE_CHECKING:
    import typer

    from specbench.cli.options import DraftingOptions
    from specbench.recipe import Recipe


@without_collector()  # torch may be imported
def parse_recipe(ctx: typer.Context, drafting: DraftingOptions, *groups: Any) -> Recipe:
    """Return the recipe that a command line requests, with these groups of its options.

    Raises:
        UsageError: The request is impossible.
    """
    from specbench.recipe import Recipe

    asked = Recipe.of_target(drafting.target, *groups)
    if drafting.recipe is not None:
        return row_recipe(ctx, drafting.recipe, asked)
    drafter = parse_drafter(drafting.drafter) if drafting.drafter else default_drafter(asked)
    greedy = asked.sampling.temperature == 0 and len(drafter.parts) == 1  # several draft chains of one length
    spec = drafting.draft_policy
    policy = parse_policy(spec) if spec else default_policy(greedy=greedy, gamma=drafting.gamma)
    recipe = replace(with_cache(ctx, asked), drafter=drafter, policy=policy.with_gamma(drafting.gamma))
    recipe.check()
    require_models(recipe.target, *(part.model for part in drafter.models))
    return recipe


def with_cache(ctx: typer.Context, recipe: Recipe) -> Recipe:
    """Return a recipe with the default KV cache of an int8 or int4 target, unless one was chosen."""
    from specbench.models.default import with_default_cache

    return recipe if given(ctx, "cache") else with_default_cache(recipe)


def row_recipe(ctx: typer.Context, row: str, asked: Recipe) -> Recipe:
    """Return the recipe of a row of a run, with the options on the command line in place of its own.

    Raises:
        UsageError: There is no such row, or one of its models is not in this folder.
    """
    from specbench.cli.named_runs import named_row
    from specbench.recipe import GROUPS
    from specbench.results.store import read_recipe

    recipe = read_recipe(*named_row(row))
    if given(ctx, "target"):
        recipe = replace(recipe, target=asked.target)
    told = {key.replace("-", "_") for key in split_options(str(ctx.params.get("target")))[1]}
    for name in GROUPS:
        new = getattr(asked, name)
        taken = [each.name for each in fields(new) if each.name in told or given(ctx, each.name)]
        changes = {each: getattr(new, each) for each in taken}
        recipe = recipe.with_groups(replace(getattr(recipe, name), **changes))
    return recipe.found_in(Path())
