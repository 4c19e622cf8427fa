"""Options that exclude or need each other, as rows of two tables, checked before a command runs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from specbench.base.errors import UsageError
from specbench.options import ModelOptions

if TYPE_CHECKING:
    import typer

EXCLUDE: tuple[tuple[str, tuple[str | type, ...], str, str], ...] = (
    ("generate", ("prompt", "show_accepted", "compare", "debug", "trace_file"), "prompts", "it is for one prompt"),
    ("generate", ("show_accepted",), "json_output", ""),
    ("generate serve check", ("drafter", "draft_policy", "gamma"), "recipe", "it has its own"),
    ("check", ("prompts",), "outputs", "the file has its own prompts"),
    ("check", ("drafter", "draft_policy", "gamma", "max_new_tokens", "temperature"), "outputs",
     "its outputs are finished, and greedy"),
    ("check", ("drafter", "draft_policy", "gamma", "recipe", "outputs", "cache", "ignore_eos"), "server",
     "the server has its own"),
    ("check", ("target",), "against", "answers are compared with that server's"),
    ("sweep", ("drafter", "baseline", "gamma", "draft_policy", "cache", ModelOptions, "model_defaults", "format"),
     "server", "it is for models"),
    ("sweep", ("engine",), "server", "it starts its own servers"),
    ("sweep", ("context",), "engine", "start its server and measure it with --server"),
    ("sweep", ("baseline", "cache", ModelOptions, "format"), "engine", "it is for specbench's own decoding"),
)  # fmt: skip
"""Commands, options (names of parameters, or classes whose fields are) that cannot be combined with another one, that
one, and the reason, if names alone do not say it.
"""

NEED: tuple[tuple[str, tuple[str | type, ...], str, str], ...] = (
    ("generate", ("batch",), "prompts", ""),
    ("sweep", ("minutes",), "until", ""),
    ("check", ("against",), "server", ""),
    ("sweep", ("engine_command", "arguments"), "engine", ""),
)
"""The same for options that have a meaning only with another one; of several others one is enough."""


def given(ctx: typer.Context, *names: str | type) -> list[str]:
    """Return those of the named options and groups that are on the command line, as written there."""
    found = []
    for each in names:
        for name in [each] if isinstance(each, str) else [field.name for field in fields(each)]:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                found.append(written(ctx, name))
    return found


def without_effect(ctx: typer.Context, why: str, *names: str | type) -> list[str]:
    """Return a note on those of the named options and groups that are on the command line, if there are any."""
    found = given(ctx, *names)
    return [f"{', '.join(found)} {'has' if len(found) == 1 else 'have'} no effect {why}."] if found else []


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
        for commands, options, others, why in rows:
            if ctx.info_name not in commands.split() or bool(given(ctx, *others.split())) is needed:
                continue
            for option in given(ctx, *options)[:1]:
                named = [name for name in others.split() if needed or given(ctx, name)]
                other, because = written(ctx, named[0]), f": {why}" if why else ""
                if needed:
                    hint = f"Add {other}, or leave {option} out."
                    words = ctx.params.get("arguments") or ()
                    if option.startswith("[") and words and not words[0].startswith("-"):
                        hint = f"If {words[0]!r} has prompts, write `--prompts {words[0]}`."
                    raise UsageError(f"{option} is given without {other}{because}.", hint)
                raise UsageError(f"{option} does not go with {other}{because}.", "Leave one of them out.")
