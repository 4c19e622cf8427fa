"""Groups of options: the type, flags, help and default of each option are declared here and nowhere else.

A group is a frozen dataclass that is passed whole to the functions that need several of its options.
``specbench.cli.options.unfolded`` turns it into single options. An option that only one command has is declared there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

import typer

from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt

DtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
QuantizedName = Literal["int8", "int4"]
CacheKind = Literal["dynamic", "preallocated", "static", "compiled", "none", "bit-exact"]
SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables by which chat templates switch thinking: those of Qwen, GLM and SmolLM3; of DeepSeek, Granite and Kimi."""

RENDERED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
    }
)
"""Variables that a conversation itself sets."""

DEVICE_MAPS = ("balanced", "balanced_low_0", "sequential")
"""Strategies of accelerate that place layers on several devices."""

PROMPT, MODELS, POLICY, DECODING = "Prompt", "Models", "Draft policy", "Decoding"
SAMPLING, OUTPUT = "Sampling", "Output"
"""Headings of the help."""

_LARGEST_SEED = 2**64 - 1

_LEAST_TEMPERATURE = 1e-30
"""The lowest temperature: below, a logit of 1e8 overflows float32."""


def _check_seed(seed: int) -> int:
    if not 0 <= seed <= _LARGEST_SEED:
        raise typer.BadParameter("it should be from 0 to 2**64 - 1.")
    return seed


def quantized(dtype: str) -> QuantizedName | None:
    """Return the type that a dtype quantizes a model's linear layers to; ``None`` if it does not quantize."""
    return "int8" if dtype == "int8" else "int4" if dtype == "int4" else None


FormatKind = Literal["json-schema", "regex", "grammar"]


@dataclass(frozen=True)
class Format:
    """What an output has to look like.

    Attributes:
        kind: The language that it is written in.
        text: A JSON Schema, a regular expression, or a Lark grammar.
    """

    kind: FormatKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}={self.text}"

    @classmethod
    def of(cls, written: str) -> Format:
        """Return the format that ``KIND=TEXT`` says.

        Raises:
            UsageError: It begins with no kind.
        """
        kind, _, text = written.partition("=")
        if kind not in get_args(FormatKind) or not text:
            raise UsageError(
                f"{excerpt(written, 60)!r} is no format.",
                "Write json-schema=, regex= or grammar=, and the format behind it.",
            )
        return cls(cast(FormatKind, kind), text)


def _read_format(written: str) -> Format:
    """Return a format with the content of its file; a text that can be no path is the format itself.

    Raises:
        UsageError: It is no format, or the file cannot be read.
    """
    given = Format.of(written)
    text = given.text
    if given.kind == "regex" or "\n" in text or text.lstrip().startswith(("{", "start:")):
        return given
    try:
        return replace(given, text=Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # a ValueError for other encodings
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"The file {text} cannot be read: {reason}.", "Check the path.") from error


@dataclass(frozen=True)
class LoadOptions:
    """How one model is loaded.

    Attributes:
        dtype: "auto" is the checkpoint's own on a GPU; on a CPU it is bfloat16 for a checkpoint in bfloat16 if passes
            read it at its size, otherwise float32. "int8" and "int4" load as "auto", for the caller to quantize.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", "mps", or one of ``DEVICE_MAPS``.
        any_target: Allow a trained head to draft for a target with other weights than it was trained for.

    Examples:
        >>> LoadOptions(dtype="int8")
        LoadOptions(dtype='int8', device='auto', any_target=False)
    """

    dtype: str = "auto"
    device: str = "auto"
    any_target: bool = False

    @property
    def device_map(self) -> str | None:
        """The strategy by which layers are placed on several devices; ``None`` for a single one."""
        return self.device if self.device in DEVICE_MAPS else None


def flag(group: Any, name: str, *, on: bool = True) -> str:
    """Return the first flag of a field, such as ``--max-new-tokens``, without ``on`` the one that switches it off; of a
    field that Python alone has its name.
    """
    first = next(each.metadata.get("flags", name) for each in fields(group) if each.name == name).split()[0]
    return str(first.split("/")[0 if on else 1])


def arguments_of(group: Any) -> list[str]:
    """Return a group of options as command-line arguments; options at their defaults are left out."""
    found: list[str] = []
    for each in fields(group):
        value = getattr(group, each.name)
        if value == each.default or not each.metadata:
            continue
        written = flag(type(group), each.name, on=value is not False)
        for one in value if isinstance(value, tuple) else (value,):
            found += [written] if isinstance(one, bool) else [written, str(one).removesuffix(".0")]
    return found


def panel(heading: str) -> Callable[..., Any]:
    """Return a function that declares options below a heading of the help, for annotations of parameters.

    It is called like ``option("--max-new-tokens -n N", "Maximum length", min=1)``: names of the option and, if it is
    no switch, what its value is called.
    """

    def option(syntax: str, help: str, **more: Any) -> Any:  # noqa: A002
        words = syntax.split()
        names = [word for word in words if word.startswith("-")]
        metavar = " ".join(words[len(names) :]) or None
        return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=heading, **more)

    return option


def group(heading: str) -> Callable[..., Any]:
    """Return a function that declares fields of a group: a default, and then what ``panel``'s function takes."""
    declared = panel(heading)

    def option(default: Any, syntax: str, help: str, **more: Any) -> Any:  # noqa: A002
        metadata = {"flags": syntax, "option": declared(syntax, help, **more)}
        return field(default=default, metadata=metadata)

    return option


_model, _policy = group(MODELS), group(POLICY)
_decoding, _sampling = group(DECODING), group(SAMPLING)


@dataclass(frozen=True)
class ModelOptions:
    """How the target is loaded; a drafter's model has options of its own."""

    dtype: DtypeName = _model("auto", "--dtype DTYPE", "auto, float32, bfloat16, float16, int8, int4.")
    device: str = _model(
        "auto",
        "--device DEVICE",
        "auto, cpu, cuda, cuda:N, mps; balanced or sequential.",
    )

    @property
    def target(self) -> LoadOptions:
        return LoadOptions(self.dtype, self.device)

    def behind(self, model: str) -> str:
        """Return a target with these options behind it, as ``--target`` takes it."""
        pairs = [("dtype", self.dtype), ("device", self.device)]
        words = [f"{name}={value}" for name, value in pairs if value != "auto"]
        return model + ":" * bool(words) + ",".join(words)

    def with_options(self, target: str, options: Mapping[str, str | bool]) -> ModelOptions:
        """Return these options with those that stand behind a target.

        Raises:
            UsageError: There is no such option or value, or an option has another value here.
        """
        changes: dict[str, Any] = {}
        for key, value in options.items():
            if key not in ("dtype", "device"):
                raise UsageError(f"{target!r} has the option {key!r}.", "A target takes dtype= and device=.")
            if value is True:
                raise UsageError(f"The option {key!r} of {target!r} is incomplete.", f"Write {key}=VALUE.")
            if key == "dtype" and value not in get_args(DtypeName):
                raise UsageError(f"{value!r} is no dtype.", f"Choose {', '.join(get_args(DtypeName))}.")
            own = getattr(self, key)
            if own not in ("auto", value):
                raise UsageError(f"{target} does not go with --{key} {own}.", "Leave one of them out.")
            changes[key] = value
        return replace(self, **changes)


@dataclass(frozen=True)
class DecodingOptions:
    """Options that change an output, in addition to the model, the prompt and the sampling.

    Each is also declared in ``DecodingKeywords``, for callers in Python.

    Raises:
        UsageError: A stop string is empty, ``max_new_tokens`` is below 1, ``min_new_tokens`` is negative, or a format
            is none or is combined with an option that it excludes.

    Examples:
        >>> DecodingOptions(max_new_tokens=64, ignore_eos=True).max_new_tokens
        64
    """

    max_new_tokens: int = _decoding(
        256, "--max-new-tokens -n N", "Maximum length of the output, in tokens.", min=1
    )
    min_new_tokens: int = 0  # for Python and clients of `serve`: no end token before so many
    stop: tuple[str, ...] = _decoding(
        (), "--stop TEXT", "Text or special token that ends the output; repeatable."
    )
    ignore_eos: bool = _decoding(False, "--ignore-eos", "Continue after end tokens.")
    first_target: bool = (
        True  # for Python alone: whether the target emits the first token before anything is drafted
    )
    model_defaults: bool = _decoding(
        True,
        "--model-defaults/--no-model-defaults",
        "Leave out the rules of generation_config.json.",
    )
    format: Format | None = _decoding(
        None,
        "--format FORMAT",
        "Only output json-schema=FILE, regex=REGEX or grammar=FILE (Lark).",
        parser=_read_format,
    )

    def __post_init__(self) -> None:
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "stop", stop)
        if isinstance(form := cast(Any, self.format), str):
            object.__setattr__(self, "format", Format.of(form))
        if not all(stop):
            raise UsageError("A stop string is empty.", "Give at least one character.")
        if self.max_new_tokens < 1:
            raise UsageError(f"The number of new tokens is {self.max_new_tokens}.", "Ask for at least 1.")
        if self.min_new_tokens < 0:
            raise UsageError(f"min_new_tokens is {self.min_new_tokens}.", "Give 0 or more.")
        if self.format is not None and (self.ignore_eos or self.min_new_tokens):
            other = "ignore_eos" if self.ignore_eos else "min_new_tokens"
            raise UsageError(
                f"A format does not go with {other}: it says where the output ends.", "Leave one of them out."
            )

    def end_ids(self, own: Iterable[int]) -> tuple[int, ...]:
        """Return the tokens that end an output; ``own`` are the model's end tokens."""
        return () if self.ignore_eos else tuple(own)

    def context_rules(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rules that change logits according to the context only, by their names in ``transformers``.

        ``own`` are the model's rules, which options replace.
        """
        rules = dict(own) if self.model_defaults else {}
        if self.min_new_tokens:  # in place of the model's own
            rules["min_new_tokens"] = self.min_new_tokens
        return rules

    def with_changes(self, **changes: Unpack[DecodingKeywords]) -> DecodingOptions:
        return replace(self, **changes)  # type: ignore[arg-type] # `stop` may be one text


class DecodingKeywords(TypedDict, total=False):
    """The fields of ``DecodingOptions`` as keyword arguments; ``stop`` can be a single text."""

    max_new_tokens: int
    min_new_tokens: int
    stop: str | Sequence[str]
    ignore_eos: bool
    first_target: bool
    model_defaults: bool
    format: Format | str | None


@dataclass(frozen=True)
class TemplateOptions:
    """What a chat template is told beside the messages. A template that does not use it is a ``UsageError``.

    Raises:
        UsageError: A value has no name, or one that another option sets.

    Examples:
        >>> TemplateOptions(template_option=("documents_first=true", "reasoning_effort=low")).named
        {'documents_first': True, 'reasoning_effort': 'low'}
    """

    thinking: bool | None = _decoding(
        None, "--thinking/--no-thinking", "Whether the model thinks before it answers."
    )
    template_option: tuple[str, ...] = _decoding(
        (),
        "--template-option NAME=VALUE",
        "Variable of the chat template, such as reasoning_effort=low; repeatable.",
    )

    def __post_init__(self) -> None:
        given = tuple(self.template_option)
        object.__setattr__(self, "template_option", given)
        for each in given:
            name = each.partition("=")[0]
            if "=" not in each or not name.isidentifier():
                raise UsageError(f"{excerpt(each, 60)!r} sets no variable.", "Write NAME=VALUE.")
            if name in RENDERED or (name in SWITCHES and self.thinking is not None):
                raise UsageError(f"The variable {name} is already set.", "Leave it out.")

    @classmethod
    def of(cls, variables: Mapping[str, Any], reasoning_effort: str | None = None) -> TemplateOptions:
        """Return the options that a request has: values by name, and an effort under any name."""
        effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
        given = tuple(f"{name}={json.dumps(value)}" for name, value in {**variables, **effort}.items())
        return cls(template_option=given)

    def over(self, other: TemplateOptions) -> TemplateOptions:
        """Return these options, with those of ``other`` that these leave open."""
        own = {each.partition("=")[0] for each in self.template_option}
        own |= set() if self.thinking is None else set(SWITCHES)
        rest = tuple(each for each in other.template_option if each.partition("=")[0] not in own)
        thinking = other.thinking if own.isdisjoint(SWITCHES) else self.thinking
        return TemplateOptions(thinking, (*rest, *self.template_option))

    @property
    def named(self) -> dict[str, Any]:
        """The variables that have a name of their own; the one that switches thinking differs between templates."""
        found: dict[str, Any] = {}
        for each in self.template_option:
            name, _, text = each.partition("=")
            found[name] = text
            with suppress(ValueError):
                found[name] = json.loads(text)
        return found

    def variables(self, used: Collection[str]) -> dict[str, Any]:
        """Return the variables for a template.

        Args:
            used: The variables that the template uses.

        Raises:
            UsageError: It does not use one of them, or has no switch for thinking.
        """
        found = self.named
        if not SWITCHES.isdisjoint(used):  # clients name the switch of every template
            found = {name: value for name, value in found.items() if name in used or name not in SWITCHES}
        if unknown := [name for name in found if name not in used]:
            others = ", ".join(sorted(set(used) - RENDERED)) or "none"
            raise UsageError(
                f"The model's chat template has no variable {unknown[0]}.", f"Leave it out; it has {others}."
            )
        if self.thinking is not None:
            switch = min(SWITCHES & {*used}, default=None)
            if switch is None:
                other = (
                    "`generate` and `sweep` take --template-option reasoning_effort=low"
                    if "reasoning_effort" in used
                    else "it cannot be changed"
                )
                raise UsageError(
                    "The model's chat template has no switch for thinking.",
                    f"Leave --thinking and --no-thinking out: {other}.",
                )
            found[switch] = self.thinking
        return found

    def for_server(self) -> dict[str, Any]:
        """Return the fields of a request to a server, whose template is not known: it gets the switch by each name."""
        found = self.named | ({} if self.thinking is None else dict.fromkeys(sorted(SWITCHES), self.thinking))
        if not found:
            return {}
        effort = {name: value for name, value in found.items() if name == "reasoning_effort"}
        return {**effort, "chat_template_kwargs": found}


NO_OPTIONS = TemplateOptions()


@dataclass(frozen=True)
class CacheOptions:
    """The KV cache, and the forward passes that use it."""

    cache: CacheKind = _decoding(
        "dynamic",
        "--cache KIND",
        "KV cache: dynamic; preallocated (default of int8 and int4 targets); static, with CUDA graphs on a GPU;"
        " compiled, with torch.compile too; bit-exact in passes of any size; none.",
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is chosen from logits.

    Attributes:
        temperature: 0 for greedy decoding (the argmax, no random number), else the divisor of the logits.
        top_k: Keep the k most probable tokens (ties with the k-th are kept); 0 for all.
        top_p: Keep the smallest set of most probable tokens whose mass reaches top_p; 1 for all.
        min_p: Drop tokens less probable than min_p times the most probable one; 0 for none.
        repetition_penalty: Divides positive and multiplies negative logits of tokens that occurred (Keskar et al.
            2019); 1 for none.
        seed: Of the generator from which everything random is drawn.

    Raises:
        UsageError: A value outside its range.
    """

    temperature: float = _sampling(0.0, "--temperature -t X", "Temperature; 0 for greedy decoding.", min=0.0)
    top_k: int = _sampling(0, "--top-k K", "Keep the K most probable tokens, 0 for all.", min=0)
    top_p: float = _sampling(
        1.0,
        "--top-p P",
        "Keep the most probable tokens that add up to P.",
    )
    min_p: float = _sampling(
        0.0, "--min-p P", "Drop tokens less probable than P times the best.", min=0.0, max=1.0
    )
    repetition_penalty: float = _sampling(
        1.0, "--repetition-penalty X", "Repetition penalty above 0; 1 for none."
    )
    seed: int = _sampling(0, "--seed N", "Seed of the generator for every random draw.", callback=_check_seed)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(
                f"The temperature is {self.temperature}.", "Give 0 for greedy decoding, or a positive number."
            )
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UsageError(
                f"The temperature is {self.temperature:g}, so small that logits divided by it overflow.",
                f"Give 0 for greedy decoding, or at least {_LEAST_TEMPERATURE:g}.",
            )
        if not self.top_k >= 0:
            raise UsageError(f"top-k is {self.top_k}.", "Give 0 for all tokens, or a positive number.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p}.", "Give a number above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min-p is {self.min_p}.", "Give a number from 0 to 1.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UsageError(
                f"The repetition penalty is {self.repetition_penalty}.", "Give a positive number, 1 for none."
            )

    @property
    def greedy(self) -> bool:
        """Whether the argmax is taken, without random numbers."""
        return self.temperature == 0

    @property
    def transforms(self) -> dict[str, Any]:
        """All options except the seed."""
        return {name: value for name, value in vars(self).items() if name != "seed"}
