"""Prediction where the target is, of every kind of drafter, against what it decodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from head_files import few_head, few_tokens
from scripted_engine import grid_of, prompts, specs_of
from tiny import tiny_language_model, tiny_llama, tiny_tokenizer

from specbench.bench.engines.own import ModelEngine
from specbench.bench.grid import Sweep, SweepOptions
from specbench.decoding.records import Step
from specbench.decoding.sampling import Sampling
from specbench.decoding.theory import PassCosts
from specbench.generate import GenerationRun
from specbench.models.drafters import load_drafter, wrap_drafter
from specbench.models.load import wrap_model
from specbench.models.prepare import LoadedDrafter
from specbench.models.target import Target, wrap_target
from specbench.options import DecodingOptions
from specbench.policies import build_policy
from specbench.predict.chances import target_probabilities
from specbench.predict.forecast import forecast
from specbench.predict.here import _answers, predict_rows
from specbench.predict.law import Answer
from specbench.results.stats import pooled_rate
from specbench.specs.policies import Auto, Fixed

PROMPT = [1, 2, 3, 1, 2]
GAMMAS = [1, 2, 5]
HEADS = [
    "eagle-3",
    "eagle-1",
    "medusa",
    "mtp",
    "dflash",
    "dspark",
    "dflash2",
    "peagle",
    "pard",
]
COSTS = PassCosts({1: 0.1, 2: 0.08, 9: 0.12}, dict.fromkeys(("lookup", "self:int8", "small"), 0.01))


@pytest.fixture(scope="module")
def few() -> Target:
    return wrap_target(few_tokens(), pack=False)


def drafter_of(kind: str, target: Target, folder: Any) -> Any:
    if kind == "small":
        return wrap_drafter(wrap_model(tiny_llama(vocab_size=9, layers=1, seed=2), None, "small"), target)
    if kind in ("lookup", "suffix", "self:int8", "lookup+self:int8"):
        return load_drafter(kind, target)
    return few_head(folder / kind, kind, target)


def records(
    target: Target, drafter: Any, policy: str, sampling: Sampling, limit: int, seed: int = 0
) -> list[Any]:
    run = GenerationRun(
        PROMPT,
        target,
        drafter,
        policy=build_policy(policy),
        sampling=sampling,
        seed=seed,
        max_new_tokens=limit,
    )
    return list(run)


def answer_of(found: list[Any], sampling: Sampling, limit: int, name: str = "a") -> Answer:
    first, *steps = found
    tokens = [first.token, *(token for step in steps for token in step.tokens)]
    return Answer(PROMPT, tokens, sampling, None, limit, name)


def counted(found: list[Any]) -> tuple[int, int]:
    """Steps, and accepted tokens."""
    steps = [each for each in found if isinstance(each, Step)]
    return len(steps), sum(step.accepted for step in steps)


@pytest.mark.parametrize("kind", ["lookup", "small", *HEADS])
def test_every_kind_of_drafter_is_predicted_to_take_the_steps_that_it_takes(kind, few, tmp_path):
    limit, drafter = 30, drafter_of(kind, few, tmp_path)
    plain = answer_of(records(few, None, "fixed", Sampling(), limit), Sampling(), limit)
    for row in forecast(drafter, [plain], GAMMAS, target=few.scorer).rows:
        made = records(few, drafter, f"fixed:gamma={row.gamma}", Sampling(), limit)
        (each,) = row.counts
        assert (each.steps, each.accepted.sum()) == pytest.approx(counted(made)), row.gamma
        passes = sum(step.passes or 0 for step in made[1:])
        assert 0.5 * passes <= each.passes <= 1.5 * passes, "passes after a wrong token are estimated"


@pytest.mark.parametrize("kind", ["eagle-3", "self:int8"])
def test_sampled_drafts_are_predicted_on_average(kind, few, tmp_path):
    limit, drafter, sampling = 16, drafter_of(kind, few, tmp_path), Sampling(1.0)
    steps, answers = [], []
    for seed in range(60):
        made = records(few, drafter, "fixed:gamma=3", sampling, limit, seed)
        answer = answer_of(made, sampling, limit, str(seed))
        steps.append(counted(made)[0])
        answers.append(replace(answer, probabilities=target_probabilities(few.scorer, answer)))
    (row,) = forecast(drafter, answers, [3], target=few.scorer).rows
    off = np.array(steps) - [each.steps for each in row.counts]
    assert abs(off.mean()) < 3 * off.std() / np.sqrt(len(steps))


def test_the_rows_of_a_sweep_are_predicted_from_plain_outputs():
    target = wrap_target(tiny_language_model().model, tiny_tokenizer(), name="tiny", pack=False)
    made = {name: load_drafter(name, target) for name in ("lookup", "self:int8")}
    made["small"] = wrap_drafter(tiny_language_model(seed=1, layers=1), target)
    engine = ModelEngine(
        target, [LoadedDrafter(name, spec, made[name]) for name, spec in specs_of(*made).items()]
    )
    options = SweepOptions(
        gammas=(1, 4), policies=(Fixed(), Auto()),
        decoding=DecodingOptions(max_new_tokens=12, ignore_eos=True),
    )  # fmt: skip
    sweep = Sweep(options, prompts(3), tuple(grid_of(options, *made, small="f")))
    plain, *rest = sweep.configs

    def decoded(row: Any, prompt: Any) -> Any:
        return engine.generate(row, engine.encode(prompt, []), options.decoding, seed=0)

    outputs = {each.id: decoded(plain, each).token_ids for each in sweep.prompts}
    found, failed = predict_rows(engine, sweep, plain, outputs, COSTS)
    assert failed == {}
    rest = [row for row in rest if row.gamma is not None]
    assert found.keys() == {row.id for row in rest}
    for row in rest:
        if row.drafter != "self:int8":  # which reads the target's keys and values
            runs = [decoded(row, each) for each in sweep.prompts]
            measured = pooled_rate([11] * 3, [len(run.steps.drafted) for run in runs], list(outputs))
            assert found[row.id].tokens_per_step.value == pytest.approx(measured.value), row.id
        assert found[row.id].speedup.value > 0
    answers = list(_answers(engine, sweep, plain, outputs))
    for name in ("lookup", "small"):
        alone = forecast(made[name], answers, [1, 4])  # as ``predict`` does, without the target
        for each, row in zip(alone.rows, [row for row in rest if row.drafter == name], strict=False):
            assert found[row.id].speedup == alone.speedup(each, COSTS), row.id
    assert decoded(plain, sweep.prompts[0]).token_ids == outputs["one-0"], "caches hold nothing that is wrong"
    _, untimed = predict_rows(engine, sweep, plain, outputs, PassCosts({1: 0.1}, {"lookup": 0.001}))
    assert untimed.keys() == {"self:int8", "small"}
