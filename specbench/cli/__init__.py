"""The command line: one small module for each command, which imports what is heavy when it runs."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specbench._version import __version__
from specbench.base.errors import RunError, SpecbenchError, UsageError
from specbench.base.record import to_dict
from specbench.base.textsafe import terminal_safe
from specbench.cli.check import check
from specbench.cli.compare import compare
from specbench.cli.console import say
from specbench.cli.doctor import doctor
from specbench.cli.drafters import drafters
from specbench.cli.export import export
from specbench.cli.generate import generate
from specbench.cli.help import GroupedCommand
from specbench.cli.options import unfolded
from specbench.cli.plot import plot
from specbench.cli.predict import predict
from specbench.cli.report import report
from specbench.cli.serve import serve
from specbench.cli.signals import (
    answer_ctrl_c,
    end_cleanly_on_sigterm,
    exit_code_of_interrupt,
    interrupted,
)
from specbench.cli.sweep import sweep
from specbench.cli.trace import trace
from specbench.cli.train import train
from specbench.cli.tune import tune

OUTPUT_CLOSED = 141  # what shells report for SIGPIPE

_FIRST_STEPS = """\
Is your model faster with speculative decoding? Three commands to begin with:

  # one answer, with and without drafts
  specbench generate --compare "Why is the sky blue?"
  # the fastest setting on this machine
  specbench tune
  # is the output the model's own?
  specbench check

They use a small built-in model (98 MB, fetched once); --target MODEL names yours.
`specbench --help` lists all commands."""

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_OUT_OF_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory", re.IGNORECASE)
_VALIDATOR_WORDS = re.compile("Value error, |, unable to parse .*")


class _EscapeError(Exception):
    """Exception whose cause is an error that typer would otherwise turn into an exit."""


class _Commands(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        """List the commands with their whole summaries, which click would cut to a line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(10_000)) for name, command in self.commands.items()]
            )

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError, EOFError) as error:
            raise _EscapeError from error


app = typer.Typer(
    name="specbench",
    cls=_Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for _command in (
    *(generate, serve, drafters, train, predict, tune, sweep),
    *(plot, report, compare, export, check, doctor, trace),
):
    app.command(cls=GroupedCommand)(unfolded(_command))


def _show_version(verbose: bool) -> None:
    """Print the version; if verbose, also what a bug report needs: machine, versions, instructions."""
    typer.echo(f"specbench {__version__}")
    if not verbose:
        return
    from specbench.bench.environment import describe_environment
    from specbench.kernels import describe, reads_bfloat16

    dtype = "bfloat16 if stored in it, else float32" if reads_bfloat16() else "float32, bfloat16 is slow here"
    rows = {**to_dict(describe_environment()), "dtype_auto": f"{dtype} (CPU)", **describe()}
    del rows["specbench"]
    for name, value in rows.items():
        text = (
            ", ".join(value) or "none" if isinstance(value, list) else "unknown" if value is None else value
        )
        typer.echo(f"{name.replace('_', ' ') + ':':16}{terminal_safe(str(text))}")


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: also show the machine and other versions.")
    ] = False,
    traceback: Annotated[  # noqa: ARG001 - ``run`` reads it, which sees every error
        bool, typer.Option("--traceback", help="Before a command: show the traceback of an error.")
    ] = False,
) -> None:
    """Generate text with speculative decoding, and measure whether it pays."""
    if version:
        _show_version(verbose)
        raise typer.Exit
    if verbose:
        raise UsageError("--verbose says more about --version only.", "Use `specbench --version --verbose`.")
    if ctx.invoked_subcommand is None:
        typer.echo(_FIRST_STEPS, err=True)
        raise typer.Exit(2)
    try:
        Path.cwd()
    except OSError as error:
        raise RunError(
            "The working folder cannot be read: it may have been removed.", "Change to another folder."
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Codes: 0 done; 1 the run failed; 2 wrong command line or input; 130 interrupted; 141 output closed; 143 terminated.
    """
    end_cleanly_on_sigterm()
    codes = [1]
    # The first one registered is called last: taking the interpreter apart would take a fifth of a second.
    atexit.register(lambda: _leave(codes[-1]))
    codes.append(run(list(sys.argv[1:] if arguments is None else arguments)))
    sys.exit(codes[-1])


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; an error becomes one sentence on stderr."""
    try:
        answer_ctrl_c()
        _prepare_streams()
        _set_environment()
        result: Any = _command_line().main(arguments, prog_name="specbench", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as raised:
        error = raised.__cause__ if isinstance(raised, _EscapeError) and raised.__cause__ else raised
        if "--traceback" in arguments[:1] and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return _explain(error)
    return result if isinstance(result, int) else 0


@functools.cache
def _command_line() -> Any:
    """Return every command with its options, built once."""
    return typer.main.get_command(app)


def _prepare_streams() -> None:
    """Make stdout and stderr replace characters that their encoding lacks, since models can write any character.

    What the caller has closed is opened again, so that no other file takes its number: stdin at its end, stdout such
    that writing is an error, stderr such that nobody reads it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, open(number, mode))  # noqa: PTH123, SIM115 - for as long as the program runs
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _set_environment() -> None:
    """Set what torch and OpenMP read when torch is loaded, unless the user has (figures: notes/measured.md)."""
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        # Large memory in huge pages from the start: joining pages later takes as long as the rest of a start.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads spin for some 100 µs, then sleep. By default they spin forever with as many cores as
        # threads, and as soon as another process wants a core, forward passes take 10 to 40 times as long.
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        # Kernels for 128 shapes of products, not 1,024: every prompt length has its own, of some 2.3 MB each for a
        # small model in float32, and a process that reads many prompts would grow by 500 MB.
        os.environ.setdefault(capacity, "128")


def _explain(error: BaseException) -> int:
    """Print what went wrong in a sentence; return the exit code."""
    unexpected = not isinstance(error, SpecbenchError | SystemExit | BrokenPipeError)
    if isinstance(error, KeyboardInterrupt | typer.Abort) or (interrupted() and unexpected):
        _say("interrupted.")
        return exit_code_of_interrupt()
    # rich turns a closed pipe into an exit.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        _give_up_stdout()  # without a message: the reader has seen enough, as in `specbench trace FILE | head`
        return OUTPUT_CLOSED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, SpecbenchError):
        _say(str(error))
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's own errors
        context = getattr(error, "ctx", None)
        hint = f" See `{context.command_path} --help`." if context is not None else ""
        message = str(error.format_message())
        if "unexpected extra argument" in message and context is not None and context.info_name == "generate":
            hint = " Put a prompt of several words in quotes." + hint
        if "No such option: --traceback" in message:
            hint = " It comes before the command: `specbench --traceback COMMAND`."
        _say(_sentence(message) + hint)
        return int(error.exit_code)
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename is None:
        _give_up_stdout()
        _say(f"the output cannot be written: {error.strerror}.")
        return 1
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        _say("not enough memory. Use a smaller model, a narrower dtype, or a shorter prompt.")
        return 1
    where = "this should not happen; `specbench --traceback COMMAND` shows where"
    _say(f"{type(error).__name__}: {error or 'no message'} ({where})")
    return 1


def _sentence(message: str) -> str:
    """Return a message of the option parser as a sentence, without its validator's words."""
    message = _VALIDATOR_WORDS.sub("", message).replace("Input should be", "it should be").rstrip(" .")
    return message if message.endswith("?") else f"{message}."


def _give_up_stdout() -> None:
    """Discard the rest of stdout's buffer; otherwise the interpreter would print another error when it exits."""
    with suppress(OSError, ValueError):  # ValueError: not a real file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    with suppress(OSError):  # stderr may be closed as well
        say(message)
