"""Lengths of context as an axis of sweeps: prompts, plan, costs, figures, sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_runs import write_prompts
from scripted import GivenCosts, build_with
from scripted_engine import ScriptedEngine, cost_lines, grid_of, make_sweep, measure, prompts

from specbench.base.errors import UsageError
from specbench.bench.axes import parse_contexts
from specbench.bench.contexts import fill, fitting, passage
from specbench.bench.grid import Sweep, SweepOptions, check_contexts
from specbench.bench.passes import pass_costs
from specbench.bench.prompts import Prompt
from specbench.decoding.drafts import Draft
from specbench.decoding.protocols import NewPrompt
from specbench.decoding.theory import PassCosts, reading_seconds
from specbench.options import DecodingOptions
from specbench.results.lines import CostLine
from specbench.results.results import load_results
from specbench.results.summary import Summary
from specbench.rows import conditions_of
from specbench.show.answer import find_answers
from specbench.show.plots import draw_figures

TEXT = "\n\n".join(f"w{i} x{i} y{i}" for i in range(400))


def words(prompt: Prompt) -> int:
    return sum(len(turn.split()) for turn in prompt.turns)


def context_sweep(contexts: tuple[int, ...] = (16, 64), count: int = 4, **options: object) -> Sweep:
    made = SweepOptions(
        conditions_of(context=contexts), gammas=(1, 2), repeats=2, warmup=1, turns=1,
        decoding=DecodingOptions(max_new_tokens=5), **options,
    )  # fmt: skip
    return Sweep(made, prompts(count), tuple(grid_of(made, "d")), text=TEXT)


# -- prompts -----------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("tokens", [2, 3, 16, 257, 1200])
def test_a_prompt_gets_exactly_so_many_tokens_with_its_question_at_the_end(tokens):
    prompt = Prompt("a", "chat", ("The question?", "Later"))
    filled = fill(prompt, tokens, passage(TEXT, "a"), lambda each: len(each.turns[0].split()))
    assert len(filled.turns[0].split()) == tokens
    assert filled.turns[0].endswith("The question?")
    assert filled.turns[1:] == ("Later",)
    body = filled.turns[0].split()[:-2]
    assert len(set(body)) == len(body), "no part of the text is repeated"


def test_a_prompt_that_cannot_be_filled_is_refused():
    prompt = Prompt("a", "chat", ("one two three",))
    with pytest.raises(UsageError, match="has 3 tokens, more than 2"):
        fill(prompt, 2, TEXT, words)
    with pytest.raises(UsageError, match="ends before 5,000 tokens"):
        fill(prompt, 5000, TEXT, words)


def test_all_lengths_have_the_same_prompts():
    long = Prompt("long", "chat", ("word " * 20,))
    kept, notes = fitting((*prompts(2), long), (16, 64), words)
    assert [each.id for each in kept] == ["one-0", "one-1"]
    assert notes == ["1 prompt left out: longer than 16 tokens."]
    with pytest.raises(UsageError, match="Every prompt has more than 16 tokens"):
        fitting((long,), (16,), words)
    assert fitting((long,), (), words) == ((long,), [])


def test_lengths_that_cannot_be_are_refused():
    assert parse_contexts("256,1024, 64") == [64, 256, 1024]
    with pytest.raises(UsageError, match="is not a range"):
        parse_contexts("0")
    options = SweepOptions(
        conditions_of(context=(256, 8000)), turns=1, decoding=DecodingOptions(max_new_tokens=200)
    )
    check_contexts(options, 8200)
    check_contexts(options, None)
    with pytest.raises(UsageError, match=r"8,000 of context leave no room for 200"):
        check_contexts(options, 8199)
    for turns, batch in ((None, ()), (1, (2,))):
        with pytest.raises(UsageError, match="--context"):
            SweepOptions(conditions_of(context=(8,), batch=batch), turns=turns)


# -- the plan ----------------------------------------------------------------------------------------


def test_configurations_of_one_length_decode_back_to_back():
    sweep = context_sweep(count=8)
    contexts = {config.id: config.condition.context for config in sweep.configs}
    blocks: dict[tuple[str, int], list[int | None]] = {}
    for cell in sweep.plan():
        if not cell.warmup:
            blocks.setdefault((cell.prompt, cell.repeat), []).append(contexts[cell.config])
    assert all(block in ([16] * 3 + [64] * 3, [64] * 3 + [16] * 3) for block in blocks.values())
    assert len({tuple(block) for block in blocks.values()}) == 2


def test_a_sweep_feeds_prompts_of_these_lengths_and_times_passes_at_each(tmp_path):
    seen: dict[int | None, set[int]] = {}

    class Counting(ScriptedEngine):
        def encode(self, prompt, answers):
            return [7] * self.count_tokens(prompt)

        def generate(self, config, prompt, decoding, *, seed):
            seen.setdefault(config.condition.context, set()).add(len(prompt))
            return super().generate(config, prompt, decoding, seed=seed)

    measure(tmp_path, context_sweep(), Counting())
    assert seen == {16: {16}, 64: {64}}
    results = load_results(tmp_path)
    assert set(zip(results.done["context"], results.done["prompt_tokens"], strict=True)) == {
        (16, 16),
        (64, 64),
    }
    costs = results.run.costs
    assert costs is not None
    assert costs.context == 16
    assert costs.context_s[1] == pytest.approx(0.001)
    assert costs.error == pytest.approx(0.0, abs=1e-6)


# -- costs -------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_times_at_several_contexts_become_a_line_for_each_width():
    lines = [
        *cost_lines({1: [1.0], 2: [1.2]}, {"d": [0.1]}, 100),
        *cost_lines({1: [1.1], 2: [1.6]}, {"d": [0.2]}, 200),
        *cost_lines({1: [1.3], 2: [2.4]}, {"d": [0.4]}, 400),
    ]
    costs = pass_costs(lines)
    assert costs.context == 100
    assert costs.context_s == {1: pytest.approx(0.001), 2: pytest.approx(0.004)}
    assert msgspec.json.decode(msgspec.json.encode(costs), type=PassCosts) == costs
    longer = [
        CostLine(
            kind="drafter",
            drafter="d",
            seconds=[0.001 * x + 3 * (0.001 * x - 0.05)],
            context_tokens=x,
            passes=4,
        )
        for x in (100, 200, 400)
    ]
    costs = pass_costs([*lines, *longer])
    assert costs.later_s["d"] == pytest.approx(0.05)
    alone = pass_costs(lines[:3])
    assert (alone.context_s, alone.error) == ({}, None)


def test_the_reading_of_a_context_has_its_own_costs():
    lines = [
        *cost_lines({1: [1.0]}, {"d": [0.1]}, 100),
        *cost_lines({1: [1.1]}, {"d": [0.2]}, 200),
        CostLine(kind="reading", drafter="d", seconds=[4.0], context_tokens=200),
        CostLine(kind="reading", drafter="d", seconds=[1.0, 3.0, 1.5], context_tokens=100),
    ]
    costs = pass_costs(lines)
    assert costs.reading_s == {"d": {100: 1.5, 200: 4.0}}
    assert msgspec.json.decode(msgspec.json.encode(costs), type=PassCosts) == costs
    known = costs.reading_s["d"]
    assert [reading_seconds(known, n) for n in (0, 50, 100, 150, 300)] == [0.0, 0.75, 1.5, 2.75, 6.5]
    assert reading_seconds({}, 50) == 0.0


def begins(policy: Any, budget: int) -> bool:
    return policy.begin_step(budget) > 0 and policy.should_continue(Draft(passes=0))


@pytest.mark.smoke
@pytest.mark.parametrize(("unread", "tokens", "expected"), [
    (8000, 64, False), (8000, 150, False), (8000, 250, True), (50, 64, False), (1, 64, True), (0, 64, True),
])  # fmt: skip
def test_auto_begins_only_if_the_rest_of_the_output_can_repay_the_reading(unread, tokens, expected):
    costs = GivenCosts(0.1, {1: 1.0, 9: 1.1}, {1: 0.1, 50: 30.0, 8000: 40.0})
    policy = build_with(costs, "auto:max=8")
    policy.begin(NewPrompt(unread))
    assert begins(policy, tokens) == expected


# -- what is shown -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def falls(tmp_path_factory) -> Path:
    """A run whose drafter pays at 16 and 64 tokens, more at 64, and not at 128."""
    path = tmp_path_factory.mktemp("contexts")

    def slower(config, prompt):
        return (
            1.0
            if config.kind == "plain"
            else {16: 1.5, 64: 1.0, 128: 4.0}[config.condition.context] * (1 + prompt[0] / 2000)
        )

    measure(path, context_sweep((16, 64, 128), 8), ScriptedEngine(slower=slower))
    return path


def test_the_answer_names_the_longest_context_that_pays_and_the_best(falls):
    results = load_results(falls)
    summary = Summary(results)
    assert [row.config.condition.context for row in summary.curves("context")[0]] == [16, 64, 128]
    (answer,) = find_answers(summary)
    assert answer.verdict == "faster"
    assert answer.headline.startswith("Yes, d γ=1: pays up to 64 tokens of context, ")
    assert "At 128 tokens of context the interval lies below 1, 0." in answer.headline


def test_the_figure_of_contexts(falls, tmp_path):
    drawn, _ = draw_figures(load_results(falls), ["contexts"])
    axes = drawn["contexts"].axes[0]
    assert axes.get_xlabel() == "tokens of context"
    assert [axes.xaxis.get_major_formatter()(x) for x in axes.get_xticks()] == ["16", "64", "128"]
    measure(tmp_path, make_sweep())
    with pytest.raises(UsageError, match="no lengths of context were measured"):
        draw_figures(load_results(tmp_path), ["contexts"])


def test_our_own_decoder_measures_contexts(cli, models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_prompts(Path("mine.jsonl"), {f"chat-{i}": [f"Question {i}?"] for i in range(2)})
    words = [
        "sweep", "--target", models / "target", "--drafter", models / "small", "--prompts", "./mine.jsonl",
        "--gamma", 2, "--draft-policy", "fixed", "-n", 6, "--repeats", 1, "--context", "32,64", "--out", "run",
    ]  # fmt: skip
    limit = 1_000_000
    cli(*words, "--context", limit).refused(2, "leave no room for 6 new ones", "--context up to")
    result = cli(*words)
    assert result.code == 0, result.err
    results = load_results("run")
    assert set(zip(results.done["context"], results.done["prompt_tokens"], strict=True)) == {
        (32, 32),
        (64, 64),
    }
    assert (results.done.groupby("prompt")["context"].nunique() == 2).all()
    costs = results.run.costs
    assert costs is not None
    assert (costs.context, set(costs.context_s)) == (32, {1, 2, 3})
    assert results.run.options["context_text"].startswith("documentation.txt ")
    (reading,) = costs.reading_s.values()
    assert reading.keys() == {32, 64}, "a model reads the context"
    assert cli(*words, "--resume").code == 0


# -- a drafter's own limit -----------------------------------------------------------------------------
