"""Recipes with their models loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbench.decoding.sampling import Sampling
from specbench.drafters.plain import NoDraft
from specbench.generate import GenerationRun
from specbench.models.prepare import prepare
from specbench.policies import FixedLength, build_policy

if TYPE_CHECKING:
    from specbench.base.progress import Progress
    from specbench.decoding.protocols import Drafter, DraftPolicy
    from specbench.decoding.request import Request
    from specbench.models.load import LanguageModel
    from specbench.models.prepare import LoadedDrafter
    from specbench.models.target import Target
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

    def request(self, prompt: Sequence[int]) -> Request:
        """Return what decides the output of a prompt."""
        return self.start(prompt).request


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
