"""Comparison of two runs, or of two configurations of one: A over B with an interval and a verdict.

Configurations of one run were measured in turns, so their generations are paired one by one. Two runs were measured at
different times: they are paired by prompt, and changes of the machine in between affect the ratio. Definitions:
docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True)
class ComparedRow:
    """One configuration of A over its counterpart of B.

    Attributes:
        configs: Both.
        label: Their name or names.
        category: ``None`` for all prompts.
        kind: The figure.
        values: ``Figures.values`` of both, of the prompts that both have.
        one_by_one: Whether they were measured in turns: values are then paired by prompt, turn and repeat, otherwise
            by prompt.
        disturbed: Whether other programs disturbed what was timed: intervals of ratios are then wider.
        bounds: A over B with the bounds by which a gate judges A; ``None`` without a gate.
        outcome: What the gate says: ``worse``, ``not worse`` or ``cannot tell``; empty without a gate.
        why: Why it cannot tell, if not for these bounds.
    """

    configs: tuple[Row, Row]
    label: str
    category: str | None
    kind: Metric
    values: tuple[pd.DataFrame, pd.DataFrame]
    one_by_one: bool = False
    disturbed: bool = False
    bounds: Estimate | None = None
    outcome: str = ""
    why: str = ""

    @cached_property
    def a(self) -> Estimate:
        """The figure of A."""
        return self._side(0)

    @cached_property
    def b(self) -> Estimate:
        """The figure of B."""
        return self._side(1)

    @cached_property
    def ratio(self) -> Estimate:
        """A over B with its 95% interval, or the bounds of a gate."""
        return self.bounds or self.ratio_at(stats.CONFIDENCE)

    def ratio_at(self, confidence: float) -> Estimate:
        """Return A over B with an interval of this coverage."""
        if self.kind.sums is not None:
            a, of_a, b, of_b, prompts = _arrays(self._pairs, "value_a", "of_a", "value_b", "of_b", "prompt")
            return stats.pooled_speedup(a, of_a, b, of_b, prompts, confidence)
        if self.one_by_one:
            a, b, prompts, repeats = _arrays(self._pairs, "value_a", "value_b", "prompt", "repeat")
            ratio = stats.geometric_mean(a / b, prompts, repeats, confidence)
        else:
            ours, theirs = (tuple(_arrays(side, "value", "prompt", "repeat")) for side in self.values)
            ratio = stats.compare(ours, theirs, confidence)
        return stats.widened(ratio) if self.disturbed else ratio

    def _side(self, side: int) -> Estimate:
        if self.kind.sums is not None:
            return stats.pooled_rate(*_arrays(self.values[side], "value", "of", "prompt"))
        return stats.geometric_mean(*_arrays(self.values[side], "value", "prompt", "repeat"))

    @cached_property
    def _pairs(self) -> pd.DataFrame:
        return self.values[0].merge(self.values[1], on=["prompt", "turn", "repeat"], suffixes=("_a", "_b"))

    @property
    def verdict(self) -> stats.Verdict:
        """Whether A is above or below B, according to the interval."""
        return stats.verdict(self.ratio)

    @property
    def category_name(self) -> str:
        return self.category or "all"

    @property
    def provisional(self) -> bool:
        """Whether the verdict rests on disturbed measurements."""
        return self.disturbed and not self.outcome and self.verdict != "cannot tell"

    @property
    def verdict_word(self) -> str:
        """The verdict; of what is no speed, whether A is higher or lower; or what the gate says."""
        verdict = self.verdict if _is_speed(self.kind) else _WORDS.get(self.verdict, self.verdict)
        return self.outcome or verdict


def _is_speed(kind: Metric) -> bool:
    """Return whether more of a figure is faster."""
    return kind.mean_of is not None and kind.form != "ms"


def _arrays(rows: pd.DataFrame, *names: str) -> list[Any]:
    return [rows[name].to_numpy() for name in names]


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison.

    Attributes:
        names: Names of A and B.
        rows: A row for each configuration; of a single one, also for each category if there are several. Of a gate, a
            row for each figure and configuration.
        notes: Sentences that explain the table.
        words: What A and B are called.
        worse_than: How much worse than B a gate allows A to be, as a share of B's figure; ``None`` without a gate.
    """

    names: tuple[str, str]
    rows: list[ComparedRow]
    notes: list[str]
    words: tuple[str, str] = ("A", "B")
    worse_than: float | None = None


# --- Comparing ------------------------------------------------------------------------------------


def compare_runs(
    results_a: Results,
    results_b: Results,
    names: tuple[str, str] = ("A", "B"),
    *,
    a: str | None = None,
    b: str | None = None,
    metric: str | None = None,
) -> Compared:
    """Compare run A with run B.

    Args:
        results_a, results_b, a, b: See ``Matched``.
        names: Names of the runs.
        metric: One of ``COMPARED``; ``None`` is tokens per second if both machines are of one kind, otherwise speedups.

    Raises:
        UsageError: They have no configuration, prompt or finished generation in common, or cannot be compared.
    """
    both = Matched(results_a, results_b, a=a, b=b)
    kind = METRICS[metric or both.usual_metric]
    matched = both.rows(kind)
    rows = [row for row in matched if not row.values[0].empty]
    if len(matched) == len(rows) == 1:
        rows += _categories(rows[0])
    missing = [one_line(row.configs[0].label) for row in matched if row.values[0].empty]
    if not rows and both.is_one_run:
        labels = " and ".join(one_line(config.label) for config in matched[0].configs)
        raise UsageError(f"{labels} have no finished generation in common.", "Continue the sweep.")
    if not rows:
        what = "finished generation" if both.prompts else "prompt"
        raise UsageError(f"The runs have no {what} in common.", "Measure the same prompts in both.")
    names = both.names(matched, names)
    why = both.disturbance(kind)
    notes = [
        *([why] if why else []),
        *([stats.PROVISIONAL] if any(row.provisional for row in rows) else []),
        *_meaning_notes(kind, matched, both),
        *both.notes(matched, names),
        *([f"No common finished generation: {listed(missing)}."] if missing else []),
        *_interval_notes(rows),
    ]
    return Compared(names, rows, notes)


def _categories(row: ComparedRow) -> Iterator[ComparedRow]:
    """Yield a row for each category of a row's prompts, if there are several."""
    ours, theirs = row.values
    categories = ours["category"].unique()
    for category in categories if len(categories) > 1 else ():
        mine = ours[ours["category"] == category]
        values = mine, theirs[theirs["prompt"].isin(mine["prompt"])]
        yield replace(row, category=one_line(category), values=values)


class Matched:
    """Two runs whose configurations and prompts are matched, or two configurations of one run.

    Attributes:
        runs: Both.
        is_one_run: Whether they are one.
        machines: How their machines differ; empty if they do not.
        prompts: Ids of the prompts that both have with the same text; unknown texts count as equal.

    Args:
        results_a, results_b: The runs; of one run ``a`` and ``b`` are compared.
        a, b: Compare only configuration ``a`` of A with ``b`` of B; if only one of the two is given, it names both.
        words: What messages call both.

    Raises:
        UsageError: Both are the same run, or their targets differ.
    """

    def __init__(
        self,
        results_a: Results,
        results_b: Results,
        *,
        a: str | None = None,
        b: str | None = None,
        words: tuple[str, str] = ("A", "B"),
    ) -> None:
        self._words = words
        self.runs = results_a.run, results_b.run
        self.is_one_run = results_a.run.run_id == results_b.run.run_id
        self._named = a or b, b or a
        if self.is_one_run and (a is None or b is None):
            raise UsageError(
                "Both are the same run.", "Name two configurations of it: `specbench compare RUN:A RUN:B`."
            )
        if targets := _differing_targets(*self.runs):
            raise UsageError(f"The targets differ ({targets}).", "Compare runs of one target.")
        self.machines = _differing_machines(*self.runs)
        self.prompts, self._prompt_notes = _common_prompts(results_a, results_b)
        self._summaries = Summary(results_a), Summary(results_b)

    @property
    def usual_metric(self) -> str:
        """The figure that is compared if none is named."""
        return "speedup" if self.machines else "tokens_per_second"

    @property
    def baseline(self) -> str:
        """The name of what speedups are over."""
        a, b = (run.baseline for run in self.runs)
        if a != b:
            return f"the baseline ({a} / {b})"
        return f"the {PLAIN}" if a == PLAIN else f"the server {a}"

    def disturbance(self, kind: Metric) -> str:
        """Return why verdicts on a figure are provisional; empty if they are not."""
        results = [summary.results for summary in self._summaries]
        if kind.sums is not None:
            return ""
        if self.is_one_run:
            return results[0].disturbance
        reasons = zip(self._words, results, strict=True)
        return " ".join(f"{side}: {each.disturbance}" for side, each in reasons if each.disturbance)

    def rows(self, kind: Metric) -> list[ComparedRow]:
        """Return a row for all prompts of each pair of configurations; its values are empty if no prompt finished in
        both.

        Raises:
            UsageError: There is no such configuration, none in common, or the figure is a speed and the machines
                differ.
        """
        if self.machines and kind.is_timed:
            raise UsageError(
                f"The runs were made on different machines ({self.machines}), so their speeds cannot be compared.",
                "Compare speedups: --metric speedup.",
            )
        disturbed = bool(self.disturbance(kind))
        found = []
        for match in self._matches(kind):
            labels = dict.fromkeys(one_line(config.label) for config in match[: 1 if self.is_one_run else 2])
            values = (figures.values(kind.name) for figures in self.figures(match))
            ours, theirs = (side[side["prompt"].isin(self.prompts)] for side in values)
            keys = ["prompt", "turn", *(["repeat"] if self.is_one_run else [])]
            turns = ours[keys].merge(theirs[keys]).drop_duplicates()
            common = ours.merge(turns), theirs.merge(turns)
            label = " / ".join(labels)
            found.append(ComparedRow(match, label, None, kind, common, self.is_one_run, disturbed))
        return found

    def figures(self, configs: tuple[Row, Row]) -> list[Figures]:
        """Return the figures of a configuration of each run."""
        return [Figures(*side) for side in zip(self._summaries, configs, strict=True)]

    def _matches(self, kind: Metric) -> list[tuple[Row, Row]]:
        def has_none(config: Row) -> bool:
            return kind.is_speedup and config.id == config.baseline

        (run_a, run_b), (a, b) = self.runs, self._named
        if a is not None and b is not None:
            places = ["this run" if self.is_one_run else f"run {word}" for word in self._words]
            pair = find_config(run_a, a, places[0]), find_config(run_b, b, places[1])
            if self.is_one_run and pair[0].id == pair[1].id:
                raise UsageError("A configuration is compared with itself.", "Name two configurations.")
            if baseline := next(filter(has_none, pair), None):
                label = one_line(baseline.label)
                raise UsageError(
                    f"{label} is the baseline, so it has no speedup.", "Name another configuration."
                )
            return [pair]
        by_id = {config.id: config for config in run_b.configs}
        found = [
            (config, by_id[config.id])
            for config in run_a.configs
            if config.id in by_id and not has_none(config)
        ]
        if not found:
            unless_baseline = " except the baseline" if kind.is_speedup else ""
            raise UsageError(
                f"The runs have no configuration in common{unless_baseline}.",
                "Name one of each: `specbench compare RUN:A RUN:B`.",
            )
        return found

    def names(self, rows: Sequence[ComparedRow], names: tuple[str, str]) -> tuple[str, str]:
        """Return the names of both runs, or of both configurations of one run."""
        labels = rows[0].configs[0].label, rows[0].configs[1].label
        a, b = map(one_line, labels if self.is_one_run else names)
        return a, b

    def notes(self, rows: Sequence[ComparedRow], names: tuple[str, str]) -> Iterator[str]:
        """Yield how the runs differ in settings, versions, prompts and configurations."""
        if differing := _differences(*self.runs):
            yield f"Also different, {' / '.join(self._words)}: {'; '.join(differing)}."
        yield from self._prompt_notes
        for side, run in enumerate(self.runs if self._named == (None, None) else ()):
            matched = {row.configs[side].id for row in rows} | {config.baseline for config in run.configs}
            if only := [one_line(config.label) for config in run.configs if config.id not in matched]:
                yield f"Only in {self._words[side]} ({names[side]}): {listed(only)}."


# --- What can be compared -------------------------------------------------------------------------


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


def _meaning_notes(kind: Metric, rows: Sequence[ComparedRow], both: Matched) -> Iterator[str]:
    """Yield what the ratios are, and what is not in their intervals."""
    what = "decode tokens/s" if kind.name == "tokens_per_second" else kind.name
    mean = "geometric mean over the prompts" if kind.sums is None else "from the sums over the prompts"
    more = "faster" if _is_speed(kind) else "higher"
    over = f" over {both.baseline} of its own run," if kind.is_speedup and not both.is_one_run else ""
    interleaved = " Both decoded each prompt back to back." * both.is_one_run
    yield (
        f"A / B: {what}{over} of A over that of B, {mean} that both have; above 1, A is {more}.{interleaved}"
    )
    in_batch = any(config.condition.batch is not None for row in rows for config in row.configs)
    if kind.name == "tokens_per_second" and in_batch:
        yield "With a batch, a request's tokens/s count from its arrival to its end, including TTFT and waiting."
    if both.machines and kind.is_speedup:
        yield (
            f"The machines differ ({both.machines}), so only the speedups over {both.baseline} of each run are"
            " compared."
        )
    if kind.is_timed and not both.is_one_run:
        yield (
            "The runs were not made at the same time: changes of the machine between them are in the ratios and not in"
            f" their intervals. --metric speedup compares each with {both.baseline} of its own run instead."
        )


def _differences(run_a: Run, run_b: Run) -> list[str]:
    """Return the settings and versions that differ between two comparable runs."""
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
    return [f"{what}: {_shown(a)} / {_shown(b)}" for what, a, b in pairs if _differ(a, b)]


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


def to_json(compared: Compared) -> Json:
    """Return a comparison as JSON data, with ``null`` for values without enough data."""
    rows = [
        {
            "config_a": row.configs[0].id,
            "config_b": row.configs[1].id,
            "label": row.label,
            "category": row.category,
            "metric": row.kind.name,
            "prompts": row.ratio.prompts,
            **{
                f"{name}{end}": finite_or_none(getattr(estimate, part))
                for name, estimate in (("a", row.a), ("b", row.b), ("ratio", row.ratio))
                for end, part in (("", "value"), ("_low", "low"), ("_high", "high"))
            },
            "basis": row.ratio.basis,
            "verdict": row.verdict_word,
            "provisional": row.provisional,
            "why": row.why,
        }
        for row in compared.rows
    ]
    return {
        "schema": COMPARISON_VERSION,
        "kind": "specbench-comparison",
        "a": compared.names[0],
        "b": compared.names[1],
        "confidence": stats.CONFIDENCE,
        "worse_than": compared.worse_than,
        "rows": rows,
        "notes": compared.notes,
    }
