"""`specbench chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import SpecbenchError
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.policy import parse_recipe
from specbench.cli.progress import starting
from specbench.cli.signals import CtrlC, terminated
from specbench.cli.watchers import TextOutput
from specbench.options import (
    CacheOptions,
    DecodingOptions,
    ModelOptions,
    SamplingOptions,
    TemplateOptions,
)

if TYPE_CHECKING:
    from specbench.conversation import Conversation

_MOST_TOKENS = 1024
_COMMANDS = {
    "/reset": "begin a new conversation with the same system message",
    "/system TEXT": "set the system message; without TEXT remove it",
    "/help": "show this list (Ctrl-C stops an answer)",
    "/exit": "leave, like Ctrl-D",
}


def chat(
    ctx: typer.Context,
    *,
    system: opt.SystemOption = None,
    drafting: opt.DraftingOptions,
    models: ModelOptions,
    decoding: Annotated[DecodingOptions, opt.Fields(without=opt.DEMONSTRATED, max_new_tokens=_MOST_TOKENS)],
    caching: CacheOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress, no notes, no statistics.")] = False,
) -> None:
    """Chat with a model. Answers go to stdout, everything else to stderr; /help lists commands."""
    from specbench.base.progress import quiet_transformers

    recipe = parse_recipe(ctx, drafting, models, decoding, caching, sampling, template)
    with ExitStack() as stack:
        with starting(quiet) as progress:
            from specbench.cli.setting import facts
            from specbench.conversation import Conversation
            from specbench.loaded import load_recipe

            stack.enter_context(quiet_transformers())
            setting = load_recipe(recipe, progress)
            conversation = Conversation(
                setting.target,
                setting.drafter,
                system=system,
                template=recipe.template,
                policy=setting.policy,
                sampling=setting.sampling,
                seed=recipe.sampling.seed,
                decoding=recipe.decoding,
            )
        chatting = _Chat(conversation, quiet=quiet)
        if not quiet:
            notes = [
                f"{setting.models}, {setting.policy.name}.",
                *setting.target.language_model.notes,
                *facts(setting),
            ]
            notes += ["/help lists commands; Ctrl-D ends."] if chatting.interactive else []
            from specbench.cli.summary import show_notes

            show_notes(notes, spaced=chatting.interactive)
        chatting.run()


class _Chat:
    """A conversation as it is typed and answered.

    Attributes:
        interactive: Whether input comes from a terminal, with a prompt for every line. Otherwise errors and Ctrl-C end
            the command.
    """

    def __init__(self, conversation: Conversation, *, quiet: bool) -> None:
        self._conversation, self._quiet = conversation, quiet
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        if self.interactive:
            with suppress(ImportError):  # the line can be edited then, and earlier ones called back
                import readline

                if os.environ.get("TERM", "dumb") != "dumb":
                    # What is pasted is one message, with all of its lines. Python switches that off.
                    readline.parse_and_bind("set enable-bracketed-paste on")

    def run(self) -> None:
        """Read and answer until the end."""
        while True:
            try:
                line = self._read()
                if line is None or line.strip() == "/exit":
                    return
                text = line.strip()
                if text.startswith("/") and "\n" not in text:  # what was pasted may begin with a slash
                    self._command(text)
                elif text:
                    self._answer(text)
            except KeyboardInterrupt:
                if not self.interactive or terminated():
                    raise
                sys.stderr.write("\n")
                _say("Ctrl-D or /exit ends the conversation.")

    def _read(self) -> str | None:
        """Return the next line; ``None`` at the end."""
        try:
            if self.interactive and sys.stdout.isatty():
                return input("> ")
            if self.interactive:
                sys.stderr.write("> ")
                sys.stderr.flush()
            return (sys.stdin.readline() or None) if sys.stdin is not None else None
        except EOFError:
            sys.stderr.write("\n")
            return None

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self._conversation.clear()
            self._confirm("A new conversation.")
        elif name == "/system":
            self._conversation.system = rest.strip() or None
            self._confirm("System message set." if rest.strip() else "No system message.")
        elif name == "/help":
            for command, meaning in _COMMANDS.items():
                _say(f"{command:13} {meaning}")
        else:
            _say(f"There is no command {name}; /help lists the commands.")

    def _answer(self, text: str) -> None:
        """Ask, print the answer, and add both to the conversation."""
        stopped = False
        try:
            run = self._conversation.ask(text)
            with CtrlC(armed=self.interactive) as ctrl_c:
                shown = TextOutput(run)
                try:
                    for record in run:
                        shown.record(record)
                        if ctrl_c.pressed:
                            stopped = True
                            break
                finally:
                    shown.end(run.result())
        except SpecbenchError as error:
            if not self.interactive:
                raise
            _say(str(error))
            return
        except KeyboardInterrupt:
            if not self.interactive or terminated():
                raise
            _say("Interrupted: the message is dropped.")
            return
        answer = run.result()
        if said := run.answer():
            self._conversation.add(text, said)
        else:
            what = "it only thought" if answer.text else "the answer has no text"
            _say(f"The message is dropped: {what}.")
        if not self._quiet:
            from specbench.cli.summary import show_answer

            show_answer(answer, kept=run.cached_tokens, stopped=stopped)

    def _confirm(self, line: str) -> None:
        if not self._quiet:
            _say(line)


def _say(line: str) -> None:
    typer.echo(terminal_safe(line), err=True)
