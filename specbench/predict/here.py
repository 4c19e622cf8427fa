"""Prediction where the target is loaded: every draft length and policy of a sweep, from a few plain outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from specbench.base.errors import SpecbenchError
from specbench.base.record import Estimate, ratio
from specbench.bench.contexts import ContextPrompts
from specbench.loaded import transforms_of
from specbench.predict.chances import model_of, target_probabilities
from specbench.predict.forecast import Forecast, PredictedRow, forecast
from specbench.predict.law import Answer, ReadAnswer
from specbench.specs.policies import Fixed

if TYPE_CHECKING:
    from specbench.bench.engines.own import ModelEngine
    from specbench.bench.grid import Sweep
    from specbench.decoding.protocols import Drafter
    from specbench.decoding.theory import PassCosts
    from specbench.rows import Row

_FEW = 3
"""Answers along which policies other than fixed lengths are replayed, which takes longer, and on which drafters that
cannot win are predicted."""

_SLACK = 0.85
"""By how much less than what is asked for a drafter may reach on these to be predicted on all answers."""

_USUAL = 4
"""The draft length that other policies are compared with where no rows have one."""

_COUNTED = 2
"""Answers on which passes are counted."""

Report: TypeAlias = Callable[[str, int, int], None]
"""Receives a stage, how much of it is done, and of how much."""


class Prediction(NamedTuple):
    """What is predicted of a row of a sweep.

    Attributes:
        speedup: Over plain decoding.
        tokens_per_step: All tokens over all steps.
    """

    speedup: Estimate
    tokens_per_step: Estimate


@dataclass
class Predictions:
    """What is predicted of a sweep.

    Attributes:
        rows: By id; rows that cannot be predicted are missing.
        failed: Errors by drafter.
    """

    rows: dict[str, Prediction] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def predict_rows(
    engine: ModelEngine,
    sweep: Sweep,
    plain: Row,
    outputs: Mapping[str, Sequence[int]],
    costs: PassCosts,
    *,
    least: float = 0.0,
    report: Report = lambda *_: None,
) -> Predictions:
    """Predict the rows of a sweep under one condition.

    Args:
        engine: The loaded models.
        sweep: The sweep.
        plain: The row of plain decoding, the baseline of the others.
        outputs: Its outputs of some prompts, by their ids; at least one with a token after the first.
        costs: Times of passes.
        least: The share of the best prediction that matters: other drafters are predicted on a few answers, and not all
            of their policies.
        report: Receives progress.
    """
    answers = list(_answers(engine, sweep, plain, outputs))
    if not answers:
        return Predictions()
    predictor = _Predictor(engine, sweep, plain, costs, report, on_cache=not least)
    few = answers[:_FEW]
    if least and len(answers) > len(few):
        predictor.predict_lengths(predictor.rows, few)
        predictor.predict_lengths(predictor.near(_SLACK * least), answers)
    else:
        predictor.predict_lengths(predictor.rows, answers)
    predictor.predict_policies(predictor.near(least), few)
    engine.target.scorer.begin()
    return predictor.found()


class _Predictor:
    """Predicts the rows of one condition, drafter by drafter.

    Attributes:
        rows: The rows by drafter.
    """

    def __init__(
        self,
        engine: ModelEngine,
        sweep: Sweep,
        plain: Row,
        costs: PassCosts,
        report: Report,
        *,
        on_cache: bool,
    ) -> None:
        self._engine, self._costs, self._report, self._on_cache = engine, costs, report, on_cache
        self._lengths: dict[str, Forecast] = {}
        self._policies: dict[str, Prediction] = {}
        self._failed: dict[str, str] = {}
        self.rows: dict[str, list[Row]] = {}
        for row in sweep.configs:
            if row.baseline == plain.id and row.kind == "speculative":
                self.rows.setdefault(row.drafter, []).append(row)

    def predict_lengths(self, names: Collection[str], answers: Sequence[Answer]) -> None:
        """Predict the draft lengths of some drafters."""
        for drafters in self._by_model(names):
            reads: dict[int, ReadAnswer] = {}
            for name, drafter in drafters.items():
                if name not in self._costs.drafter_s:
                    self._failed[name] = "its passes could not be timed"
                    continue
                gammas = sorted({row.gamma for row in self.rows[name] if row.gamma is not None} or {_USUAL})
                try:
                    self._lengths[name] = forecast(
                        drafter, answers, gammas, target=self._engine.target.scorer, reads=reads, most=_COUNTED,
                        report=self._reporting(name, len(answers)), on_cache=self._on_cache,
                    )  # fmt: skip
                except SpecbenchError as error:
                    self._failed[name] = str(error)

    def _reporting(self, name: str, total: int) -> Callable[[int], None]:
        return lambda done: self._report(f"predicting {name}", done, total)

    def predict_policies(self, names: Collection[str], answers: Sequence[Answer]) -> None:
        """Predict other policies of some drafters, by how they compare with the best draft length on these answers."""
        for drafters in self._by_model(names):
            reads: dict[int, ReadAnswer] = {}
            for name, drafter in drafters.items():
                best = self._lengths[name].best(self._costs)
                assert isinstance(best.spec, Fixed)
                for row in self.rows[name]:
                    if row.policy is None or isinstance(row.policy, Fixed):
                        continue
                    self._report(f"predicting {name} {row.policy}", 0, 1)
                    try:
                        found = forecast(
                            drafter, answers, [best.spec.gamma_max], [row.policy], costs=self._costs, reads=reads,
                            target=self._engine.target.scorer, on_cache=self._on_cache,
                        )  # fmt: skip
                    except SpecbenchError:  # it decides by what only a run has
                        continue
                    fixed, other = (self._of(found, each) for each in found.rows)
                    scaled = zip(self._of(self._lengths[name], best), other, fixed, strict=True)
                    self._policies[row.id] = Prediction(
                        *(_times(each, ratio(mine.value, its.value)) for each, mine, its in scaled)
                    )

    def near(self, least: float) -> set[str]:
        """Return the drafters whose best draft length has this share of the best of all and of plain decoding."""
        best = {
            name: each.speedup(each.best(self._costs), self._costs).value
            for name, each in self._lengths.items()
        }
        top = max([1.0, *best.values()])
        return {name for name, value in best.items() if value >= least * top}

    def found(self) -> Predictions:
        """Return everything that was predicted."""
        rows = dict(self._policies)
        for name, found in self._lengths.items():
            by_spec = {each.spec: self._of(found, each) for each in found.rows}
            rows |= {row.id: by_spec[row.policy] for row in self.rows[name] if row.policy in by_spec}
        return Predictions(
            {name: each for name, each in rows.items() if math.isfinite(each.speedup.value)}, self._failed
        )

    def _of(self, found: Forecast, row: PredictedRow) -> Prediction:
        return Prediction(found.speedup(row, self._costs), found.tokens_per_step(row))

    def _by_model(self, names: Collection[str]) -> Iterator[dict[str, Drafter]]:
        """Yield loaded drafters, those with the same model together."""
        groups: dict[int, dict[str, Drafter]] = {}
        for each in self._engine.drafters:
            if each.name not in names:
                continue
            if isinstance(each.outcome, SpecbenchError):
                self._failed[each.name] = str(each.outcome)
            else:
                groups.setdefault(id(model_of(each.outcome)), {})[each.name] = each.outcome
        yield from groups.values()


def _times(estimate: Estimate, factor: float) -> Estimate:
    low, high = (None if each is None else factor * each for each in (estimate.low, estimate.high))
    return msgspec.structs.replace(estimate, value=factor * estimate.value, low=low, high=high)


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
            ids, tokens, sampling, limit=decoding.max_new_tokens, name=prompt.id, category=prompt.category,
            end_ids=decoding.end_ids(target.end_ids),
        )  # fmt: skip
        if not sampling.greedy:
            answer = replace(answer, probabilities=target_probabilities(target.scorer, answer))
        yield answer
