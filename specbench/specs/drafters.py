"""Drafters as the command line names them: a word with options, a model, or two with a plus between them.

``parse_drafter`` reads one, once, and ``str`` writes it again as results call it. Each kind says for itself what the
rest has to know of it; what drafts is built of it in ``specbench.models.prepare``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from specbench.errors import UsageError
from specbench.specs.models import BUILTIN_MODELS, PACKAGED_HEADS, ModelSpec, parse_model
from specbench.specs.notation import Options, add_option, join_spec, split_spec

_LONGEST_MATCH = 64
"""Longer ones are not told apart."""

_MOST_SUCCESSORS = 64

_HIGHEST_ORDER = 16
"""Every token is counted once per context length, so the order multiplies the memory."""


class DrafterSpec:
    """What ``--drafter`` asks for.

    Attributes:
        word: How it begins on the command line.
        summary: What it does, in a sentence.
        options: What they mean, by how they are written (``order=N``).
        probabilities: Which distributions its tokens are drawn from, in words.
        has_logits: Whether there are distributions of it that a draft-length rule can read.
        is_plain: Whether it proposes nothing, so that decoding is plain.
        trees: Whether it drafts trees where it is asked to.
    """

    word: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[Mapping[str, str]] = {}
    probabilities: ClassVar[str]
    has_logits: ClassVar[bool] = True
    is_plain: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    @property
    def model_part(self) -> DrafterSpec:
        """The part that says what passes are made of: a cascade's second drafter, or all of it."""
        return self

    @property
    def own_model(self) -> ModelSpec | None:
        """The model that is loaded for it; ``None`` if it needs none, or the target's own weights."""
        return None

    @property
    def own_models(self) -> tuple[ModelSpec, ...]:
        """All models that are loaded for it."""
        return () if self.own_model is None else (self.own_model,)

    @property
    def parts(self) -> tuple[DrafterSpec, ...]:
        """The drafters side by side that it is made of: itself, if it is one."""
        return (self,)

    @property
    def keeps_state(self) -> bool:
        """Whether what it learns from one generation serves the next."""
        return False

    @classmethod
    def read(cls, given: Options, text: str) -> DrafterSpec:
        """Of the options behind its word; ``text`` is the whole of it, for messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(DrafterSpec):
    """Nothing is drafted."""

    word = "none"
    summary = "Proposes nothing: plain decoding, the baseline of every comparison."
    probabilities = "none"
    has_logits = False
    is_plain = True

    def __str__(self) -> str:
        return self.word

    @classmethod
    def read(cls, given: Options, text: str) -> Plain:  # noqa: ARG003
        return cls()


@dataclass(frozen=True)
class Lookup(DrafterSpec):
    """Prompt lookup.

    Attributes:
        n: Longest match that is told from shorter ones, 1 to 64; ``None`` for any length, which means 64.
        min: Shortest suffix that counts as a match, 1 to 64.
        before_model: Whether a model drafts where this one does not. Then a match may be of any length and has to have
            two tokens if nothing is said.

    Raises:
        UsageError: A value outside its range, or ``min`` above ``n``.
    """

    word = "lookup"
    summary = "Prompt lookup: finds the end of the text earlier in prompt and output, copies what followed."
    options: ClassVar[Mapping[str, str]] = {
        "n=TOKENS (or any)": "longest match tried first",
        "min=TOKENS": "shortest match that counts",
    }
    probabilities = "certain (one-hot)"
    has_logits = False

    n: int | None = 3
    min: int = 1
    before_model: bool = False

    def __post_init__(self) -> None:
        for what, value in (("longest", self.n), ("shortest", self.min)):
            if value is not None and not 1 <= value <= _LONGEST_MATCH:
                raise UsageError(
                    f"The {what} match of the lookup is {value} tokens.", f"Give 1 to {_LONGEST_MATCH}."
                )
        if self.n is not None and self.min > self.n:
            raise UsageError(
                f"The shortest match of the lookup, {self.min} tokens, is above the longest, {self.n}.",
                "Lower min, or raise n.",
            )

    @property
    def longest(self) -> int:
        """The longest match in tokens, whether it was given or not."""
        return self.n or _LONGEST_MATCH

    def __str__(self) -> str:
        default = self._default(self.before_model)
        return join_spec(
            self.word,
            {"n": self.n or "any", "min": self.min},
            {"n": default.n or "any", "min": default.min},
        )

    @classmethod
    def _default(cls, before_model: bool) -> Lookup:
        return cls(None, 2, before_model=True) if before_model else cls()

    @classmethod
    def read(cls, given: Options, text: str, *, before_model: bool = False) -> Lookup:  # noqa: ARG003
        default = cls._default(before_model)
        n = given.integer("n", default.n, {"any": None})
        return cls(n, given.integer("min", default.min), before_model)


@dataclass(frozen=True)
class NGram(DrafterSpec):
    """Counts of what followed the last tokens.

    Attributes:
        order: Length of the longest n-gram counted, context and continuation together: 2 (bigrams) to 16.
        max: The most tokens drafted in a step; ``None`` leaves that to the draft-length rule.
        window: Forget what was counted at tokens that are no longer among the last so many read; ``None`` forgets
            nothing before the next prompt.
        keep: Keep the counts between prompts (no n-gram spans two of them). Without a window they grow for ever.
        top_k: With k > 1, every emitted token also adds 1 to the counts of the k tokens that the target's untransformed
            logits prefer in its place. It is itself counted once, among them or not. It passes for the last one seen,
            and the others for seen the earlier the less probable they are. The window forgets them all together. With
            1 only the emitted token is counted.
        sample: Draw from the normalised counts of the longest known context instead, and keep them as q; the sampling
            transforms do not apply to them. In greedy decoding, and before the first commit has shown how large the
            vocabulary is, the most frequent token is taken all the same.
        min: Shortest context that counts, in tokens: 1 to ``order - 1``.
        before_model: Whether a model drafts where this one does not. Then a context has two tokens at least if nothing
            is said.

    Raises:
        UsageError: A value outside its range.
    """

    word = "ngram"
    summary = "Counts of what followed the last tokens in prompt and output, with back-off."
    options: ClassVar[Mapping[str, str]] = {
        "order=N": "2 for bigrams to 4 (default) and up: contexts of N-1 tokens and less",
        "max=TOKENS": "most tokens drafted in a step",
        "window=TOKENS": "forget tokens that left the last so many",
        "keep": "keep the counts between prompts",
        "top-k=K": "also count the target's K most probable tokens at each verified position",
        "sample": "draw from the counts instead of taking the most frequent",
        "min=TOKENS": "shortest context that counts",
    }
    probabilities = "certain (one-hot); drawn from the counts with 'sample'"
    has_logits = False

    order: int = 4
    max: int | None = None
    window: int | None = None
    keep: bool = False
    top_k: int = 1
    sample: bool = False
    min: int = 1
    before_model: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.order <= _HIGHEST_ORDER:
            raise UsageError(
                f"The n-gram order is {self.order}.", f"Give a number from 2 (bigrams) to {_HIGHEST_ORDER}."
            )
        for what, value in (("draft limit", self.max), ("window", self.window), ("top-k", self.top_k)):
            if value is not None and value < 1:
                raise UsageError(f"The n-gram {what} is {value}.", "Give at least 1.")
        if not 1 <= self.min < self.order:
            raise UsageError(
                f"The shortest context of the n-grams is {self.min} tokens.",
                f"Give 1 to {self.order - 1}, the longest for order {self.order}.",
            )

    @property
    def keeps_state(self) -> bool:
        return self.keep

    def __str__(self) -> str:
        default = type(self)(min=2, before_model=True) if self.before_model else type(self)()
        return join_spec(self.word, self._values(), default._values())

    def _values(self) -> dict[str, Any]:
        return {
            "order": self.order, "max": self.max, "window": self.window, "keep": self.keep, "top-k": self.top_k,
            "sample": self.sample, "min": self.min,
        }  # fmt: skip

    @classmethod
    def read(cls, given: Options, text: str, *, before_model: bool = False) -> NGram:  # noqa: ARG003
        order = given.integer("order", 4)
        return cls(
            order=order,
            max=given.integer("max", None),
            window=given.integer("window", None),
            keep=given.flag("keep"),
            top_k=given.integer("top-k", 1),
            sample=given.flag("sample"),
            min=given.integer("min", min(2, order - 1) if before_model else 1),
            before_model=before_model,
        )


@dataclass(frozen=True)
class Suffix(DrafterSpec):
    """Counts of what followed the longest match, which may be long.

    Attributes:
        n: Longest match that is told from shorter ones, 1 to 64.
        min: Shortest match that counts, 1 to ``n``.
        keep: Look in the outputs of earlier prompts too. They are never forgotten.
        before_model: Whether a model drafts where this one does not. Then a match has two tokens at least if nothing is
            said.

    Raises:
        UsageError: A value outside its range, or ``min`` above ``n``.
    """

    word = "suffix"
    summary = "SuffixDecoding: what most often followed the longest match of the last tokens; also as a tree."
    options: ClassVar[Mapping[str, str]] = {
        "n=TOKENS": "longest match told from shorter ones (16)",
        "min=TOKENS": "shortest match that counts",
        "keep": "look in the outputs of earlier prompts too: warm, and refused where runs are compared",
    }
    probabilities = "certain (one-hot)"
    has_logits = False
    trees = True

    n: int = 16
    min: int = 1
    keep: bool = False
    before_model: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _LONGEST_MATCH:
            raise UsageError(
                f"The longest match of the suffixes is {self.n} tokens.", f"Give 1 to {_LONGEST_MATCH}."
            )
        if not 1 <= self.min <= self.n:
            raise UsageError(
                f"The shortest match of the suffixes is {self.min} tokens.",
                f"Give 1 to {self.n}, the longest match.",
            )

    @property
    def keeps_state(self) -> bool:
        return self.keep

    def __str__(self) -> str:
        default = type(self)(min=2, before_model=True) if self.before_model else type(self)()
        return join_spec(self.word, self._values(), default._values())

    def _values(self) -> dict[str, Any]:
        return {"n": self.n, "min": self.min, "keep": self.keep}

    @classmethod
    def read(cls, given: Options, text: str, *, before_model: bool = False) -> Suffix:  # noqa: ARG003
        n = given.integer("n", 16)
        return cls(
            n, given.integer("min", min(2, n) if before_model else 1), given.flag("keep"), before_model
        )


@dataclass(frozen=True)
class Recycle(DrafterSpec):
    """A table of each token's latest successors under the target.

    Attributes:
        top_k: How many successors, 1 to 64.

    Raises:
        UsageError: More or less.
    """

    word = "recycle"
    summary = (
        "Token Recycling: the successors that the target last preferred behind each token; best as a tree."
    )
    options: ClassVar[Mapping[str, str]] = {"top-k=K": "successors of each token (8)"}
    probabilities = "certain (one-hot)"
    has_logits = False
    trees = True

    top_k: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= _MOST_SUCCESSORS:
            raise UsageError(f"The recycled top-k is {self.top_k}.", f"Give 1 to {_MOST_SUCCESSORS}.")

    def __str__(self) -> str:
        return join_spec(self.word, {"top-k": self.top_k}, {"top-k": type(self)().top_k})

    @classmethod
    def read(cls, given: Options, text: str, *, before_model: bool = False) -> Recycle:  # noqa: ARG003
        return cls(given.integer("top-k", 8))


@dataclass(frozen=True)
class SelfForm(DrafterSpec):
    """The target's own weights in a cheaper form.

    Attributes:
        int8, int4: Its linear layers quantised.
        layers: Its first so many decoder layers; ``None`` for all.
        skip: Those left out, counted from 0, ascending.
        calibrated: What was chosen by ``specbench calibrate``; excludes the others.
    """

    word = "self"
    summary = "The target's own weights, on the target's own cache: no second model needed."
    options: ClassVar[Mapping[str, str]] = {
        "int8": "in int8; also together with layers or skip",
        "int4": "in int4, coarser and smaller; also together with layers or skip",
        "layers=N": "the first N layers (early exit)",
        "skip=I-J-...": "all layers but these, counted from 0",
        "calibrated": "what `specbench calibrate` chose for this target, dtype and device",
    }
    probabilities = "yes"
    trees = True

    int8: bool = False
    layers: int | None = None
    skip: tuple[int, ...] = ()
    calibrated: bool = False
    int4: bool = False

    def __str__(self) -> str:
        return join_spec(self.word, self._values(), type(self)()._values())

    def _values(self) -> dict[str, Any]:
        skip = "-".join(map(str, self.skip))
        return {
            "int8": self.int8,
            "int4": self.int4,
            "layers": self.layers,
            "skip": skip,
            "calibrated": self.calibrated,
        }

    @classmethod
    def read(cls, given: Options, text: str) -> SelfForm:
        form = cls(
            given.flag("int8"),
            given.integer("layers", None),
            tuple(sorted(set(given.integers("skip")))),
            given.flag("calibrated"),
            given.flag("int4"),
        )
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

    Raises:
        UsageError: ``vocab`` is below 1.
    """

    word = "MODEL"
    summary = (
        "A small model, best with the target's tokenizer: hub id, folder, .gguf file or built-in name. With another one"
        " it drafts the tokens that both have. Or a head trained for the target: EAGLE, P-EAGLE, DFlash, Medusa or"
        f" PaSS; {' and '.join(PACKAGED_HEADS)} comes with specbench."
    )
    options: ClassVar[Mapping[str, str]] = {
        "vocab=N": "draft the N tokens that the target writes most often (`specbench calibrate --vocab`)"
    }
    probabilities = "yes"
    trees = True

    model: ModelSpec
    vocab: int | None = None

    def __post_init__(self) -> None:
        if self.vocab is not None and self.vocab < 1:
            raise UsageError(f"The drafter's vocabulary is {self.vocab} tokens.", "Give at least 1.")

    def __str__(self) -> str:
        return self.model.name if self.vocab is None else add_option(self.model.name, f"vocab={self.vocab}")

    @property
    def own_model(self) -> ModelSpec:
        return self.model


@dataclass(frozen=True)
class Cascade(DrafterSpec):
    """Token by token, a drafter that costs nothing where it knows something, and one with passes where it does not.

    Attributes:
        front: Asked first.
        back: A small model, or the target in a cheaper form.
        passes: The most passes of ``back`` in a step; ``None`` leaves that to the draft-length rule.

    Raises:
        UsageError: ``passes`` is below 1.
    """

    word = "A+B"
    summary = (
        "A cascade, such as lookup+self:int8. Token by token, lookup, ngram or suffix drafts where it has a match of"
        " two tokens or more (min=N), or recycle where it knows the last one; and B, self or a MODEL, elsewhere."
    )
    options: ClassVar[Mapping[str, str]] = {
        "passes=N": "an option of A then: most passes of B in a step, while A may go on"
    }
    probabilities = "A's and B's, token by token"

    front: Lookup | NGram | Suffix | Recycle
    back: SelfForm | SmallModel
    passes: int | None = None

    def __post_init__(self) -> None:
        if self.passes is not None and self.passes < 1:
            raise UsageError(f"The most passes of the cascade's model are {self.passes}.", "Give at least 1.")

    def __str__(self) -> str:
        return cascade_name(str(self.front), self.passes, str(self.back))

    @property
    def model_part(self) -> SelfForm | SmallModel:
        return self.back

    @property
    def own_model(self) -> ModelSpec | None:
        return self.back.own_model

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
    def own_models(self) -> tuple[ModelSpec, ...]:
        return tuple(model for drafter in self.drafters for model in drafter.own_models)

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

_FRONTS: Mapping[str, type[Lookup | NGram | Suffix | Recycle]] = {
    kind.word: kind for kind in (Lookup, NGram, Suffix, Recycle)
}
_WORDS: Mapping[str, type[DrafterSpec]] = {
    kind.word: kind for kind in (Plain, Lookup, NGram, Suffix, Recycle, SelfForm)
}


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
    if plus and _word(first) in _FRONTS:
        return _parse_cascade(first.strip(), second.strip())
    kind = _WORDS.get(_word(text))
    if kind is not None:
        return kind.read(_options(text, kind.options), text)
    model, given = _model_options(text)
    if (meant := _mistyped(model, offered)) is not None:
        raise UsageError(
            f"There is no drafter {text!r}.", f"Give {meant!r}, or a hub id with its organisation."
        )
    return SmallModel(parse_model(model), given.integer("vocab", None))


def _word(text: str) -> str:
    return text.partition(":")[0].strip()


def _options(text: str, known: Mapping[str, str]) -> Options:
    word, given = split_spec(text)
    return Options(word, given, {written.partition("=")[0]: written for written in known})


def _model_options(text: str) -> tuple[str, Options]:
    """A model and its options: what follows its last colon, where that reads name=value with names that are known."""
    model, colon, rest = text.rpartition(":")
    known = {written.partition("=")[0]: written for written in SmallModel.options}
    if colon and not Path(text).expanduser().exists():
        items = [item.partition("=") for item in rest.split(",")]
        if all(equals and name.strip() in known for name, equals, _ in items):
            return model, Options("a model", split_spec(f"model:{rest}")[1], known)
    return text, Options("a model", {}, known)


def _parse_cascade(first: str, second: str) -> Cascade:
    kind = _FRONTS[_word(first)]
    given = _options(first, {**kind.options, **Cascade.options})
    passes = given.integer("passes", None)
    front = kind.read(given, first, before_model=True)
    back = _parse(second, {SelfForm.word: SelfForm}) if second else None
    if not isinstance(back, SelfForm | SmallModel):
        raise UsageError(
            f"The second drafter of a cascade, {second!r}, is no model.",
            "Put self:... or a model behind the plus, as in lookup+self:int8.",
        )
    return Cascade(front, back, passes)


def _mistyped(text: str, offered: Mapping[str, type[DrafterSpec]]) -> str | None:
    """A drafter or a folder here that a spec nearly is, which the hub need not be asked about then.

    What names an organisation, as models on the hub do, and what exists, is taken at its word. Options that the drafter
    lacks are left out.
    """
    name, colon, options = text.partition(":")
    if "/" in text or text in BUILTIN_MODELS or text in PACKAGED_HEADS or Path(text).exists():
        return None
    if near := get_close_matches(name, offered, 1, 0.7):
        (word,) = near
        meant = (word + colon + options, word, *(f"{word}:{option}" for option in offered[word].options))
        return next(spec for spec in meant if _is_right(spec))
    folders = [path.name for path in Path().iterdir() if (path / "config.json").is_file()]
    return next(iter(get_close_matches(text, folders, 1, 0.8)), None)


def _is_right(text: str) -> bool:
    try:
        parse_drafter(text)
    except UsageError:
        return False
    return True
