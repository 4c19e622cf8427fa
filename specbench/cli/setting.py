"""What a user should know of models that were just loaded, and the options that decide an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench import kernels
from specbench.cli import options as opt
from specbench.cli.conflicts import given, without_effect
from specbench.drafters.parts import models_of
from specbench.loaded import model_notes
from specbench.policies import FixedLength
from specbench.specs.drafters import Grammar

if TYPE_CHECKING:
    import typer

    from specbench.loaded import LoadedRecipe


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


def notes_of(ctx: typer.Context, loaded: LoadedRecipe, chat: bool | None) -> list[str]:
    """Return what the user should know before reading the output, and which options have no effect."""
    lines: list[str] = []
    if loaded.sampling.greedy:
        why = "at temperature 0: the most probable token is taken"
        lines += without_effect(ctx, why, "top_k", "top_p", "min_p", "seed")
    if loaded.recipe.drafter.is_plain:
        lines += without_effect(ctx, "with the drafter none", "draft_policy", "gamma")
    dtype, drafter = loaded.target.quantization, loaded.recipe.drafter
    if dtype and loaded.recipe.target.kind == "builtin" and not given(ctx, "drafter", "recipe"):
        lines.append(f"The drafter is {drafter}: a model in {dtype} does not draft for itself.")
    lines += facts(loaded)
    if chat is not False and not getattr(loaded.target.tokenizer, "chat_template", None):
        lines.append("The model has no chat template: the prompt is continued as raw text.")
    return lines


def deciding_options(loaded: LoadedRecipe) -> dict[str, Any]:
    """Return the options that decide the output, by name; ``None`` for those that are switched off."""
    policy = loaded.policy
    branches = policy.branches or loaded.drafter.traits.several
    named = (branches or policy.verification is not None) and not loaded.sampling.greedy
    return {
        "draft_policy": policy.name,
        "verification": policy.method(loaded.drafter) if named else None,
        "gamma": policy.gamma if isinstance(policy, FixedLength) else None,
        **opt.deciding(loaded.recipe, loaded.sampling, loaded.target.language_model),
    }
