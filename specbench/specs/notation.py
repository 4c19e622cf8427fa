"""The notation of specs: a word, a colon, and options separated by commas, as in ``ngram:order=3,sample``.

Each kind of spec is a subclass of ``Spec``, and its options are the fields that it declares with ``option``. Parsing,
ranges, printing, completion, listings and documentation are derived from these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from specbench.base.errors import UsageError


def dashed(text: str) -> tuple[int, ...]:
    """Parse whole numbers with dashes between them, as in ``3-7-11``; raise ``ValueError`` for anything else."""
    return tuple(map(int, text.split("-")))


@dataclass(frozen=True)
class Option:
    """An option of a spec.

    Attributes:
        syntax: Its syntax, with a placeholder for the value: ``order=N``. A flag has no value.
        parse: Converts text to its value; raises ``ValueError``.
        expected: A phrase on the values that ``parse`` accepts, for messages.
        least, most: Its range; a function computes the limit from all values of the spec.
        before_model: Its default before a model in a cascade; ``...`` if that is the same.
    """

    syntax: str
    help: str
    default: Any
    parse: Callable[[str], Any] = int
    expected: str = "whole number"
    least: float | None = None
    most: float | Callable[[Any], float] | None = None
    before_model: Any = ...
    name: str = ""

    @property
    def key(self) -> str:
        return self.syntax.partition("=")[0]

    def read(self, value: str | bool, word: str, hint: str) -> Any:
        """Parse its value in the spec of ``word``; raise ``UsageError`` with ``hint`` if that cannot be."""
        if "=" not in self.syntax:
            if value is True:
                return True
            raise UsageError(
                f"The option {self.key!r} of {word} takes no value, and was given {value!r}.", hint
            )
        if isinstance(value, bool):
            raise UsageError(f"The option {self.key!r} of {word} needs a value.", hint)
        try:
            return self.parse(value)
        except ValueError:
            raise UsageError(
                f"The option {self.key!r} of {word} is {value!r}, which is no {self.expected}.", hint
            ) from None

    def write(self, value: Any) -> str:
        """Return its key and a value as ``read`` takes them."""
        if value is True:
            return self.key
        written = "-".join(map(str, value)) if isinstance(value, tuple) else value
        return f"{self.key}={'any' if value is None else written}"

    def check(self, value: Any, word: str, values: Any) -> None:
        """Raise ``UsageError`` for a value outside its range; ``values`` has those of all options."""
        if not isinstance(value, int | float):
            return
        most = self.most(values) if callable(self.most) else self.most
        inside = (self.least is None or value >= self.least) and (most is None or value <= most)
        if not inside:  # NaN is not
            wanted = f"at most {most}" if self.least is None else f"at least {self.least}"
            wanted = wanted if None in (self.least, most) else f"{self.least} to {most}"
            raise UsageError(f"The option {self.key!r} of {word} is {value}.", f"Give {wanted}.")


def option(default: Any, syntax: str, help_text: str, **more: Any) -> Any:
    """Declare a dataclass field as an option; for the arguments see ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(syntax, help_text, default, **more)})


@dataclass(frozen=True)
class Spec:
    """A word with options; what all specs of a kind share stands in its class statement.

    Attributes:
        word: The word that the spec begins with.

    Raises:
        UsageError: An option is outside its range.
    """

    word: ClassVar[str]

    def __init_subclass__(cls, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        for each in sorted(self.options(), key=lambda each: callable(each.most)):  # those of others last
            each.check(getattr(self, each.name), self.word, self)

    def __str__(self) -> str:
        return self.written(self.word)

    def written(self, word: str) -> str:
        """Return its options behind a word, without those at their defaults."""
        options = self.options()
        defaults = with_defaults({}, options, before_model=getattr(self, "before_model", False))
        values = [(each, getattr(self, each.name)) for each in options]
        items = [o.write(value) for o, value in values if value != defaults[o.name]]
        return f"{word}:{','.join(items)}" if items else word

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the options that it declares, in order."""
        return tuple(
            dataclasses.replace(field.metadata["option"], name=field.name)
            for field in dataclasses.fields(cls)
            if "option" in field.metadata
        )

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a spec that begins with the word."""
        return cls(**read_options(cls.word, split_spec(text)[1], cls.options()))


def read_options(word: str, given: Mapping[str, str | bool], options: Sequence[Option]) -> dict[str, Any]:
    """Return the values that are given in a spec (the result of ``split_spec``), by the options' names.

    Raises:
        UsageError: There is no such option, or a value is of another kind.
    """
    known = {each.key: each for each in options}
    hint = f"Options of {word}: {', '.join(each.syntax for each in options)}."
    hint = hint if options else f"{word} has no options."
    values = {}
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{word} has no option {key!r}.{meant}", hint)
        values[known[key].name] = known[key].read(value, word, hint)
    return values


def with_defaults(
    values: Mapping[str, Any], options: Sequence[Option], *, before_model: bool = False
) -> dict[str, Any]:
    """Return values with defaults for missing ones; a default above the option's range is reduced to its maximum."""
    found = {}
    for each in options:
        special = before_model and each.before_model is not ...
        found[each.name] = values.get(each.name, each.before_model if special else each.default)
    for each in options:
        if each.name not in values and callable(each.most) and found[each.name] is not None:
            found[each.name] = min(found[each.name], each.most(SimpleNamespace(**found)))
    return found


def split_spec(spec: str) -> tuple[str, dict[str, str | bool]]:
    """Split ``word:key=value,flag`` into ``("word", {"key": "value", "flag": True})``.

    White space around the parts is dropped, and an underscore in a key is read as a dash.

    Raises:
        UsageError: An option, key or value is empty, or a key is repeated.
    """
    word, colon, rest = spec.partition(":")
    options: dict[str, str | bool] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        key = key.replace("_", "-")
        if not key or (equals and not value):
            raise UsageError(
                f"An option is empty in {spec!r}.",
                "Write word:key=value,flag, or the word alone without a colon.",
            )
        if key in options:
            raise UsageError(f"The option {key!r} is given twice in {spec!r}.", "Give it once.")
        options[key] = value if equals else True
    return word.strip(), options
