"""Load a target with its drafters; combinations that cannot work are refused before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.backends.torch.caches import make_cache
from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.progress import Progress
from specbench.decoding.protocols import Drafter
from specbench.models.devices import check_options
from specbench.models.drafters import DrafterLoader, check_drafter, loading
from specbench.models.heads import TrainedHead, head_of
from specbench.models.load import LanguageModel, ModelText, load_model
from specbench.models.pairing import translation_of
from specbench.models.target import Target, default_cache, prepare_target
from specbench.options import CacheKind, ModelOptions
from specbench.specs.drafters import DrafterSpec
from specbench.specs.models import ModelSpec

if TYPE_CHECKING:
    from specbench.models.training_metadata import TrainingMetadata


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that is ready, or the reason why it is not.

    Attributes:
        outcome: The drafter, or the error that loading it raised.
        models: The models loaded for it.
    """

    name: str
    spec: DrafterSpec
    outcome: Drafter | SpecbenchError
    models: tuple[LanguageModel | TrainedHead, ...] = ()

    @property
    def drafter(self) -> Drafter:
        if isinstance(self.outcome, SpecbenchError):
            raise self.outcome
        return self.outcome

    @property
    def is_loaded(self) -> bool:
        return not isinstance(self.outcome, SpecbenchError)

    @property
    def training(self) -> TrainingMetadata | None:
        """The training metadata of its head; ``None`` without a head."""
        heads = (each.files if isinstance(each, TrainedHead) else head_of(each) for each in self.models)
        return next((files.training for files in heads if files is not None), None)

    @property
    def weights(self) -> str:
        """Fingerprints of its models; empty without any."""
        return "+".join(model.fingerprint for model in self.models)


def check_models(
    target: ModelSpec,
    drafters: Sequence[DrafterSpec],
    options: ModelOptions,
    *,
    progress: Progress | None = None,
) -> None:
    """Raise ``UsageError`` for an unusable device, dtype or drafter, before any weights are loaded."""
    check_options(options.target)
    for spec in drafters:
        for model in spec.models:
            check_options(loading(model))
        check_drafter(spec, target, progress=progress)


def prepare(
    target: ModelSpec,
    drafters: Sequence[DrafterSpec],
    options: ModelOptions,
    *,
    cache: CacheKind | None = None,
    progress: Progress | None = None,
    before_weights: Callable[[ModelText], None] | None = None,
    before_packing: Callable[[LanguageModel], None] | None = None,
) -> tuple[Target, list[LoadedDrafter]]:
    """Load a target and its drafters. Each model is loaded once.

    Args:
        target, drafters: The requested target and drafters.
        options: How to load their weights.
        cache: Kind of KV cache; ``None`` for the target's default (``default_cache``) and dynamic drafters.
        progress: Receives the stages.
        before_weights: See ``load_model``.
        before_packing: Called with the target as ``transformers`` has loaded it, before its layers change. Since it can
            take long, the drafters' models are loaded and checked first.

    Raises:
        UsageError: See ``check_models``, or two drafters have the same name.
        RunError: The target could not be loaded. A drafter's error is raised when its ``drafter`` is used.
    """
    check_models(target, drafters, options, progress=progress)

    language_model = load_model(
        target,
        options.target,
        progress=progress,
        before_weights=before_weights,
    )
    config = language_model.model.config
    kind = cache or default_cache(config, quantized=language_model.quantize is not None)
    loader = DrafterLoader(cache=cache or "dynamic", progress=progress)
    if before_packing is not None:
        make_cache(kind, config)  # refuses what it cannot hold
        for spec in dict.fromkeys(model for drafter in drafters for model in drafter.models):
            model = loader.load_model(spec, language_model)
            if isinstance(model, LanguageModel):
                translation_of(language_model, model)  # or the refusal
        before_packing(language_model)
    ready = prepare_target(language_model, kind, progress=progress)
    loaded_drafters = prepare_drafters(ready, drafters, loader)
    for drafting in loader.loaded.values():
        if isinstance(drafting, LanguageModel):
            language_model.notes += drafting.notes
    return ready, loaded_drafters


def prepare_drafters(
    ready: Target, drafters: Sequence[DrafterSpec], loader: DrafterLoader
) -> list[LoadedDrafter]:
    """Load drafters for a loaded target; see ``prepare``.

    Raises:
        UsageError: A drafter does not fit the target, or two have the same name.
    """
    found: list[LoadedDrafter] = []
    for spec in drafters:
        outcome: Drafter | RunError
        try:
            outcome = loader.load(spec, ready)
        except RunError as error:
            outcome = error
        name = str(spec) if isinstance(outcome, RunError) else outcome.traits.name
        if any(name == other.name for other in found):
            raise UsageError(f"Two drafters are called {name!r}.", "Name each drafter once.")
        models = tuple(loader.loaded[model] for model in spec.models if model in loader.loaded)
        found.append(LoadedDrafter(name, spec, outcome, models))
    return found
