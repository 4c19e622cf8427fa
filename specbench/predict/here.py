"""Prediction where the target is loaded: every draft length of a sweep, from a few plain outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from specbench.base.errors import SpecbenchError
from specbench.base.record import Estimate
from specbench.bench.contexts import ContextPrompts
from specbench.loaded import transforms_of
from specbench.predict.chances import model_of, target_probabilities
from specbench.predict.forecast import Report, forecast
from specbench.predict.law import Answer
from specbench.specs.policies import Fixed

if TYPE_CHECKING:
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.grid import Sweep
    from specbench.decoding.theory import PassCosts
    from specbench.rows import Row


class Prediction(NamedTuple):
    """What is predicted of a row of a sweep.

    Attributes:
        speedup: Over plain decoding.
        tokens_per_step: All tokens over all steps.
    """

    speedup: Estimate
    tokens_per_step: Estimate


def predict_rows(
    engine: ModelEngine,
    sweep: Sweep,
    plain: Row,
    outputs: Mapping[str, Sequence[int]],
    costs: PassCosts,
    report: Report | None = None,
) -> tuple[dict[str, Prediction], dict[str, str]]:
    """Predict the rows of a sweep under one condition that have a draft length.

    Args:
        engine: The loaded models.
        sweep: The sweep.
        plain: The row of plain decoding, the baseline of the others.
        outputs: Its outputs of some prompts, by their ids.
        costs: Times of passes.
        report: Receives progress; see ``forecast``.

    Returns:
        Predictions by the ids of rows, and errors by drafter.
    """
    answers, found = list(_answers(engine, sweep, plain, outputs)), dict[str, Prediction]()
    rows: dict[str, dict[int, str]] = {}
    for row in sweep.configs:
        if row.baseline == plain.id and row.gamma is not None and row.policy == Fixed(row.gamma):
            rows.setdefault(row.drafter, {})[row.gamma] = row.id
    drafters = [each for each in engine.drafters if answers and each.name in rows]
    failed = {each.name: str(each.outcome) for each in drafters if not each.is_loaded}
    loaded = {each.name: each.drafter for each in drafters if each.is_loaded}
    for model in {id(model_of(each)): model_of(each) for each in loaded.values()}.values():
        reads = dict[int, torch.Tensor]()
        for name, drafter in loaded.items():
            if model_of(drafter) is not model:
                continue
            if name not in costs.drafter_s:
                failed[name] = "its passes could not be timed"
                continue
            try:
                made = forecast(
                    drafter, answers, list(rows[name]), report, target=engine.target.scorer, reads=reads
                )
            except SpecbenchError as error:
                failed[name] = str(error)
                continue
            for each in made.rows:
                speedup = made.speedup(each, costs)
                if math.isfinite(speedup.value):
                    found[rows[name][each.gamma]] = Prediction(speedup, made.tokens_per_step(each))
    engine.target.scorer.begin()
    return found, failed


def _answers(
    engine: ModelEngine, sweep: Sweep, plain: Row, outputs: Mapping[str, Sequence[int]]
) -> Iterator[Answer]:
    """Yield the outputs of plain decoding as answers; sampled ones with their probabilities, by the target's pass."""
    decoding, target = sweep.options.decoding, engine.target
    assert plain.recipe is not None
    sampling = transforms_of(plain.recipe, target.language_model)
    prompts = ContextPrompts(sweep.prompts, sweep.options.template, sweep.text, engine.count_tokens)
    for prompt in sweep.prompts:
        tokens = outputs.get(prompt.id, ())
        if len(tokens) < 2:
            continue
        ids = engine.encode(prompts.at(prompt.id, plain.condition), [])
        answer = Answer(
            ids, tokens, sampling, limit=decoding.max_new_tokens, name=prompt.id,
            end_ids=decoding.end_ids(target.end_ids),
        )  # fmt: skip
        if not sampling.greedy:
            answer = replace(answer, probabilities=target_probabilities(target.scorer, answer))
        yield answer
