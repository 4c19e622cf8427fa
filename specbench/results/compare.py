"""Comparison of two runs, or of two configurations of one: A over B with an interval and a verdict.

Configurations of one run were measured in turns, so their generations are paired one by one. Two runs were measured at
different times: they are paired by prompt, and changes of the machine in between affect the ratio. Definitions:
docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite_or_none
from specbench.base.textsafe import counted, listed, one_line
from specbench.results import stats
from specbench.results.metrics import METRICS, Figures, Metric
from specbench.results.results import Results
from specbench.results.run import PLAIN, Run, find_config
from specbench.results.summary import Summary
from specbench.rows import Row

COMPARISON_VERSION = 1
"""Version of ``to_json``. 1: first release."""

COMPARED = [name for name, kind in METRICS.items() if kind.is_compared]
"""Figures that can be compared."""

_MACHINE = {"cpu": "processor", "physical_cores": "cores", "cores": "logical cores", "ram_gb": "memory in GB",
            "devices": "accelerators"}  # fmt: skip
_SOFTWARE = ("os", "python", "torch", "transformers", "specbench", "git_commit", "cpu_capability", "threads",
             "huge_pages")  # fmt: skip
_OPTIONS = {"max_new_tokens": "new tokens", "ignore_eos": "ignore end tokens", "turns": "turns"}
_WORDS = {"faster": "higher", "slower": "lower"}


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One configuration of A over its counterpart of B.

    Attributes:
        category: ``None`` for all prompts.
        a, b: The figure of each, over the prompts that both have.
        ratio: A over B; NaN without common prompts.
        provisional: Whether a verdict rests on disturbed measurements, whose interval is wider.
    """

    config_a: str
    config_b: str
    label: str
    category: str | None
    a: Estimate
    b: Estimate
    ratio: Estimate
    provisional: bool = False

    @property
    def verdict(self) -> stats.Verdict:
        """Whether A is above or below B, according to the interval."""
        return stats.verdict(self.ratio)


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison.

    Attributes:
        a, b: Names of the two sides.
        metric: What is compared, one of ``COMPARED``.
        rows: For each configuration: a row for all prompts, then a row for each category if there are several.
        notes: Sentences that explain the table.
        disturbance: Why verdicts are provisional; empty if they are not.
    """

    a: str
    b: str
    metric: str
    rows: list[ComparedRow]
    notes: list[str]
    disturbance: str = ""

    @property
    def overall(self) -> list[ComparedRow]:
        """The rows for all prompts."""
        return [row for row in self.rows if row.category is None]

    def below(self, ratio: float) -> list[ComparedRow]:
        """Return the rows for all prompts whose interval is wholly below
        ``ratio``; none if measurements were disturbed.
        """
        return [
            row
            for row in self.overall
            if row.ratio.basis == "prompts" and row.ratio.high is not None and row.ratio.high < ratio
            if not self.disturbance
        ]

    def verdict_text(self, row: ComparedRow) -> str:
        """Return a row's verdict; of what is no speed, whether A is higher or lower."""
        verdict = row.verdict if _is_speed(METRICS[self.metric]) else _WORDS.get(row.verdict, row.verdict)
        return stats.verdict_text(verdict, row.provisional)


# --- Comparing ------------------------------------------------------------------------------------


def compare_configs(results: Results, a: str, b: str, metric: str = "tokens_per_second") -> Compared:
    """Compare configuration ``a`` with ``b`` of one run, each given by id or label; see ``compare_runs``."""
    return compare_runs(results, results, a=a, b=b, metric=metric)


def compare_runs(
    results_a: Results,
    results_b: Results,
    names: tuple[str, str] = ("A", "B"),
    *,
    a: str | None = None,
    b: str | None = None,
    metric: str | None = None,
) -> Compared:
    """Compare run A with run B: configurations matched by id, and paired by prompt.

    Args:
        results_a, results_b: The runs. Of one run ``a`` and ``b`` are compared, paired one by one.
        names: Names of the runs.
        a, b: Compare only configuration ``a`` of A with ``b`` of B; if only one of the two is given, it names both.
        metric: One of ``COMPARED``; ``None`` is tokens per second if both machines are of one kind, otherwise speedups.

    Raises:
        UsageError: Both are the same run or configuration, their targets differ, they have no configuration, prompt or
            finished generation in common, or ``metric`` is a speed and the machines differ.
    """
    run_a, run_b = results_a.run, results_b.run
    is_one_run = run_a.run_id == run_b.run_id
    if is_one_run and (a is None or b is None):
        raise UsageError(
            "Both are the same run.", "Name two configurations of it: `specbench compare RUN:A RUN:B`."
        )
    if targets := _differing_targets(run_a, run_b):
        raise UsageError(f"The targets differ ({targets}).", "Compare runs of one target.")
    machines = _differing_machines(run_a, run_b)
    metric = metric or ("speedup" if machines else "tokens_per_second")
    kind = METRICS[metric]
    if machines and kind.is_timed:
        raise UsageError(
            f"The runs were made on different machines ({machines}), so their speeds cannot be compared.",
            "Compare speedups: --metric speedup.",
        )
    matches = _matched(run_a, run_b, a, b, kind)
    summaries = Summary(results_a), Summary(results_b)
    prompts, prompt_notes = _common_prompts(results_a, results_b)
    rows: list[ComparedRow] = []
    missing: list[str] = []
    for match in matches:
        label = one_line(match[0].label)
        if match[1].label != match[0].label and not is_one_run:
            label += f" / {one_line(match[1].label)}"
        values = [
            Figures(summary, config).values(metric) for summary, config in zip(summaries, match, strict=True)
        ]
        ours, theirs = (each[each["prompt"].isin(prompts)] for each in values)
        found = list(_rows(match, label, ours, theirs, kind, is_one_run))
        rows += found
        missing += [] if found else [one_line(match[0].label)]
    if not rows and is_one_run:
        labels = " and ".join(one_line(config.label) for config in matches[0])
        raise UsageError(f"{labels} have no finished generation in common.", "Continue the sweep.")
    if not rows:
        what = "prompt" if not prompts else "finished generation"
        raise UsageError(f"The runs have no {what} in common.", "Measure the same prompts in both.")
    notes = [
        *_meaning_notes(kind, matches, is_one_run, machines, _baselines(run_a, run_b)),
        *_difference_notes(run_a, run_b),
        *prompt_notes,
    ]
    if missing:
        notes.append(f"No common finished generation: {listed(missing)}.")
    for side, run in enumerate((run_a, run_b) if a is b is None else ()):
        matched = {match[side].id for match in matches} | {config.baseline for config in run.configs}
        if only := [one_line(config.label) for config in run.configs if config.id not in matched]:
            notes.append(f"Only in {'AB'[side]} ({one_line(names[side])}): {listed(only)}.")
    notes += _interval_notes(rows)
    disturbance = results_a.disturbance
    if is_one_run:
        names = one_line(matches[0][0].label), one_line(matches[0][1].label)
    else:
        reasons = (("A", results_a.disturbance), ("B", results_b.disturbance))
        disturbance = " ".join(f"{side}: {why}" for side, why in reasons if why)
        names = one_line(names[0]), one_line(names[1])
    if kind.sums is not None or not disturbance:
        return Compared(*names, metric, rows, notes)
    rows = [replace(row, ratio=stats.widened(row.ratio)) for row in rows]
    rows = [replace(row, provisional=row.verdict != "cannot tell") for row in rows]
    explained = [stats.PROVISIONAL] if any(row.provisional for row in rows) else []
    return Compared(*names, metric, rows, [disturbance, *explained, *notes], disturbance)


def _rows(
    match: tuple[Row, Row], label: str, ours: pd.DataFrame, theirs: pd.DataFrame, kind: Metric, one_by_one: bool
) -> Iterator[ComparedRow]:  # fmt: skip
    """Yield a row for all prompts, then one for each category if there are several. Turns that only one side has
    finished are left out.
    """
    turns = ours[["prompt", "turn"]].merge(theirs[["prompt", "turn"]]).drop_duplicates()
    ours, theirs = ours.merge(turns), theirs.merge(turns)
    categories = ours["category"].unique()
    for category in [None, *(categories if len(categories) > 1 else ())] if len(ours) else ():
        mine = ours if category is None else ours[ours["category"] == category]
        estimates = _estimates(mine, theirs[theirs["prompt"].isin(mine["prompt"])], kind, one_by_one)
        shown = None if category is None else one_line(category)
        yield ComparedRow(match[0].id, match[1].id, label, shown, *estimates)


def _estimates(
    ours: pd.DataFrame, theirs: pd.DataFrame, kind: Metric, one_by_one: bool
) -> tuple[Estimate, Estimate, Estimate]:
    """Return A, B and A / B from ``Figures.values`` of the same prompts."""
    if kind.sums is not None:
        both = ours.merge(theirs, on="prompt", suffixes=("_a", "_b"))
        a, of_a, b, of_b = (both[name].to_numpy() for name in ("value_a", "of_a", "value_b", "of_b"))
        prompts = both["prompt"].to_numpy()
        rates = [stats.pooled_rate(*sums, prompts) for sums in ((a, of_a), (b, of_b))]
        return rates[0], rates[1], stats.pooled_speedup(a, of_a, b, of_b, prompts)
    if one_by_one:
        pairs = ours.merge(theirs, on=["prompt", "turn", "repeat"], suffixes=("_a", "_b"))
        labels = pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
        values = pairs["value_a"], pairs["value_b"], pairs["value_a"] / pairs["value_b"]
        first, second, ratio = (stats.geometric_mean(each.to_numpy(), *labels) for each in values)
        return first, second, ratio
    sides = [[side[name].to_numpy() for name in ("value", "prompt", "repeat")] for side in (ours, theirs)]
    return (
        stats.geometric_mean(*sides[0]),
        stats.geometric_mean(*sides[1]),
        stats.compare(*sides[0], *sides[1]),
    )


# --- What can be compared -------------------------------------------------------------------------


def _matched(run_a: Run, run_b: Run, a: str | None, b: str | None, kind: Metric) -> list[tuple[Row, Row]]:
    """Return the pairs of configurations that are compared."""

    def has_none(config: Row) -> bool:
        return kind.is_speedup and config.id == config.baseline

    if a is not None or b is not None:
        places = ("this run", "this run") if run_a.run_id == run_b.run_id else ("run A", "run B")
        pair = find_config(run_a, str(a or b), places[0]), find_config(run_b, str(b or a), places[1])
        if run_a.run_id == run_b.run_id and pair[0].id == pair[1].id:
            raise UsageError("A configuration is compared with itself.", "Name two configurations.")
        if baseline := next(filter(has_none, pair), None):
            raise UsageError(
                f"{one_line(baseline.label)} is the baseline, so it has no speedup.",
                "Name another configuration.",
            )
        return [pair]
    by_id = {config.id: config for config in run_b.configs}
    found = [
        (config, by_id[config.id]) for config in run_a.configs if config.id in by_id and not has_none(config)
    ]
    if not found:
        unless_baseline = " except the baseline" if kind.is_speedup else ""
        raise UsageError(
            f"The runs have no configuration in common{unless_baseline}.",
            "Name one of each: `specbench compare RUN:A RUN:B`.",
        )
    return found


def _common_prompts(results_a: Results, results_b: Results) -> tuple[set[str], list[str]]:
    """Return the prompts that both runs have with the same text,
    and notes about the others; unknown texts count as equal.
    """
    both = (results_a, results_b)
    texts = [{prompt.id: prompt.fingerprint for prompt in each.run.prompts} for each in both]
    ids = [set(each.generations["prompt"]) for each in both]
    common = ids[0] & ids[1]
    changed = {name for name in common if _differ(texts[0].get(name), texts[1].get(name))}
    notes = []
    if changed:
        notes.append(
            f"{counted(len(changed), 'prompt')} left out: the same name, but another text in each run."
        )
    if alone := len(ids[0] ^ ids[1]):
        notes.append(f"{counted(alone, 'prompt')} left out: measured in one of the runs only.")
    return common - changed, notes


def _differing_targets(run_a: Run, run_b: Run) -> str:
    """Return how the targets differ, empty if they do not. A model that has two names is still one target."""
    a, b = run_a.target, run_b.target
    known = a.fingerprint is not None and b.fingerprint is not None
    differ = a.fingerprint != b.fingerprint if known else a.name != b.name
    if not differ and a.dtype == b.dtype:
        return ""
    shown = [
        ", ".join(one_line(name) for name in (each.name, each.dtype) if name is not None) for each in (a, b)
    ]
    if shown[0] == shown[1]:
        return f"both are called {shown[0]}, but their weights differ"
    return " / ".join(shown)


def _differing_machines(run_a: Run, run_b: Run) -> str:
    """Return how the machines differ, empty if they do not."""
    for name, what in _MACHINE.items():
        a, b = (getattr(run.environment, name) for run in (run_a, run_b))
        # The system's memory size varies a little from boot to boot.
        near = name == "ram_gb" and a and b and math.isclose(a, b, rel_tol=0.05)
        if not near and (a or None) != (b or None):
            return f"{what}: {_shown(a)} / {_shown(b)}"
    devices = [run.target.device for run in (run_a, run_b)]
    return "" if devices[0] == devices[1] else f"device: {_shown(devices[0])} / {_shown(devices[1])}"


# --- Notes ----------------------------------------------------------------------------------------


def _baselines(run_a: Run, run_b: Run) -> str:
    a, b = run_a.baseline, run_b.baseline
    if a != b:
        return f"the baseline ({a} / {b})"
    return f"the {PLAIN}" if a == PLAIN else f"the server {a}"


def _is_speed(kind: Metric) -> bool:
    """Return whether more of a figure is faster."""
    return kind.mean_of is not None and kind.form != "ms"


def _meaning_notes(
    kind: Metric, matches: Sequence[tuple[Row, Row]], is_one_run: bool, machines: str, baseline: str
) -> Iterator[str]:
    """Yield what the ratios are, and what is not in their intervals."""
    what = "decode tokens/s" if kind.name == "tokens_per_second" else kind.name
    mean = "geometric mean over the prompts" if kind.sums is None else "from the sums over the prompts"
    more = "faster" if _is_speed(kind) else "higher"
    if is_one_run:
        yield (
            f"A / B: {what} of A over those of B, {mean}; above 1, A is {more}. Both decoded each prompt back to back."
        )
    else:
        what += f" over {baseline} of its own run," if kind.is_speedup else ""
        yield f"A / B: {what} of A over that of B, {mean} that both have; above 1, A is {more}."
    in_batch = any(config.condition.batch is not None for match in matches for config in match)
    if kind.name == "tokens_per_second" and in_batch:
        yield "With a batch, a request's tokens/s count from its arrival to its end, including TTFT and waiting."
    if machines and kind.is_speedup:
        yield f"The machines differ ({machines}), so only the speedups over {baseline} of each run are compared."
    if kind.is_timed and not is_one_run:
        yield (
            "The runs were not made at the same time: changes of the machine between them are in the ratios and not in"
            f" their intervals. --metric speedup compares each with {baseline} of its own run instead."
        )


def _difference_notes(run_a: Run, run_b: Run) -> Iterator[str]:
    """Return notes on settings and versions that differ between two comparable runs."""
    runs = (run_a, run_b)
    pairs = [
        (what, *(getattr(run, name, run.options.get(name)) for run in runs))
        for name, what in _OPTIONS.items()
    ]
    pairs += [
        (name.replace("_", " "), *(getattr(run.environment, name) for run in runs)) for name in _SOFTWARE
    ]
    ours, theirs = ({config.drafter: config.fingerprint for config in run.configs} for run in runs)
    pairs += [(f"weights of {one_line(name)}", ours[name], theirs[name]) for name in ours if name in theirs]
    pairs.append(("cache", *(sorted({config.cache for config in run.configs}) for run in runs)))
    differing = [f"{what}: {_shown(a)} / {_shown(b)}" for what, a, b in pairs if _differ(a, b)]
    if differing:
        yield f"Also different, A / B: {'; '.join(differing)}."


def _interval_notes(rows: Sequence[ComparedRow]) -> Iterator[str]:
    bases = [row.ratio.basis for row in rows]
    if "prompts" in bases:
        yield "In brackets the 95% interval over prompts. Verdict: whether it lies wholly above or below 1."
    if "repeats" in bases:
        yield "*: one or two prompts; the interval is over repeats, holds for these prompts only, and is no verdict."


def _differ(a: Any, b: Any) -> bool:
    return a is not None and b is not None and a != b


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(one_line, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else one_line(value)[:60]


# --- JSON -----------------------------------------------------------------------------------------


def to_json(compared: Compared, fail_below: float | None = None) -> Json:
    """Return a comparison as JSON data, with ``null`` for values without enough data."""
    rows = [
        {
            "config_a": row.config_a,
            "config_b": row.config_b,
            "label": row.label,
            "category": row.category,
            "prompts": row.ratio.prompts,
            **{
                f"{name}{end}": finite_or_none(getattr(estimate, part))
                for name, estimate in (("a", row.a), ("b", row.b), ("ratio", row.ratio))
                for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))
            },
            "basis": row.ratio.basis,
            "verdict": compared.verdict_text(replace(row, provisional=False)),
            "provisional": row.provisional,
        }
        for row in compared.rows
    ]
    return {
        "schema": COMPARISON_VERSION,
        "kind": "specbench-comparison",
        "a": compared.a,
        "b": compared.b,
        "metric": compared.metric,
        "confidence": stats.CONFIDENCE,
        "rows": rows,
        "notes": compared.notes,
        "fail_below": fail_below,
        "below": [] if fail_below is None else [row.label for row in compared.below(fail_below)],
    }
