"""The notation of drafters: a word, a colon, and options between commas, as in ``ngram:order=3,sample``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from specbench.errors import UsageError

_Default = TypeVar("_Default")


def split_spec(spec: str) -> tuple[str, dict[str, str | bool]]:
    """Take ``word:key=value,flag`` apart: ``("word", {"key": "value", "flag": True})``.

    White space around the parts is dropped, and an underscore in a key is read as a dash.

    Raises:
        UsageError: Nothing stands behind the colon or between two commas, a key or value is empty, or a key
            is repeated.
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


def join_spec(word: str, values: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """The inverse of ``split_spec``: the word and what is not at its default; ``True`` becomes a flag."""
    items = [
        key if value is True else f"{key}={value}" for key, value in values.items() if value != defaults[key]
    ]
    return f"{word}:{','.join(items)}" if items else word


def add_option(spec: str, option: str) -> str:
    """A spec with one option more at its end."""
    return f"{spec}{',' if ':' in spec else ':'}{option}"


class Options:
    """The options given to one drafter word, read with their types.

    Args:
        word: The drafter's word, for messages.
        given: What ``split_spec`` found.
        known: How each option is written (``"order=N"``), by key.

    Raises:
        UsageError: A key is not among the known ones.
    """

    def __init__(self, word: str, given: Mapping[str, str | bool], known: Mapping[str, str]) -> None:
        self._word = word
        self._given = given
        self._hint = (
            f"Options of {word}: {', '.join(known.values())}." if known else f"{word} has no options."
        )
        for key in given:
            if key not in known:
                raise UsageError(f"{word} has no option {key!r}.", self._hint)

    def flag(self, key: str) -> bool:
        """Whether the flag is given.

        Raises:
            UsageError: It is given a value.
        """
        value = self._given.get(key, False)
        if not isinstance(value, bool):
            raise UsageError(
                f"The option {key!r} of {self._word} takes no value, and was given {value!r}.", self._hint
            )
        return value

    def integer(
        self, key: str, default: _Default, words: Mapping[str, _Default] | None = None
    ) -> int | _Default:
        """The whole number given for ``key``, or ``default`` without one; ``words`` stand for values of their own.

        Raises:
            UsageError: The value is missing or no whole number.
        """
        if key not in self._given:
            return default
        value = self._given[key]
        if isinstance(value, bool):
            raise UsageError(f"The option {key!r} of {self._word} needs a value.", self._hint)
        if words and value in words:
            return words[value]
        try:
            return int(value)
        except ValueError:
            raise UsageError(
                f"The option {key!r} of {self._word} is {value!r}, which is no whole number.", self._hint
            ) from None

    def integers(self, key: str) -> tuple[int, ...]:
        """The whole numbers given for ``key`` with dashes between them, as in ``3-7-11``; none without it.

        Raises:
            UsageError: The value is missing or of another form.
        """
        value = self._given.get(key, "")
        if isinstance(value, bool):
            raise UsageError(f"The option {key!r} of {self._word} needs a value.", self._hint)
        try:
            return tuple(int(part) for part in value.split("-")) if value else ()
        except ValueError:
            raise UsageError(
                f"The option {key!r} of {self._word} is {value!r}, and not whole numbers with dashes between them.",
                self._hint,
            ) from None
