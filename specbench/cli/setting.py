"""Notes for the user about models that were just loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from specbench import kernels
from specbench.base.errors import SpecbenchError
from specbench.drafters.parts import models_of
from specbench.drafters.translate import TranslatingDrafter
from specbench.specs.drafters import Grammar

if TYPE_CHECKING:
    from specbench.decoding.protocols import Drafter
    from specbench.loaded import LoadedRecipe
    from specbench.models.prepare import LoadedDrafter
    from specbench.models.target import Target
    from specbench.options import DecodingOptions


def facts(loaded: LoadedRecipe) -> list[str]:
    """Return what the user should know of the models before reading an output."""
    target, drafter, decoding = loaded.target, loaded.drafter, loaded.recipe.decoding
    lines = [*loaded.notes, *model_notes(target, [drafter], decoding)]
    parts = loaded.recipe.drafter.all_parts()
    if decoding.format is None and any(isinstance(part, Grammar) for part in parts):
        lines.append("The drafter grammar has no effect without --format.")
    if not target.packed and target.quantization is None and target.scorer.device.type == "cpu":
        lines.append(
            "Packed linear layers are not available on this machine: decoding uses the ordinary, slower ones."
        )
    for scorer in (target.scorer, *(model.scorer for model in models_of(drafter))):
        if scorer.device.type == "cpu" and (reason := kernels.why_not(scorer.model)) is not None:
            what = "Decoding" if scorer is target.scorer else "Drafting"
            lines.append(
                f"{what} is slower than it could be, because native forward passes are not available: {reason}."
            )
            break
    return lines


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
