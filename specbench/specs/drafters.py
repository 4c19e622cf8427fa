"""Specs of drafters: a word with options, a model, or two drafters joined by a plus.

``parse_drafter`` parses a spec, and ``str`` writes it as results show it. A class declares everything about a kind of
drafter except how it drafts. The first paragraph of its docstring is what `specbench drafters` says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from specbench.base.errors import UsageError
from specbench.specs.models import (
    BUILTIN_MODELS,
    CHECKPOINT_MTP,
    ModelSpec,
    split_options,
)
from specbench.specs.notation import Spec, option, read_options, split_spec, with_defaults
from specbench.specs.own_code import names_in

_CLASS_IN_FILE = re.compile(r"([^|+]+\.py):([^\W\d]\w*)")

_LONGEST_MATCH = 64
"""Longer matches are not distinguished."""


@dataclass(frozen=True)
class DrafterSpec(Spec):
    """A drafter as ``--drafter`` takes it.

    Attributes:
        drafter: The class that drafts, as ``module:Class`` in ``specbench.drafters``, if it needs no model; it is made
            from the spec.
        has_logits: Whether a draft policy can use its distributions.
        is_plain: Whether it proposes nothing, so that decoding is plain.
        trees: Whether it can draft trees.
    """

    drafter: ClassVar[str | None] = None
    has_logits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    @property
    def model_part(self) -> DrafterSpec:
        """The part that runs forward passes: the second drafter of a cascade, otherwise the drafter itself."""
        return self

    @property
    def model_spec(self) -> ModelSpec | None:
        """The model to load for it; ``None`` if it needs no model, uses the target's weights, or has several parts."""
        return getattr(self.model_part, "model", None)

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        """The drafters whose chains are merged: itself, if it is one."""
        return (self,)

    def all_parts(self) -> Iterator[DrafterSpec]:
        """Yield itself and the drafters that it is made of, in the order of the spec."""
        yield self
        for value in vars(self).values():
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, DrafterSpec):
                    yield from part.all_parts()

    @property
    def models(self) -> tuple[SmallModel, ...]:
        """Its parts with models of their own."""
        return tuple(part for part in self.all_parts() if isinstance(part, SmallModel))

    @property
    def keeps_state(self) -> bool:
        """Whether it still uses in the next generation what it has learned."""
        return any(getattr(part, "keep", False) for part in self.all_parts())


@dataclass(frozen=True)
class Plain(DrafterSpec, word="none", has_logits=False, is_plain=True):
    """Proposes nothing: plain decoding, the baseline of every comparison."""


@dataclass(frozen=True)
class FreeSpec(DrafterSpec, has_logits=False):
    """A drafter without a model, which can be the first of a cascade: that changes some defaults (``before_model``)."""

    before_model: bool = field(default=False, kw_only=True)


def _shortest(what: str, most: Any) -> Any:
    return option(1, "min=TOKENS", f"shortest {what} that counts", least=1, most=most, before_model=2)


@dataclass(frozen=True)
class Lookup(FreeSpec, word="lookup", drafter="lookup:LookupDrafter"):
    """Prompt lookup: finds the end of the text earlier in prompt and output, copies what followed.

    Before a model, a match has to have at least two tokens, and its length is not limited.
    """

    n: int | None = option(
        3,
        "n=TOKENS (or any)",
        "longest match tried first",
        least=1,
        most=_LONGEST_MATCH,
        parse=lambda text: None if text == "any" else int(text),
        before_model=None,
    )
    min: int = _shortest("match", lambda spec: spec.n or _LONGEST_MATCH)

    @property
    def longest(self) -> int:
        return self.n or _LONGEST_MATCH


@dataclass(frozen=True)
class NGram(FreeSpec, word="ngram", drafter="ngram:NGramDrafter"):
    """Counts of what followed the last tokens in prompt and output, with back-off.

    Attributes:
        keep: No n-gram spans two prompts. The counts grow forever.
        top_k: The target's k most probable tokens, before transforms, count as seen before the emitted token, in the
            order of their probability.
        sample: The counts after the longest known context are then q, normalized and untransformed. Greedy decoding
            takes the most frequent token.
    """

    # Each token is counted once per context length, so the order multiplies the memory.
    order: int = option(
        4, "order=N", "2 for bigrams to 4 (default) and up: contexts of N-1 tokens and less", least=2, most=16
    )
    keep: bool = option(False, "keep", "keep the counts between prompts")
    top_k: int = option(
        1, "top-k=K", "also count the target's K most probable tokens at each verified position", least=1
    )
    sample: bool = option(False, "sample", "draw from the counts instead of taking the most frequent")
    min: int = _shortest("context", lambda spec: spec.order - 1)


@dataclass(frozen=True)
class Suffix(FreeSpec, word="suffix", drafter="suffix:SuffixDrafter", trees=True):
    """SuffixDecoding: what most often followed the longest match of the last tokens; also as a tree."""

    n: int = option(16, "n=TOKENS", "longest match (16)", least=1, most=_LONGEST_MATCH)
    min: int = _shortest("match", lambda spec: spec.n)
    keep: bool = option(False, "keep", "also search earlier outputs; an error where drafters are compared")


@dataclass(frozen=True)
class Grammar(FreeSpec, word="grammar", drafter="grammar:GrammarDrafter"):
    """The tokens that --format forces, at no cost; before any other drafter of chains: grammar+lookup."""

    rest: FreeSpec | None = None

    def __str__(self) -> str:
        return super().__str__() if self.rest is None else f"{super().__str__()}+{self.rest}"


@dataclass(frozen=True)
class Outside(FreeSpec, word="FILE.py", drafter="outside:make_outside"):
    """A drafter of your own, such as ./mine.py:MyDrafter (docs/drafters.md): a class in a file."""

    cls: str
    file: ModelSpec

    def __str__(self) -> str:
        return f"{self.file.name}:{self.cls}"

    @classmethod
    def find(cls, text: str) -> Outside | None:
        """Return the drafter of a spec that names a class in a file."""
        named = _CLASS_IN_FILE.fullmatch(text)
        return named and cls(named[2], ModelSpec("python", named[1]))

    def load(self) -> Any:
        """Import its module, and return what has its name there; ``None`` if nothing has."""
        return names_in(self.file.source).get(self.cls)

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Whether its class drafts trees: this imports the module."""
        return bool(getattr(self.load(), "trees", False))


@dataclass(frozen=True)
class SelfForm(DrafterSpec, word="self", trees=True):
    """The target's own weights in a cheaper form, on the target's own cache: no second model needed."""

    int8: bool = option(False, "int8", "in int8; also together with layers")
    int4: bool = option(False, "int4", "in int4, coarser and smaller; also together with layers")
    layers: int | None = option(None, "layers=N", "the first N layers (early exit)")

    @classmethod
    def read(cls, text: str) -> Self:
        form = super().read(text)
        if form == cls():
            raise UsageError(
                f"{text!r} does not say how the target drafts for itself.",
                "Write self:int8, self:int4 or self:layers=N.",
            )
        if form.int8 and form.int4:
            raise UsageError(f"{text!r} has both int8 and int4.", "Write one of them.")
        return form


@dataclass(frozen=True)
class SmallModel(DrafterSpec, word="MODEL", trees=True):
    """A small model, best with the target's tokenizer: hub id, folder, .gguf file or built-in name. With another one it
    drafts the tokens that both have. Or a head trained for the target: EAGLE, P-EAGLE, DFlash or Medusa.
    """

    model: ModelSpec
    dtype: str = option("auto", "dtype=DTYPE", "in which it drafts (int8 on a CPU)", parse=str)
    device: str = option("auto", "device=DEVICE", "where it drafts", parse=str)
    any_target: bool = option(
        False, "any-target", "of a trained head: drafts for other weights than those it was trained for"
    )

    def __str__(self) -> str:
        return self.model.name + self.written("")

    @classmethod
    def parse(cls, text: str) -> SmallModel:
        """Parse a model with options; what exists as a path is one, whatever characters it has."""
        model, given = split_options(text)
        return SmallModel(model, **read_options(cls.word, given, cls.options()))


@dataclass(frozen=True)
class Mtp(SmallModel, word="mtp"):
    """The MTP layer of the target's checkpoint, in the layouts of DeepSeek-V3, GLM-4.5, Qwen3.5 and others."""

    model: ModelSpec = CHECKPOINT_MTP


@dataclass(frozen=True)
class Cascade(DrafterSpec, word="A+B"):
    """A cascade, such as lookup+self:int8. For each token, A drafts if it can, otherwise B. A is lookup, ngram or
    suffix, with a match of at least two tokens (min=N), one of your own, or grammar, also before one of these. B is
    self or a MODEL.
    """

    front: FreeSpec
    back: SelfForm | SmallModel

    def __str__(self) -> str:
        return f"{self.front}+{self.back}"

    @property
    def model_part(self) -> SelfForm | SmallModel:
        return self.back


@dataclass(frozen=True)
class Several(DrafterSpec, word="A|B"):
    """Several drafters, such as 'lookup|self:int8' (in quotes): a chain of each, merged into one tree."""

    drafters: tuple[DrafterSpec, ...]

    def __post_init__(self) -> None:
        if any(drafter.is_plain for drafter in self.drafters):
            raise UsageError("The drafter none drafts nothing.", "Leave it out.")
        if len(set(self.drafters)) < len(self.drafters):
            raise UsageError("A drafter is given twice.", "Leave one out.")

    def __str__(self) -> str:
        return "|".join(map(str, self.drafters))

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        return self.drafters


DRAFTERS: tuple[type[DrafterSpec], ...] = (
    Plain, Lookup, NGram, Suffix, Grammar, SelfForm, Mtp, SmallModel, Outside, Cascade, Several
)  # fmt: skip
"""All kinds, in the order of listings."""

_WORDS: dict[str, type[DrafterSpec]] = {kind.word: kind for kind in DRAFTERS if kind.word.islower()}


def parse_drafter(text: str) -> DrafterSpec:
    """Parse a ``--drafter``. A spec that starts with none of the words is a model, whose name can contain a plus.

    An existing path is taken as a path, whatever characters it has.

    Raises:
        UsageError: There is no such drafter or option, a value is outside its range, or the text cannot be a model.
    """
    if "|" in text and not Path(text).exists():
        return Several(tuple(parse_drafter(part.strip()) for part in text.split("|")))
    first, plus, second = text.partition("+")
    if (outside := Outside.find(first.strip())) is not None:
        return Cascade(outside, _model_after(second.strip())) if plus else outside
    front = _WORDS.get(first.partition(":")[0].strip(), DrafterSpec)
    if plus and issubclass(front, FreeSpec):
        return _parse_cascade(front, first, second.strip())
    kind = _WORDS.get(text.partition(":")[0].strip())
    if kind is not None:
        return kind.read(text)
    _refuse_mistyped(text)
    return SmallModel.parse(text)


def _parse_cascade(kind: type[FreeSpec], first: str, second: str) -> Cascade | Grammar:
    """Parse a cascade, whose first drafter has other defaults than alone."""
    if issubclass(kind, Grammar) and first.strip() == Grammar.word and second:
        joined = after_grammar(parse_drafter(second))
        if joined is not None:
            return joined
    values = read_options(kind.word, split_spec(first)[1], kind.options())
    front = kind(**with_defaults(values, kind.options(), before_model=True), before_model=True)
    return Cascade(front, _model_after(second))


def after_grammar(rest: DrafterSpec) -> Cascade | Grammar | None:
    """Return ``rest`` behind ``grammar``, whose tokens come first; ``None`` where that cannot be."""
    if isinstance(rest, FreeSpec) and not isinstance(rest, Grammar):
        return Grammar(rest)
    if isinstance(rest, Cascade) and not isinstance(rest.front, Grammar):
        return replace(rest, front=Grammar(rest.front))
    return Cascade(Grammar(), rest) if isinstance(rest, SelfForm | SmallModel) else None


def _model_after(second: str) -> SelfForm | SmallModel:
    """Parse what stands after the plus of a cascade."""
    back = parse_drafter(second) if second else None
    if not isinstance(back, SelfForm | SmallModel):
        raise UsageError(
            f"The second drafter of a cascade, {second!r}, is no model.",
            "Put self:... or a model after the plus, as in lookup+self:int8.",
        )
    return back


def _refuse_mistyped(text: str) -> None:
    """Refuse a spec that is nearly a drafter's word, before the hub is queried: no organization, no existing path."""
    name = text.partition(":")[0]
    near = get_close_matches(name, _WORDS, 1, 0.7)
    if near and not ("/" in text or name in BUILTIN_MODELS or Path(text).exists()):
        meant = near[0] + text[len(name) :]
        raise UsageError(
            f"There is no drafter {text!r}.", f"Give {meant!r}, or a hub id with its organization."
        )
