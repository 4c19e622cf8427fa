"""Running `specbench check`: the request, and checks of configurations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Iterable, Iterator, Sequence

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

    def note_unused(self, why: str, *names: str | type) -> None:
        """Print which of the named options stand on the command line, and that they have no effect."""
        for line in without_effect(self.ctx, why, *names):
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


class DecodingJob:
    """Checks of each drafter with each policy that applies to it."""

    def __init__(self, request: CheckRequest, prompts: Sequence[Prompt], recipes: Sequence[Recipe]) -> None:
        self.request, self.prompts, self.recipes = request, prompts, recipes
        self._checks: list[DecodingCheck] = []
        self._header: dict[str, Any] = {}

    def run(self) -> int:
        """Check, and print what was found; return the exit code."""
        try:
            with StageProgress(self.request.quiet) as progress, quiet_transformers():
                self.request.console = progress.console
                for number, checking in enumerate(self._checks):
                    checking.report = partial(self._report, progress, number)
                    checking.check_steps()
        finally:  # an interrupt loses nothing of what is checked
            begun = [checking for checking in self._checks if checking.greedy]
            if begun:
                self._show(begun, all(checking.complete for checking in self._checks))
        return int(worst([checking.verdict for checking in begun]) in ("wrong", "nothing tested"))

    def _report(self, progress: StageProgress, number: int, done: int) -> None:
        cases = len(self._checks[number].requests)
        done, total = number * cases + done, len(self._checks) * cases
        progress.update("checking", done, total, note=self._checks[number].label)

    def prepare(self, progress: Progress) -> None:
        """Load the models, let ``transformers`` answer, and put the checks together.

        The target is loaded once: ``transformers`` decodes with it before its layers are packed.
        """
        request = self.request
        drafters = [*dict.fromkeys(recipe.drafter for recipe in self.recipes)]
        for recipe in self.recipes:
            recipe.check()
        check_models(request.recipe.target, drafters, request.recipe.models, progress=progress)
        names = ("top_k", "top_p", "min_p", "seed", "residual_adjustment")
        if request.recipe.sampling.temperature == 0:
            request.note_unused("at temperature 0: nothing is sampled", *names)
        rounded = quantized(request.recipe.models.dtype)
        prompts: list[tuple[str, list[int]]] = []
        references: dict[str, GreedyOutput] = {}

        def answer(model: LanguageModel) -> None:
            """Let ``transformers`` decode with the target, before its layers are packed."""
            self._model = model
            prompts.extend(self._encode(model, self.prompts))
            if not rounded:
                references.update(self._references(model, prompts, progress))

        target, loaded_drafters = load_models(request.recipe, drafters, progress, before_packing=answer)
        request.note_models(target, [each.outcome for each in loaded_drafters])
        plain_outputs: dict[str, GreedyOutput] = {}
        by_spec = dict(zip(drafters, loaded_drafters, strict=True))
        for recipe in self.recipes:
            ready = LoadedRecipe.of(recipe, target, by_spec[recipe.drafter])
            checking = DecodingCheck(
                {name: ready.request(ids) for name, ids in prompts},
                references,
                no_transformers=f"it has no such {rounded} model" if rounded else None,
                bit_exact=target.bit_exact,
                plain_outputs=plain_outputs,
            )
            self._checks.append(checking)
        self._header = {
            "check": "decoding",
            "target": target.name,
            "dtype": target.dtype,
            "device": str(target.scorer.device),
            "rounding": rounding_of(target),
            "options": {
                "cache": request.recipe.caching.cache,
                **opt.deciding(request.recipe, ready.sampling, target.language_model),
                "residual_adjustment": request.recipe.decoding.residual_adjustment,
            },
        }

    def _encode(self, model: LanguageModel, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]]]:
        """Return ids and token ids of the prompts that fit into the context; of conversations, of the first turn."""
        encoded = [
            (prompt.id, self.request.encode(model, prompt.turns[0], prompt.system, prompt.template))
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
            self.request.note(f"{who} left out: too long for the target's context.")
        return fitting

    def _references(
        self, model: LanguageModel, prompts: Sequence[tuple[str, list[int]]], progress: Progress
    ) -> Iterator[tuple[str, GreedyOutput]]:
        for done, (name, ids) in enumerate(prompts):
            progress.update("transformers' own answers", done, len(prompts))
            yield name, reference_output(model, self.request.recipe, ids)

    def _show(self, results: Sequence[DecodingCheck], complete: bool) -> None:
        """Print what was found, under what was checked."""
        header, piece = self._header, pieces_of(self._model)
        verdict = worst([result.verdict for result in results])
        found = [result.to_dict(piece) for result in results]
        figures = {**header, "verdict": verdict, "complete": complete, "configurations": found}
        target = f"{header['target']} ({header['dtype']}), cache {header['options']['cache']}"
        parts = check_parts(results, target, dtype=header["rounding"], piece=piece)
        self.request.show(figures, parts)
