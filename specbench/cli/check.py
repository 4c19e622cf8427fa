"""`specbench check`: are configurations lossless, and are outputs from elsewhere the target's own?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli import options as opt
from specbench.cli.policy import (
    recipes_of,
    requested_policies,
    row_recipe,
    with_cache,
)
from specbench.cli.progress import starting
from specbench.models.default import default_drafter
from specbench.models.find import require_models
from specbench.options import (
    MODELS,
    OUTPUT,
    CacheOptions,
    DecodingOptions,
    SamplingOptions,
    group,
)
from specbench.specs.drafters import parse_drafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from specbench.recipe import Recipe

_DEFAULT_LIMIT = 12
CHECKED = "What is checked"
_check, _output = group(CHECKED), group(OUTPUT)


@dataclass(frozen=True)
class CheckedOptions:
    """Which outputs are checked, and how closely."""

    prompts: tuple[str, ...] = opt.prompts_field(CHECKED)
    drafter: tuple[str, ...] = opt.drafters_field(MODELS)
    limit: int | None = _check(
        None,
        "--limit N",
        "Number of prompts, taken in turn from the categories, or of lines of --outputs. Default:"
        f" {_DEFAULT_LIMIT} prompts, all lines.",
        min=1,
    )
    outputs: Path | None = _check(
        None,
        "--outputs FILE",
        'Greedy outputs of any engine to check instead: lines of {"prompt": text or ids, "token_ids": [...]}; -'
        " reads standard input.",
    )
    recipe: str | None = opt.recipe_field()
    json_output: bool = _output(False, "--json", "Print one JSON object.")
    quiet: bool = _output(False, "--quiet -q", "No progress, no notes.")


def check(
    ctx: typer.Context,
    *,
    checked: CheckedOptions,
    chat: opt.ChatOption = None,
    target: opt.TargetOption = opt.DEFAULT_TARGET,
    drafting: opt.PoliciesOptions,
    decoding: Annotated[
        DecodingOptions,
        opt.Fields(without=("stop",), max_new_tokens=64),
    ],
    caching: CacheOptions,
    sampling: Annotated[SamplingOptions, opt.Fields("temperature")],
) -> None:
    """Check that configurations are lossless: greedy output, sampled distribution, and every step's invariants.

    Each drafter is checked with each draft policy and γ. Exit code 1 if something is wrong. docs/check.md says what is
    checked, and when a difference is a numerical tie.
    """
    from specbench.bench.suites import choose_prompts
    from specbench.recipe import Recipe

    with starting(checked.quiet) as progress:
        notes: list[str] = []
        asked = Recipe.of_target(target, caching, decoding, sampling)
        if checked.recipe is not None:
            base = row_recipe(ctx, checked.recipe, asked)
            recipes = [base]
        else:
            base = with_cache(ctx, asked)
            recipes, notes = _requested(base, checked, drafting)
        from specbench.cli.check_run import CheckRequest, check_outputs, prepare_checks

        request = CheckRequest(base, checked.json_output, checked.quiet, chat, progress.console)
        run: Callable[[], int]
        if checked.outputs is not None:
            run = partial(check_outputs, request, checked.outputs, checked.limit)
        else:
            prompts, _ = choose_prompts(
                checked.prompts or ["all"], checked.limit or _DEFAULT_LIMIT, progress=progress
            )
            for note in notes:
                request.note(note)
            run = prepare_checks(request, prompts, recipes, progress)
    if code := run():
        raise typer.Exit(code)


def _requested(
    base: Recipe, checked: CheckedOptions, drafting: opt.PoliciesOptions
) -> tuple[list[Recipe], list[str]]:
    """Return each drafter with each draft policy, and notes on policies that do not apply."""
    from specbench.bench.axes import parse_gammas
    from specbench.bench.grid import left_out

    drafters = [*map(parse_drafter, dict.fromkeys(checked.drafter))] or [default_drafter(base)]
    policies = requested_policies(
        drafting.draft_policy,
        parse_gammas(drafting.gamma) if drafting.gamma is not None else [],
        greedy=base.sampling.temperature == 0,
    )
    for policy in policies:
        replace(base, policy=policy).check()
    require_models(base.target, *(part.model for spec in drafters for part in spec.models))
    notes = left_out(base, policies, [drafter for drafter in drafters if not drafter.is_plain])
    return recipes_of(base, drafters, policies), notes
