"""Running `specbench check`: checks of configurations, and of outputs of other engines."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.base.files import file_errors
from specbench.base.progress import quiet_transformers
from specbench.base.textsafe import counted, visible
from specbench.bench.suites import choose_prompts
from specbench.check.greedy import worst
from specbench.check.outputs import check_output, outputs_json, read_outputs, refuse_misfit
from specbench.check.reference import reference_output
from specbench.check.render import check_parts, outputs_parts
from specbench.check.run import DecodingCheck
from specbench.cli import options as opt
from specbench.cli.console import write_json, write_parts
from specbench.cli.progress import StageProgress, starting
from specbench.cli.setting import load_notes
from specbench.cli.summary import show_notes
from specbench.cli.sweep_options import CHECKED_PROMPTS
from specbench.generate import encode_prompt
from specbench.loaded import LoadedRecipe, load_models, notes_on_weights, transforms_of
from specbench.options import NO_OPTIONS, TemplateOptions, quantized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specbench.base.record import Json
    from specbench.check.greedy import Piece
    from specbench.check.outputs import OutputResult
    from specbench.cli.sweep_options import CheckedOptions
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.recipe import Recipe
    from specbench.show.document import Part


def _encode(
    recipe: Recipe,
    chat: bool | None,
    model: LanguageModel,
    text: str,
    system: str | None = None,
    template: TemplateOptions = NO_OPTIONS,
) -> list[int]:
    """Return the token ids of a prompt; without a place for it, the system message comes before the text."""
    if model.tokenizer is None:
        raise UsageError("The target has no tokenizer.", "Choose a model folder that holds one.")
    encode = partial(encode_prompt, model.tokenizer, chat=chat, template=recipe.template.over(template))
    if system is not None:
        with suppress(UsageError):
            return encode(text, system=system)
        text = f"{system}\n\n{text}"
    return encode(text)


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


def _show(asked: CheckedOptions, figures: Json, parts: Sequence[Part]) -> None:
    if asked.json_output:
        write_json(figures)
    else:
        write_parts(*parts)


def check_recipes(
    asked: CheckedOptions, recipes: Sequence[Recipe], notes: Sequence[str], chat: bool | None
) -> int:
    """Check recipes, which differ in drafter and draft policy, and print what was found; return the exit code.

    The target is loaded once: ``transformers`` decodes with it before its layers are packed.
    """
    base, encoded, references = recipes[0], dict[str, list[int]](), dict[str, list[int]]()
    rounded = quantized(base.models.dtype)
    with starting(asked.quiet) as progress:
        prompts, _ = choose_prompts(
            asked.prompts or ["all"], asked.limit or CHECKED_PROMPTS, progress=progress
        )
        for recipe in recipes:
            recipe.check()

        def answer(model: LanguageModel) -> None:
            """Encode the first turns of prompts, and let ``transformers`` answer them."""
            limit = model.context_limit
            for prompt in prompts:
                ids = _encode(base, chat, model, prompt.turns[0], prompt.system, prompt.template)
                if limit is None or len(ids) < limit:
                    encoded[prompt.id] = ids
            if not encoded:
                raise UsageError(
                    f"All prompts are too long for the target's context of {limit} tokens.",
                    "Choose shorter prompts.",
                )
            for done, (name, ids) in enumerate(() if rounded else encoded.items()):
                progress.update("transformers' own answers", done, len(encoded))
                references[name] = reference_output(model, base.decoding, ids)

        drafters = [*dict.fromkeys(recipe.drafter for recipe in recipes)]
        target, loaded = load_models(base, drafters, progress, before_packing=answer)
        if left_out := len(prompts) - len(encoded):
            who = counted(left_out, "prompt is", "prompts are")
            notes = [*notes, f"{who} left out: too long for the target's context."]
        _note(asked, progress, *notes, *load_notes(target, loaded, base.decoding))
    ready = [LoadedRecipe.of(recipe, target, loaded[drafters.index(recipe.drafter)]) for recipe in recipes]
    checks = [
        DecodingCheck(
            {name: each.request(ids) for name, ids in encoded.items()},
            references,
            no_transformers=f"it has no such {rounded} model" if rounded else None,
            bit_exact=target.bit_exact,
        )
        for each in ready
    ]
    try:
        with StageProgress(asked.quiet) as progress, quiet_transformers():
            total = len(checks) * len(encoded)
            for number, checking in enumerate(checks):
                checking.plain_outputs = checks[0].plain_outputs  # of the same target, cache and stop rules
                for done in checking.check_steps():
                    progress.update("checking", number * len(encoded) + done, total, note=checking.label)
    finally:  # an interrupt loses nothing of what is checked
        begun = [checking for checking in checks if checking.greedy]
        verdict = worst([checking.verdict for checking in begun])
        if begun:
            header, piece = _header("decoding", target), _piece(target)
            cache, limits = base.caching.cache, list(ready[-1].notes)
            deciding = opt.deciding(base, ready[-1].sampling, target.language_model)
            figures = {
                **header,
                "device": str(target.scorer.device),
                "notes": limits,
                "options": {"cache": cache, **deciding},
                "verdict": verdict,
                "complete": all(checking.complete for checking in checks),
                "configurations": [checking.to_dict(piece) for checking in begun],
            }
            what = f"{target.name} ({target.dtype}), cache {cache}"
            _show(asked, figures, check_parts(begun, what, limits, dtype=header["rounding"], piece=piece))
    return int(verdict in ("wrong", "nothing tested"))


def check_outputs(asked: CheckedOptions, recipe: Recipe, chat: bool | None) -> int:
    """Score greedy outputs that were made elsewhere, and print what was found; return the exit code."""
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
    vocab = min(target.vocab_size, target.scorer.embeddings)
    prompts: dict[int, Sequence[int]] = {}
    for line, each in lines.items():
        text = each.prompt
        prompts[line] = _encode(recipe, chat, target.language_model, text) if isinstance(text, str) else text
        refuse_misfit(line, prompts[line], each.token_ids, vocab, target.scorer.context_limit)
    sampling, end_ids = transforms_of(recipe, target.language_model), recipe.decoding.end_ids(target.end_ids)
    found: list[OutputResult] = []
    try:
        with StageProgress(asked.quiet) as progress:
            for number, (line, each) in enumerate(lines.items()):
                progress.update("scoring outputs", number, len(lines))
                found.append(check_output(target.scorer, line, each, prompts[line], sampling, end_ids))
    finally:  # an interrupt loses nothing of what is checked
        header, piece = _header("outputs", target), _piece(target)
        figures = {**header, **outputs_json(found, piece), "complete": len(found) == len(lines)}
        parts = outputs_parts(found, complete=figures["complete"], dtype=header["rounding"], piece=piece)
        _show(asked, figures, parts)
    return int(figures["verdict"] == "wrong")
