"""Thinking: the switches of chat templates, and which tokens of an answer are thinking."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli_runs import Cli, Result
from scripted import ScriptedScorer, fixed_script, steps_of, tokens_of
from test_serve import Running
from tiny import SPECIAL_TOKENS, tiny_llama, tiny_tokenizer

from specbench.base.errors import UsageError
from specbench.decoding.formats import FormatCompiler
from specbench.decoding.protocols import NoDraft
from specbench.decoding.sampling import Sampling
from specbench.decoding.stops import StopRules
from specbench.decoding.thinking import ThinkingSplit, thinking_tokens
from specbench.drafters.grammar import GrammarDrafter
from specbench.drafters.model import ModelDrafter
from specbench.generate import encode_prompt
from specbench.models.drafters import load_drafter
from specbench.models.target import load_target
from specbench.options import DecodingOptions, Format, LoadOptions, TemplateOptions
from specbench.policies import build_policy
from specbench.recipe import Recipe
from specbench.results.results import load_results
from specbench.results.thinking import part_rows
from specbench.serve.engine import Engine
from specbench.specs.drafters import Grammar, Lookup
from specbench.specs.models import parse_model

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
QWEN = (
    TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + TURNS
    + "<|im_start|>assistant\n"
    "{% if thinking %}<think>{% else %}</think>{% endif %}"
)
HARMONY = (
    "{% set reasoning_effort = reasoning_effort | default('medium') %}Reasoning: {{ reasoning_effort }}\n"
    + TURNS
    + "<|start|>assistant"
)
MISTRAL = TURNS + "{% if mode %}[MODE]{{ mode | tojson }}[/MODE]{% endif %}"
MARKS = ("<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "[THINK]", "[/THINK]")


def tokenizer_of(template, special=MARKS):
    return tiny_tokenizer(special_tokens=(*SPECIAL_TOKENS, *special), chat_template=template)


def rendered(tokenizer, **options):
    return tokenizer.decode(encode_prompt(tokenizer, "Hi", template=TemplateOptions(**options)))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("template", "options", "shows", "hides"),
    [
        (QWEN, {"thinking": False}, "<think>\n\n</think>", "nothing"),
        (QWEN, {"thinking": True}, "assistant\n", "<think>"),
        (QWEN, {"template_option": ("enable_thinking=false",)}, "<think>\n\n</think>", "nothing"),
        (OPENED, {"thinking": True}, "assistant\n<think>", "</think>"),
        (OPENED, {"thinking": False}, "assistant\n</think>", "<think>"),
        (HARMONY, {"template_option": ("reasoning_effort=high",)}, "Reasoning: high", "medium"),
        (MISTRAL, {"template_option": ('mode={"a": [1]}',)}, '[MODE]{"a": [1]}[/MODE]', "nothing"),
        (MISTRAL, {"template_option": ("mode=as it is",)}, '[MODE]"as it is"[/MODE]', "nothing"),
    ],
)
def test_a_template_is_told_what_the_options_say(template, options, shows, hides):
    text = rendered(tokenizer_of(template), **options)
    assert shows in text
    assert hides not in text


@pytest.mark.parametrize(
    ("template", "options", "word"),
    [
        (HARMONY, {"thinking": True}, "--template-option reasoning_effort=low"),
        (TURNS, {"thinking": False}, "cannot be changed"),
        (QWEN, {"template_option": ("reasoning_effort=low",)}, "enable_thinking"),
        (QWEN, {"template_option": ("other=1",)}, "other"),
    ],
)
def test_a_switch_that_a_template_does_not_know_is_refused(template, options, word):
    with pytest.raises(UsageError, match=word):
        rendered(tokenizer_of(template), **options)


@pytest.mark.parametrize("given", ["no value", "=1", "messages=[]", "bos_token=x", "a b=1"])
def test_what_sets_no_variable_of_a_template_is_refused(given):
    with pytest.raises(UsageError):
        TemplateOptions(template_option=(given,))


def test_thinking_is_set_once():
    with pytest.raises(UsageError, match="already"):
        TemplateOptions(thinking=True, template_option=("enable_thinking=false",))


def test_a_switch_needs_the_template():
    with pytest.raises(UsageError, match="--raw"):
        encode_prompt(tokenizer_of(QWEN), "Hi", chat=False, template=TemplateOptions(thinking=True))


@pytest.mark.smoke
@pytest.mark.parametrize("special", [MARKS, ()], ids=["tokens", "letters"])
@pytest.mark.parametrize(
    ("prompt", "thought", "answer"),
    [
        ("<|im_start|>assistant\n", "<think>\nHmm.\n</think>", "\n\nYes."),
        ("<|im_start|>assistant\n<think>\n", "Hmm.</think>", "Yes </think> no."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", "Yes."),
        ("<think>earlier</think>ok<|im_start|>assistant\n", "", "Yes <think>."),
        ("<|im_start|>user\nWhat does <think> do?<|im_end|>\n<|im_start|>assistant\n", "", "It opens."),
        ("<|im_start|>user\n[THINK]<|im_end|>\n<|im_start|>assistant\n", "<think>Hm</think>", "It."),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nOkay,", " hm</think>", "It."),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nOkay</think>\n", "", "It."),
        ("<|im_start|>user\nSo <think> it is: [/INST]", "", "It."),
        ("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>\n", "Hm</think>", "It."),
        ("<|im_start|>assistant\n", "[THINK]a</thin b[/THINK]", "Yes."),
        ("<|im_start|>assistant\n", "<think>a < b </th", ""),
        ("<|im_start|>assistant\n", "<think>never ended, and an emoji 🙂", ""),
        (
            "<|start|>assistant",
            "<|channel|>analysis<|message|>Hmm<|end|><|start|>assistant<|channel|>final<|message|>",
            "Yes",
        ),
        ("<|start|>assistant", "<|channel|>final<|message|>", "Yes"),
        ("<|im_start|>assistant\n", "", "<thin air"),
        ("<|im_start|>assistant\n", "", ""),
    ],
)
def test_thinking_ends_with_its_mark(special, prompt, thought, answer):
    tokenizer = tokenizer_of(QWEN, special)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    told = [*ids(thought), *ids(answer)]
    assert thinking_tokens(tokenizer, ids(prompt), told) == len(ids(thought))
    split = ThinkingSplit(tokenizer, ids(prompt))
    labeled = [each for token in told for each in split.push(token)] + split.finish()
    assert [token for token, _ in labeled] == told
    said = tokenizer.decode([token for token, part in labeled if part == "answer"])
    inside = tokenizer.decode([token for token, part in labeled if part == "thinking"])
    assert said == answer
    assert not any(mark in inside for mark in ("<think>", "</think>", "[THINK]", "[/THINK]", "<|"))


# -- formats: they hold for the answer, behind the thinking that the prompt has opened --------------

TOLD = "Say yes to <think> and [THINK] </think>"
"""A message with marks, which open and close nothing."""


@pytest.mark.smoke
@pytest.mark.parametrize("special", [MARKS, ()], ids=["tokens", "letters"])
@pytest.mark.parametrize("gamma", [1, 2, 5, 9])
@pytest.mark.parametrize(
    ("opened", "closing"),
    [("<think>\n", "</think>"), ("[THINK]", "[/THINK]"), ("<think>\n\n</think>\n\n", ""), ("", "")],
)
def test_a_format_holds_from_the_closing_mark_on(opened, closing, gamma, special):
    """A target that would write ``<7> or <8>?`` twice, and a drafter that errs at every sixth token."""
    tokenizer = tokenizer_of(TURNS, special)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt = ids(f"<|im_start|>user\n{TOLD}<|im_end|>\n<|im_start|>assistant\n{opened}")
    script = [*ids("<7> or <8>?" + closing), *ids("<7> or <8>?")]
    wrong = [0 if place % 6 == 5 else token for place, token in enumerate(script)]
    target, small = (
        ScriptedScorer(fixed_script(each, len(tokenizer), len(prompt)), len(tokenizer))
        for each in (script, wrong)
    )
    compiled = FormatCompiler(tokenizer, len(tokenizer), (0,)).compile(Format("regex", "<7>|[<]8>"))
    for drafter in (NoDraft(), ModelDrafter(small, "model"), GrammarDrafter(Grammar(Lookup()))):
        records = steps_of(
            prompt, target, drafter, policy=build_policy(f"fixed:gamma={gamma}"), stops=StopRules((0,)),
            sampling=Sampling().with_format(compiled), max_new_tokens=60,
        )  # fmt: skip
        text = tokenizer.decode([token for token in tokens_of(records) if token])
        assert text == ("<7> or <8>?" if closing else "") + closing + "<7>"


# -- commands: a format has the tiny model think ---------------------------------------------------

SAYS = "regex=<think>hm{1,5}</think>[ab]{6}"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> Path:
    """A model folder whose template has a switch."""
    folder = tmp_path_factory.mktemp("models") / "thinker"
    tokenizer = tokenizer_of(QWEN, ())
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def generate(cli, thinker) -> Cli:
    def call(*arguments: object) -> Result:
        return cli("generate", "--target", thinker, "--dtype", "float32", "-n", 40, *arguments)

    return call


def test_a_switch_reaches_the_prompt_and_an_unknown_one_is_refused(generate):
    plain = generate("Hi", "--json").json()
    without = generate("Hi", "--no-thinking", "--json").json()
    assert without["prompt_tokens"] > plain["prompt_tokens"]
    refused = generate("Hi", "--template-option", "reasoning_effort=low")
    assert refused.code == 2
    assert "enable_thinking" in refused.err


def serving(folder: Path) -> Running:
    """A server whose answers all think first."""
    target = load_target(str(folder), LoadOptions(dtype="float32"))
    recipe = Recipe(parse_model(str(folder)), decoding=DecodingOptions(max_new_tokens=40, format=SAYS))
    drafter = load_drafter("self:layers=1", target)
    engine = Engine(target, drafter, max_batch=2, max_waiting=4, pool_tokens=4096)
    return Running(engine, recipe)


@pytest.mark.parametrize("server", [False, True], ids=["models", "server"])
def test_a_sweep_tells_thinking_from_answers(cli, thinker, tmp_path, server):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("Hi", "Why is it so?")))
    what = ["--target", thinker, "--prompts", prompts, "-n", 40, "-r", 1, "--thinking", "on,off"]
    what += ["--out", tmp_path / "run", "--quiet"]
    with serving(thinker) if server else nullcontext() as running:
        what += ["--server", f"here={running.url}/v1"] if server else []
        if not server:
            what += ["--dtype", "float32", "--drafter", "self:layers=1", "--gamma", 2, "--format", SAYS]
        result = cli("sweep", *what)
    assert result.code == 0, result.err
    results = load_results(tmp_path / "run")
    assert {row.condition.thinking for row in results.run.configs} == {True, False}
    rows = part_rows(results)
    assert True in {row.config.condition.thinking for row in rows}
    done = results.done
    for config in {row.config.id for row in rows}:
        thinking, answer = (row for row in rows if row.config.id == config)
        mine = done[done["config"] == config]
        assert thinking.share + answer.share == pytest.approx(1.0)
        assert thinking.tokens + answer.tokens == int((mine["new_tokens"] - mine["first_tokens"]).sum())
        assert answer.tokens >= 6
    if not server:
        drafting = [row for row in rows if row.config.kind == "speculative"]
        assert all(row.figures.tokens_per_step.value >= 1 for row in drafting)
        report = cli("report", tmp_path / "run").out
        assert "Thinking and answer" in (tmp_path / "run" / "report.md").read_text(), report


def test_the_server_sends_thinking_as_reasoning(thinker):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    kinds = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    with serving(thinker) as running:
        whole = running.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
        assert set(whole["reasoning_content"]) <= {"h", "m"}
        assert len(whole["content"]) == 6
        streamed = running.post("/v1/chat/completions", **body, stream=True).text
        deltas = [
            json.loads(line[6:])["choices"][0]["delta"] for line in streamed.splitlines() if line[6:7] == "{"
        ]
        assert "".join(each.get("reasoning_content", "") for each in deltas) == whole["reasoning_content"]
        assert "".join(each.get("content", "") for each in deltas) == whole["content"]
        for fields, status in (
            ({"chat_template_kwargs": {"enable_thinking": False}}, 200),
            ({"chat_template_kwargs": {"other": 1}}, 400),
            ({"reasoning_effort": "low"}, 400),
        ):
            answer = running.post("/v1/chat/completions", **body, **fields, response_format=kinds)
            assert answer.status_code == status, answer.text
        text = running.post("/v1/completions", prompt="Hi", max_tokens=40).json()["choices"][0]["text"]
        assert "<think>" in text
