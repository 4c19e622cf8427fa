"""Tool calls in `specbench serve`: forms of chat templates, the parser, and answers to the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from test_serve import PATIENCE_S, Running
from tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_llama, tiny_tokenizer

from specbench import UsageError, load_drafter, wrap_target
from specbench.models.target import Target
from specbench.options import DecodingOptions, Format
from specbench.recipe import Recipe
from specbench.serve.engine import Engine
from specbench.serve.tools import CallDelta, CallForm, CallParser, call_form
from specbench.specs.drafters import parse_drafter
from specbench.specs.models import ModelSpec
from specbench.specs.policies import parse_policy

# -- forms -------------------------------------------------------------------------------------------


def template(before: str, middle: str, after: str, between: str = "", *, body: str = "") -> str:
    """A chat template that writes tool calls between these texts; names, arguments and ids are expressions."""
    return (
        "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
        f"{body}{{% if message.tool_calls %}}{{{{ {before} }}}}{{% for call in message.tool_calls %}}"
        f"{{% if not loop.first %}}{{{{ {between or repr('')} }}}}{{% endif %}}"
        f"{{{{ {middle} }}}}{{% endfor %}}{{{{ {after} }}}}{{% endif %}}"
        "{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


ARGUMENTS = "(call.function.arguments | tojson)"
HERMES = template(
    "''",
    '\'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' + '
    + ARGUMENTS
    + " + '}\\n</tool_call>'",
    "''",
    "'\\n'",
)
MISTRAL = template(
    "'[TOOL_CALLS] ['",
    '\'{"name": "\' + call.function.name + \'", "arguments": \' + '
    + ARGUMENTS
    + " + ', \"id\": \"' + call.id + '\"}'",
    "']'",
    "', '",
)
LLAMA = template(
    "''",
    '\'{"name": "\' + call.function.name + \'", "parameters": \' + ' + ARGUMENTS + " + '}'",
    "''",
    body="{% if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}",
)
DEEPSEEK = template(
    "'<calls>'",
    "'<call>function<sep>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```</call>'",
    "'</calls>'",
    "'\\n'",
)
FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "deepseek": DEEPSEEK}


def tokenizer_of(text: str | None) -> Any:
    tokenizer = tiny_tokenizer(special_tokens=[*SPECIAL_TOKENS, "[TOOL_CALLS]"], chat_template=text)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def form_of(name: str) -> CallForm:
    tokenizer = tokenizer_of(FORMS[name])
    return call_form(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHAT_TEMPLATE, "takes no tools"),
        (template("''", "call.function.name", "''"), "does not write tool calls as names and JSON"),
        (
            template("''", f"call.function.name + '\\n' + {ARGUMENTS}", "''"),
            "nothing in front of a tool call",
        ),
        ("{{ raise_exception('never') }}", "takes no tools"),
    ],
)
def test_templates_without_a_form_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        call_form(tokenizer_of(text), [])


# -- the parser --------------------------------------------------------------------------------------

ROME = '{"city": "Ro}m\\"e{", "days": [1, {"a": {}}]}'
OSLO = '{ "city":"Oslo" }'
TEXTS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "No call: {braces} and <tool_call> alone. ", "No call: {braces} and <tool_call> alone. ", []),
    ("hermes", f'<tool_call>\n{{"name": "get", "arguments": {ROME}}}\n</tool_call>', "", [("get", ROME)]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"name":"get","arguments":{ROME}}}</tool_call>\n<tool_call>\n{{"name": "get_all",'
        f' "arguments": {OSLO}}}\n</tool_call>\nThat is it.',
        "Let me see.\nThat is it.",
        [("get", ROME), ("get_all", OSLO)],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "gets", "arguments": {}}\n</tool_call>',
        "",
        [],
    ),  # no such function: text
    ("hermes", '<tool_call>\n{"name": "get", "arguments": {"city": "R', "", [("get", '{"city": "R')]),
    ("hermes", '<tool_call>\n{"name": "ge', '<tool_call>\n{"name": "ge', []),
    ("hermes", '<tool_call>\n{"name": "get", "arguments": []}', "", []),
    (
        "mistral",
        f'Both: [TOOL_CALLS] [{{"name": "get", "arguments": {ROME}, "id": "abc123XYZ"}}, {{"name": "get", "arguments":'
        f' {OSLO}, "id": "x"}}]',
        "Both:",
        [("get", ROME), ("get", OSLO)],
    ),
    ("llama", f'{{"name": "get", "parameters": {OSLO}}}', "", [("get", OSLO)]),
    ("llama", 'A set: {"name": "x"}', 'A set: {"name": "x"}', []),
    (
        "deepseek",
        f"<calls><call>function<sep>get\n```json\n{ROME}\n```</call>\n<call>function<sep>get_all\n```json\n{OSLO}\n"
        "```</call></calls>",
        "",
        [("get", ROME), ("get_all", OSLO)],
    ),
]


@pytest.mark.parametrize(("form", "text", "expected", "calls"), TEXTS)
def test_texts_are_split_into_text_and_calls_however_they_arrive(form, text, expected, calls):
    form = form_of(form)
    for size in (1, 2, 3, 7, len(text)):
        parser = CallParser(form, ["get", "get_all"])
        parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
        parts += parser.finish()
        found = [[part.name, ""] for part in parts if isinstance(part, CallDelta) and part.name is not None]
        for part in parts:
            if isinstance(part, CallDelta):
                found[part.index][1] += part.arguments
        said = "".join(part for part in parts if isinstance(part, str))
        assert [tuple(each) for each in found] == calls
        assert parser.calls == len(calls)
        assert said == (expected if expected or calls else text)


# -- answers -----------------------------------------------------------------------------------------

GET: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


NOW = function(name="now")
FORCED: dict[str, Any] = {"tools": [GET], "tool_choice": "required"}
WRONG_CALL = {"id": "1", **function(name="now", arguments="[1]")}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


def tool_target(form: str = "hermes") -> Target:
    tokenizer = tokenizer_of(FORMS[form])
    tokenizer.eos_token = "<|im_end|>"
    return wrap_target(tiny_llama(vocab_size=len(tokenizer), context=4096), tokenizer, pack=False)


def serving_of(target: Target, drafter: str = "grammar+lookup", **decoding: Any) -> Running:
    engine = Engine(target, load_drafter(drafter, target), max_batch=8, max_waiting=200, pool_tokens=None)
    options = DecodingOptions(max_new_tokens=150, **decoding)
    policy = parse_policy("fixed:gamma=3")
    return Running(
        engine, Recipe(ModelSpec("folder", "tiny"), parse_drafter(drafter), policy, decoding=options)
    )


@pytest.fixture(scope="module")
def serving() -> Iterator[Running]:
    with serving_of(tool_target()) as running:
        yield running


@pytest.fixture(scope="module")
def client(serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as made:
        yield made


def named_call(serving) -> Any:
    asked = {"model": serving.engine.target.name, "messages": ASKED, "tools": [NOW, GET]}
    return {**asked, "tool_choice": function(name="get_weather")}


def test_the_official_client_gets_a_named_call_whole_and_in_a_stream(serving, client):
    asked = named_call(serving)
    whole = client.chat.completions.create(**asked)
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert choice.message.content is None
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 20, "forced tokens are drafts"
    plainly = client.chat.completions.create(**asked, extra_body={"speculation": "off"}).choices[0]
    assert plainly.message.tool_calls[0].function == call.function
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert [each.function.arguments for each in streamed.message.tool_calls] == [call.function.arguments]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    again = client.chat.completions.create(**asked | {"messages": [*ASKED, choice.message, answer]})
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    assert again.choices[0].message.tool_calls


def test_a_stop_string_inside_a_call_is_the_reason_for_its_end(serving, client):
    """Arguments that are cut must not be run; a stop after them cuts nothing."""
    asked = named_call(serving)
    for stop, reason, whole in (("days", "stop", False), ("</tool_call>", "tool_calls", True)):
        (choice,) = client.chat.completions.create(**asked, stop=stop).choices
        written = choice.message.tool_calls[0].function.arguments
        assert (choice.finish_reason, written.endswith("}")) == (reason, whole)
        chunks = client.chat.completions.create(**asked, stop=stop, stream=True)
        parts = [chunk.choices[0] for chunk in chunks]
        calls = [call for part in parts for call in part.delta.tool_calls or ()]
        assert (parts[-1].finish_reason, "".join(call.function.arguments for call in calls)) == (
            reason,
            written,
        )


def test_required_calls_may_be_several_and_other_choices_are_kept(serving, client):
    asked = named_call(serving) | {"max_tokens": 200}
    del asked["tool_choice"]
    several = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    asked_once = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    (one,) = client.chat.completions.create(**asked_once).choices
    assert len(one.message.tool_calls) == 1
    assert one.finish_reason == "tool_calls"
    assert several.message.tool_calls[0].function == one.message.tool_calls[0].function
    assert all(each.function.name in ("now", "get_weather") for each in several.message.tool_calls)
    ids = [each.id for each in several.message.tool_calls]
    assert len({*ids}) == len(ids)
    counts = []
    for choice in ("none", "auto"):
        free = client.chat.completions.create(**asked, tool_choice=choice, extra_body={"min_tokens": 3})
        assert free.choices[0].message.content, "a model of random weights calls nothing by itself"
        assert not free.choices[0].message.tool_calls
        counts.append(free.usage.prompt_tokens)
    assert counts[0] < counts[1], "tools that cannot be called are not shown"


def test_calls_between_texts_are_found_by_their_tokens():
    """With the server's own format in place of a model that chooses to call; one is hidden from ordinary texts."""
    said = '"See: " {} "[{{\\"name\\": \\"now\\", \\"arguments\\": {{}}, \\"id\\": \\"abcdefghi\\"}}]"'
    target = tool_target("mistral")
    mark = target.tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    with serving_of(target, format="grammar=start: " + said.format(f"<[{mark}]>")) as running:
        answer = running.post("/v1/chat/completions", messages=ASKED, tools=[NOW]).json()["choices"][0]
        bodies = running.post("/v1/chat/completions", messages=ASKED, tools=[NOW], stream=True).text
        plain = running.post("/v1/chat/completions", messages=ASKED).json()["choices"][0]["message"]
    assert answer["message"]["content"] == "See:"
    assert [each["function"] for each in answer["message"]["tool_calls"]] == [
        {"name": "now", "arguments": "{}"}
    ]
    deltas = [
        json.loads(line[6:])["choices"][0] for line in bodies.splitlines() if line.startswith("data: {")
    ]
    calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["now"]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert plain["content"].startswith("See: [{")
    assert "tool_calls" not in plain


def test_strict_functions_bind_calls_among_free_text(serving):
    strict = {**GET, "function": {**GET["function"], "strict": True}}
    model, tokenizer = serving.engine.target.language_model, serving.engine.target.tokenizer

    def admits(text: str, *tools: Any) -> bool:
        grammar = form_of("hermes").grammar(tools, several=True, text=True)
        matcher = model.formats.compile(Format("grammar", grammar)).matcher(0)
        return matcher.mask_after(tokenizer(text)["input_ids"]) is not None

    call = (
        'So: <tool_call>\n{"name": "get_weather", "arguments": {"city": "%s", "days": 3}}\n</tool_call> done.'
    )
    assert admits(call % "Rome" + call % "Oslo", strict)
    assert not admits(call % "Ros", strict)
    assert admits(call % "Ros", GET, {"type": "function", "function": {"name": "now", "strict": True}})
    answer = serving.post("/v1/chat/completions", messages=ASKED, tools=[strict], max_tokens=8)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [GET, GET]}, "two functions have the same name"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [GET], "tool_choice": function(name="x")}, "no such function"),
        ({"tools": [function(name="a b")]}, "tools.0.function.name: "),
        (FORCED | {"response_format": {"type": "json_object"}}, "response_format"),
        (FORCED | {"ignore_eos": True}, "ignore_eos"),
        (FORCED | {"tools": [function(name="a", parameters={"type": "odd"})]}, "tools: "),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [WRONG_CALL]}]}, "no JSON object"),
    ],
)
def test_what_is_wrong_with_tools_is_said(serving, body, said):
    answer = serving.post("/v1/chat/completions", **{"messages": ASKED} | body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
