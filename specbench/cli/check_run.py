"""Running `specbench check`: the request, and checks of configurations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from specbench.base.errors import SpecbenchError, UsageError
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted
from specbench.check.greedy import worst
from specbench.check.reference import reference_output
from specbench.check.render import check_parts
from specbench.check.run import DecodingCheck
from specbench.cli import options as opt
from specbench.cli.conflicts import without_effect
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress
from specbench.cli.setting import model_notes
from specbench.cli.summary import show_notes
from specbench.generate import encode_prompt
from specbench.loaded import LoadedRecipe, load_models
from specbench.models.prepare import check_models
from specbench.options import NO_OPTIONS, TemplateOptions, quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import typer
    from rich.console import Console

    from specbench.base.progress import Progress
    from specbench.base.record import Json
    from specbench.bench.prompts import Prompt
    from specbench.check.greedy import GreedyOutput, Piece
    from specbench.decoding.protocols import Drafter
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe
    from specbench.show.document import Part


@dataclass
class CheckRequest:
    """What both kinds of checks share."""

    ctx: typer.Context
    recipe: Recipe
    json_output: bool
    quiet: bool
    chat: bool | None
    console: Console

    def note_models(self, target: Target, drafters: Iterable[Drafter | SpecbenchError] = ()) -> None:
        """Print notes on the loaded models."""
        for line in (*target.language_model.notes, *model_notes(target, drafters, self.recipe.decoding)):
            self.note(line)

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not self.quiet:
            show_notes([text], spaced=False, console=self.console)

    def show(self, figures: Json, parts: Sequence[Part]) -> None:
        """Print what was found."""
        if self.json_output:
            write_json(figures)
        else:
            write_parts(*parts)

    def encode(
        self,
        model: LanguageModel,
        text: str,
        system: str | None = None,
        template: TemplateOptions = NO_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a prompt; without a place for it, the system message comes before the text."""
        template = self.recipe.template.over(template)
        if model.tokenizer is None:
            raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
        if system is not None:
            with suppress(UsageError):
                return encode_prompt(model.tokenizer, text, chat=self.chat, system=system, template=template)
            text = f"{system}\n\n{text}"
        return encode_prompt(model.tokenizer, text, chat=self.chat, template=template)


def pieces_of(model: LanguageModel) -> Piece | None:
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def rounding_of(target: Target) -> str:
    """Return the name of the dtype whose rounding decides."""
    return str(target.scorer.rounding).removeprefix("torch.")


def prepare_checks(
    request: CheckRequest, prompts: Sequence[Prompt], recipes: Sequence[Recipe], progress: Progress
) -> Callable[[], int]:
    """Load the models, let ``transformers`` answer, and put the checks together, of each drafter with each policy.

    The target is loaded once: ``transformers`` decodes with it before its layers are packed.

    Returns:
        What checks, prints what was found, and returns the exit code.
    """
    drafters = [*dict.fromkeys(recipe.drafter for recipe in recipes)]
    for recipe in recipes:
        recipe.check()
    check_models(request.recipe.target, drafters, request.recipe.models, progress=progress)
    if request.recipe.sampling.temperature == 0:
        why = "at temperature 0: nothing is sampled"
        for line in without_effect(request.ctx, why, "top_k", "top_p", "min_p", "seed"):
            request.note(line)
    rounded = quantized(request.recipe.models.dtype)
    encoded: list[tuple[str, list[int]]] = []
    references: dict[str, GreedyOutput] = {}

    def answer(model: LanguageModel) -> None:
        """Let ``transformers`` decode with the target, before its layers are packed."""
        encoded.extend(_encode(request, model, prompts))
        for done, (name, ids) in enumerate(encoded if not rounded else ()):
            progress.update("transformers' own answers", done, len(encoded))
            references[name] = reference_output(model, request.recipe, ids)

    target, loaded_drafters = load_models(request.recipe, drafters, progress, before_packing=answer)
    request.note_models(target, [each.outcome for each in loaded_drafters])
    plain_outputs: dict[str, GreedyOutput] = {}
    by_spec = dict(zip(drafters, loaded_drafters, strict=True))
    checks = []
    for recipe in recipes:
        ready = LoadedRecipe.of(recipe, target, by_spec[recipe.drafter])
        checking = DecodingCheck(
            {name: ready.request(ids) for name, ids in encoded},
            references,
            no_transformers=f"it has no such {rounded} model" if rounded else None,
            bit_exact=target.bit_exact,
            plain_outputs=plain_outputs,
        )
        checks.append(checking)
    header = {
        "check": "decoding",
        "target": target.name,
        "dtype": target.dtype,
        "device": str(target.scorer.device),
        "rounding": rounding_of(target),
        "notes": list(ready.notes),
        "options": {
            "cache": request.recipe.caching.cache,
            **opt.deciding(request.recipe, ready.sampling, target.language_model),
        },
    }
    return partial(_check, request, checks, header, pieces_of(target.language_model))


def _encode(
    request: CheckRequest, model: LanguageModel, prompts: Sequence[Prompt]
) -> list[tuple[str, list[int]]]:
    """Return ids and token ids of the prompts that fit into the context; of conversations, of the first turn."""
    encoded = [
        (prompt.id, request.encode(model, prompt.turns[0], prompt.system, prompt.template))
        for prompt in prompts
    ]
    limit = model.context_limit
    fitting = [(name, ids) for name, ids in encoded if limit is None or len(ids) < limit]
    if not fitting:
        raise UsageError(
            f"All prompts are too long for the target's context of {limit} tokens.",
            "Choose shorter prompts.",
        )
    if left_out := len(encoded) - len(fitting):
        who = counted(left_out, "prompt is", "prompts are")
        request.note(f"{who} left out: too long for the target's context.")
    return fitting


def _check(request: CheckRequest, checks: Sequence[DecodingCheck], header: Json, piece: Piece | None) -> int:
    """Check, and print what was found under what was checked; return the exit code."""
    try:
        with StageProgress(request.quiet) as progress, quiet_transformers():
            request.console = progress.console
            for number, checking in enumerate(checks):
                checking.report = partial(_report, progress, checks, number)
                checking.check_steps()
    finally:  # an interrupt loses nothing of what is checked
        begun = [checking for checking in checks if checking.greedy]
        verdict = worst([checking.verdict for checking in begun])
        if begun:
            found = {
                "verdict": verdict,
                "complete": all(checking.complete for checking in checks),
                "configurations": [checking.to_dict(piece) for checking in begun],
            }
            target = f"{header['target']} ({header['dtype']}), cache {header['options']['cache']}"
            parts = check_parts(begun, target, header["notes"], dtype=header["rounding"], piece=piece)
            request.show(header | found, parts)
    return int(verdict in ("wrong", "nothing tested"))


def _report(progress: StageProgress, checks: Sequence[DecodingCheck], number: int, done: int) -> None:
    cases = len(checks[number].requests)
    total = len(checks) * cases
    progress.update("checking", number * cases + done, total, note=checks[number].label)
