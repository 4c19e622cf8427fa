"""Specs of drafters: a word with options, a model, or two drafters joined by a plus.

``parse_drafter`` parses a spec, and ``str`` writes it as results show it. A class declares everything about a kind of
drafter: its options (``specbench.specs.notation.option``), the class that drafts, and, in the first paragraph of its
docstring, what `specbench drafters` says of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar, Self

from specbench.base.errors import UsageError
from specbench.specs.models import BUILTIN_MODELS, CHECKPOINT_MTP, PACKAGED_HEADS, ModelSpec, parse_model
from specbench.specs.notation import (
    Dashed,
    Option,
    add_option,
    dashed,
    join_spec,
    option,
    options_of,
    read_options,
    split_spec,
    with_defaults,
)

GROUP = "specbench.drafters"
"""The entry points by which installed packages name their drafters."""

_CLASS_IN_FILE = re.compile(r"([^|+]+\.py):([^\W\d]\w*)")

_LONGEST_MATCH = 64
"""Longer matches are not distinguished."""


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter as ``--drafter`` takes it.

    Attributes:
        word: The word that the spec begins with.
        drafter: ``module:Class`` in ``specbench.drafters``, for a drafter that needs no model; made from the spec only.
        has_logits: Whether a draft policy can use its distributions.
        is_plain: Whether it proposes nothing, so that decoding is plain.

    Raises:
        UsageError: An option is outside its range.
    """

    word: ClassVar[str]
    drafter: ClassVar[str | None] = None
    has_logits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for each in self.options():
            each.check(getattr(self, each.name), self.word, self)

    def __str__(self) -> str:
        return self.written(self.word)

    def written(self, word: str) -> str:
        """Return its options behind a word, without those at their defaults."""
        options = self.options()
        defaults = with_defaults({}, options, before_model=getattr(self, "before_model", False))
        values = [(each, getattr(self, each.name)) for each in options]
        return join_spec(word, [o.write(value) for o, value in values if value != defaults[o.name]])

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        return options_of(cls)

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
        for part in (
            *getattr(self, "drafters", ()),
            *(getattr(self, each, None) for each in ("front", "rest", "back")),
        ):
            if part is not None:
                yield from part.all_parts()

    @property
    def models(self) -> tuple[SmallModel, ...]:
        """Its parts with models of their own."""
        return tuple(part for part in self.all_parts() if isinstance(part, SmallModel))

    @property
    def keeps_state(self) -> bool:
        """Whether it still uses in the next generation what it has learned."""
        return any(getattr(part, "keep", False) for part in self.all_parts())

    @classmethod
    def read(cls, given: Mapping[str, str | bool], text: str) -> Self:  # noqa: ARG003
        """Parse the options of a spec; ``text`` is the whole spec, for messages."""
        return cls(**read_options(cls.word, given, cls.options()))


@dataclass(frozen=True)
class Plain(DrafterSpec):
    """Proposes nothing: plain decoding, the baseline of every comparison."""

    word = "none"
    has_logits = False
    is_plain = True


@dataclass(frozen=True)
class FreeSpec(DrafterSpec):
    """A drafter without a model, which can be the first of a cascade: that changes some defaults (``before_model``)."""

    has_logits = False

    before_model: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Lookup(FreeSpec):
    """Prompt lookup: finds the end of the text earlier in prompt and output, copies what followed.

    Before a model, a match has to have at least two tokens, and its length is not limited.
    """

    word = "lookup"
    drafter = "lookup:LookupDrafter"

    n: int | None = option(
        3,
        "n=TOKENS (or any)",
        "longest match tried first",
        least=1,
        most=_LONGEST_MATCH,
        words={"any": None},
        before_model=None,
    )
    min: int = option(
        1,
        "min=TOKENS",
        "shortest match that counts",
        least=1,
        most=lambda spec: spec.n or _LONGEST_MATCH,
        before_model=2,
    )

    @property
    def longest(self) -> int:
        return self.n or _LONGEST_MATCH


@dataclass(frozen=True)
class NGram(FreeSpec):
    """Counts of what followed the last tokens in prompt and output, with back-off.

    Attributes:
        keep: Keep the counts between prompts (no n-gram spans two). Without a window they grow forever.
        top_k: With k > 1, each emitted token also adds 1 to the counts of the k tokens with the largest untransformed
            logits of the target at its place. The emitted token counts once, as the most recent; the others count as
            seen before it, in the order of their probability. The window forgets them together.
        sample: Draw from the normalized counts after the longest known context, which are then q; sampling transforms
            do not apply. In greedy decoding, and before the vocabulary's size is known, the most frequent token is
            taken.
    """

    word = "ngram"
    drafter = "ngram:NGramDrafter"

    # Each token is counted once per context length, so the order multiplies the memory.
    order: int = option(
        4, "order=N", "2 for bigrams to 4 (default) and up: contexts of N-1 tokens and less", least=2, most=16
    )
    max: int | None = option(None, "max=TOKENS", "maximum number of tokens drafted in a step", least=1)
    window: int | None = option(None, "window=TOKENS", "count only the last TOKENS tokens", least=1)
    keep: bool = option(False, "keep", "keep the counts between prompts")
    top_k: int = option(
        1, "top-k=K", "also count the target's K most probable tokens at each verified position", least=1
    )
    sample: bool = option(False, "sample", "draw from the counts instead of taking the most frequent")
    min: int = option(
        1,
        "min=TOKENS",
        "shortest context that counts",
        least=1,
        most=lambda spec: spec.order - 1,
        before_model=2,
    )


@dataclass(frozen=True)
class Suffix(FreeSpec):
    """SuffixDecoding: what most often followed the longest match of the last tokens; also as a tree."""

    word = "suffix"
    drafter = "suffix:SuffixDrafter"
    trees = True

    n: int = option(16, "n=TOKENS", "longest match (16)", least=1, most=_LONGEST_MATCH)
    min: int = option(
        1, "min=TOKENS", "shortest match that counts", least=1, most=lambda spec: spec.n, before_model=2
    )
    keep: bool = option(
        False,
        "keep",
        "also search the outputs of earlier prompts; an error where configurations are compared",
    )


@dataclass(frozen=True)
class Grammar(FreeSpec):
    """The tokens that --format forces, at no cost; before any other drafter of chains: grammar+lookup."""

    word = "grammar"
    drafter = "grammar:GrammarDrafter"

    rest: FreeSpec | None = None

    def __str__(self) -> str:
        return super().__str__() if self.rest is None else f"{super().__str__()}+{self.rest}"


@dataclass(frozen=True)
class Outside(FreeSpec):
    """A drafter of your own, such as ./mine.py:MyDrafter (docs/write-a-drafter.md), or one of an installed package.

    Attributes:
        cls: The class in the file, or the name that the package gives it.
        file: The file; ``None`` for an installed package.
    """

    word = "FILE.py"
    drafter = "outside:make_outside"
    trees = True

    cls: str
    file: ModelSpec | None = None

    def __str__(self) -> str:
        return self.cls if self.file is None else f"{self.file.name}:{self.cls}"

    @classmethod
    def find(cls, text: str) -> Outside | None:
        """Return the drafter of a spec that names a class in a file, or the drafter of an installed package."""
        if named := _CLASS_IN_FILE.fullmatch(text):
            return cls(named[2], ModelSpec("python", named[1]))
        return cls(text) if text not in _WORDS and text in installed_drafters() else None


@dataclass(frozen=True)
class SelfForm(DrafterSpec):
    """The target's own weights in a cheaper form, on the target's own cache: no second model needed."""

    word = "self"
    trees = True

    int8: bool = option(False, "int8", "in int8; also together with layers or skip")
    int4: bool = option(False, "int4", "in int4, coarser and smaller; also together with layers or skip")
    layers: int | None = option(None, "layers=N", "the first N layers (early exit)")
    skip: tuple[int, ...] = option(
        (),
        "skip=I-J-...",
        "all layers but these, counted from 0",
        parse=lambda text: Dashed(sorted(set(dashed(text)))),
        expected="list of whole numbers with dashes between them",
    )

    @classmethod
    def read(cls, given: Mapping[str, str | bool], text: str) -> Self:
        form = super().read(given, text)
        if form == cls():
            raise UsageError(
                f"{text!r} does not say how the target drafts for itself.",
                "Write self:int8, self:int4, self:layers=N or self:skip=3-7-11.",
            )
        if form.int8 and form.int4:
            raise UsageError(f"{text!r} has both int8 and int4.", "Write one of them.")
        if form.layers is not None and form.skip:
            raise UsageError(
                f"{text!r} has both layers to use and layers to skip.",
                "Write either layers=N or skip=..., with all that are to be left out.",
            )
        return form

    def kept(self, total: int) -> tuple[int, ...]:
        return tuple(i for i in range(total if self.layers is None else self.layers) if i not in self.skip)


@dataclass(frozen=True)
class SmallModel(DrafterSpec):
    """A small model, best with the target's tokenizer: hub id, folder, .gguf file or built-in name. With another one it
    drafts the tokens that both have. Or a head trained for the target: EAGLE, P-EAGLE, DFlash or Medusa;
    smollm2-135m-head comes with specbench.
    """

    word = "MODEL"
    trees = True

    model: ModelSpec
    dtype: str = option(
        "auto", "dtype=DTYPE", "in which it drafts (int8 on a CPU)", parse=str, expected="dtype"
    )
    device: str = option("auto", "device=DEVICE", "where it drafts", parse=str, expected="device")
    any_target: bool = option(
        False, "any-target", "of a trained head: drafts for other weights than those it was trained for"
    )

    def __str__(self) -> str:
        return self.written(self.model.name)

    @classmethod
    def parse(cls, text: str) -> SmallModel:
        """Parse a model with options; what exists as a path is one, whatever characters it has."""
        exists = Path(text).exists()
        name, given = (text, {}) if exists else (text.partition(":")[0], split_spec(text)[1])
        return SmallModel(parse_model(name.strip()), **read_options(cls.word, given, cls.options()))


@dataclass(frozen=True)
class Mtp(SmallModel):
    """The MTP layer of the target's checkpoint, in the layouts of DeepSeek-V3, GLM-4.5, Qwen3.5 and others."""

    word = "mtp"

    model: ModelSpec = CHECKPOINT_MTP


@dataclass(frozen=True)
class Cascade(DrafterSpec):
    """A cascade, such as lookup+self:int8. For each token, A drafts if it can, otherwise B. A is lookup, ngram or
    suffix, with a match of at least two tokens (min=N), one of your own, or grammar, also before one of these. B is
    self or a MODEL.
    """

    word = "A+B"

    front: FreeSpec
    back: SelfForm | SmallModel
    passes: int | None = option(
        None,
        "passes=N",
        "option of A: maximum number of forward passes of B in a step; A can still continue",
        least=1,
    )

    def __str__(self) -> str:
        return cascade_name(str(self.front), self.passes, str(self.back))

    @property
    def model_part(self) -> SelfForm | SmallModel:
        return self.back


@dataclass(frozen=True)
class Several(DrafterSpec):
    """Several drafters, such as 'lookup|self:int8' (in quotes): a chain of each, merged into one tree."""

    word = "A|B"

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


@cache
def installed_drafters() -> dict[str, EntryPoint]:
    """Return by name the drafters of installed packages; none of their code runs before its drafter is loaded."""
    return {each.name: each for each in entry_points(group=GROUP)}


def cascade_name(front: str, passes: int | None, back: str) -> str:
    """Return a cascade's name from the names of its parts."""
    return f"{front if passes is None else add_option(front, f'passes={passes}')}+{back}"


DRAFTERS: tuple[type[DrafterSpec], ...] = (
    Plain, Lookup, NGram, Suffix, Grammar, SelfForm, Mtp, SmallModel, Outside, Cascade, Several
)  # fmt: skip
"""All kinds, in the order of listings."""

_WORDS: Mapping[str, type[DrafterSpec]] = {kind.word: kind for kind in DRAFTERS if kind.word.islower()}


def parse_drafter(text: str) -> DrafterSpec:
    """Parse a ``--drafter``. A spec that starts with none of the words is a model, whose name can contain a plus.

    An existing path is taken as a path, whatever characters it has.

    Raises:
        UsageError: There is no such drafter or option, a value is outside its range, or the text cannot be a model.
    """
    return _parse(text, _WORDS)


def _parse(text: str, offered: Mapping[str, type[DrafterSpec]]) -> DrafterSpec:
    """Parse a drafter; for a mistyped word, an error suggests one of ``offered``."""
    if "|" in text and not Path(text).exists():
        return Several(tuple(_parse(part.strip(), offered) for part in text.split("|")))
    if (outside := Outside.find(text)) is not None:
        return outside
    first, plus, second = text.partition("+")
    if plus and (outside := Outside.find(first.strip())) is not None:
        return Cascade(replace(outside, before_model=True), _model_after(second.strip()))
    front = _WORDS.get(first.partition(":")[0].strip(), DrafterSpec)
    if plus and issubclass(front, FreeSpec):
        return _parse_cascade(front, first, second.strip())
    kind = _WORDS.get(text.partition(":")[0].strip())
    if kind is not None:
        return kind.read(split_spec(text)[1], text)
    if (meant := _mistyped(text, offered)) is not None:
        raise UsageError(
            f"There is no drafter {text!r}.", f"Give {meant!r}, or a hub id with its organization."
        )
    return SmallModel.parse(text)


def _parse_cascade(kind: type[FreeSpec], first: str, second: str) -> Cascade | Grammar:
    """Parse a cascade; its option ``passes`` is written among the options of its first drafter."""
    if issubclass(kind, Grammar) and first.strip() == Grammar.word and second:
        joined = after_grammar(_parse(second, _WORDS))
        if joined is not None:
            return joined
    values = read_options(kind.word, split_spec(first)[1], (*kind.options(), *Cascade.options()))
    passes = values.pop("passes", None)
    front = kind(**with_defaults(values, kind.options(), before_model=True), before_model=True)
    return Cascade(front, _model_after(second), passes)


def after_grammar(rest: DrafterSpec) -> Cascade | Grammar | None:
    """Return ``rest`` behind ``grammar``, whose tokens come first; ``None`` where that cannot be."""
    if isinstance(rest, FreeSpec) and not isinstance(rest, Grammar):
        return Grammar(rest)
    if isinstance(rest, Cascade) and not isinstance(rest.front, Grammar):
        return replace(rest, front=Grammar(rest.front, before_model=True))
    return Cascade(Grammar(before_model=True), rest) if isinstance(rest, SelfForm | SmallModel) else None


def _model_after(second: str) -> SelfForm | SmallModel:
    """Parse what stands after the plus of a cascade."""
    back = _parse(second, {SelfForm.word: SelfForm}) if second else None
    if not isinstance(back, SelfForm | SmallModel):
        raise UsageError(
            f"The second drafter of a cascade, {second!r}, is no model.",
            "Put self:... or a model after the plus, as in lookup+self:int8.",
        )
    return back


def _mistyped(text: str, offered: Mapping[str, type[DrafterSpec]]) -> str | None:
    """Return the drafter or folder whose name is close to a mistyped spec; called before the hub is queried.

    A name with an organization and an existing path count as correct.
    """
    name = text.partition(":")[0]
    if "/" in text or name in BUILTIN_MODELS or name in PACKAGED_HEADS or Path(text).exists():
        return None
    if near := get_close_matches(name, (*offered, *installed_drafters()), 1, 0.7):
        return near[0] + text[len(name) :]
    folders = [path.name for path in Path().iterdir() if (path / "config.json").is_file()]
    return next(iter(get_close_matches(text, folders, 1, 0.8)), None)
