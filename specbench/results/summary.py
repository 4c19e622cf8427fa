"""The metrics of every configuration of a run, over all prompts and by category.

Definitions of the metrics and their pitfalls: docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from specbench.base.record import BASELINE, NO_FIGURE, Estimate, ratio
from specbench.decoding.records import PARTS
from specbench.decoding.theory import PassCosts
from specbench.results import stats
from specbench.results.pairs import paired_generations, paired_groups
from specbench.results.predict import predict
from specbench.results.results import Results, row_cells
from specbench.results.run import BUSY_WARNINGS, RIVALS, Mismatch, Run
from specbench.results.steps import Steps
from specbench.rows import Row

_NAN = math.nan
_MOST_DISTURBED = 0.5
"""Share of disturbed generations above which pairing within a round no longer makes up for it."""


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """Metrics of one configuration over all prompts, or those of a category; NaN if a metric does not exist.

    For requests in batches, ``tokens_per_second`` is the throughput of a group of requests, and ``speedup`` the ratio
    of throughputs, both as geometric means over groups.

    Attributes:
        category: A category, or a task of a suite that has several; empty for all prompts.
        prompts, generations, failures: Numbers of prompts, finished and failed generations.
        verdict: What the interval of ``speedup`` says; ``None`` for a baseline.
        tokens_per_second: Decode speed, geometric mean over prompts.
        speedup: Speedup over the baseline, geometric mean over prompts of paired ratios; 1 for a baseline.
        speedup_total: The same including the time to first token.
        pooled_speedup: Speedup from all tokens over all seconds.
        tokens_per_step: Emitted tokens over steps.
        acceptance_rate, acceptance_tested: Accepted over drafted, and over tested tokens.
        alpha: Mean expected acceptance of tested tokens.
        mean_gamma, mean_nodes: Tokens and nodes drafted per step.
        step_source: Where a server's tokens per step come from: the ``server``, or ``bursts``, an estimate.
        predicted_speedup: Prediction from the tokens per step and the measured costs of forward passes, geometric
            mean over prompts; NaN if other programs used the machine most of the time.
        speedup_first: Speedup of a server in the first repeat only.
        warming: Speed of a server in later repeats, whose prompts it has seen before, over its speed in the first
            repeat.
        c: Cost of a drafter's forward pass relative to a forward pass of the target with one token.
        ttft_s: Time to the first token, geometric mean over prompts.
        ms_per_token: Time of the steps per emitted token.
        share: Share of that time by part of a step.
        share_draft_prefill: Share of that time for the drafter's prefill, which is part of drafting.
        share_masks: Share of that time for the masks of the output's format, in drafting and acceptance; in plain
            decoding, what the format costs.
        forced_share, corrected_share: Shares of the tokens of steps that the format forced, which are accepted drafts,
            and that are correction tokens; NaN, as ``share_masks``, without a format.
        peak_memory_bytes: The largest peak memory of its generations.
        log_probability: Log-probability per token of an answer, mean over prompts; NaN if it was not requested.
        identical_share: Share of greedy outputs that equal the baseline's.
        difference: Why other outputs differ (``ties``, ``beyond rounding``, ``not checked``); ``None`` for none.
        cached_share: Share of the prompts' tokens that a server took from its cache, if it reports that.
        provisional: Whether the verdict rests on intervals that are wider because other programs used the machine most
            of the time.
    """

    config: Row
    category: str = ""
    prompts: int = 0
    generations: int = 0
    failures: int = 0
    verdict: stats.Verdict | None = None
    tokens_per_second: Estimate = NO_FIGURE
    speedup: Estimate = NO_FIGURE
    speedup_total: Estimate = NO_FIGURE
    pooled_speedup: Estimate = NO_FIGURE
    tokens_per_step: Estimate = NO_FIGURE
    acceptance_rate: Estimate = NO_FIGURE
    acceptance_tested: Estimate = NO_FIGURE
    alpha: Estimate = NO_FIGURE
    predicted_speedup: Estimate = NO_FIGURE
    speedup_first: Estimate = NO_FIGURE
    warming: Estimate = NO_FIGURE
    mean_gamma: float = _NAN
    mean_nodes: float = _NAN
    c: float = _NAN
    ttft_s: float = _NAN
    ms_per_token: float = _NAN
    share: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, _NAN))
    share_draft_prefill: float = _NAN
    share_masks: float = _NAN
    forced_share: float = _NAN
    corrected_share: float = _NAN
    peak_memory_bytes: float = _NAN
    log_probability: float = _NAN
    identical_share: float = _NAN
    difference: str | None = None
    step_source: str | None = None
    cached_share: float = _NAN
    provisional: bool = False

    @property
    def is_baseline(self) -> bool:
        return self.config.id == self.config.baseline

    @property
    def measured(self) -> bool:
        """Whether a speedup over another configuration was measured."""
        return not self.is_baseline and not math.isnan(self.speedup.value)

    @property
    def verdict_text(self) -> str:
        return stats.verdict_text(self.verdict, self.provisional)


@dataclass(frozen=True)
class Summary:
    """The configurations of a run, in its order.

    Attributes:
        rows: One row for each configuration that has generations.
        over: Name of the baseline.
        dtype: Dtype of the target.
        disturbance: Why verdicts are provisional, in a sentence: other programs used the machine most of the time.
            Empty if they are not.
        withheld: Why there are no predictions, in a sentence; empty if there are.
        stopping: Why measuring stopped, if the run was made with ``--until``.
        fastest: Id of the configuration that `specbench tune` found fastest, if its speedup is certain; ``None`` for
            other runs.
    """

    rows: list[SummaryRow]
    over: str
    dtype: str | None = None
    disturbance: str = ""
    withheld: str = ""
    stopping: str = ""
    fastest: tuple[str, ...] | None = None

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The same as a data frame."""
        return to_frame(self.rows).drop(columns="category")

    @cached_property
    def winners(self) -> set[str]:
        """Ids of the configurations with the highest speedup over each baseline, if their verdict is "faster".

        For a run of `specbench tune`, it is the configuration that it found fastest.
        """
        if self.fastest is not None:
            return set(self.fastest)
        return {
            row.config.id for row in best_by_baseline(row for row in self.rows if row.verdict == "faster")
        }

    @property
    def side_by_side(self) -> bool:
        return any(row.config.condition.batch is not None for row in self.rows)

    def row(self, config: str) -> SummaryRow:
        """Return the row of a configuration, by id."""
        return next(row for row in self.rows if row.config.id == config)


def best_by_baseline(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Return the rival with the highest speedup over each baseline, of rows that have speedups."""
    best: dict[str, SummaryRow] = {}
    for row in sorted(rows, key=lambda row: -row.speedup.value):
        if row.config.kind in RIVALS:
            best.setdefault(row.config.baseline, row)
    return list(best.values())


def disturbance(results: Results) -> str:
    """Return why verdicts are provisional, if other programs used the machine most of the time; otherwise empty."""
    warnings = results.generations["warnings"]
    busy = sum(not BUSY_WARNINGS.isdisjoint(names) for names in warnings)
    if busy <= _MOST_DISTURBED * len(warnings):
        return ""
    return f"Verdicts are provisional: other programs used the processor during {busy} of {len(warnings)} generations."


def _stopped(run: Run, prompts: int) -> str:
    """Return why measuring stopped with ``--until``, and what that means for intervals; empty without it."""
    if run.stopping is None:
        return ""
    until, goal = run.stopping.until, "the verdict on the fastest was sure"
    if until != "sure":
        goal = f"the interval of the fastest reached {until} to each side"
    why = {
        "decided": f"after {prompts} of {len(run.prompts)} prompts, when {goal}",
        "time": f"after {run.stopping.minutes or 0:g} minutes, before {goal}",
        "blocks": f"after all {len(run.prompts)} prompts, before {goal}",
        None: f"before {goal}",
    }[run.stopping.ended]
    return (
        f"Measuring stopped {why}. The intervals of speedups are wide enough to hold at every look together."
    )


def configs_of(results: Results) -> list[Row]:
    """Return the configurations that have generations, in the order of the run."""
    present = set(results.generations["config"])
    return [config for config in results.run.configs if config.id in present]


def summarize(results: Results) -> Summary:
    """Return the metrics of every configuration."""
    run, tuning = results.run, results.run.tuning
    pairs = dict(list(paired_generations(results).groupby("config", sort=False)))
    groups = dict(list(paired_groups(results).groupby("config", sort=False)))
    tuned = {} if tuning is None or tuning.answer is None else tuning.answer.measured
    rows = results.generations
    places = rows.groupby("config", sort=False).indices
    steps = by_config(results)
    no_steps = results.steps.take(np.empty(0, dtype=np.intp))
    found = []
    for config in configs_of(results):
        mine, its_steps = rows.iloc[places[config.id]], steps.get(config.id, no_steps)
        row = _with_speedups(
            run, _summary_row(results, config, mine, its_steps), pairs.get(config.id), groups.get(config.id)
        )
        if config.id in tuned:
            row = replace(row, speedup=tuned[config.id].speedup, verdict=tuned[config.id].verdict)
        if tuned:  # it is over the same generations without noise correction
            row = replace(row, pooled_speedup=NO_FIGURE)
        found.append(row)
    why = disturbance(results)
    disturbed = "" if tuning is not None and tuning.answer is not None else why
    fastest = None
    if tuning is not None and tuning.ranking:
        fastest = tuple(tuning.ranking[:1]) if tuning.verdict == "faster" else ()
    if disturbed:
        found = [*map(_with_provisional_verdict, found)]
    withheld = ""
    if why and any(not math.isnan(row.predicted_speedup.value) for row in found):
        found = [replace(row, predicted_speedup=NO_FIGURE) for row in found]
        withheld = (
            f"Predicted speedups are left out:{why.partition(':')[2]} Forward passes timed meanwhile say little about"
            " what generations took."
        )
    stopped = _stopped(run, rows["prompt"].nunique())
    return Summary(found, run.baseline, run.target.dtype, disturbed, withheld, stopped, fastest)


def categorize(results: Results) -> list[SummaryRow]:
    """Return a row for each category and configuration except baselines; categories of one task are put together.

    They have speedups and tokens per step only.
    """
    tuning, tasks = results.run.tuning, results.run.tasks
    tuned = {} if tuning is None or tuning.answer is None else tuning.answer.measured
    pairs = paired_generations(results)
    groups = dict(list(pairs.groupby([pairs["category"].replace(tasks), "config"], sort=False)))
    accepted = _tokens_per_step(results, tasks)
    rows = []
    for category in dict.fromkeys(results.generations["category"].replace(tasks).dropna()):
        for config in configs_of(results):
            if (category, config.id) not in groups:
                continue
            speedup, pooled = _speedups_of(groups[category, config.id], confidence_of(results.run))
            prompts = speedup.prompts
            if tuned:
                pooled = NO_FIGURE
            if config.id in tuned:
                speedup = tuned[config.id].categories.get(category, NO_FIGURE)
            per_step = Estimate(accepted.get((config.id, category), _NAN), None, None, 0)
            rows.append(
                SummaryRow(
                    config,
                    category,
                    prompts,
                    verdict=stats.verdict(speedup),
                    speedup=speedup,
                    pooled_speedup=pooled,
                    tokens_per_step=per_step,
                )
            )
    return rows if tuned or not disturbance(results) else [*map(_with_provisional_verdict, rows)]


def _tokens_per_step(results: Results, tasks: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Return emitted tokens over steps by configuration id and category."""
    rows, steps = results.generations, results.steps
    kinds = pd.MultiIndex.from_arrays([rows["config"], rows["category"].replace(tasks).fillna("")])
    codes, pairs = pd.factorize(kinds)
    found = {
        pairs[code]: float(mine["emitted"].mean()) for code, mine in steps.split(codes[steps.row]).items()
    }
    answers = results.answers  # of servers, which report no single steps
    if len(answers):
        sums = answers[["emitted_in_steps", "reported_steps"]].groupby(codes[answers.index]).sum()
        found |= {
            pairs[code]: ratio(*mine) for code, mine in zip(sums.index, sums.to_numpy(float), strict=True)
        }
    return found


def confidence_of(run: Run) -> float:
    """Return the nominal coverage of a speedup's interval; larger if the run could stop at several looks."""
    return stats.CONFIDENCE if run.stopping is None else run.stopping.confidence


_RATIOS = ("speedup", "speedup_total", "pooled_speedup", "speedup_first")


def _with_provisional_verdict(row: SummaryRow) -> SummaryRow:
    if row.verdict is None:
        return row
    wider: dict[str, Any] = {name: stats.widened(getattr(row, name)) for name in _RATIOS}
    found = stats.verdict(wider["speedup"])
    return replace(row, **wider, verdict=found, provisional=found != "cannot tell")


def by_config(results: Results) -> dict[str, Steps]:
    """Return the steps of each configuration that has any, by id."""
    codes, names = pd.factorize(results.generations["config"])
    steps = results.steps
    return {str(names[i]): mine for i, mine in steps.split(codes[steps.row]).items()}


# -- figures of a configuration --------------------------------------------------------------------


def _summary_row(results: Results, config: Row, rows: pd.DataFrame, steps: Steps) -> SummaryRow:
    """Return a row without its speedups, from the generations and steps of a configuration."""
    done = rows[rows["status"] == "ok"]
    prompts, repeats = done["prompt"].to_numpy(), done["repeat"].to_numpy()
    server = config.kind == "server"
    acceptance = _reported_acceptance(results, config, done) if server else _acceptance(steps)
    log_probability = (done["log_probability"] / done["new_tokens"]).groupby(done["prompt"]).mean()
    masked = bool(steps["mask_s"].any())
    corrected = sum(each.closing.count("corrected") for each in done["steps"]) if masked else 0
    emitted = steps["emitted"].sum() if masked else 0
    return SummaryRow(
        config,
        prompts=done["prompt"].nunique(),
        generations=len(done),
        failures=int((rows["status"] == "failed").sum()),
        tokens_per_second=_speed_of(results, config, done),
        **acceptance,
        **_prediction(results, config, steps),
        warming=_warming(done) if server else NO_FIGURE,
        ttft_s=stats.geometric_mean(done["ttft_s"].to_numpy(), prompts, repeats).value,
        ms_per_token=1000.0 * float(ratio(steps.total_s().sum(), steps["emitted"].sum())),
        share={part: _share(steps, f"{part}_s") for part in PARTS},
        share_draft_prefill=_share(steps, "draft_prefill_s"),
        share_masks=_share(steps, "mask_s") if masked else _NAN,
        forced_share=float(ratio(steps["forced"].sum(), emitted)),
        corrected_share=float(ratio(corrected, emitted)),
        peak_memory_bytes=float(done["peak_memory_bytes"].max()) if len(done) else _NAN,
        log_probability=float(log_probability.mean()),
        cached_share=_cached_share(results, done) if server else _NAN,
    )


def _with_speedups(
    run: Run, row: SummaryRow, pairs: pd.DataFrame | None, groups: pd.DataFrame | None
) -> SummaryRow:
    """Return a row with its speedups, from the pairs of a configuration's generations and groups."""
    config = row.config
    if (config.kind == "plain" or row.is_baseline) and row.generations + row.failures:
        total = BASELINE if config.condition.batch is None else NO_FIGURE
        return replace(row, speedup=BASELINE, speedup_total=total, pooled_speedup=BASELINE)
    if pairs is None:
        return row
    compared, confidence = pairs if groups is None else groups, confidence_of(run)
    speedup, pooled = _speedups_of(compared, confidence)
    # With a batch, the speedup itself is about whole times.
    totals = pairs["ratio_total"] * (1.0 if groups is None else _NAN)
    identical = pairs["identical"].dropna()
    first = compared[compared["repeat"] == 0]
    return replace(
        row,
        speedup=speedup,
        verdict=stats.verdict(speedup),
        pooled_speedup=pooled,
        speedup_total=_mean_of(pairs, totals, confidence),
        speedup_first=_mean_of(first, first["ratio"], confidence) if config.kind == "server" else NO_FIGURE,
        identical_share=float(identical.astype(bool).mean()) if len(identical) else _NAN,
        difference=None if identical.all() else _cause(run.differences or (), config),
    )


def _speedups_of(pairs: pd.DataFrame, confidence: float) -> tuple[Estimate, Estimate]:
    columns = pairs[["tokens", "seconds", "base_tokens", "base_seconds"]].to_numpy().T
    tokens, seconds, base_tokens, base_seconds = columns
    prompts = pairs["prompt"].to_numpy()
    pooled = stats.pooled_speedup(tokens, seconds, base_tokens, base_seconds, prompts, confidence)
    return _mean_of(pairs, pairs["ratio"], confidence), pooled


def _cause(differences: Iterable[Mismatch], config: Row) -> str:
    """Return why outputs differ, from the check of their first differing tokens at the end of the sweep."""
    ties = {each.numerical_tie for each in differences if each.config == config.id}
    return "beyond rounding" if False in ties else "ties" if ties == {True} else "not checked"


def _speed_of(results: Results, config: Row, done: pd.DataFrame) -> Estimate:
    """Return decode tokens/s as a geometric mean over prompts; for batches, throughput as one over groups."""
    groups = results.groups[results.groups["config"] == config.id]
    units, name, unit = (
        (groups, "throughput", "group") if len(groups) else (done, "tokens_per_second", "prompt")
    )
    return stats.geometric_mean(
        units[name].to_numpy(dtype=float), units[unit].to_numpy(), units["repeat"].to_numpy()
    )


def _share(steps: Steps, name: str) -> float:
    return float(ratio(steps[name].sum(), steps.total_s().sum()))


def _acceptance(steps: Steps) -> dict[str, Any]:
    """Return the fields of a row on acceptance."""
    if not steps["drafted"].any():
        per_step = float(ratio(steps["emitted"].sum(), len(steps)))
        return {"tokens_per_step": Estimate(per_step, None, None, 0)}
    return {
        "tokens_per_step": stats.pooled_rate(steps["emitted"], np.ones(len(steps)), steps.prompt, least=1.0),
        "acceptance_rate": stats.pooled_rate(steps["accepted"], steps["drafted"], steps.prompt, most=1.0),
        "acceptance_tested": stats.pooled_rate(steps["accepted"], steps["tested"], steps.prompt, most=1.0),
        "alpha": stats.pooled_rate(steps.alpha_sum, steps["tested"], steps.prompt, most=1.0),
        "mean_gamma": float(steps["drafted"].mean()),
        "mean_nodes": float(steps["nodes"].mean()),
    }


def _prediction(results: Results, config: Row, steps: Steps) -> dict[str, Any]:
    """Return the fields of a row on predictions."""
    if config.condition.batch is not None or config.kind == "server" or results.run.costs is None:
        return {}
    return predict(steps, config, costs_at(results.run, config), results)


def costs_at(run: Run, config: Row) -> PassCosts:
    """Return the costs of single passes after the context of a configuration and half of its output."""
    costs = run.costs or PassCosts({})
    return (
        costs
        if config.condition.context is None
        else costs.at(config.condition.context + (run.max_new_tokens or 0) / 2)
    )


def reported(results: Results, done: pd.DataFrame) -> pd.DataFrame:
    """Return the answers of a server with the keys of the given generations."""
    return results.answers.join(done[["prompt", "prompt_tokens", "repeat", "group"]], how="inner")


def _reported_acceptance(results: Results, config: Row, done: pd.DataFrame) -> dict[str, Any]:
    answers = reported(results, done)
    stepped, drafting = answers[answers["reported_steps"] > 0], answers[answers["drafted"] > 0]
    groups = results.groups[(results.groups["config"] == config.id) & (results.groups["drafted"] > 0)]
    sources = set(stepped["step_source"])
    rows, unit = (groups, "group") if drafting.empty else (drafting, "prompt")
    return {
        "tokens_per_step": _pooled(stepped, "emitted_in_steps", "reported_steps", "prompt", least=1.0),
        "acceptance_rate": _pooled(rows, "accepted", "drafted", unit, most=1.0),
        "step_source": next((source for source in ("bursts", "server") if source in sources), None),
    }


def _cached_share(results: Results, done: pd.DataFrame) -> float:
    cached = reported(results, done)
    cached = cached[cached["cached_tokens"].notna()]
    return float(ratio(cached["cached_tokens"].sum(), cached["prompt_tokens"].sum()))


def _pooled(rows: pd.DataFrame, numerator: str, denominator: str, unit: str, **ends: float) -> Estimate:
    """Return the sum of one column over the sum of another, see ``stats.pooled_rate``; NaN without rows."""
    if rows.empty:
        return NO_FIGURE
    part, whole = rows[numerator].to_numpy(dtype=float), rows[denominator].to_numpy(dtype=float)
    return stats.pooled_rate(part, whole, rows[unit].to_numpy(), **ends)


def _warming(done: pd.DataFrame) -> Estimate:
    alone = done[done["group"] == ""]
    first = alone.loc[alone["repeat"] == 0, ["prompt", "tokens_per_second"]]
    again = alone[alone["repeat"] > 0].merge(first, on="prompt", suffixes=("", "_first"))
    return _mean_of(again, again["tokens_per_second"] / again["tokens_per_second_first"])


def _mean_of(rows: pd.DataFrame, values: pd.Series[float], confidence: float = stats.CONFIDENCE) -> Estimate:
    return stats.geometric_mean(
        values.to_numpy(), rows["prompt"].to_numpy(), rows["repeat"].to_numpy(), confidence
    )


# -- data frames -----------------------------------------------------------------------------------


def to_frame(rows: Sequence[SummaryRow]) -> pd.DataFrame:
    """Return rows as a data frame with a column per field; an empty one has the fields as columns.

    An ``Estimate`` becomes ``<name>``, ``<name>_low`` and ``<name>_high``, and for ``speedup`` also ``speedup_basis``.
    A configuration becomes its id as ``config``, and its fields. A mapping becomes a column ``<name>_<key>`` per key.
    """
    names = [field.name for field in fields(SummaryRow)]
    cells = [dict(cell for name in names for cell in _cells(name, getattr(row, name))) for row in rows]
    return pd.DataFrame(cells, columns=None if cells else names)


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Row):
        yield name, value.id
        yield from row_cells(value).items()
    elif isinstance(value, Estimate):
        if name == "speedup":
            yield "speedup_basis", value.basis
        yield name, value.value
        yield f"{name}_low", math.nan if value.low is None else value.low
        yield f"{name}_high", math.nan if value.high is None else value.high
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _cells(f"{name}_{key}", each)
    else:
        yield name, value
