"""Running `specbench check`: checks of configurations, and of outputs of other engines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.base.files import file_errors
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, visible
from specbench.bench.prompts import load_prompts
from specbench.check.outputs import check_outputs, outputs_json, read_outputs
from specbench.check.reference import prompts_that_fit, reference_output
from specbench.check.render import check_parts, outputs_parts
from specbench.check.run import checks_json, checks_of, verdict_on
from specbench.cli import options as opt
from specbench.cli.check_options import CHECKED_PROMPTS
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress, starting
from specbench.cli.summary import show_notes
from specbench.loaded import LoadedRecipe, load_models, load_notes, notes_on_weights, transforms_of
from specbench.options import quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.record import Json
    from specbench.check.greedy import Piece
    from specbench.check.outputs import OutputResult
    from specbench.cli.check_options import CheckedOptions
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe
    from specbench.show.document import Part


def check_recipes(asked: CheckedOptions, recipes: Sequence[Recipe], notes: Sequence[str]) -> int:
    """Check recipes, which differ in drafter and draft policy, and print the results; return the exit code.

    The target is loaded once: ``transformers`` decodes with it before its layers are packed.
    """
    base, drafters = recipes[0], [*dict.fromkeys(recipe.drafter for recipe in recipes)]
    encoded, references = dict[str, list[int]](), dict[str, list[int]]()
    rounded = quantized(base.models.dtype)
    with starting(asked.quiet) as progress:
        limit = asked.limit or CHECKED_PROMPTS
        prompts = load_prompts(asked.prompts or ["all"], limit)
        for recipe in recipes:
            recipe.check()

        def answer(model: LanguageModel) -> None:
            """Encode the prompts, and let ``transformers`` answer them."""
            encoded.update(prompts_that_fit(model, [prompt.told(base.template) for prompt in prompts]))
            for done, (name, ids) in enumerate(() if rounded else encoded.items()):
                progress.update("transformers' own answers", done, len(encoded))
                references[name] = reference_output(model, base.decoding, ids)

        target, loaded = load_models(base, drafters, progress, before_packing=answer)
        if left_out := len(prompts) - len(encoded):
            who = counted(left_out, "prompt is", "prompts are")
            notes = [*notes, f"{who} left out: too long for the target's context."]
        _note(asked, progress, *notes, *load_notes(target, loaded, base.decoding))
    ready = [LoadedRecipe.of(recipe, target, loaded[drafters.index(recipe.drafter)]) for recipe in recipes]
    checks = checks_of(ready, encoded, references, f"it has no such {rounded} model" if rounded else None)
    try:
        with StageProgress(asked.quiet) as progress, quiet_transformers():
            total = len(checks) * len(encoded)
            for number, checking in enumerate(checks):
                for done in checking.check_steps():
                    progress.update("checking", number * len(encoded) + done, total, note=checking.label)
    finally:  # an interrupt loses nothing of what is checked
        begun = [checking for checking in checks if checking.greedy]
        if begun:
            cache, limits = base.caching.cache, list(ready[-1].notes)
            deciding = {"cache": cache, **opt.deciding(base, ready[-1].sampling, target.language_model)}
            header, piece = _header("decoding", target), _piece(target)
            header |= {"device": str(target.scorer.device), "notes": limits, "options": deciding}
            what = f"{target.name} ({target.dtype}), cache {cache}"
            parts = check_parts(begun, what, limits, dtype=header["rounding"], piece=piece)
            complete = all(checking.complete for checking in checks)
            show_result(asked, header | checks_json(begun, piece) | {"complete": complete}, parts)
    return int(verdict_on(begun) in ("wrong", "nothing tested"))


def check_finished(asked: CheckedOptions, recipe: Recipe) -> int:
    """Score greedy outputs that were made elsewhere, and print the results; return the exit code."""
    file = asked.outputs
    assert file is not None
    name = "standard input" if str(file) == "-" else visible(str(file))
    with file_errors(f"The outputs in {name} cannot be read", "Check the path.", kind=UsageError):
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    lines = read_outputs(data.split(b"\n"), asked.limit)
    if not lines:
        raise UsageError(f"There are no outputs in {name}.", "Give each a line of its own.")
    with starting(asked.quiet) as progress:
        target, _ = load_models(recipe, (), progress)
        _note(asked, progress, *load_notes(target, (), recipe.decoding), *notes_on_weights(recipe, target))
    sampling, end_ids = transforms_of(recipe, target.language_model), recipe.decoding.end_ids(target.end_ids)
    results: list[OutputResult] = []
    scored = check_outputs(target, lines, sampling, end_ids, recipe.template)
    try:
        with StageProgress(asked.quiet) as progress:
            for result in scored:
                results.append(result)
                progress.update("scoring outputs", len(results), len(lines))
    finally:  # an interrupt loses nothing of what is checked
        header, piece = _header("outputs", target), _piece(target)
        figures = {**header, **outputs_json(results, piece), "complete": len(results) == len(lines)}
        parts = outputs_parts(results, complete=figures["complete"], dtype=header["rounding"], piece=piece)
        show_result(asked, figures, parts)
    return int(figures["verdict"] == "wrong")


def _note(asked: CheckedOptions, progress: StageProgress, *notes: str) -> None:
    if not asked.quiet:
        show_notes(notes, spaced=False, console=progress.console)


def _piece(target: Target) -> Piece | None:
    tokenizer = target.tokenizer
    return None if tokenizer is None else lambda token: str(tokenizer.decode([token]))


def _header(kind: str, target: Target) -> Json:
    """Return what was checked; ``rounding`` is the dtype whose rounding decides."""
    rounding = str(target.scorer.rounding).removeprefix("torch.")
    return {"check": kind, "target": target.name, "dtype": target.dtype, "rounding": rounding}


def show_result(asked: CheckedOptions, figures: Json, parts: Sequence[Part]) -> None:
    """Print a result, as JSON or in words."""
    if asked.json_output:
        write_json(figures)
    else:
        write_parts(*parts)
