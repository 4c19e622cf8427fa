"""`specbench chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import SpecbenchError
from specbench.cli import options as opt
from specbench.cli.console import say
from specbench.cli.policy import parse_recipe
from specbench.cli.progress import starting
from specbench.cli.signals import terminated
from specbench.cli.watchers import TextOutput
from specbench.options import DecodingOptions, SamplingOptions, TemplateOptions

if TYPE_CHECKING:
    from specbench.conversation import Conversation

_MAX_NEW_TOKENS = 1024


def chat(
    ctx: typer.Context,
    *,
    system: opt.SystemOption = None,
    drafting: Annotated[opt.DraftingOptions, opt.Fields(without=("recipe",))],
    decoding: Annotated[DecodingOptions, opt.Fields("max_new_tokens", max_new_tokens=_MAX_NEW_TOKENS)],
    sampling: Annotated[SamplingOptions, opt.Fields("temperature", "top_k", "top_p", "seed")],
    template: Annotated[TemplateOptions, opt.Fields("thinking")],
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress, no notes, no statistics.")] = False,
) -> None:
    """Chat with a model: a line is a message, Ctrl-C stops an answer, Ctrl-D or /exit ends.

    Answers go to stdout, everything else to stderr.
    """
    from specbench.base.progress import quiet_transformers
    from specbench.cli.summary import show_notes

    recipe = parse_recipe(ctx, drafting, decoding, sampling, template)
    with ExitStack() as stack:
        with starting(quiet) as progress:
            from specbench.cli.setting import facts
            from specbench.conversation import Conversation
            from specbench.loaded import load_recipe

            stack.enter_context(quiet_transformers())
            loaded = load_recipe(recipe, progress)
            conversation = Conversation(
                loaded.target,
                loaded.drafter,
                system=system,
                template=recipe.template,
                policy=loaded.policy,
                sampling=loaded.sampling,
                seed=recipe.sampling.seed,
                decoding=recipe.decoding,
            )
        if not quiet:
            first = f"{loaded.models}, {loaded.policy.name}."
            show_notes([first, *loaded.target.language_model.notes, *facts(loaded)], spaced=False)
        interactive = sys.stdin is not None and sys.stdin.isatty()
        _converse(conversation, interactive=interactive, quiet=quiet)


def _converse(conversation: Conversation, *, interactive: bool, quiet: bool) -> None:
    """Read messages and answer them until the end of the input.

    Args:
        interactive: Whether somebody types: then an error or Ctrl-C ends an answer, and not the command.
    """
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    if interactive:
        with suppress(ImportError):  # the line can be edited then, and earlier ones called back
            import readline  # noqa: F401
    while (line := _read(interactive)) is not None and line.strip() != "/exit":
        if line.strip():
            try:
                _answer(conversation, line.strip(), interactive=interactive, quiet=quiet)
            except SpecbenchError as error:
                if not interactive:
                    raise
                say(str(error))


def _read(interactive: bool) -> str | None:
    """Return the next line; ``None`` at the end."""
    if not interactive:
        return (sys.stdin.readline() or None) if sys.stdin is not None else None
    try:
        return input("> ")
    except EOFError:
        sys.stderr.write("\n")
        return None


def _answer(conversation: Conversation, text: str, *, interactive: bool, quiet: bool) -> None:
    """Ask, print the answer, and add both to the conversation."""
    run, stopped = conversation.ask(text), False
    shown = TextOutput(run)
    try:
        for record in run:
            shown.record(record)
    except KeyboardInterrupt:
        if not interactive or terminated():
            raise
        stopped = True
    finally:
        shown.end(run.result())
    conversation.add(text, run.answer())
    if not quiet:
        from specbench.cli.summary import show_answer

        show_answer(run.result(), kept=run.cached_tokens, stopped=stopped)
