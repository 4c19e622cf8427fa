"""`specbench generate`: decode one prompt, or many."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import counted
from specbench.cli import options as opt
from specbench.cli.many import BATCH, decode_prompts
from specbench.cli.policy import parse_recipe
from specbench.cli.progress import starting
from specbench.cli.watchers import ShownOptions, TraceOutput
from specbench.options import (
    PROMPT,
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    TemplateOptions,
    panel,
    quantized,
)

if TYPE_CHECKING:
    from specbench.bench.prompts import Prompt
    from specbench.cli.watchers import Paint
    from specbench.generate import GenerationRun
    from specbench.models.load import LanguageModel, ModelText


_prompt = panel(PROMPT)


def generate(
    ctx: typer.Context,
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompt, in quotes. With -, or without a prompt, it is read from standard input.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        _prompt(
            "--prompts -p SET",
            "In place of PROMPT, repeatable: first turns of a built-in set, all, or a .jsonl file.",
        ),
    ] = None,
    batch: Annotated[int, _prompt("--batch N", "Batch size of --prompts.", min=1)] = BATCH,
    system: opt.SystemOption = None,
    chat: opt.ChatOption = None,
    drafting: opt.DraftingOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
    caching: CacheOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    show: ShownOptions,
) -> None:
    """Generate text. The text goes to stdout, everything else to stderr."""
    from specbench.base.progress import quiet_transformers
    from specbench.bench.prompts import load_prompts, read_prompt_text
    from specbench.cli.summary import show_legend, show_notes

    recipe = parse_recipe(ctx, drafting, models, decoding, caching, sampling, template)
    if prompts:
        recipe.check("batch")
        several, text = load_prompts(prompts), ""
    else:
        several, text = [], read_prompt_text(prompt, sys.stdin)
    paint = _paint() if show.show_accepted else None
    with ExitStack() as stack:
        trace_to = None
        if show.debug or show.trace_file:
            trace_to = stack.enter_context(TraceOutput(show.trace_file, show.debug))
        with starting(show.quiet) as progress:
            from specbench.bench.pairs import transformers_speed, warm_up
            from specbench.cli.one_prompt import decode
            from specbench.cli.setting import deciding_options, notes_of
            from specbench.loaded import load_recipe

            stack.enter_context(quiet_transformers())
            if show.compare:
                recipe.check("timing")
            speeds: list[float | None] = []
            tokens: list[int] = []

            def read_prompt(model: ModelText) -> None:
                tokens[:] = [] if several else _encode(model, text, chat, system, recipe.template)

            def time_reference(model: LanguageModel) -> None:
                progress.update("decoding with transformers, to compare", 0, None)
                speeds.append(transformers_speed(model, recipe, tokens))

            compared = show.compare and quantized(recipe.models.dtype) is None
            timed = time_reference if compared else None
            loaded = load_recipe(recipe, progress, before_weights=read_prompt, before_packing=timed)
            if show.compare:
                progress.update("warming up", 0, None)
                warm_up(loaded, tokens)
        if not show.quiet:
            notes = notes_of(ctx, loaded, chat)
            notes += loaded.target.language_model.notes if several and show.verbose else []
            if longer := sum(len(each.turns) > 1 for each in several):
                notes.append(
                    f"{counted(longer, 'prompt')} of several turns: only the first turn is answered."
                )
            show_notes(notes, spaced=sys.stdout.isatty())
            if paint is not None:
                show_legend(paint)
        if several:

            def start(each: Prompt) -> GenerationRun:
                said = each.system or system
                template = recipe.template.over(each.template)
                ids = _encode(loaded.target.language_model, each.turns[0], chat, said, template)
                return loaded.start(ids)

            more = {"options": deciding_options(loaded), "device": str(loaded.target.scorer.device)}
            decode_prompts(several, batch, start, more, show)
            return
        speed = next(iter(speeds), None)
        decode(loaded, tokens, text, trace_to, paint, show, transformers_speed=speed)
        if trace_to is not None:
            trace_to.complain()


def _paint() -> Paint:
    """Return what styles text by the origin of its tokens.

    Raises:
        UsageError: The output cannot show it.
    """
    from rich.console import Console

    from specbench.show.painted import painted

    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "--show-accepted needs a terminal with colors, and the output does not go to one.",
            "Leave it out: --json counts what was accepted, and --debug shows it.",
        )
    return partial(painted, color=not console.no_color)


def _encode(
    model: ModelText | LanguageModel,
    text: str,
    chat: bool | None,
    system: str | None,
    template: TemplateOptions,
) -> list[int]:
    from specbench.generate import encode_prompt

    ids = encode_prompt(model.tokenizer, text, chat=chat, system=system, template=template)
    limit = model.context_limit
    if limit is not None and len(ids) >= limit:
        raise UsageError(
            f"The prompt has {len(ids)} tokens, too many for the target's context of {limit}.",
            "Shorten the prompt.",
        )
    return ids
