"""Options that several commands share, as annotated types, and how their help is laid out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from specbench.specs.drafters import DRAFTERS
from specbench.specs.rules import rule_words

if TYPE_CHECKING:
    from specbench.backends.torch.caches import CacheKind

__all__ = [
    "DEFAULT_DRAFTER",
    "DEFAULT_TARGET",
    "AdaptConfidenceOption",
    "BitExactOption",
    "CacheName",
    "CacheOption",
    "CompileOption",
    "ConfidenceOption",
    "CostsOption",
    "DeviceMapOption",
    "DeviceOption",
    "DrafterDeviceMapOption",
    "DrafterDeviceOption",
    "DrafterDtypeOption",
    "DrafterOption",
    "DtypeName",
    "DtypeOption",
    "EgagBetaOption",
    "EgagOption",
    "EgagScaleOption",
    "EntropyLambdaOption",
    "FirstTargetOption",
    "GammaMaxOption",
    "GammaMinOption",
    "GammaOption",
    "GroupedCommand",
    "IgnoreEosOption",
    "LengthPolicyOption",
    "MaxNewTokensOption",
    "MinPOption",
    "ModelDefaultsOption",
    "PickleOption",
    "PromptFile",
    "RepetitionPenaltyOption",
    "SeedOption",
    "SiblingsOption",
    "StopOption",
    "SvipThresholdOption",
    "TargetOption",
    "TemperatureOption",
    "TopKOption",
    "TopPOption",
    "TracebackOption",
    "cache_for",
    "chained",
    "command_with",
    "complete_configurations",
    "complete_drafters",
    "complete_prompts",
    "complete_rules",
    "given",
    "widths_differ",
]

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "lookup"
"""What measured best for the built-in model on ordinary prompts (docs/log.md)."""

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8"]
CacheName = Literal["dynamic", "preallocated", "static", "none"]

PROMPT, MODELS, DECODING, SAMPLING, OUTPUT = "Prompt", "Models", "Decoding", "Sampling", "Output"
LENGTH = "Draft length"

_LARGEST_SEED = 2**64 - 1


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the headings of their ``rich_help_panel``."""

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
        options = ((kind.word, *option.partition("=")[:2]) for kind in words for option in kind.options)
        found += [f"{word}:{name}{sign}" for word, name, sign in options]
    return _beginning(incomplete, found)


def complete_rules(incomplete: str) -> list[str]:
    """What ``--length-policy`` may go on to."""
    return _beginning(incomplete, rule_words())


def complete_prompts(incomplete: str) -> list[str]:
    """The built-in sets that ``--prompts`` may go on to; a shell offers files where there are none."""
    from specbench.bench.prompts import set_names

    return _beginning(incomplete, set_names())


def complete_configurations(ctx: typer.Context, incomplete: str) -> list[str]:
    """The configurations of the runs that are named before ``--a`` or ``--b``."""
    from specbench.results.store import stored_runs

    folders = (
        ctx.params.get("runs") or ctx.args
    )  # the latter: an option that has no value yet ends the parsing
    runs = [run for folder in folders for _, run in stored_runs(folder)]
    names = [
        config.get("id") for run in runs for config in run.get("configs") or () if isinstance(config, dict)
    ]
    return _beginning(incomplete, dict.fromkeys(name for name in names if isinstance(name, str)))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _check_seed(seed: int) -> int:
    if not 0 <= seed <= _LARGEST_SEED:
        raise typer.BadParameter("it should be from 0 to 2**64 - 1.")
    return seed


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
        help="What proposes tokens: a word that `specbench drafters` lists, or a model with the target's tokenizer.",
        rich_help_panel=MODELS,
    ),
]
DtypeOption = Annotated[
    DtypeName,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="The target's: auto, float32, bfloat16, float16 or int8.",
        rich_help_panel=MODELS,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="The target's: auto, cpu, cuda, cuda:N or mps.",
        rich_help_panel=MODELS,
    ),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="Instead of --device: accelerate's auto, balanced, balanced_low_0 or sequential, or a JSON file.",
        rich_help_panel=MODELS,
    ),
]
DrafterDtypeOption = Annotated[
    DtypeName,
    typer.Option(
        "--drafter-dtype",
        metavar="DTYPE",
        help="A drafter model's; auto is int8 on a CPU.",
        rich_help_panel=MODELS,
    ),
]
DrafterDeviceOption = Annotated[
    str,
    typer.Option(
        "--drafter-device", metavar="DEVICE", help="A drafter model's device.", rich_help_panel=MODELS
    ),
]
DrafterDeviceMapOption = Annotated[
    str | None,
    typer.Option(
        "--drafter-device-map", metavar="MAP", help="A drafter model's device map.", rich_help_panel=MODELS
    ),
]
PickleOption = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Load pickled weights where there are no safetensors.",
        rich_help_panel=MODELS,
    ),
]

GammaOption = Annotated[
    int | None,
    typer.Option(
        "--gamma",
        "-g",
        min=1,
        metavar="N",
        help="γ, tokens drafted in a step (5): of fixed; of heuristic, in the first one.",
        rich_help_panel=LENGTH,
    ),
]
EgagOption = Annotated[
    bool, typer.Option("--egag", help="Short for --length-policy egag.", rich_help_panel=LENGTH)
]
GammaMinOption = Annotated[
    int | None,
    typer.Option(
        "--gamma-min",
        min=1,
        metavar="N",
        help="Shortest draft of egag and heuristic (1).",
        rich_help_panel=LENGTH,
    ),
]
GammaMaxOption = Annotated[
    int | None,
    typer.Option(
        "--gamma-max",
        min=1,
        metavar="N",
        help="Longest draft: of egag (8), auto (16), confidence, entropy-bound (20), svip, heuristic (40).",
        rich_help_panel=LENGTH,
    ),
]
EgagBetaOption = Annotated[
    float | None,
    typer.Option(
        "--egag-ema-beta",
        metavar="B",
        help="egag: weight of the past in the average of the entropy, 0 (none) to below 1 (0).",
        rich_help_panel=LENGTH,
    ),
]
EgagScaleOption = Annotated[
    float | None,
    typer.Option(
        "--egag-scale",
        metavar="H",
        help="egag: normalised entropy at which γ has come down to the shortest (0.3).",
        rich_help_panel=LENGTH,
    ),
]
ConfidenceOption = Annotated[
    float | None,
    typer.Option(
        "--confidence", metavar="P", help="confidence: the threshold (0.4).", rich_help_panel=LENGTH
    ),
]
AdaptConfidenceOption = Annotated[
    bool,
    typer.Option(
        "--adapt-confidence",
        help="confidence: move the threshold by what was accepted.",
        rich_help_panel=LENGTH,
    ),
]
EntropyLambdaOption = Annotated[
    float | None,
    typer.Option(
        "--entropy-lambda",
        metavar="L",
        help="entropy-bound: λ at the beginning (0.6).",
        rich_help_panel=LENGTH,
    ),
]
SvipThresholdOption = Annotated[
    float | None,
    typer.Option("--svip-threshold", metavar="H", help="svip: the threshold (0.3).", rich_help_panel=LENGTH),
]
SiblingsOption = Annotated[
    int | None,
    typer.Option(
        "--siblings",
        min=0,
        metavar="N",
        help="Most alternatives that are verified beside a draft in greedy decoding (auto: 8, other rules: 0).",
        rich_help_panel=LENGTH,
    ),
]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="auto: times of passes to go by, from a JSON file of an earlier run, instead of measuring them.",
        rich_help_panel=LENGTH,
    ),
]
MaxNewTokensOption = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        min=1,
        metavar="N",
        help="The output never gets longer.",
        rich_help_panel=DECODING,
    ),
]
CacheOption = Annotated[
    CacheName,
    typer.Option(
        "--cache",
        metavar="KIND",
        help="Key/value cache: dynamic (grown), preallocated (written by index; the default of an int8 target), static"
        " (fixed shapes; CUDA graphs on a GPU), or none (all is recomputed).",
        rich_help_panel=DECODING,
    ),
]
CompileOption = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile passes of fixed shapes for a GPU (torch.compile); uses the static cache. Every width is compiled"
        " when it is first met, which takes a while.",
        rich_help_panel=DECODING,
    ),
]
BitExactOption = Annotated[
    bool,
    typer.Option(
        "--bit-exact",
        help="Logits bitwise equal in every pass, so that greedy outputs cannot part at ties in any dtype;"
        " refused where it cannot be had. Uses the preallocated cache.",
        rich_help_panel=DECODING,
    ),
]
LengthPolicyOption = Annotated[
    str | None,
    typer.Option(
        "--length-policy",
        metavar="RULE",
        autocompletion=complete_rules,
        help="Draft-length rule: auto, fixed, egag, confidence, entropy-bound, svip or heuristic. Default: auto at"
        " temperature 0, fixed above (a seed repeats a run then) and with --gamma.",
        rich_help_panel=LENGTH,
    ),
]
StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Text or special token that ends the output; repeatable.",
        rich_help_panel=DECODING,
    ),
]
FirstTargetOption = Annotated[
    bool,
    typer.Option(
        "--first-target/--no-first-target",
        help="Let the target emit the first token before anything is drafted.",
        rich_help_panel=DECODING,
    ),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on behind end tokens.", rich_help_panel=DECODING)
]

ModelDefaultsOption = Annotated[
    bool,
    typer.Option(
        "--model-defaults/--no-model-defaults",
        help="Apply what the model's generation_config.json asks for beside sampling, such as suppressed tokens.",
        rich_help_panel=DECODING,
    ),
]

TemperatureOption = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        min=0.0,
        metavar="X",
        help="0 for greedy decoding.",
        rich_help_panel=SAMPLING,
    ),
]
TopKOption = Annotated[
    int,
    typer.Option(
        "--top-k",
        min=0,
        metavar="K",
        help="Keep the K most probable tokens, 0 for all.",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Keep the most probable tokens that together reach P; above 0 and at most 1.",
        rich_help_panel=SAMPLING,
    ),
]
MinPOption = Annotated[
    float,
    typer.Option(
        "--min-p",
        min=0.0,
        max=1.0,
        metavar="P",
        help="Drop tokens less probable than P times the most probable one.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenaltyOption = Annotated[
    float,
    typer.Option("--repetition-penalty", metavar="X", help="Above 0; 1 for none.", rich_help_panel=SAMPLING),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        callback=_check_seed,
        help="Of the one generator that every random draw comes from.",
        rich_help_panel=SAMPLING,
    ),
]

TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="Show where an error came from.", rich_help_panel=OUTPUT)
]
"""Read by ``specbench.cli.run``, which sees every error."""

PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file", metavar="FILE", help="Read the prompt from this file.", rich_help_panel=PROMPT
    ),
]


def given(ctx: typer.Context, *names: str) -> list[str]:
    """Those of the named options that stand on the command line, as they are written there."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


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


def chained(bit_exact: bool, dtype: DtypeName) -> str | None:
    """What on the command line asks for passes that are the same to the bit, so that drafts have no siblings."""
    return "--bit-exact" if bit_exact else "--dtype int8" if dtype == "int8" else None


def widths_differ(reason: str) -> str:
    """What the user should know of an int8 target whose logits depend on the width of the pass."""
    return (
        "Bit-exact passes cannot be had here, so that outputs of this int8 target may part from plain decoding's."
        f" {reason}"
    )


def cache_for(
    ctx: typer.Context, cache: CacheName, target: str, dtype: DtypeName, bit_exact: bool, compiled: bool
) -> CacheKind:
    """The kind of cache to use, given what was asked for; of an int8 target the configuration is read for that.

    Raises:
        UsageError: Bit-exact or compiled passes with another cache than theirs, or both.
    """
    from specbench.errors import UsageError

    if bit_exact and compiled:
        raise UsageError("--bit-exact and --compile exclude each other.", "Give one of the two.")
    for asked, name, its_own in (
        (bit_exact, "--bit-exact", "preallocated"),
        (compiled, "--compile", "static"),
    ):
        if asked and cache != its_own and given(ctx, "cache"):
            raise UsageError(f"{name} does not go with --cache {cache}.", "Leave --cache out.")
    if compiled:
        return "compiled"
    if bit_exact:
        return "preallocated"
    if dtype == "int8" and not given(ctx, "cache"):
        from specbench.models.load import load_config
        from specbench.models.prepare import default_cache

        return default_cache(load_config(target), int8=True)
    return cache
