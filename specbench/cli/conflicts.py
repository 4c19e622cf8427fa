"""Options that exclude or need each other, as rows of two tables, checked before a command runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.options import ModelOptions

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True)
class Row:
    """Options of a command, and another one that they exclude or need.

    Attributes:
        command: Its name; several are separated by spaces.
        options: Names of parameters, or classes whose fields are.
        other: The name of a parameter; of several, separated by spaces, one is enough.
        why: The reason, if names alone do not say it.
    """

    command: str
    options: tuple[str | type, ...]
    other: str
    why: str = ""


EXCLUDE = (
    Row(
        "generate",
        ("prompt", "show_accepted", "compare", "debug", "trace_file"),
        "prompts",
        "it is for one prompt",
    ),
    Row("generate", ("show_accepted",), "json_output"),
    Row(
        "generate chat serve check",
        ("drafter", "draft_policy", "gamma"),
        "recipe",
        "it has its own",
    ),
    Row("check", ("prompts",), "outputs", "the file has its own prompts"),
    Row(
        "sweep",
        ("drafter", "baseline", "gamma", "draft_policy", "cache", ModelOptions, "model_defaults", "format"),
        "server",
        "it is for models",
    ),
    Row("sweep", ("engine",), "server", "it starts its own servers"),
    Row("sweep", ("context", "trace"), "engine", "start its server and measure it with --server"),
    Row("sweep", ("batch", "context", "trace"), "prompt_cache", "a conversation is one request after the other"),
    Row("sweep", ("until",), "engine", "its servers may have to be measured one after the other"),
    Row(
        "sweep",
        ("baseline", "cache", ModelOptions, "format"),
        "engine",
        "it is for specbench's own decoding",
    ),
    Row("tune", (ModelOptions, "cache", "out", "overwrite", "format"), "engine",
        "it is for specbench's own decoding"),
    Row("tune", ("out", "overwrite", "results", "resume"), "break_even", "it stores nothing"),
    Row("predict", ("target_pass_ms",), "target_config", "the target's time is measured"),
)  # fmt: skip
"""The options cannot be combined with the other one."""

NEED = (
    Row("generate", ("repeats",), "compare"),
    Row("generate", ("batch",), "prompts"),
    Row("sweep", ("minutes",), "until"),
    Row("sweep", ("accept_changes", "retry_failed"), "resume"),
    Row("sweep", ("accept_changes",), "out", "it is for a run that is named"),
    Row("sweep", ("api", "timeout"), "server engine", "it is for servers"),
    Row("sweep", ("prompt_cache",), "server", "it is for servers"),
    Row("sweep", ("engine_command", "arguments"), "engine"),
    Row(
        "tune",
        ("engine_command", "arguments", "api", "timeout"),
        "engine",
    ),
    Row("tune", ("batch",), "engine break_even"),
)
"""The options have a meaning only with the other one."""


def given(ctx: typer.Context, *names: str | type) -> list[str]:
    """Return those of the named options and groups that are on the command line, as written there."""
    found = []
    for each in names:
        for name in [each] if isinstance(each, str) else [field.name for field in fields(each)]:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                found.append(written(ctx, name))
    return found


def written(ctx: typer.Context, name: str) -> str:
    """Return how a parameter is written on the command line: ``--stop``, ``--raw``, ``PROMPT``."""
    each = next(each for each in ctx.command.params if each.name == name)
    if each.param_type_name == "argument":
        return str(each.metavar or name.upper())
    return ((ctx.params.get(name) is False and each.secondary_opts) or each.opts)[0]


def refuse_conflicts(ctx: typer.Context) -> None:
    """Refuse options that exclude each other, or that lack the one they need.

    Raises:
        UsageError: The command line has such options.
    """
    for rows, needed in ((EXCLUDE, False), (NEED, True)):
        for row in rows:
            if ctx.info_name not in row.command.split() or bool(given(ctx, *row.other.split())) is needed:
                continue
            for option in given(ctx, *row.options)[:1]:
                others = [name for name in row.other.split() if needed or given(ctx, name)]
                other, because = written(ctx, others[0]), f": {row.why}" if row.why else ""
                if needed:
                    hint = f"Add {other}, or leave {option} out."
                    raise UsageError(f"{option} is given without {other}{because}.", hint)
                raise UsageError(f"{option} does not go with {other}{because}.", "Leave one of them out.")
