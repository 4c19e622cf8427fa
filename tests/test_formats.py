"""Formats: masked targets, forced tokens, messages for what cannot work."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_exact import largest_gap
from tiny import letter_tokenizer, save_tiny, tiny_llama, tiny_tokenizer

from specbench.base.errors import RunError, UsageError
from specbench.bench.pairs import predict
from specbench.check.reference import reference_output
from specbench.decoding import formats
from specbench.decoding.formats import FormatCompiler
from specbench.decoding.metrics import summary
from specbench.decoding.model_defaults import ModelDefaults
from specbench.decoding.sampling import Sampling
from specbench.generate import GenerationRun, encode_prompt, speculative_generate
from specbench.generate_many import speculative_generate_many
from specbench.models.target import Target, wrap_target
from specbench.options import DecodingOptions, Format
from specbench.results.lines import StepLists
from specbench.results.trace import step_event

table: Any = importlib.import_module("distributions")

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 23, None]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
FORMATS: list[dict[str, Any]] = [
    {"format": f"json-schema={PERSON}"},
    {"format": "regex=(the cat|a dog) (sat|ran)[.!]"},
    {"format": 'grammar=start: item ("; " item)~0..2\nitem: /[a-z]{1,3}/ "=" ("on" | "off")'},
]
MODEL = "self:int8"
DRAFTERS = (
    "lookup",
    "suffix",
    MODEL,
    "grammar",
    "grammar+lookup",
    f"grammar+{MODEL}",
    f"grammar+lookup+{MODEL}",
)
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def target() -> Target:
    return wrap_target(tiny_llama(), tiny_tokenizer(), pack=False)


# -- exactness ---------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("drafter", ["ngram:sample", "grammar+lookup+model"])
def test_chains_have_the_masked_distribution(drafter):
    for verification in ("rejection", "block"):
        cell = table.Cell(verification, "fixed:gamma=2", drafter, "format")
        assert table.measure(cell) < table.TOLERANCE


def test_the_masked_distribution_is_the_targets_without_what_does_not_match():
    """By the definition alone: every text up to some length, and a pattern of Python."""
    tokenizer, sampling = letter_tokenizer("ab"), table.SAMPLINGS["format"]
    expected = table.target_distribution(sampling, 3)
    free = table.target_distribution(Sampling(temperature=1.0), 3)
    for tokens, weight in expected.items():
        end = tokens.index(2) if 2 in tokens else len(tokens)
        text = tokenizer.decode(tokens[:end]).replace(" ", "")
        assert any(re.fullmatch("(aab|b)+", text + more) for more in ("", "b", "ab")), text
        assert (2 not in tokens) or re.fullmatch("(aab|b)+", text)
        assert weight >= free[tokens] - 1e-9
    assert largest_gap(expected, free) > 0.01


# -- greedy parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", FORMATS, ids=lambda each: each["format"].partition("=")[0])
def test_greedy_outputs_are_those_of_the_masked_target(target, options):
    decoding = DecodingOptions(max_new_tokens=40, **options)
    expected = reference_output(target.language_model, decoding, PROMPT)
    forced = 0
    for drafter in ("none", *DRAFTERS):
        result = speculative_generate(PROMPT, target, drafter, gamma=3, decoding=decoding)
        assert list(result.token_ids) == expected, drafter
        forced += sum(step.forced_accepted for step in result.steps)
        assert all(step.times.mask_s > 0 for step in result.steps)
    assert forced > 0
    if options["format"].startswith("json-schema") and expected[-1] in target.end_ids:
        assert set(json.loads(result.text)) == {"name", "age"}
    for drafter in ("none", "grammar+lookup"):
        runs = speculative_generate_many(
            [PROMPT, PROMPT[:5], PROMPT[2:]], target, drafter, max_batch=3, decoding=decoding
        )
        assert list(runs.results()[0].token_ids) == expected


def test_forced_tokens_come_in_one_pass_whatever_the_draft_length(target):
    text = "the long constant that nobody could write otherwise"
    result = speculative_generate(
        PROMPT, target, "grammar", gamma=1, format=f"regex={text}(a|b)", max_new_tokens=80
    )
    assert result.text in (text + "a", text + "b")
    assert len(result.steps) <= 3
    (step, *_) = result.steps
    assert step.forced == tuple(range(len(step.drafted)))
    assert set(step.origins[: step.accepted]) == {"forced"}


def test_forced_drafted_and_corrected_tokens_are_stored_traced_and_explained_apart(target, cli, tmp_path):
    schema = f"json-schema={PERSON}"
    result = speculative_generate(
        PROMPT, target, f"grammar+{MODEL}", format=schema, max_new_tokens=60, trace=True
    )
    forced = sum(step.forced_accepted for step in result.steps)
    stored = StepLists.of(result.steps)
    assert sum(stored.accepted) > sum(stored.forced) == forced > 0
    assert sum(stored.mask_s) == pytest.approx(sum(step.times.mask_s for step in result.steps), rel=1e-3)
    explained = predict(replace(result, steps=result.steps * 4))
    assert explained is not None
    assert explained["forced"] == pytest.approx(forced / len(result.steps))
    assert 0 < explained["masks"] < explained["step"]
    figures = summary(result)
    assert (figures["forced"], figures["corrected"]) == (forced, stored.closing.count("corrected"))
    event = step_event(next(step for step in result.steps if step.forced_accepted), str)
    assert event.forced == [*range(len(event.forced))][: len(event.forced)]
    assert event.times.mask_s > 0
    folder = save_tiny(tmp_path / "tiny")
    format_ = ("--format", "regex=(a|b) constant.", "--drafter", "grammar")
    said = cli("generate", "x", "--target", folder, *format_, "-n", 20, "--debug", "--raw")
    assert "forced" in said.err
    assert "masks" in said.err


def test_a_rolled_back_matcher_gives_the_same_masks(target):
    """Forward, back and forth over branches, against a fresh matcher for each path."""
    compiled = target.language_model.formats.compile(Format("json-schema", PERSON))
    ids = tiny_tokenizer()('{"name": "the", "age": 23}')["input_ids"]
    wandering = compiled.matcher(0)
    for length in (3, 9, 2, len(ids), 7, 7, 1, 12, 0, len(ids)):
        for rows in (1, min(3, length + 1)):
            found = wandering.masks([], ids[:length], rows)[-1]
            fresh = compiled.matcher(0).mask_after(ids[:length])
            assert found is not None
            assert fresh is not None
            assert found.only == fresh.only
            assert [found.allows(t) for t in range(280)] == [fresh.allows(t) for t in range(280)]
    assert wandering.mask_after([*ids, *target.end_ids]) is None
    assert wandering.mask_after([ids[0], ids[0], ids[0]]) is None, "outside the format"


def test_a_text_that_looks_like_a_special_token_is_written_with_ordinary_ones(target):
    value = "a<|im_end|>b<|endoftext|>"
    result = speculative_generate(
        PROMPT, target, "grammar", format="json-schema=" + json.dumps({"const": value}), max_new_tokens=80
    )
    assert json.loads(result.text) == value
    assert not {*result.token_ids[:-1]} & {*tiny_tokenizer().all_special_ids}
    assert result.finish_reason == "eos"


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


QUESTIONS = ("Describe a planet.", "List some numbers: 1, 2, 3.", "the the the and the", "Was ist das?")


@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_outputs_of_many_schemas_are_those_of_masked_plain_decoding(target, step):
    """Alone and in batches of eight; all fifty schemas take a minute, so usually every twelfth."""
    cases = [
        (encode_prompt(target.tokenizer, text, chat=False), f"json-schema={json.dumps(schema)}")
        for schema in [*fifty()][::step]
        for text in QUESTIONS
    ]
    settings: list[dict[str, Any]] = [{"max_new_tokens": 40, "format": format_} for _, format_ in cases]
    drafters, expected = ("grammar", "grammar+lookup", f"grammar+{MODEL}"), []
    for (prompt, _), asked in zip(cases, settings, strict=True):
        plain = speculative_generate(prompt, target, "none", **asked)
        expected.append(plain.token_ids)
        for drafter in drafters:
            assert speculative_generate(prompt, target, drafter, **asked).token_ids == plain.token_ids
        if plain.finish_reason == "eos":
            json.loads(plain.text)
    runs = [
        GenerationRun(prompt, target, drafters[-1], **asked)
        for (prompt, _), asked in zip(cases, settings, strict=True)
    ]
    many = speculative_generate_many(runs, target, drafters[-1], max_batch=8)
    assert [result.token_ids for result in many.results()] == expected


# -- what cannot work --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "regex=(a"}, "unclosed group"),
        ({"format": r"regex=a[^\s\S]b"}, "allows no output"),
        ({"format": "json-schema={"}, "The JSON Schema cannot be used:"),
        ({"format": "json-schema=[]"}, "no JSON object"),
        ({"format": 'json-schema={"type": "strange"}'}, "strange"),
        ({"format": 'json-schema={"type": "integer", "minimum": 5, "maximum": 3}'}, "Unsatisfiable"),
        ({"format": 'json-schema={"$ref": "#"}'}, "allows no output"),
        ({"format": "json-schema=" + '{"not": ' * 90_000}, "720,000 characters"),
        ({"format": "json-schema=" + '{"items": ' * 5000 + "{}" + "}" * 5000}, "nested too deeply"),
        ({"format": "grammar=start: start"}, "allows no output"),
        ({"format": "grammar=start: ("}, "The grammar cannot be used:"),
        ({"format": "grammar=start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
    ],
)
def test_a_format_that_cannot_work_is_refused_in_a_sentence(target, options, message):
    with pytest.raises(UsageError) as error:
        speculative_generate(PROMPT, target, "none", **options)
    assert message in error.value.message
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("format_", ['grammar=start: "a" start', "regex=((a|b){1,100}c){1,1000}d"])
def test_a_hostile_format_ends_within_the_librarys_limits(target, format_):
    try:
        result = speculative_generate(PROMPT, target, "grammar", max_new_tokens=30, format=format_)
    except (UsageError, RunError) as error:
        message = str(error)
    else:
        message = result.finish_reason
    assert "\n" not in message


def test_one_output_cannot_use_up_the_states_of_a_format_for_others(target, monkeypatch):
    monkeypatch.setattr(formats, "_LEXER_STATES", 1500)
    compiled = FormatCompiler(target.tokenizer, 300, target.end_ids).compile(
        Format("regex", "([ab]*a[ab]{12}c)*")
    )
    letters = target.tokenizer("ab")["input_ids"]
    letters = letters if len(letters) == 2 else [target.tokenizer(each)["input_ids"][0] for each in "ab"]
    chosen = random.Random(0)
    matcher, path = compiled.matcher(0), []

    def follow() -> None:
        for _ in range(5000):
            matcher.mask_after(path)
            path.append(chosen.choice(letters))

    with pytest.raises(RunError, match="too many states"):
        follow()
    assert compiled.matcher(0).mask_after(path[:9]) is not None
    monkeypatch.setattr(formats, "_SHARED_MASKS", 20)
    for _ in range(40):
        matcher, path = compiled.matcher(0), []
        for _ in range(60):
            assert matcher.mask_after(path) is not None
            path.append(chosen.choice(letters))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "regex=a", "ignore_eos": True}, "does not go with ignore_eos"),
        ({"format": "grammar=start: A", "min_new_tokens": 3}, "does not go with min_new_tokens"),
        ({"format": "xml=a"}, "'xml=a' is no format"),
        ({"format": "regex="}, "is no format"),
    ],
)
def test_formats_that_cannot_be(options, says):
    with pytest.raises(UsageError, match=says):
        DecodingOptions(**options)


def test_without_its_library_or_a_tokenizer_a_format_is_refused(target, monkeypatch):
    with pytest.raises(UsageError, match="tokenizer"):
        speculative_generate(PROMPT, wrap_target(tiny_llama(), pack=False), "none", format="regex=a")
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UsageError, match="llguidance") as error:
        FormatCompiler(tiny_tokenizer(), 300, (1,)).compile(Format("regex", "a"))
    assert "specbench-llm[formats]" in error.value.hint


def test_own_settings_that_ban_what_the_format_demands_are_an_error(target, monkeypatch):
    monkeypatch.setattr(target.language_model, "defaults", ModelDefaults({"suppress_tokens": [*range(280)]}))
    for temperature in (0.0, 1.0):
        with pytest.raises(RunError, match="suppress_tokens"):
            speculative_generate(
                PROMPT, target, "none", format="regex=aaa", sampling=Sampling(temperature=temperature)
            )
