"""Running `specbench check`: checks of configurations, and of outputs of other engines."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.base.errors import SpecbenchError, UsageError
from specbench.base.files import reason
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, visible
from specbench.check.greedy import worst
from specbench.check.outputs import check_output, outputs_json, read_outputs, refuse_misfit, verdict_on
from specbench.check.reference import reference_output
from specbench.check.render import check_parts, outputs_parts
from specbench.check.run import DecodingCheck
from specbench.cli import options as opt
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress
from specbench.cli.setting import model_notes
from specbench.cli.summary import show_notes
from specbench.generate import encode_prompt
from specbench.loaded import LoadedRecipe, load_models, notes_on_weights, transforms_of
from specbench.models.devices import check_options
from specbench.models.prepare import check_models
from specbench.models.target import load_target
from specbench.options import NO_OPTIONS, TemplateOptions, quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from specbench.base.progress import Progress
    from specbench.base.record import Json
    from specbench.bench.prompts import Prompt
    from specbench.check.greedy import Piece
    from specbench.check.outputs import OutputResult
    from specbench.decoding.protocols import Drafter
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe
    from specbench.show.document import Part


@dataclass
class CheckRequest:
    """What both kinds of checks share."""

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


def _piece(model: LanguageModel) -> Piece | None:
    tokenizer = model.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _header(kind: str, target: Target) -> Json:
    """Return what was checked; ``rounding`` is the dtype whose rounding decides."""
    rounding = str(target.scorer.rounding).removeprefix("torch.")
    return {"check": kind, "target": target.name, "dtype": target.dtype, "rounding": rounding}


# -- configurations --------------------------------------------------------------------------------


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
    rounded = quantized(request.recipe.models.dtype)
    encoded: list[tuple[str, list[int]]] = []
    references: dict[str, list[int]] = {}

    def answer(model: LanguageModel) -> None:
        """Let ``transformers`` decode with the target, before its layers are packed."""
        encoded.extend(_encode(request, model, prompts))
        for done, (name, ids) in enumerate(encoded if not rounded else ()):
            progress.update("transformers' own answers", done, len(encoded))
            references[name] = reference_output(model, request.recipe, ids)

    target, loaded_drafters = load_models(request.recipe, drafters, progress, before_packing=answer)
    request.note_models(target, [each.outcome for each in loaded_drafters])
    by_spec = dict(zip(drafters, loaded_drafters, strict=True))
    ready = [LoadedRecipe.of(recipe, target, by_spec[recipe.drafter]) for recipe in recipes]
    checks = [
        DecodingCheck(
            {name: each.request(ids) for name, ids in encoded},
            references,
            no_transformers=f"it has no such {rounded} model" if rounded else None,
            bit_exact=target.bit_exact,
        )
        for each in ready
    ]
    header = {
        **_header("decoding", target),
        "device": str(target.scorer.device),
        "notes": list(ready[-1].notes),
        "options": {
            "cache": request.recipe.caching.cache,
            **opt.deciding(request.recipe, ready[-1].sampling, target.language_model),
        },
    }
    return partial(_check, request, checks, header, _piece(target.language_model))


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
            plain_outputs = checks[0].plain_outputs
            for number, checking in enumerate(checks):
                checking.plain_outputs = plain_outputs  # of the same target, cache and stop rules
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


# -- outputs of other engines ----------------------------------------------------------------------


def check_outputs(request: CheckRequest, file: Path, limit: int | None) -> int:
    """Score greedy outputs that were made elsewhere, and print what was found; return the exit code."""
    name = "standard input" if str(file) == "-" else visible(str(file))
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The outputs in {name} cannot be read: {reason(error)}.", "Check the path."
        ) from None
    lines = read_outputs(data.split(b"\n"), limit)
    if not lines:
        raise UsageError(f"There are no outputs in {name}.", "Give each a line of its own.")
    recipe, models = request.recipe, request.recipe.models
    check_options(models.target)
    with StageProgress(request.quiet) as progress:
        target = load_target(
            recipe.target,
            models.target,
            cache=recipe.caching.cache,
            progress=progress,
            allow_pickle=models.allow_pickle,
        )
    request.note_models(target)
    for note in notes_on_weights(recipe, target):
        request.note(note)
    vocab = min(target.vocab_size, target.scorer.embeddings)
    prompts: dict[int, Sequence[int]] = {}
    for line, each in lines.items():
        text = each.prompt
        prompts[line] = request.encode(target.language_model, text) if isinstance(text, str) else text
        refuse_misfit(line, prompts[line], each.token_ids, vocab, target.scorer.context_limit)
    sampling, end_ids = transforms_of(recipe, target.language_model), recipe.decoding.end_ids(target.end_ids)
    found: list[OutputResult] = []
    try:
        with StageProgress(request.quiet) as progress:
            for number, (line, each) in enumerate(lines.items()):
                progress.update("scoring outputs", number, len(lines))
                found.append(check_output(target.scorer, line, each, prompts[line], sampling, end_ids))
    finally:  # an interrupt loses nothing of what is checked
        complete, header = len(found) == len(lines), _header("outputs", target)
        piece = _piece(target.language_model)
        parts = outputs_parts(found, complete=complete, dtype=header["rounding"], piece=piece)
        request.show({**header, **outputs_json(found, piece), "complete": complete}, parts)
    return int(verdict_on(found) == "wrong")
