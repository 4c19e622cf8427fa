"""Formats as grammars of the library llguidance, whose own limits bound its work."""

from __future__ import annotations

import json
from typing import Any

from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt
from specbench.options import Format

NAMES = {"json-schema": "The JSON Schema", "regex": "The regular expression", "grammar": "The grammar"}
"""What messages call each kind of format."""

LONGEST = 2**18
"""Most characters of a format."""

_LEXER_STATES = 100_000
"""The most states of a compiled format, of up to 2 KB."""

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it, on one line; ``x-guidance`` in a schema changes it."""


def library() -> Any:
    """Return the library.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise UsageError(
            "Formats need the package llguidance.", "Install it: pip install 'specbench-llm[formats]'."
        ) from error
    return llguidance


def grammar_of(given: Format) -> str:
    """Return a format as the library's matcher takes it.

    Raises:
        UsageError: It is invalid or too long.
    """
    if len(given.text) > LONGEST:
        raise UsageError(
            f"{NAMES[given.kind]} has {len(given.text):,} characters, and only {LONGEST:,} are allowed.",
            "Shorten it.",
        )
    try:
        return _grammar(given)
    except ValueError as error:
        raise invalid(NAMES[given.kind], str(error)) from error


def _grammar(given: Format) -> str:
    matcher = library().LLMatcher
    if given.kind == "regex":
        return str(matcher.grammar_from_regex(given.text))
    if given.kind == "grammar":
        return str(matcher.grammar_from_lark(given.text))
    try:
        schema = json.loads(given.text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(schema, dict | bool):
        raise ValueError("it is no JSON object")
    return str(matcher.grammar_from_json_schema({} if schema is True else schema, defaults=_JSON))


def matcher_of(tokens: Any, grammar: str) -> Any:
    """Return the library's matcher of a grammar, for a tokenizer as the library reads it."""
    limits = library().LLParserLimits(verbose_errors=False, max_lexer_states=_LEXER_STATES)
    return library().LLMatcher(tokens, grammar, log_level=0, limits=limits)


def invalid(name: str, reason: str) -> UsageError:
    """Return the error of a format that the library refuses for a reason."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    why = excerpt((causes or lines or ["it is invalid"])[0], 200)
    return UsageError(f"{name} cannot be used: {why}.", "Change it.")
