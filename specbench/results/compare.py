"""Comparison of two runs, or of two configurations of one: A over B with an interval and a verdict.

Configurations of one run were measured in turns, so their generations are paired one by one. Two runs were measured at
different times: they are paired by prompt, and changes of the machine in between affect the ratio. Definitions:
docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from specbench.base.errors import UsageError
from specbench.base.record import Estimate, Json, finite_or_none
from specbench.base.textsafe import counted, listed, one_line
from specbench.results import stats
from specbench.results.pairs import paired_generations, whole_speed
from specbench.results.results import Results
from specbench.results.run import PLAIN, Run, find_config
from specbench.results.summary import disturbance
from specbench.rows import Row

if TYPE_CHECKING:
    import pandas as pd

COMPARISON_VERSION = 1
"""Version of ``to_json``. 1: first release."""

Measure: TypeAlias = Literal["speed", "speedup"]
"""Decode tokens/s, or their ratio to the baseline of the same run."""

_KEY = ["prompt", "turn", "repeat"]
_MACHINE = {"cpu": "processor", "physical_cores": "cores", "cores": "logical cores", "ram_gb": "memory in GB",
            "devices": "accelerators"}  # fmt: skip
_SOFTWARE = ("os", "python", "torch", "transformers", "specbench", "git_commit", "cpu_capability", "threads",
             "huge_pages")  # fmt: skip
_OPTIONS = {
    "max_new_tokens": "new tokens",
    "ignore_eos": "ignore end tokens",
    "turns": "turns",
}


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One configuration of A over its counterpart of B.

    Attributes:
        category: ``None`` for all prompts.
        a, b: Speed (tokens/s) or speedup of each, as the geometric mean over the prompts that both have.
        ratio: A over B; NaN without common prompts.
        verdict: Whether A is faster or slower, according to the interval.
        provisional: Whether the verdict rests on disturbed measurements, whose interval is wider.
    """

    config_a: str
    config_b: str
    label: str
    category: str | None
    a: Estimate
    b: Estimate
    ratio: Estimate
    verdict: stats.Verdict
    provisional: bool = False

    @property
    def verdict_text(self) -> str:
        return stats.verdict_text(self.verdict, self.provisional)

    @classmethod
    def of(
        cls,
        rows: tuple[Row, Row],
        label: str,
        category: str | None,
        a: Estimate,
        b: Estimate,
        ratio: Estimate,
    ) -> ComparedRow:
        """Return the row of two configurations, with the verdict on their ratio."""
        return cls(rows[0].id, rows[1].id, label, category, a, b, ratio, stats.verdict(ratio))


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison.

    Attributes:
        a, b: Names of the two sides.
        rows: For each configuration: a row for all prompts, then a row for each category if there are several.
        notes: Sentences that explain the table.
        disturbance: Why verdicts are provisional; empty if they are not.
    """

    a: str
    b: str
    measure: Measure
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


# --- Two configurations of one run ----------------------------------------------------------------


def compare_configs(results: Results, a: str, b: str) -> Compared:
    """Compare configuration ``a`` with ``b`` of one run, each given by id or label.

    Raises:
        UsageError: There is no such configuration, both are the same, or they have no generation in common.
    """
    first, second = (find_config(results.run, name, "this run") for name in (a, b))
    if first.id == second.id:
        raise UsageError("A configuration is compared with itself.", "Name two configurations.")
    label_a, label_b = one_line(first.label), one_line(second.label)
    pairs = side_by_side(results, first.id, second.id)
    if pairs.empty:
        raise UsageError(
            f"{label_a} and {label_b} have no finished generation in common.", "Continue the sweep."
        )
    rows = []
    for category, mine in _by_category(pairs):
        prompts, repeats = mine["prompt"].to_numpy(), mine["repeat"].to_numpy()
        speed_a, speed_b, ratio = (
            stats.geometric_mean(values.to_numpy(), prompts, repeats)
            for values in (mine["a"], mine["b"], mine["a"] / mine["b"])
        )
        rows.append(ComparedRow.of((first, second), label_a, category, speed_a, speed_b, ratio))
    notes = [
        "A / B: decode tokens/s of A over those of B, geometric mean over prompts; above 1, A is faster."
        " Both decoded each prompt back to back.",
        *_batch_notes(first, second),
        *_interval_notes(rows),
    ]
    return _with_disturbance(Compared(label_a, label_b, "speed", rows, notes), disturbance(results))


def _with_disturbance(compared: Compared, why: str) -> Compared:
    if not why:
        return compared
    rows = []
    for row in compared.rows:
        ratio = stats.widened(row.ratio)
        verdict = stats.verdict(ratio)
        rows.append(replace(row, ratio=ratio, verdict=verdict, provisional=verdict != "cannot tell"))
    explained = [stats.PROVISIONAL] if any(row.provisional for row in rows) else []
    return replace(compared, rows=rows, notes=[why, *explained, *compared.notes], disturbance=why)


def side_by_side(results: Results, a: str, b: str) -> pd.DataFrame:
    """Pair the decode speeds of two configurations of one run, ``a`` and ``b`` by id, by prompt, turn and repeat.

    Returns:
        One row per pair with ``prompt, turn, repeat, category, a, b``.
    """
    rows = _speeds(results)
    ours, theirs = (rows[rows["config"] == config] for config in (a, b))
    columns = [*_KEY, "value"]
    return ours[[*columns, "category"]].rename(columns={"value": "a"}).merge(
        theirs[columns].rename(columns={"value": "b"}), on=_KEY
    )  # fmt: skip


# --- Two runs -------------------------------------------------------------------------------------


def compare_runs(
    results_a: Results,
    results_b: Results,
    names: tuple[str, str] = ("A", "B"),
    *,
    a: str | None = None,
    b: str | None = None,
    measure: Measure | None = None,
) -> Compared:
    """Compare run A with run B: configurations matched by id, else by label, and paired by prompt.

    Args:
        results_a, results_b: The runs.
        names: Names of the runs.
        a, b: Compare only configuration ``a`` of A with ``b`` of B; if only one of the two is given, it names both.
        measure: What to compare; ``None`` is speeds if both machines are of one kind, otherwise speedups.

    Raises:
        UsageError: Both are the same run, their targets differ, they have no configuration or prompt in common, or
            ``measure`` is speed and the machines differ.
    """
    run_a, run_b = results_a.run, results_b.run
    if run_a.run_id == run_b.run_id:
        raise UsageError(
            "Both are the same run.",
            "Name two configurations of it: `specbench compare RUN:A RUN:B`.",
        )
    targets = _differing_targets(run_a, run_b)
    if targets:
        raise UsageError(f"The targets differ ({targets}).", "Compare runs of one target.")
    machines = _differing_machines(run_a, run_b)
    if machines and measure == "speed":
        raise UsageError(
            f"The runs were made on different machines ({machines}), so their speeds cannot be compared.",
            "Compare speedups: --measure speedup.",
        )
    measure = measure or ("speedup" if machines else "speed")
    matches = _matched(run_a, run_b, a, b, measure)
    values = [_values(each, measure) for each in (results_a, results_b)]
    prompts, prompt_notes = _common_prompts(results_a, results_b)
    rows: list[ComparedRow] = []
    missing: list[str] = []
    for match in matches:
        ours, theirs = (
            each[(each["config"] == config.id) & each["prompt"].isin(prompts)]
            for each, config in zip(values, match, strict=True)
        )
        found = list(_rows(*match, ours, theirs))
        rows += found
        missing += [] if found else [one_line(match[0].label)]
    if not rows:
        what = "prompt" if not prompts else "finished generation"
        raise UsageError(f"The runs have no {what} in common.", "Measure the same prompts in both.")
    over = _baselines(run_a, run_b)
    what = "decode tokens/s" if measure == "speed" else f"speedup over {over} of its own run,"
    notes = [
        f"A / B: {what} of A over that of B, geometric mean over the prompts that both have; above 1, A is faster.",
        *_batch_notes(*(config for match in matches for config in match)),
    ]
    if machines:
        notes.append(
            f"The machines differ ({machines}), so only the speedups over {over} of each run are compared."
        )
    if measure == "speed":
        notes.append(
            "The runs were not made at the same time: changes of the machine between them are in the ratios and not in"
            f" their intervals. --measure speedup compares each with {over} of its own run instead."
        )
    notes += [*_difference_notes(run_a, run_b), *prompt_notes]
    if missing:
        notes.append(f"No common finished generation: {listed(missing)}.")
    for side, run in enumerate((run_a, run_b) if a is b is None else ()):
        matched = {match[side].id for match in matches} | {config.baseline for config in run.configs}
        if only := [one_line(config.label) for config in run.configs if config.id not in matched]:
            notes.append(f"Only in {'AB'[side]} ({one_line(names[side])}): {listed(only)}.")
    notes += _interval_notes(rows)
    reasons = zip("AB", map(disturbance, (results_a, results_b)), strict=True)
    compared = Compared(one_line(names[0]), one_line(names[1]), measure, rows, notes)
    return _with_disturbance(compared, " ".join(f"{side}: {why}" for side, why in reasons if why))


def _rows(config_a: Row, config_b: Row, ours: pd.DataFrame, theirs: pd.DataFrame) -> Iterator[ComparedRow]:
    """Yield a row for all prompts, then one for each category; turns that only one run has finished are left out."""
    turns = ours[["prompt", "turn"]].merge(theirs[["prompt", "turn"]]).drop_duplicates()
    ours, theirs = ours.merge(turns), theirs.merge(turns)
    label = one_line(config_a.label)
    if config_a.id != config_b.id and config_a.label != config_b.label:
        label = f"{label} / {one_line(config_b.label)}"
    for category, mine in _by_category(ours) if len(ours) else ():
        other = theirs[theirs["prompt"].isin(mine["prompt"])]
        sides = [
            (each["value"].to_numpy(), each["prompt"].to_numpy(), each["repeat"].to_numpy())
            for each in (mine, other)
        ]
        ratio = stats.compare(*sides[0], *sides[1])
        speed_a, speed_b = (stats.geometric_mean(*side) for side in sides)
        yield ComparedRow.of((config_a, config_b), label, category, speed_a, speed_b, ratio)


def _speeds(results: Results) -> pd.DataFrame:
    """Return decode speeds with their keys; for requests of a batch, speeds from arrival to end."""
    columns = ["config", "category", "group", *_KEY, "tokens_per_second", "new_tokens", "total_s"]
    ok = results.done[columns].copy()
    ok["tokens_per_second"] = ok["tokens_per_second"].where(ok["group"] == "", whole_speed(ok))
    return ok[ok["tokens_per_second"] > 0].rename(columns={"tokens_per_second": "value"})


def _values(results: Results, measure: Measure) -> pd.DataFrame:
    if measure == "speed":
        return _speeds(results)
    pairs = paired_generations(results)[["config", "category", *_KEY, "ratio"]]
    return pairs[pairs["ratio"] > 0].rename(columns={"ratio": "value"})


def _by_category(rows: pd.DataFrame) -> Iterator[tuple[str | None, pd.DataFrame]]:
    """Yield all rows together, then the rows of each category if there are several."""
    yield None, rows
    categories = list(dict.fromkeys(rows["category"]))
    if len(categories) > 1:
        for category in categories:
            yield one_line(category), rows[rows["category"] == category]


# --- What can be compared -------------------------------------------------------------------------


def _matched(run_a: Run, run_b: Run, a: str | None, b: str | None, measure: Measure) -> list[tuple[Row, Row]]:
    if a is not None or b is not None:
        pair = find_config(run_a, str(a or b), "run A"), find_config(run_b, str(b or a), "run B")
        for config in pair:
            if measure == "speedup" and config.id == config.baseline:
                raise UsageError(
                    f"{one_line(config.label)} is the baseline, so it has no speedup.",
                    "Name another configuration.",
                )
        return [pair]
    by_id = {config.id: config for config in run_b.configs}
    found = [
        (config, by_id[config.id])
        for config in run_a.configs
        if config.id in by_id and not (measure == "speedup" and config.id == config.baseline)
    ]
    if not found:
        unless_baseline = " except the baseline" if measure == "speedup" else ""
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


def _batch_notes(*configs: Row) -> Iterator[str]:
    if any(config.condition.batch is not None for config in configs):
        yield "With a batch, a request's tokens/s count from its arrival to its end, including TTFT and waiting."


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
        yield "In brackets the 95% interval over prompts. Faster or slower: it lies wholly above or below 1."
    if "repeats" in bases:
        yield "*: one prompt; the interval is over its repeats, holds within that prompt only, and is no verdict."


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
            "verdict": row.verdict,
            "provisional": row.provisional,
        }
        for row in compared.rows
    ]
    return {
        "schema": COMPARISON_VERSION,
        "kind": "specbench-comparison",
        "a": compared.a,
        "b": compared.b,
        "measure": "tokens_per_second" if compared.measure == "speed" else "speedup",
        "confidence": stats.CONFIDENCE,
        "rows": rows,
        "notes": compared.notes,
        "fail_below": fail_below,
        "below": [] if fail_below is None else [row.label for row in compared.below(fail_below)],
    }
