"""Formats as grammars of the library llguidance, and a process that tries whether one can be compiled.

The library's own limits bound most of its work, but not all: a JSON Schema of 300 characters (``allOf`` with references
to more of them) can take all memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from specbench.base.bounded import BoundedProcess
from specbench.base.errors import UsageError
from specbench.base.textsafe import excerpt
from specbench.options import Format

NAMES = {"json-schema": "The JSON Schema", "regex": "The regular expression", "grammar": "The grammar"}
"""What messages call each kind of format."""

LONGEST = 2**18
"""Most characters of a format."""

SECONDS = 3.0
"""Time limit for a trial."""

_MEMORY = 512 * 2**20

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
        UsageError: It is invalid.
    """
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


def one_line_json(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema, as part of a grammar, of JSON on one line like that of ``--format json-schema``."""
    return {**schema, "x-guidance": {**_JSON, **schema.get("x-guidance", {})}}


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


_trials = BoundedProcess("tries formats", f"{__name__}:compile_once", _MEMORY, library)


def check_size(given: Format) -> None:
    """Check that a format can be compiled in a bounded time and memory.

    Raises:
        UsageError: It is too long, or takes too much of either.
    """
    name = NAMES[given.kind]
    if len(given.text) > LONGEST:
        raise UsageError(
            f"{name} has {len(given.text):,} characters, and only {LONGEST:,} are allowed.", "Shorten it."
        )
    if _trials.ask({"kind": given.kind, "text": given.text}, SECONDS) is None:
        raise UsageError(
            f"{name} takes more than {SECONDS:g} seconds or {_MEMORY // 2**20} MiB to compile.",
            "Simplify it.",
        )


def compile_once(request: Mapping[str, str]) -> dict[str, Any]:
    """Compile a format in the other process, for a tokenizer of bytes; whether it is valid is found out later."""
    try:
        matcher = matcher_of(_bytes(), _grammar(Format(request["kind"], request["text"])))  # type: ignore[arg-type]
    except ValueError:
        return {}
    matcher.compute_ff_tokens()
    matcher.compute_bitmask()
    return {}


class _Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return [*text]


@cache
def _bytes() -> Any:
    return library().LLTokenizer(library().TokenizerWrapper(_Bytes()))
