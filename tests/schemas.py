"""Fifty JSON Schemas, a validator of what they use, and comparisons of outputs and of masks with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from specbench.generate import GenerationRun, encode_prompt
from specbench.generate_many import speculative_generate_many
from specbench.models.target import Target
from specbench.options import DecodingOptions

QUESTIONS = ("Describe a planet.", "List some numbers: 1, 2, 3.", "the the the and the", "Was ist das?")

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def record(**properties: Any) -> dict[str, Any]:
    keys = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "object", **keys}


LEAVES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 5},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "boolean"},
    {"enum": ["red", "green", 7, None, True]},
    {"const": "as agreed"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{3}$"},
    {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 3}]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
]


def fifty() -> Iterator[dict[str, Any]]:
    """Yield the schemas: each leaf alone, in a list, as a value of a record, beside others, and deep in a record."""
    for number, leaf in enumerate(LEAVES):
        other = LEAVES[(number + 3) % len(LEAVES)]
        yield leaf
        yield {"type": "array", "items": leaf, "minItems": 2, "maxItems": 3}
        yield record(value=leaf, unit={"enum": ["km", "kg"]})
        yield {
            "type": "object",
            "properties": {"first": leaf, "second": other, "third": {"type": "boolean"}},
            "required": ["second"],
            "additionalProperties": False,
        }
        inner = {"$ref": "#/$defs/inner"}
        yield {
            **record(left=inner, right=inner),
            "$defs": {"inner": record(deep=record(at=leaf), more=other)},
        }


def fits(value: Any, schema: Any, whole: Any = None) -> bool:
    """Return whether a value fits a schema of the keywords used here."""
    whole = schema if whole is None else whole
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        found = whole
        for part in schema["$ref"].split("/")[1:]:
            found = found[part]
        return fits(value, found, whole)
    types = schema.get("type", [*TYPES])
    types = [types] if isinstance(types, str) else types
    number = isinstance(value, int | float) and not isinstance(value, bool)
    length = len(value) if isinstance(value, str | list) else 0
    limits = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
    checks = [
        any(
            isinstance(value, TYPES[each]) and (number or each not in ("number", "integer")) for each in types
        ),
        "enum" not in schema or any(value == each and type(value) is type(each) for each in schema["enum"]),
        "const" not in schema or (value == schema["const"] and type(value) is type(schema["const"])),
        "anyOf" not in schema or any(fits(value, each, whole) for each in schema["anyOf"]),
        not number or schema.get("minimum", value) <= value <= schema.get("maximum", value),
        schema.get(limits[0], 0) <= length <= schema.get(limits[1], length),
        not isinstance(value, str)
        or "pattern" not in schema
        or re.search(schema["pattern"], value) is not None,
    ]
    if isinstance(value, list) and "items" in schema:
        checks += [fits(each, schema["items"], whole) for each in value]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        checks.append({*schema.get("required", ())} <= {*value})
        checks += [
            fits(each, known.get(name, schema.get("additionalProperties", True)), whole)
            for name, each in value.items()
        ]
    return all(checks)


def disagreements(
    target: Target, tokens: int, drafters: Sequence[str], schemas: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Return what is wrong with greedy outputs of the schemas (the fifty) on four questions.

    Outputs with each drafter, and in batches of eight, have to be those of plain decoding, and to fit or be cut.
    """
    wrong: list[str] = []
    prompts = [encode_prompt(target.tokenizer, text, chat=False) for text in QUESTIONS]
    decodings = [
        DecodingOptions(max_new_tokens=tokens, format="json-schema=" + json.dumps(schema))
        for schema in schemas or fifty()
    ]
    cases = [(prompt, decoding) for decoding in decodings for prompt in prompts]
    outputs = []
    for number, (prompt, decoding) in enumerate(cases):
        results = []
        for drafter in ("none", *drafters):
            run = GenerationRun(prompt, target, drafter, decoding=decoding)
            for _ in run:
                pass
            results.append(run.result())
        plain = results[0]
        outputs.append(plain.token_ids)
        wrong += [
            f"case {number}, {result.drafter}: {result.text!r}, not {plain.text!r}"
            for result in results
            if result.token_ids != plain.token_ids
        ]
        assert decoding.format is not None
        if plain.finish_reason == "eos" and not _parses(plain.text or "", decoding.format.text):
            wrong.append(f"case {number}: {plain.text!r} does not fit {decoding.format}")
    runs = [GenerationRun(prompt, target, drafters[-1], decoding=decoding) for prompt, decoding in cases]
    many = speculative_generate_many(runs, target, drafters[-1], max_batch=8)
    for number, (result, expected) in enumerate(zip(many.results(), outputs, strict=True)):
        if not hasattr(result, "token_ids") or result.token_ids != expected:
            wrong.append(f"case {number} in a batch: {result!r}")
    return wrong


def _parses(text: str, schema: str) -> bool:
    try:
        return fits(json.loads(text), json.loads(schema))
    except ValueError:
        return False
