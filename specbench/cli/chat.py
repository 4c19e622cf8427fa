"""`specbench chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Event, Thread, main_thread
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.base.errors import SpecbenchError
from specbench.base.textsafe import terminal_safe
from specbench.cli import options as opt
from specbench.cli.policy import parse_recipe
from specbench.cli.progress import starting, without_collector
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
    from specbench.base.progress import Progress
    from specbench.conversation import Conversation

_MOST_TOKENS = 1024
_AGAIN_S = 0.2
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
    decoding: Annotated[DecodingOptions, opt.Fields(max_new_tokens=_MOST_TOKENS)],
    caching: CacheOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    quiet: Annotated[bool, opt.output("--quiet -q", "No progress, no notes, no statistics.")] = False,
) -> None:
    """Chat with a model. Answers go to stdout, everything else to stderr; /help lists commands."""
    from specbench.base.progress import quiet_transformers
    from specbench.models.ahead import read_layers_ahead

    with ExitStack() as stack:

        def load(progress: Progress) -> tuple[Conversation, list[str]]:
            recipe = parse_recipe(ctx, drafting, models, decoding, caching, sampling, template)
            read_layers_ahead(recipe)
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
            first = f"{setting.models}, {setting.policy.name}."
            return conversation, [first, *setting.target.language_model.notes, *facts(setting)]

        interactive = sys.stdin is not None and sys.stdin.isatty()
        loading = _Loading(load, quiet=quiet)
        if interactive and hasattr(signal, "pthread_kill"):
            loading.start()
        else:
            loading.conversation()
        _Chat(loading, quiet=quiet, interactive=interactive).run()


class _Loading(Thread):
    """A conversation whose models are loaded while the first message is typed.

    If they cannot be loaded, the main thread is interrupted until it calls ``check``.

    Args:
        load: Returns the conversation and notes on it.
        quiet: Show neither progress nor notes.
    """

    def __init__(self, load: Callable[[Progress], tuple[Conversation, list[str]]], *, quiet: bool) -> None:
        super().__init__(daemon=True)
        self._load, self._quiet = load, quiet
        self._loaded: tuple[Conversation, list[str]] | None = None
        self._error: BaseException | None = None
        self._known = Event()
        self._shown: Progress | None = None

    def run(self) -> None:
        try:
            with without_collector():
                self._loaded = self._load(self)
        except BaseException as error:
            self._error = error
            while not self._known.wait(_AGAIN_S):
                signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    def update(self, stage: str, done: int, total: int | None) -> None:
        """Show progress while somebody waits."""
        if self._shown is not None:
            self._shown.update(stage, done, total)

    def conversation(self) -> Conversation:
        """Return the conversation once it is loaded, after notes on it the first time."""
        if self._loaded is None:
            with starting(self._quiet) as self._shown:
                if self.ident is None:
                    self._loaded = self._load(self)
                else:
                    self.join()
        self.check()
        assert self._loaded is not None
        conversation, notes = self._loaded
        self._loaded = conversation, []
        if notes and not self._quiet:
            from specbench.cli.summary import show_notes

            show_notes(notes, spaced=self.ident is not None)
        return conversation

    def check(self) -> None:
        """Raise the error if loading has failed."""
        if self._error is not None:
            with suppress(KeyboardInterrupt):  # a last one
                self._known.set()
                self.join()
            raise self._error


class _Chat:
    """A conversation as it is typed and answered.

    Args:
        interactive: Whether input comes from a terminal, with a prompt for every line. Otherwise errors and Ctrl-C end
            the command.
    """

    def __init__(self, loading: _Loading, *, quiet: bool, interactive: bool) -> None:
        self._loading, self._quiet, self._interactive = loading, quiet, interactive
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        if interactive:
            self._confirm("/help lists commands; Ctrl-D ends.")
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
                if not self._interactive or terminated():
                    raise
                sys.stderr.write("\n")
                self._loading.check()
                _say("Ctrl-D or /exit ends the conversation.")

    def _read(self) -> str | None:
        """Return the next line; ``None`` at the end."""
        try:
            if self._interactive and sys.stdout.isatty():
                return input("> ")
            if self._interactive:
                sys.stderr.write("> ")
                sys.stderr.flush()
            return (sys.stdin.readline() or None) if sys.stdin is not None else None
        except EOFError:
            sys.stderr.write("\n")
            return None

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name == "/reset":
            self._loading.conversation().clear()
            self._confirm("A new conversation.")
        elif name == "/system":
            self._loading.conversation().system = rest.strip() or None
            self._confirm("System message set." if rest.strip() else "No system message.")
        elif name == "/help":
            for command, meaning in _COMMANDS.items():
                _say(f"{command:13} {meaning}")
        else:
            _say(f"There is no command {name}; /help lists the commands.")

    def _answer(self, text: str) -> None:
        """Ask, print the answer, and add both to the conversation."""
        stopped, conversation = False, self._loading.conversation()
        try:
            run = conversation.ask(text)
            with CtrlC(armed=self._interactive) as ctrl_c:
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
            if not self._interactive:
                raise
            _say(str(error))
            return
        except KeyboardInterrupt:
            if not self._interactive or terminated():
                raise
            _say("Interrupted: the message is dropped.")
            return
        answer = run.result()
        if said := run.answer():
            conversation.add(text, said)
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
