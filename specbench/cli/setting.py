"""What a command line says of models, draft length and sampling, loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbench.base.errors import SpecbenchError
from specbench.cli.policy import RequestedPolicy, requested_policy
from specbench.recipe import Recipe
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import parse_model

if TYPE_CHECKING:
    import typer

    from specbench.backends.torch.scorer import Scorer
    from specbench.base.errors import SpecbenchError
    from specbench.base.progress import Progress
    from specbench.cli.options import DraftingOptions
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.request import DraftPlan
    from specbench.decoding.sampling import Sampling
    from specbench.models.target import Target
    from specbench.options import (
        CacheOptions,
        DecodingOptions,
        ModelOptions,
        SamplingOptions,
        SharedPolicyOptions,
    )
    from specbench.recipe import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its models.

    Attributes:
        recipe: As asked for; its policy without siblings where passes have to be the same to the bit.
        target, drafter: Loaded.
        policy: How much is drafted.
        sampling: The transforms, with what the model's own settings ask for.
        note: What there is to say of something calibrated; ``None`` for nothing.
    """

    recipe: Recipe
    target: Target
    drafter: Drafter
    policy: DraftPlan
    sampling: Sampling
    note: str | None


def parse_recipe(
    ctx: typer.Context,
    drafting: DraftingOptions,
    models: ModelOptions,
    length: SharedPolicyOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
) -> Recipe:
    """What a command line asks for.

    Raises:
        UsageError: Something cannot be.
    """
    from specbench.cli.options import cache_for

    kind = cache_for(ctx, drafting.target, models, caching)
    target, drafter = parse_model(drafting.target), parse_drafter(drafting.drafter)
    greedy = sampling.temperature == 0 and len(drafter.parts) == 1  # several draft chains of one length
    policy = requested_policy(
        drafting.draft_policy, drafting.tree, {**length.given, "gamma": drafting.gamma}, greedy=greedy
    )
    return Recipe(target, drafter, policy, length.costs, models, caching.with_kind(kind), decoding, sampling)


def load_recipe(recipe: Recipe, progress: Progress) -> LoadedRecipe:
    """Load the models of a recipe; what cannot work is refused before that.

    Raises:
        UsageError, RunError: Something is wrong with it, or it cannot be loaded.
    """
    from specbench.cli.options import chained
    from specbench.decoding.sampling import Sampling
    from specbench.models.prepare import prepare

    assert recipe.policy is not None
    transforms = Sampling(**recipe.sampling.transforms)
    policy = RequestedPolicy(recipe.policy, recipe.costs, chained=chained(recipe.models, recipe.caching))
    if not recipe.drafter.is_plain:
        policy.spec.check(recipe.drafter)
    target, (loaded_drafter,) = prepare(
        recipe.target,
        [recipe.drafter],
        recipe.models,
        cache=recipe.caching.kind,
        bit_exact=recipe.caching.bit_exact,
        progress=progress,
    )
    defaults = target.language_model.defaults.under(recipe.decoding)
    transforms = transforms.with_defaults(defaults, target.vocab_size)
    plan, note = policy.build(target, loaded_drafter, transforms)
    return LoadedRecipe(
        replace(recipe, policy=policy.spec), target, loaded_drafter.drafter, plan, transforms, note
    )


def facts(target: Target, drafter: Drafter, decoding: DecodingOptions) -> list[str]:
    """What the user should know of them before reading an output; how the models were loaded is not among it."""
    from specbench.cli.options import widths_differ

    lines = list(target.language_model.defaults.notes(applied=decoding.model_defaults))
    lines += tokenizer_notes([drafter])
    if not decoding.residual_adjustment:
        lines.append("NOT LOSSLESS: the residual adjustment is off.")
    if (parting := widths_differ(target)) is not None:
        lines.append(parting)
    if not target.packed and target.quantization is None and target.scorer.device.type == "cpu":
        lines.append("This machine lacks the packed linear layers; decoding uses the ordinary, slower ones.")
    for what, scorer in (("Decoding", target.scorer), ("Drafting", _own_scorer(drafter))):
        if (reason := _without_native_products(scorer)) is not None:
            lines.append(f"{what} is slower than it could be, without native passes: {reason}.")
            break
    return lines


def tokenizer_notes(drafters: Iterable[Drafter | SpecbenchError]) -> list[str]:
    """What there is to say of drafting models with another tokenizer than the target's, a sentence each."""
    from specbench.drafters.parts import models_of
    from specbench.drafters.translate import TranslatingDrafter

    loaded = [drafter for drafter in drafters if not isinstance(drafter, SpecbenchError)]
    models = [model for drafter in loaded for model in models_of(drafter)]
    translated = [model for model in models if isinstance(model, TranslatingDrafter)]
    found = {model.name.rsplit(" (", 1)[0]: model.translation for model in translated}  # in whatever dtype
    return [
        f"The drafter {name} has another tokenizer than the target: tokens are translated, and it drafts only the"
        f" {len(both.shared):,} of the target's {both.tokens:,} tokens ({len(both.shared) / both.tokens:.1%})"
        " that both have."
        for name, both in found.items()
    ]


def _own_scorer(drafter: Drafter) -> Scorer | None:
    """What makes a drafter's passes, if it is a model."""
    from specbench.drafters.cascade import CascadeDrafter
    from specbench.drafters.model import ModelDrafter

    model = drafter.model if isinstance(drafter, CascadeDrafter) else drafter
    return model.scorer if isinstance(model, ModelDrafter) else None


def _without_native_products(scorer: Scorer | None) -> str | None:
    """Why a model on a CPU has none where it could: in int8 or int4, or of the Llama family; ``None`` for others."""
    import torch

    from specbench.backends.torch.forward import FusedForward
    from specbench.backends.torch.kernels.native import why_unavailable
    from specbench.backends.torch.kernels.surgery import quantization_of
    from specbench.backends.torch.scorer import Scorer

    if scorer is None or scorer.device.type != "cpu":
        return None
    if quantization_of(scorer.model) is not None:
        return why_unavailable()
    short = isinstance(scorer, Scorer) and issubclass(scorer.way, FusedForward)  # a head has a way of its own
    return why_unavailable() if short and scorer.model.dtype != torch.float16 else None
