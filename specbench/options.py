"""The options of the command line in groups: type, flags, help and default of each stand here and nowhere else.

A group is a frozen dataclass, and so are the values of a command: what needs several of them takes the group.
``specbench.cli.options.unfolded`` makes single options of it. Options of one command alone stand in that command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_type_hints

import typer

from specbench.base.errors import UsageError
from specbench.specs.verification import VERIFICATIONS, VerificationName

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
QuantizedName = Literal["int8", "int4"]
CacheKind = Literal["dynamic", "preallocated", "static", "compiled", "none"]
CacheName = Literal["dynamic", "preallocated", "static", "none"]

PROMPT, MODELS, LENGTH, DECODING = "Prompt", "Models", "Draft length", "Decoding"
SAMPLING, OUTPUT = "Sampling", "Output"
"""Headings of the help."""

_LARGEST_SEED = 2**64 - 1


def _check_seed(seed: int) -> int:
    if not 0 <= seed <= _LARGEST_SEED:
        raise typer.BadParameter("it should be from 0 to 2**64 - 1.")
    return seed


def quantized(dtype: str) -> QuantizedName | None:
    """What the linear layers of a model in this dtype are rounded to; ``None`` for nothing."""
    if dtype == "int8":
        return "int8"
    return "int4" if dtype == "int4" else None


@dataclass(frozen=True)
class LoadOptions:
    """How one model is loaded.

    Attributes:
        dtype: "auto" is the checkpoint's own on a GPU; on a CPU it is bfloat16 for a half-precision checkpoint if the
            processor computes in it, otherwise float32. "int8" and "int4" load as "auto" does and ask the caller
            to quantize.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps".
        device_map: One of accelerate's strategies, or the path of a JSON file from module names to devices;
            excludes ``device``.
        any_target: Of a trained head: let it draft for weights that it was not trained for.
    """

    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    any_target: bool = False


def flag(group: Any, name: str, *, on: bool = True) -> str:
    """The first flag of a field of a group, as ``--max-new-tokens``; ``on=False``: the one that switches it off."""
    option: Any = get_type_hints(group, include_extras=True)[name].__metadata__[0]
    written = (
        option.default if isinstance(option.default, str) else option.param_decls[0]
    )  # which typer moves
    switches_on, _, switches_off = str(written).partition("/")
    return switches_on if on else switches_off


def require(group: Any, **needed: str) -> None:
    """Refuse fields of a group that are given where the one that each of them needs is not.

    Raises:
        UsageError: There is one.
    """
    usual = {each.name: each.default for each in fields(group)}
    for name, other in needed.items():
        if getattr(group, name) != usual[name] and getattr(group, other) == usual[other]:
            given, missing = flag(type(group), name), flag(type(group), other)
            raise UsageError(f"{given} is given without {missing}.", f"Add {missing}, or leave {given} out.")


def words_of(group: Any) -> list[str]:
    """A group of options as words of a command line; fields at their defaults are left out."""
    words: list[str] = []
    for each in fields(group):
        value = getattr(group, each.name)
        if value == each.default:
            continue
        written = flag(type(group), each.name, on=value is not False)
        for one in value if isinstance(value, tuple) else (value,):
            words += [written] if isinstance(one, bool) else [written, str(one).removesuffix(".0")]
    return words


_model = partial(typer.Option, rich_help_panel=MODELS)


@dataclass(frozen=True)
class ModelOptions:
    """How the target and the drafters' models are loaded."""

    dtype: Annotated[
        DtypeName,
        _model(
            "--dtype", metavar="DTYPE", help="The target's: auto, float32, bfloat16, float16, int8 or int4."
        ),
    ] = "auto"
    device: Annotated[
        str, _model("--device", metavar="DEVICE", help="The target's: auto, cpu, cuda, cuda:N or mps.")
    ] = "auto"
    device_map: Annotated[
        str | None,
        _model(
            "--device-map",
            metavar="MAP",
            help="Instead of --device: accelerate's auto, balanced, balanced_low_0 or sequential, or a JSON file.",
        ),
    ] = None
    drafter_dtype: Annotated[
        DtypeName,
        _model("--drafter-dtype", metavar="DTYPE", help="A drafter model's; auto is int8 on a CPU."),
    ] = "auto"
    drafter_device: Annotated[
        str, _model("--drafter-device", metavar="DEVICE", help="A drafter model's device.")
    ] = "auto"
    drafter_device_map: Annotated[
        str | None, _model("--drafter-device-map", metavar="MAP", help="A drafter model's device map.")
    ] = None
    allow_pickle: Annotated[
        bool, _model("--allow-pickle", help="Load pickled weights where there are no safetensors.")
    ] = False
    any_target: Annotated[
        bool, _model("--any-target", help="Let a trained head draft for weights it was not trained for.")
    ] = False

    @property
    def target(self) -> LoadOptions:
        """The target's share."""
        return LoadOptions(self.dtype, self.device, self.device_map)

    @property
    def drafter(self) -> LoadOptions:
        """The share of a drafter that is a model of its own."""
        return LoadOptions(
            self.drafter_dtype, self.drafter_device, self.drafter_device_map, any_target=self.any_target
        )


_length = partial(typer.Option, rich_help_panel=LENGTH)


@dataclass(frozen=True)
class LengthOptions:
    """Options that all draft policies share, by the names of ``specbench.specs.policies.POLICIES``; those of one alone
    stand in its notation."""

    siblings: Annotated[
        int | None,
        _length(
            "--siblings",
            min=0,
            metavar="N",
            help="Most alternatives that are verified beside a draft in greedy decoding (auto: 8, other policies: 0).",
        ),
    ] = None
    verification: Annotated[
        VerificationName | None,
        _length(
            "--verification",
            metavar="NAME",
            help="How drafts are verified above temperature 0: "
            + ", ".join(VERIFICATIONS)
            + ". Default: what applies and keeps most.",
        ),
    ] = None
    costs: Annotated[
        Path | None,
        _length(
            "--costs",
            metavar="FILE",
            help="auto, auto-tree: times of passes to go by, from a JSON file of an earlier run, instead of measuring.",
        ),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are given, by name; without the costs, which are still to be read."""
        values = {name: value for name, value in vars(self).items() if name != "costs"}
        return {name: value for name, value in values.items() if value is not None and value is not False}


_decoding = partial(typer.Option, rich_help_panel=DECODING)


@dataclass(frozen=True)
class DecodingOptions:
    """What decides an output beside the model, the prompt, and how tokens are chosen.

    An option of decoding is declared here, and once more in ``DecodingKeywords`` for callers in Python.

    Raises:
        UsageError: A stop string is empty, ``max_new_tokens`` is below 1, or ``min_new_tokens`` is negative.
    """

    max_new_tokens: Annotated[
        int, _decoding("--max-new-tokens", "-n", min=1, metavar="N", help="The output never gets longer.")
    ] = 256
    min_new_tokens: Annotated[
        int, _decoding("--min-new-tokens", min=0, metavar="N", help="No end token before N new tokens.")
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        _decoding("--stop", metavar="TEXT", help="Text or special token that ends the output; repeatable."),
    ] = ()
    ignore_eos: Annotated[bool, _decoding("--ignore-eos", help="Go on after end tokens.")] = False
    first_target: Annotated[
        bool,
        _decoding(
            "--first-target/--no-first-target",
            help="Let the target emit the first token before anything is drafted.",
        ),
    ] = True
    residual_adjustment: Annotated[
        bool,
        _decoding(
            "--residual-adjustment/--no-residual-adjustment",
            help="NOT LOSSLESS without it, for demonstration: corrected tokens are drawn from p, not the residual.",
        ),
    ] = True
    model_defaults: Annotated[
        bool,
        _decoding(
            "--model-defaults/--no-model-defaults",
            help="Apply what the model's generation_config.json asks for beside sampling, such as suppressed tokens.",
        ),
    ] = True

    def __post_init__(self) -> None:
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "stop", stop)
        if not all(stop):
            raise UsageError("A stop string is empty.", "Give at least one character.")
        if self.max_new_tokens < 1:
            raise UsageError(f"The number of new tokens is {self.max_new_tokens}.", "Ask for at least 1.")
        if self.min_new_tokens < 0:
            raise UsageError(f"min_new_tokens is {self.min_new_tokens}.", "Give 0 or more.")

    def end_ids(self, own: Iterable[int]) -> tuple[int, ...]:
        """The tokens that end an output, of those that end the model's."""
        return () if self.ignore_eos else tuple(own)

    def context_rules(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What changes logits by the context alone, by the names of ``transformers``.

        Args:
            own: What the model's own settings ask for.
        """
        policies = dict(own) if self.model_defaults else {}
        if self.min_new_tokens:  # in place of the model's own
            policies["min_new_tokens"] = self.min_new_tokens
        return policies

    def with_changes(self, **changes: Unpack[DecodingKeywords]) -> DecodingOptions:
        """These with some changed."""
        return replace(self, **changes)  # type: ignore[arg-type] # `stop` may be one text


class DecodingKeywords(TypedDict, total=False):
    """The fields of ``DecodingOptions`` as keyword arguments; ``stop`` may be one text."""

    max_new_tokens: int
    min_new_tokens: int
    stop: str | Sequence[str]
    ignore_eos: bool
    first_target: bool
    residual_adjustment: bool
    model_defaults: bool


@dataclass(frozen=True)
class CacheOptions:
    """The key/value cache, and the kind of passes over it."""

    cache: Annotated[
        CacheName,
        _decoding(
            "--cache",
            metavar="KIND",
            help="Key/value cache: dynamic (grown), preallocated (written by index; the default of an int8 or int4"
            " target), static (fixed shapes; CUDA graphs on a GPU), or none (all is recomputed).",
        ),
    ] = "dynamic"
    bit_exact: Annotated[
        bool,
        _decoding(
            "--bit-exact",
            help="Logits bitwise equal in every pass, so that greedy outputs cannot part at ties in any dtype;"
            " refused where it cannot be had. Uses the preallocated cache.",
        ),
    ] = False
    compiled: Annotated[
        bool,
        _decoding(
            "--compile",
            help="Compile passes of fixed shapes for a GPU (torch.compile); uses the static cache. Every width is"
            " compiled when it is first met, which takes a while.",
        ),
    ] = False

    @property
    def kind(self) -> CacheKind:
        """The kind of cache, of which ``compiled`` is static passes that are compiled."""
        return "compiled" if self.compiled else self.cache

    def with_kind(self, kind: Any) -> CacheOptions:
        """With another one."""
        return replace(
            self, cache="static" if kind == "compiled" else kind, compiled=kind == "compiled" or self.compiled
        )


_sampling = partial(typer.Option, rich_help_panel=SAMPLING)


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen, see ``specbench.decoding.sampling.Sampling``."""

    temperature: Annotated[
        float, _sampling("--temperature", "-t", min=0.0, metavar="X", help="0 for greedy decoding.")
    ] = 0.0
    top_k: Annotated[
        int, _sampling("--top-k", min=0, metavar="K", help="Keep the K most probable tokens, 0 for all.")
    ] = 0
    top_p: Annotated[
        float,
        _sampling(
            "--top-p",
            metavar="P",
            help="Keep the most probable tokens that together reach P; above 0 and at most 1.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        _sampling(
            "--min-p",
            min=0.0,
            max=1.0,
            metavar="P",
            help="Drop tokens less probable than P times the most probable one.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", metavar="X", help="Above 0; 1 for none.")
    ] = 1.0
    seed: Annotated[
        int,
        _sampling(
            "--seed",
            metavar="N",
            callback=_check_seed,
            help="Of the one generator that every random draw comes from.",
        ),
    ] = 0

    @property
    def transforms(self) -> dict[str, Any]:
        """What ``Sampling`` takes: all but the seed."""
        return {name: value for name, value in vars(self).items() if name != "seed"}
