"""Drafters as the command line names them: a word with options, a model, or two with a plus between them.

``parse_drafter`` reads one, once, and ``str`` writes it again as results call it. Each kind says for itself what the
rest has to know of it: its options by ``specbench.specs.notation.option``, and where its drafter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from specbench.base.errors import UsageError
from specbench.specs.models import BUILTIN_MODELS, PACKAGED_HEADS, ModelSpec, parse_model
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

_LONGEST_MATCH = 64
"""Longer ones are not told apart."""

_MOST_SUCCESSORS = 64

_HIGHEST_ORDER = 16
"""Every token is counted once per context length, so the order multiplies the memory."""


@dataclass(frozen=True)
class DrafterSpec:
    """What ``--drafter`` asks for.

    Attributes:
        word: How it begins on the command line.
        summary: What it does, in a sentence.
        probabilities: Which distributions its tokens are drawn from, in words.
        drafter: Of a drafter without a model, where its class is in ``specbench.drafters``: ``module:Class``. It is
            made of the spec alone.
        has_logits: Whether there are distributions of it that a draft-length rule can read.
        is_plain: Whether it proposes nothing, so that decoding is plain.
        trees: Whether it drafts trees where it is asked to.

    Raises:
        UsageError: An option is outside its range.
    """

    word: ClassVar[str]
    summary: ClassVar[str]
    probabilities: ClassVar[str]
    drafter: ClassVar[str | None] = None
    has_logits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for each in self.options():
            each.check(getattr(self, each.name), self.word, self)

    def __str__(self) -> str:
        defaults, values = self._defaults(), [(each, getattr(self, each.name)) for each in self.options()]
        return join_spec(self.word, [o.write(value) for o, value in values if value != defaults[o.name]])

    def _defaults(self) -> dict[str, Any]:
        return with_defaults({}, self.options())

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """What may follow its word."""
        return options_of(cls)

    @property
    def model_part(self) -> DrafterSpec:
        """The part that says what passes are made of: a cascade's second drafter, or all of it."""
        return self

    @property
    def model_spec(self) -> ModelSpec | None:
        """The model that is loaded for it; ``None`` if it needs none, or the target's own weights."""
        return None

    @property
    def model_specs(self) -> tuple[ModelSpec, ...]:
        """All models that are loaded for it."""
        return () if self.model_spec is None else (self.model_spec,)

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        """The drafters side by side that it is made of: itself, if it is one."""
        return (self,)

    @property
    def keeps_state(self) -> bool:
        """Whether what it learns from one generation serves the next."""
        return bool(getattr(self, "keep", False))

    @classmethod
    def read(cls, given: Mapping[str, str | bool], text: str) -> Self:  # noqa: ARG003
        """Of the options behind its word; ``text`` is the whole of it, for messages.

        Raises:
            UsageError: There is no such option, or a value is of another kind or outside its range.
        """
        return cls(**read_options(cls.word, given, cls.options()))


@dataclass(frozen=True)
class Plain(DrafterSpec):
    """Nothing is drafted."""

    word = "none"
    summary = "Proposes nothing: plain decoding, the baseline of every comparison."
    probabilities = "none"
    has_logits = False
    is_plain = True


@dataclass(frozen=True)
class FreeSpec(DrafterSpec):
    """A drafter without a model, which may stand before one in a cascade.

    Attributes:
        before_model: Whether a model drafts where this one does not. Some options have other defaults then.
    """

    probabilities = "certain (one-hot)"
    has_logits = False

    before_model: bool = field(default=False, kw_only=True)

    def _defaults(self) -> dict[str, Any]:
        return with_defaults({}, self.options(), before_model=self.before_model)

    @classmethod
    def first_of_cascade(cls, given: Mapping[str, str | bool]) -> tuple[Self, int | None]:
        """Of the options behind its word before a model, and the cascade's ``passes``, which stand among them.

        Raises:
            UsageError: See ``read``.
        """
        values = read_options(cls.word, given, (*cls.options(), *Cascade.options()))
        passes = values.pop("passes", None)
        return cls(**with_defaults(values, cls.options(), before_model=True), before_model=True), passes


@dataclass(frozen=True)
class Lookup(FreeSpec):
    """Prompt lookup. Before a model a match may be of any length and has to have two tokens."""

    word = "lookup"
    summary = "Prompt lookup: finds the end of the text earlier in prompt and output, copies what followed."
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
        """The longest match in tokens, whether it was given or not."""
        return self.n or _LONGEST_MATCH


@dataclass(frozen=True)
class NGram(FreeSpec):
    """Counts of what followed the last tokens.

    Attributes:
        order: Length of the longest n-gram counted, context and continuation together: 2 (bigrams) to 16.
        max: The most tokens drafted in a step; ``None`` leaves that to the draft-length rule.
        window: Forget what was counted at tokens that are no longer among the last so many read; ``None`` forgets
            nothing before the next prompt.
        keep: Keep the counts between prompts (no n-gram spans two of them). Without a window they grow forever.
        top_k: With k > 1, every emitted token also adds 1 to the counts of the k tokens that the target's untransformed
            logits prefer in its place. It is itself counted once, among them or not. It passes for the last one seen,
            and the others for seen the earlier the less probable they are. The window forgets them all together. With
            1 only the emitted token is counted.
        sample: Draw from the normalized counts of the longest known context instead, and keep them as q; the sampling
            transforms do not apply to them. In greedy decoding, and before the first commit has shown how large the
            vocabulary is, the most frequent token is taken all the same.
        min: Shortest context that counts, in tokens: 1 to ``order - 1``; before a model 2 if nothing is said.
    """

    word = "ngram"
    summary = "Counts of what followed the last tokens in prompt and output, with back-off."
    probabilities = "certain (one-hot); drawn from the counts with 'sample'"
    drafter = "ngram:NGramDrafter"

    order: int = option(
        4,
        "order=N",
        "2 for bigrams to 4 (default) and up: contexts of N-1 tokens and less",
        least=2,
        most=_HIGHEST_ORDER,
    )
    max: int | None = option(None, "max=TOKENS", "most tokens drafted in a step", least=1)
    window: int | None = option(None, "window=TOKENS", "forget tokens that left the last so many", least=1)
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
    """Counts of what followed the longest match, which may be long. Before a model it has to have two tokens."""

    word = "suffix"
    summary = "SuffixDecoding: what most often followed the longest match of the last tokens; also as a tree."
    drafter = "suffix:SuffixDrafter"
    trees = True

    n: int = option(16, "n=TOKENS", "longest match told from shorter ones (16)", least=1, most=_LONGEST_MATCH)
    min: int = option(
        1, "min=TOKENS", "shortest match that counts", least=1, most=lambda spec: spec.n, before_model=2
    )
    keep: bool = option(
        False, "keep", "look in the outputs of earlier prompts too: warm, and refused where runs are compared"
    )


@dataclass(frozen=True)
class Recycle(FreeSpec):
    """A table of each token's latest successors under the target."""

    word = "recycle"
    summary = (
        "Token Recycling: the successors that the target last preferred behind each token; best as a tree."
    )
    drafter = "recycle:RecycleDrafter"
    trees = True

    top_k: int = option(8, "top-k=K", "successors of each token (8)", least=1, most=_MOST_SUCCESSORS)


@dataclass(frozen=True)
class SelfForm(DrafterSpec):
    """The target's own weights in a cheaper form.

    Attributes:
        int8, int4: Its linear layers quantized.
        layers: Its first so many decoder layers; ``None`` for all.
        skip: Those left out, counted from 0, ascending.
        calibrated: What was chosen by ``specbench calibrate``; excludes the others.
    """

    word = "self"
    summary = "The target's own weights, on the target's own cache: no second model needed."
    probabilities = "yes"
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
    calibrated: bool = option(
        False, "calibrated", "what `specbench calibrate` chose for this target, dtype and device"
    )

    @classmethod
    def read(cls, given: Mapping[str, str | bool], text: str) -> Self:
        form = super().read(given, text)
        if form == cls():
            raise UsageError(
                f"{text!r} does not say how the target drafts for itself.",
                "Write self:int8, self:int4, self:layers=N, self:skip=3-7-11, or self:calibrated.",
            )
        if form.int8 and form.int4:
            raise UsageError(f"{text!r} asks for int8 and for int4.", "Write one of them.")
        if form.calibrated and form != cls(calibrated=True):
            raise UsageError(
                f"{text!r} asks for the calibrated form and for another one.", "Write self:calibrated alone."
            )
        if form.layers is not None and form.skip:
            raise UsageError(
                f"{text!r} names the first layers and some to be skipped.",
                "Write either layers=N or skip=..., with all that are to be left out.",
            )
        return form

    def kept(self, total: int) -> tuple[int, ...]:
        """The layers it uses, of ``total``."""
        return tuple(i for i in range(total if self.layers is None else self.layers) if i not in self.skip)


@dataclass(frozen=True)
class SmallModel(DrafterSpec):
    """A model of its own.

    Attributes:
        model: Which.
        vocab: How many tokens it drafts, those that the target writes most often; ``None`` for all.
    """

    word = "MODEL"
    summary = (
        "A small model, best with the target's tokenizer: hub id, folder, .gguf file or built-in name. With another one"
        " it drafts the tokens that both have. Or a head trained for the target: EAGLE, P-EAGLE, DFlash, Medusa or"
        f" PaSS; {' and '.join(PACKAGED_HEADS)} comes with specbench."
    )
    probabilities = "yes"
    trees = True

    model: ModelSpec
    vocab: int | None = option(
        None,
        "vocab=N",
        "draft the N tokens that the target writes most often (`specbench calibrate --vocab`)",
        least=1,
    )

    def __str__(self) -> str:
        return self.named(self.model.name)

    def named(self, model: str) -> str:
        """The same of a model that is called something else."""
        return model if self.vocab is None else add_option(model, f"vocab={self.vocab}")

    @property
    def model_spec(self) -> ModelSpec:
        return self.model


@dataclass(frozen=True)
class Cascade(DrafterSpec):
    """Token by token, a drafter that costs nothing where it knows something, and one with passes where it does not.

    Attributes:
        front: Asked first.
        back: A small model, or the target in a cheaper form.
        passes: The most passes of ``back`` in a step; ``None`` leaves that to the draft-length rule.
    """

    word = "A+B"
    summary = (
        "A cascade, such as lookup+self:int8. Token by token, lookup, ngram or suffix drafts where it has a match of"
        " two tokens or more (min=N), or recycle where it knows the last one; and B, self or a MODEL, elsewhere."
    )
    probabilities = "A's and B's, token by token"

    front: FreeSpec
    back: SelfForm | SmallModel
    passes: int | None = option(
        None, "passes=N", "an option of A then: most passes of B in a step, while A may go on", least=1
    )

    def __str__(self) -> str:
        return cascade_name(str(self.front), self.passes, str(self.back))

    @property
    def model_part(self) -> SelfForm | SmallModel:
        return self.back

    @property
    def model_spec(self) -> ModelSpec | None:
        return self.back.model_spec

    @property
    def keeps_state(self) -> bool:
        return self.front.keeps_state


@dataclass(frozen=True)
class Several(DrafterSpec):
    """Drafters side by side, whose chains are merged into one tree.

    Attributes:
        drafters: At least two, none of them plain or given twice.

    Raises:
        UsageError: They are not.
    """

    word = "A|B"
    summary = (
        "Several drafters, such as 'lookup|self:int8' (in quotes): a chain of each, merged into one tree."
    )
    probabilities = "those of its drafters"

    drafters: tuple[DrafterSpec, ...]

    def __post_init__(self) -> None:
        if any(drafter.is_plain for drafter in self.drafters):
            raise UsageError("The drafter none drafts nothing beside others.", "Leave it out.")
        if len(set(self.drafters)) < len(self.drafters):
            raise UsageError(
                "A drafter stands twice beside itself.", "For several drafts of one model use --tree chains."
            )

    def __str__(self) -> str:
        return "|".join(map(str, self.drafters))

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        return self.drafters

    @property
    def model_specs(self) -> tuple[ModelSpec, ...]:
        return tuple(model for drafter in self.drafters for model in drafter.model_specs)

    @property
    def keeps_state(self) -> bool:
        return any(drafter.keeps_state for drafter in self.drafters)


def cascade_name(front: str, passes: int | None, back: str) -> str:
    """What a cascade is called, from what its parts are called."""
    return f"{front if passes is None else add_option(front, f'passes={passes}')}+{back}"


DRAFTERS: tuple[type[DrafterSpec], ...] = (
    Plain,
    Lookup,
    NGram,
    Suffix,
    Recycle,
    SelfForm,
    SmallModel,
    Cascade,
    Several,
)
"""In the order in which listings have them."""

_WORDS: Mapping[str, type[DrafterSpec]] = {kind.word: kind for kind in DRAFTERS if kind.word.islower()}


def parse_drafter(text: str) -> DrafterSpec:
    """What a ``--drafter`` means. Of what is no word it is a model; names of models may contain a plus.

    A model's options follow its last colon; what exists as a path is a path, whatever is in it.

    Raises:
        UsageError: No such drafter or option, a value outside its range, or what cannot be a model.
    """
    return _parse(text, _WORDS)


def _parse(text: str, offered: Mapping[str, type[DrafterSpec]]) -> DrafterSpec:
    """See ``parse_drafter``; ``offered`` are the words that a mistyped one is taken for."""
    if "|" in text and not Path(text).exists():
        return Several(tuple(_parse(part.strip(), offered) for part in text.split("|")))
    first, plus, second = text.partition("+")
    front = _WORDS.get(_word(first), DrafterSpec)
    if plus and issubclass(front, FreeSpec):
        return _parse_cascade(front, first, second.strip())
    kind = _WORDS.get(_word(text))
    if kind is not None:
        return kind.read(split_spec(text)[1], text)
    model, given = _model_options(text)
    if (meant := _mistyped(model, offered)) is not None:
        raise UsageError(
            f"There is no drafter {text!r}.", f"Give {meant!r}, or a hub id with its organization."
        )
    return SmallModel(parse_model(model), **read_options("a model", given, SmallModel.options()))


def _word(text: str) -> str:
    return text.partition(":")[0].strip()


def _model_options(text: str) -> tuple[str, dict[str, str | bool]]:
    """A model and its options: what follows its last colon, where that reads name=value with names that are known."""
    model, colon, rest = text.rpartition(":")
    known = [each.key for each in SmallModel.options()]
    if colon and not Path(text).expanduser().exists():
        items = [item.partition("=") for item in rest.split(",")]
        if all(equals and name.strip() in known for name, equals, _ in items):
            return model, split_spec(f"model:{rest}")[1]
    return text, {}


def _parse_cascade(kind: type[FreeSpec], first: str, second: str) -> Cascade:
    front, passes = kind.first_of_cascade(split_spec(first)[1])
    back = _parse(second, {SelfForm.word: SelfForm}) if second else None
    if not isinstance(back, SelfForm | SmallModel):
        raise UsageError(
            f"The second drafter of a cascade, {second!r}, is no model.",
            "Put self:... or a model behind the plus, as in lookup+self:int8.",
        )
    return Cascade(front, back, passes)


def _mistyped(text: str, offered: Mapping[str, type[DrafterSpec]]) -> str | None:
    """A drafter or a folder here that a spec nearly is, which the hub need not be asked about then.

    What names an organization, as models on the hub do, and what exists, is taken at its word. Options that the drafter
    lacks are left out.
    """
    name, colon, options = text.partition(":")
    if "/" in text or text in BUILTIN_MODELS or text in PACKAGED_HEADS or Path(text).exists():
        return None
    if near := get_close_matches(name, offered, 1, 0.7):
        (word,) = near
        meant = (word + colon + options, word, *(f"{word}:{o.written}" for o in offered[word].options()))
        return next(spec for spec in meant if _is_right(spec))
    folders = [path.name for path in Path().iterdir() if (path / "config.json").is_file()]
    return next(iter(get_close_matches(text, folders, 1, 0.8)), None)


def _is_right(text: str) -> bool:
    try:
        parse_drafter(text)
    except UsageError:
        return False
    return True
