"""Draft policies as the commands take them: how they are written, what is refused, what results say of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Cli, Result, write_prompts
from scripted import Ticking
from scripted_engine import grid_of, specs_of
from tiny import tiny_language_model, tiny_tokenizer

import specbench.drafters.chain
import specbench.generate
from specbench.base.errors import UsageError
from specbench.bench.engines.own import ModelEngine
from specbench.bench.grid import SweepOptions
from specbench.generate import autoregressive_generate
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.prepare import LoadedDrafter
from specbench.models.target import wrap_target
from specbench.options import DecodingOptions
from specbench.policies import build_policy
from specbench.results.lines import Generation
from specbench.rows import Row, conditions_of
from specbench.specs.drafters import parse_drafter
from specbench.specs.policies import LONGEST_DRAFT, POLICIES, Auto, Egag, Fixed, parse_policy

PROMPT = [5, 17, 200, 33, 5, 17, 200]
WORDS = [policy.word for policy in POLICIES]
DRAFTERS = (
    "lookup",
    "ngram",
    "ngram:sample",
    "self:int8",
    "self:layers=1",
    "lookup:min=1+self:layers=1",
    "small",
)


# -- the notation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("auto", {}),
        (" egag : scale = 0.5 , max = 12 ", {"scale": 0.5, "gamma_max": 12}),
        ("confidence:threshold=0.25", {"threshold": 0.25}),
        ("entropy-bound:lambda=0.3", {"threshold": 0.3}),
        ("svip:threshold=1", {"threshold": 1.0}),
        ("heuristic:gamma=2,min=2", {"gamma": 2, "gamma_min": 2}),
        ("fixed:gamma=3", {"gamma": 3}),
    ],
)
def test_options_stand_behind_a_colon(spec, options):
    found = parse_policy(spec)
    assert found == replace(parse_policy(found.word), **options)
    assert build_policy(spec).name == str(found)


_VALUES = {"verification": "=naive", "ranks": "=60-20-8"}
"""Of options that are neither numbers nor flags."""


def test_every_option_of_every_rule_can_be_written_and_read():
    for policy in POLICIES:
        for option in policy.options():
            value = f"={0.15 if option.parse is float else 3 if option.default == 2 else 2}"
            value = _VALUES.get(option.key, value)
            spec = f"{policy.word}:{option.key}{value}"
            assert build_policy(spec).name.replace("fixed:gamma=5,", "fixed:") == spec
            assert str(parse_policy(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "egag:gamma=3",
            "egag has no option 'gamma'. Options of egag: min=N, max=N, beta=B, scale=H, verification=NAME.",
        ),
        ("auto:costs=x", "auto has no option 'costs'. Options of auto: max=N, verification=NAME."),
        ("egag:scale=much", "The option 'scale' of egag is 'much', which is no number."),
        ("egag:scale=nan", "The option 'scale' of egag is nan."),
        ("eager:scale=1", "There is no draft policy 'eager'."),
        (
            "./mine.py:Doubling",
            "There is no file './mine.py'. Check the path.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(spec, message):
    with pytest.raises(UsageError) as caught:
        build_policy(spec)
    assert message in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("word", [each.word for each in POLICIES if not each.tree])
def test_no_rule_drafts_more_than_a_cache_takes_back(word):
    key = "gamma" if word == "fixed" else "max"
    build_policy(f"{word}:{key}={LONGEST_DRAFT}")
    for length in (LONGEST_DRAFT + 1, 10**8):
        with pytest.raises(UsageError, match="Give 1 to 256"):
            build_policy(f"{word}:{key}={length}")


# -- the grid ----------------------------------------------------------------------------------------


def test_the_grid_has_a_row_for_each_rule_that_applies():
    options = SweepOptions(gammas=(2, 4), policies=(Fixed(), Egag(scale=0.5), Auto()))
    configs = grid_of(options, "lookup", "small")
    assert [(config.id, config.label, config.gamma, config.draft_policy) for config in configs] == [
        ("plain", "plain", None, "none"),
        ("lookup@2", "lookup γ=2", 2, "fixed"),
        ("lookup@4", "lookup γ=4", 4, "fixed"),
        ("lookup@auto", "lookup auto", None, "auto"),
        ("small@2", "small γ=2", 2, "fixed"),
        ("small@4", "small γ=4", 4, "fixed"),
        ("small@egag:scale=0.5", "small egag:scale=0.5", None, "egag:scale=0.5"),
        ("small@auto", "small auto", None, "auto"),
    ]
    assert not [
        d for d in ("lookup:n=2", "ngram:sample", "none") if parse_policy("svip").applies(parse_drafter(d))
    ]
    assert all(
        parse_policy("svip").applies(parse_drafter(d)) for d in ("self:int8", "org/model", "lookup+self:int8")
    )


# -- the engine: every rule with every drafter ---------------------------------------------------------


def make_engine(**options: Any) -> ModelEngine:
    target = wrap_target(tiny_language_model().model, tiny_tokenizer(), name="tiny", pack=False)
    specs = specs_of(*DRAFTERS)
    drafters = {name: load_drafter(name, target) for name in DRAFTERS[:-1]}
    drafters["small"] = wrap_drafter(tiny_language_model(seed=1, layers=1), target)
    ready = [LoadedDrafter(name, specs[name], drafter) for name, drafter in drafters.items()]
    return ModelEngine(target, ready, **options)


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    return make_engine()


@pytest.fixture(scope="module")
def plain(engine) -> Sequence[int]:
    """The tokens of plain decoding."""
    return autoregressive_generate(PROMPT, engine.target, max_new_tokens=24, ignore_eos=True).token_ids


def decode(engine: ModelEngine, config: Row, **changed: Any) -> Generation:
    prompt, seed = changed.pop("prompt", PROMPT), changed.pop("seed", 3)
    decoding = DecodingOptions(**{"max_new_tokens": 24, "ignore_eos": True, **changed})
    return engine.generate(config, prompt, decoding, seed=seed)


def config_from_recipe(drafter: str, rule: str, temperature: float = 0.0) -> Row:
    at = conditions_of(temperature=[temperature])
    options = SweepOptions(at, policies=(parse_policy(rule),), gammas=(3,))
    return grid_of(options, drafter)[1]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", [*WORDS, "egag:beta=0.5,scale=1"])
def test_greedy_outputs_are_those_of_plain_decoding(engine, plain, drafter, rule):
    if not parse_policy(rule).applies(specs_of(drafter)[drafter]):
        assert len(grid_of(SweepOptions(policies=(parse_policy(rule),)), drafter)) == 1
        return
    outcome = decode(engine, config_from_recipe(drafter, rule))
    assert outcome.token_ids == [*plain]
    assert drafter == "ngram:sample" or sum(outcome.steps.drafted) > 0


# -- from one prompt to the next ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["auto", "egag:beta=0.9,scale=1", "heuristic", "entropy-bound"])
def test_nothing_is_carried_to_the_next_prompt(rule, monkeypatch):
    clock = Ticking(2**-10)
    for module in (specbench.generate, specbench.drafters.chain):
        monkeypatch.setattr(module, "clock_for", lambda device: clock)

    def courses() -> list[Any]:
        engine, config = make_engine(), config_from_recipe("small", rule)
        outcomes = [decode(engine, config, prompt=prompt) for prompt in (PROMPT, [9, 8, 7], PROMPT)]
        return [(outcome.token_ids, outcome.steps.drafted, outcome.steps.policy) for outcome in outcomes]

    first, _, third = courses()
    assert first == third


# -- the commands ------------------------------------------------------------------------------------


@pytest.fixture
def call(cli, tmp_path, monkeypatch, models) -> Cli:
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "mine.jsonl", {"chat-a": ["Hello there, one two one two"]})

    def run_it(command: str, *arguments: object) -> Result:
        shared: list[object] = ["--target", models / "target", "--dtype", "float32", "-n", 16]
        if command == "sweep":
            shared += ["-p", "./mine.jsonl", "-r", 1, "--quiet", "--ignore-eos"]
        return cli(command, *shared, *arguments)

    return run_it


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "auto"),
        (("--gamma", 3), "fixed:gamma=3"),
        (("--draft-policy", "egag:min=2,max=9,beta=0.5,scale=0.25"),
         "egag:min=2,max=9,beta=0.5,scale=0.25"),
        (("--draft-policy", "heuristic", "-g", 2), "heuristic:gamma=2"),
        (("--draft-policy", "auto:max=4"), "auto:max=4"),
    ],
)  # fmt: skip
def test_generate_with_each_rule(call, arguments, name):
    plain = call("generate", "the thing", "--drafter", "none", "--json").json()
    found = call("generate", "the thing", "--drafter", "self:layers=1", "--json", *arguments).json()
    assert found["options"]["draft_policy"] == name
    assert found["options"]["gamma"] == (int(name[-1]) if name.startswith("fixed") else None)
    assert found["token_ids"] == plain["token_ids"]
    longest = re.search(r"(?:max|fixed:gamma)=(\d+)", name)
    assert max(found["gammas"]) <= (int(longest[1]) if longest else 40)


def test_a_sampled_output_hangs_on_no_clock_by_default(call):
    arguments = ("generate", "the thing", "--drafter", "self:layers=1", "--json", "-t", 1)
    found = call(*arguments).json()
    assert found["options"]["draft_policy"] == "fixed:gamma=5"
    assert call(*arguments).json()["token_ids"] == found["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--draft-policy", "auto", "--gamma", 3), ("policy auto has no option --gamma", "It belongs to fixed")),
        (("--draft-policy", "fixed:max=3"), ("fixed has no option 'max'",)),
        (("--draft-policy", "egag"), ("egag reads the drafter's distribution", "Choose auto, fixed")),
        (("--draft-policy", "svip:max=3", "--drafter", "ngram"), ("policy svip reads", "and ngram has none")),
        (("--draft-policy", "best"), ("no draft policy 'best'", "Choose auto, fixed, egag")),
        (("--draft-policy", "confidence:threshold=1.5"), ("1.5",)),
    ],
)  # fmt: skip
def test_generate_refuses_what_the_rule_does_not_read(call, arguments, fragments, monkeypatch):
    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded before the options are checked")

    monkeypatch.setattr("specbench.models.target.load_target", unwanted)
    call("generate", "the thing", "--drafter", "lookup", *arguments).refused(2, *fragments)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("--draft-policy", "fixed:gamma=2"), ("Give --gamma 2.",)),
        (("--draft-policy", "auto", "--draft-policy", "auto:max=16"), ("policy auto is given twice",)),
        (("--draft-policy", "egag"), ("policy egag reads the drafter's distribution, and lookup has none",)),
    ],
)  # fmt: skip
def test_a_sweep_refuses_what_its_rules_do_not_read(call, arguments, fragments):
    call("sweep", "--drafter", "lookup", *arguments).refused(2, *fragments)


def test_the_documentation_names_every_option():
    page = Path(__file__).parents[1] / "docs" / "draft-policies.md"
    text = page.read_text(encoding="utf-8")
    for policy in POLICIES:
        for option in policy.options():
            known = f"`{option.key}" in text or option.key == "verification"
            assert known, f"{page.name} lacks {option.key} of {policy.word}"
