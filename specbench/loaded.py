"""Recipes with their models loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.base.errors import SpecbenchError
from specbench.decoding.protocols import NoDraft
from specbench.decoding.sampling import Sampling
from specbench.drafters.parts import models_of
from specbench.drafters.translate import TranslatingDrafter
from specbench.generate import GenerationRun
from specbench.models.prepare import prepare
from specbench.policies import FixedLength, build_policy

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter, DraftPolicy
    from specbench.models.load import LanguageModel
    from specbench.models.prepare import LoadedDrafter
    from specbench.models.target import Target
    from specbench.options import DecodingOptions
    from specbench.recipe import Recipe
    from specbench.specs.drafters import DrafterSpec


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with its models.

    Attributes:
        recipe: What was loaded.
        target, drafter: The models.
        policy: How much is drafted; it has not drafted anything yet.
        sampling: The transforms, with the model's own settings.
        notes: What differs from the row of a run that the recipe is from, as sentences.

    Examples:
        >>> loaded = load_recipe(read_recipe("results/smollm2-135m", "plain"))
        >>> run = loaded.start([19556, 28])
        >>> sum(1 for record in run) == len(run.result().token_ids)
        True
    """

    recipe: Recipe
    target: Target
    drafter: Drafter
    policy: DraftPolicy
    sampling: Sampling
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, target: Target, loaded: LoadedDrafter | None) -> LoadedRecipe:
        """Return a recipe with its models.

        Raises:
            UsageError, RunError: The drafter could not be loaded.
        """
        spec = recipe.policy
        if spec is None or (spec.tree and recipe.drafter.is_plain):  # it has no effect
            policy: DraftPolicy = FixedLength()
        else:
            policy = build_policy(spec)
        drafter = NoDraft() if loaded is None else loaded.drafter
        sampling = transforms_of(recipe, target.language_model)
        return cls(recipe, target, drafter, policy, sampling, notes_on_weights(recipe, target, loaded))

    @property
    def models(self) -> str:
        """The models as a phrase."""
        target, drafter = self.target, self.drafter.traits.name
        return f"{target.name} ({target.dtype}, {target.scorer.device}), drafter {drafter}"

    def start(self, prompt: Sequence[int], *, plain: bool = False, **changed: Any) -> GenerationRun:
        """Return a run that has not begun.

        Args:
            prompt: Token ids.
            plain: Whether to decode without the drafter.
            changed: Arguments of ``GenerationRun`` that replace those of the recipe.
        """
        recipe = self.recipe
        options = {"seed": recipe.sampling.seed, "decoding": recipe.decoding, **changed}
        if not plain:
            options |= {"drafter": self.drafter, "policy": self.policy}
        return GenerationRun(prompt, self.target, sampling=self.sampling, **options)


def transforms_of(recipe: Recipe, model: LanguageModel) -> Sampling:
    """Return the transforms of a recipe, with the model's own settings."""
    return model.transforms(Sampling(**recipe.sampling.transforms), recipe.decoding)


def load_models(
    recipe: Recipe, drafters: Sequence[DrafterSpec], progress: Progress | None = None, **more: Any
) -> tuple[Target, list[LoadedDrafter]]:
    """Load the target of a recipe, and these drafters; see ``prepare``."""
    return prepare(
        recipe.target, drafters, recipe.models, cache=recipe.caching.cache, progress=progress, **more
    )


def load_recipe(recipe: Recipe, progress: Progress | None = None, **more: Any) -> LoadedRecipe:
    """Load the models of a recipe; what cannot work is refused before. For other arguments see ``prepare``.

    Raises:
        UsageError, RunError: Something is wrong with it, or it cannot be loaded.

    Examples:
        >>> load_recipe(read_recipe("results/smollm2-135m", "plain")).models
        'smollm2-135m (..., cpu), drafter none'
    """
    recipe.check()
    target, (drafter,) = load_models(recipe, [recipe.drafter], progress, **more)
    return LoadedRecipe.of(recipe, target, drafter)


def notes_on_weights(recipe: Recipe, target: Target, drafter: LoadedDrafter | None = None) -> tuple[str, ...]:
    """Return a sentence for each model with other weights than in the run that the recipe is from."""
    loaded = [(target.name, target.language_model.fingerprint)]
    loaded += [] if drafter is None else [(drafter.name, drafter.weights)]
    return tuple(
        f"{name} has other weights than in the run, or another dtype: outputs may differ from its."
        for (name, own), measured in zip(loaded, recipe.measured_with, strict=False)
        if measured not in (None, own)
    )


def model_notes(
    target: Target, drafters: Iterable[Drafter | SpecbenchError], decoding: DecodingOptions
) -> list[str]:
    """Return notes on the settings of a target, on its drafters, and on logits that depend on a pass's width."""
    model = target.language_model
    notes = [*model.defaults.notes(applied=decoding.model_defaults), *drafter_notes(drafters)]
    notes += [model.slower] if model.slower else []
    if target.widths_differ is not None:
        notes.append(
            f"Bit-exact forward passes are not available here: outputs of this {target.dtype} target may differ from"
            f" plain decoding's. {target.widths_differ}"
        )
    return notes


def load_notes(target: Target, drafters: Iterable[LoadedDrafter], decoding: DecodingOptions) -> list[str]:
    """Return ``model_notes`` behind those on how the target was loaded."""
    outcomes = [each.outcome for each in drafters]
    return [*target.language_model.notes, *model_notes(target, outcomes, decoding)]


def drafter_notes(drafters: Iterable[Drafter | SpecbenchError]) -> list[str]:
    """Return a sentence for each drafter model with another tokenizer than the target's."""
    loaded = [drafter for drafter in drafters if not isinstance(drafter, SpecbenchError)]
    models = [model for drafter in loaded for model in models_of(drafter)]
    translated = [model for model in models if isinstance(model, TranslatingDrafter)]
    found = {
        model.traits.name.rsplit(" (", 1)[0]: model.translation for model in translated
    }  # in whatever dtype
    return [
        f"The drafter {name} has another tokenizer than the target: tokens are translated, and it drafts only the"
        f" {len(both.shared):,} of the target's {both.tokens:,} tokens ({len(both.shared) / both.tokens:.1%})"
        " that both have."
        for name, both in found.items()
    ]
