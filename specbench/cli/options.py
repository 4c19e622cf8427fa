"""Options that several commands take, groups of them unfolded into single ones, and the layout of help."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from specbench.base.errors import UsageError
from specbench.options import (
    LENGTH,
    MODELS,
    OUTPUT,
    PROMPT,
    CacheOptions,
    ModelOptions,
    quantized,
)
from specbench.specs.drafters import DRAFTERS
from specbench.specs.rules import rule_words

if TYPE_CHECKING:
    from specbench.decoding.sampling import Sampling
    from specbench.models.load import LanguageModel
    from specbench.models.target import Target
    from specbench.options import CacheKind
    from specbench.recipe import Recipe

NOT_SWEPT = ("stop", "first_target", "residual_adjustment")
"""Fields of ``DecodingOptions`` that hold for all that a sweep or a race compares."""

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "lookup"
"""What needs no model of its own, and costs next to nothing where it does not help."""

HEADS_AHEAD: Mapping[str, str] = {"smollm2-135m": "lookup+smollm2-135m-head"}
"""Drafters that are taken in its place, by target, where the head that comes with specbench is there: those that a
stored run shows ahead of it (docs/training.md)."""

_DEFAULT_DRAFTERS = ", ".join(
    [DEFAULT_DRAFTER, *(f"{drafter} for {target}" for target, drafter in HEADS_AHEAD.items())]
)
"""As help has them."""


# -- groups of options -----------------------------------------------------------------------------


class Fields:
    """Beside a group in a command's signature: what the command takes of it, if not all as it stands in the group.

    Args:
        names: The fields, in the order of the help; all if none is named. The others keep their defaults.
        without: In place of these, fields that it does not take.
        words: Other help, by field.
        defaults: Other defaults, by field.
    """

    def __init__(
        self,
        *names: str,
        without: Collection[str] = (),
        words: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> None:
        self.names, self.without, self.words, self.defaults = names, without, words or {}, defaults


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it, with single options in place of groups.

    A group is a parameter whose type is a dataclass. Each of its fields is an option, an annotated type as typer takes
    it; one that holds a tuple may be repeated on the command line.
    """
    groups: dict[str, tuple[Any, list[Field[Any]]]] = {}
    parameters: list[Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in signature(command).parameters.values():
        hint = hints[parameter.name]
        kind, *extra = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hint))
            continue
        taken = next((each for each in extra if isinstance(each, Fields)), Fields())
        known = {field.name: field for field in fields(kind) if field.name not in taken.without}
        chosen = [known[name] for name in taken.names or known]
        groups[parameter.name] = kind, chosen
        parameters += _single(kind, chosen, taken)

    @wraps(command)
    def call(**values: Any) -> None:
        for name, (kind, chosen) in groups.items():
            own = {field.name: values.pop(field.name) for field in chosen}
            repeated = {
                field.name: tuple(own[field.name] or ())
                for field in chosen
                if isinstance(field.default, tuple)
            }
            values[name] = kind(**own | repeated)
        command(**values)

    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _single(kind: Any, chosen: Iterable[Field[Any]], taken: Fields) -> Iterator[Parameter]:
    """The fields of a group as parameters of a command."""
    hints = get_type_hints(kind, include_extras=True)
    for field in chosen:
        (value, option), default = get_args(hints[field.name]), taken.defaults.get(field.name, field.default)
        if field.name in taken.words:
            option = copy(option)
            option.help = taken.words[field.name]
        if isinstance(default, tuple):  # typer knows lists
            value, default = list[get_args(value)[0]] | None, None  # type: ignore[misc]
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[value, option]
        )


def default_drafter(target: str) -> str:
    """What drafts for a target where nothing is said."""
    from specbench.models.training_metadata import is_packaged
    from specbench.specs import models

    there = any(is_packaged(alias) for alias, model in models.PACKAGED_HEADS.items() if model == target)
    return HEADS_AHEAD.get(target, DEFAULT_DRAFTER) if there else DEFAULT_DRAFTER


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the headings of their ``rich_help_panel``.

    One that takes ``--config`` has the defaults of a `specbench.toml`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; what a configuration says stands behind it."""
        names = {str(parameter.name): parameter for parameter in self.get_params(ctx)}
        if "config" in names and not ctx.resilient_parsing:
            from specbench.cli.config import defaults_from_config

            given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            if not given.get("help"):
                lists = [name for name, parameter in names.items() if getattr(parameter, "multiple", False)]
                defaults = defaults_from_config(given, lists)
                drafter = default_drafter(given.get("target") or defaults.get("target", DEFAULT_TARGET))
                if drafter != DEFAULT_DRAFTER:
                    defaults.setdefault("drafter", [drafter] if "drafter" in lists else drafter)
                ctx.default_map = defaults
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one list per heading, in the order in which the headings appear."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def complete_drafters(incomplete: str) -> list[str]:
    """What ``--drafter`` may go on to, for a shell; behind a word and a colon, its options."""
    words = [kind for kind in DRAFTERS if kind.word.islower()]
    found = [*(kind.word for kind in words), "lookup+self:int8"]
    if incomplete:
        written = [(kind.word, each.written.partition("=")) for kind in words for each in kind.options()]
        found += [f"{word}:{key}{sign}" for word, (key, sign, _) in written]
    return _beginning(incomplete, found)


def complete_rules(incomplete: str) -> list[str]:
    """What ``--length-policy`` may go on to."""
    return _beginning(incomplete, rule_words())


def complete_prompts(incomplete: str) -> list[str]:
    """The built-in sets that ``--prompts`` may go on to; a shell offers files where there are none."""
    from specbench.bench.prompts import set_names

    return _beginning(incomplete, set_names())


def complete_configurations(ctx: typer.Context, incomplete: str) -> list[str]:
    """The configurations of the runs that are named before ``--a``, ``--b`` or ``--setting``."""
    from specbench.results.store import stored_runs

    source = ctx.params.get("source")
    # The last: an option that has no value yet ends the parsing.
    folders = ctx.params.get("runs") or ([source] if source else ctx.args)
    runs = [run for folder in folders for _, run in stored_runs(folder)]
    return _beginning(incomplete, dict.fromkeys(config.id for run in runs for config in run.configs))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


# -- options that are taken one by one ---------------------------------------------------------------

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="MODEL",
        help="The model whose output is kept: hub id (org/name@revision), folder, .gguf file, or smollm2-135m.",
        rich_help_panel=MODELS,
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="DRAFTER",
        autocompletion=complete_drafters,
        help="What proposes tokens: a word that `specbench drafters` lists, or a model.",
        show_default=_DEFAULT_DRAFTERS,
        rich_help_panel=MODELS,
    ),
]
several_drafters = partial(
    typer.Option,
    "--drafter",
    metavar="DRAFTER",
    autocompletion=complete_drafters,
    help=f"A word of `specbench drafters` or a model; repeatable. Default: {_DEFAULT_DRAFTERS}.",
)
_tree = partial(
    typer.Option,
    "--tree",
    metavar="TREE",
    rich_help_panel=LENGTH,
)
_TREES = (
    "chain, siblings:nodes=N (short: --siblings N), or a tree in place of a draft-length rule: auto, static, dynamic or"
    " chains, with options as in dynamic:top-k=4,nodes=12."
)


@dataclass(frozen=True)
class RulesOptions:
    """How much is drafted, for commands that compare draft-length rules."""

    gamma: Annotated[
        str | None,
        typer.Option(
            "--gamma",
            "-g",
            metavar="RANGE",
            help="γ of fixed (5) and, in the first step, of heuristic: 4, 1..8, 2..16..2 (with a step) or 1,2,4.",
            rich_help_panel=LENGTH,
        ),
    ] = None
    length_policy: Annotated[
        tuple[str, ...],
        typer.Option(
            "--length-policy",
            metavar="RULE",
            autocompletion=complete_rules,
            help="Draft-length rule, as generate takes it; repeatable.",
            rich_help_panel=LENGTH,
        ),
    ] = ()
    tree: Annotated[tuple[str, ...], _tree(help=f"{_TREES} Repeatable.")] = ()


@dataclass(frozen=True)
class DraftingOptions:
    """What is decoded with, and how much is drafted, for commands that decode in one way."""

    target: TargetOption = DEFAULT_TARGET
    drafter: DrafterOption = DEFAULT_DRAFTER
    length_policy: Annotated[
        str | None,
        typer.Option(
            "--length-policy",
            metavar="RULE",
            autocompletion=complete_rules,
            help="Draft-length rule: auto, fixed, egag, confidence, entropy-bound, svip or heuristic, with options as"
            " in entropy-bound:lambda=0.6. Default: auto at temperature 0, fixed above (a seed repeats a run then) and"
            " with --gamma.",
            rich_help_panel=LENGTH,
        ),
    ] = None
    tree: Annotated[str | None, _tree(help=_TREES)] = None
    gamma: Annotated[
        int | None,
        typer.Option(
            "--gamma",
            "-g",
            min=1,
            metavar="N",
            help="γ, tokens drafted in a step (5): of fixed; of heuristic, in the first one.",
            rich_help_panel=LENGTH,
        ),
    ] = None


PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file", metavar="FILE", help="Read the prompt from this file.", rich_help_panel=PROMPT
    ),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Wrap prompts with the chat template, or continue them as they are. Default: chat if there is one.",
        rich_help_panel=PROMPT,
    ),
]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="A system message.", rich_help_panel=PROMPT)
]
prompt_sets = partial(
    typer.Option,
    "--prompts",
    "-p",
    metavar="SET",
    autocompletion=complete_prompts,
    help="A built-in set, 'all', or a JSON Lines file; repeatable. Default: all.",
)
output = partial(typer.Option, rich_help_panel=OUTPUT)
ConfigOption = Annotated[
    Path | None,
    output(
        "--config", metavar="FILE", help="Take what is not given from this file. Default: ./specbench.toml."
    ),
]
NoConfigOption = Annotated[bool, output("--no-config", help="Take nothing from ./specbench.toml.")]
"""Both are read by ``GroupedCommand``."""
JsonOption = Annotated[bool, output("--json", help="Print one JSON object.")]
TracebackOption = Annotated[bool, output("--traceback", help="Show where an error came from.")]
"""Read by ``specbench.cli.run``, which sees every error."""


# -- what was given ----------------------------------------------------------------------------------


def given(ctx: typer.Context, *names: str | type) -> list[str]:
    """Those of the named options, and of groups, that stand on the command line, as they are written there."""
    written = {
        each.name: ((ctx.params.get(str(each.name)) is False and each.secondary_opts) or each.opts)[0]
        for each in ctx.command.params
        if each.opts
    }
    found = []
    for each in names:
        for name in [each] if isinstance(each, str) else [field.name for field in fields(each)]:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                found.append(written[name])
    return found


def command_with(ctx: typer.Context, **changes: Any) -> str:
    """The command line as it was given but for some parameters, for a shell; ``None`` leaves one out."""
    words, rest = ctx.command_path.split(), []
    for parameter in ctx.command.params:
        name = str(parameter.name)
        if name not in changes and not given(ctx, name):
            continue
        value = changes.get(name, ctx.params[name])
        if parameter.param_type_name == "argument":
            rest.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        elif value is not None:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(each)]
    return shlex.join([*words, *(["--"] if any(word[:1] == "-" != word for word in rest) else []), *rest])


def chained(models: ModelOptions, caching: CacheOptions) -> str | None:
    """What on the command line asks for passes that are the same to the bit, so that drafts have no siblings."""
    if caching.bit_exact:
        return "--bit-exact"
    return None if quantized(models.dtype) is None else f"--dtype {models.dtype}"


def widths_differ(target: Target) -> str | None:
    """What the user should know of an int8 or int4 target whose logits depend on the width of the pass."""
    if target.widths_differ is None:
        return None
    return (
        f"Bit-exact passes cannot be had here, so that outputs of this {target.dtype} target may part from plain"
        f" decoding's. {target.widths_differ}"
    )


def cache_for(ctx: typer.Context, target: str, models: ModelOptions, caching: CacheOptions) -> CacheKind:
    """The kind of cache to use, given what was asked for; of an int8 or int4 target the configuration is read for that.

    Raises:
        UsageError: Bit-exact or compiled passes with another cache than theirs, or both.
    """
    if caching.bit_exact and caching.compiled:
        raise UsageError("--bit-exact and --compile exclude each other.", "Give one of the two.")
    chosen = bool(given(ctx, "cache"))
    for asked, name, its_own in (
        (caching.bit_exact, "--bit-exact", "preallocated"),
        (caching.compiled, "--compile", "static"),
    ):
        if asked and caching.cache != its_own and chosen:
            raise UsageError(f"{name} does not go with --cache {caching.cache}.", "Leave --cache out.")
    if caching.compiled:
        return "compiled"
    if caching.bit_exact:
        return "preallocated"
    if quantized(models.dtype) is not None and not chosen and not (ctx.default_map or {}).get("cache"):
        from specbench.models.load import load_config
        from specbench.models.target import default_cache

        return default_cache(load_config(target), rounded=True)
    return caching.cache


def deciding(recipe: Recipe, sampling: Sampling, model: LanguageModel) -> dict[str, Any]:
    """What decides an output, by name, for a program to read; ``None`` for what is switched off.

    Args:
        recipe: As asked for.
        sampling: The transforms, with what the model's own settings ask for.
        model: The target.
    """
    decoding = recipe.decoding
    switched_on = {
        each.name: value
        for each in fields(decoding)
        if (value := getattr(decoding, each.name)) or each.default
    }
    return {
        "max_new_tokens": decoding.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "seed": recipe.sampling.seed,
        "bit_exact": recipe.caching.bit_exact or None,
        **{each.name: switched_on.get(each.name) for each in fields(decoding)},
        "stop": list(decoding.stop) or None,
        "model_defaults": (decoding.model_defaults and model.defaults.applied) or None,
    }
