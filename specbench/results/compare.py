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
from specbench.results.metrics import RATES
from specbench.results.pairs import whole_speed
from specbench.results.results import Results
from specbench.results.run import PLAIN, Run, find_config
from specbench.results.summary import Summary
from specbench.rows import Row

COMPARISON_VERSION = 1
"""Version of ``to_json``. 1: first release."""

SPEEDS = ("tokens_per_second", "ttft_s")
"""Figures that depend on the machine."""

SPEEDUPS = {"speedup": "ratio", "speedup_total": "ratio_total"}
"""Figures over the baseline of the same run, by their columns of ``paired_generations``."""

COMPARED = (*SPEEDS, *SPEEDUPS, *RATES)
"""Figures that can be compared."""

_KEY = ["prompt", "turn", "repeat"]
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
        is_speed = self.metric == "tokens_per_second" or self.metric in SPEEDUPS
        verdict = row.verdict if is_speed else _WORDS.get(row.verdict, row.verdict)
        return stats.verdict_text(verdict, row.provisional)


# --- Two configurations of one run ----------------------------------------------------------------


def compare_configs(results: Results, a: str, b: str, metric: str = "tokens_per_second") -> Compared:
    """Compare configuration ``a`` with ``b`` of one run, each given by id or label.

    Raises:
        UsageError: There is no such configuration, both are the same, or they have no generation in common.
    """
    first, second = (find_config(results.run, name, "this run") for name in (a, b))
    if first.id == second.id:
        raise UsageError("A configuration is compared with itself.", "Name two configurations.")
    label_a, label_b = one_line(first.label), one_line(second.label)
    frame = _values(Summary(results), metric)
    rows = list(_rows(first, second, frame, frame, label_a, metric, interleaved=True))
    if not rows:
        raise UsageError(
            f"{label_a} and {label_b} have no finished generation in common.", "Continue the sweep."
        )
    notes = [
        f"A / B: {_what(metric)} of A over those of B, {_mean(metric)}; above 1, A is {_more(metric)}."
        " Both decoded each prompt back to back.",
        *_batch_notes(metric, first, second),
        *_interval_notes(rows),
    ]
    return _with_disturbance(Compared(label_a, label_b, metric, rows, notes), results.disturbance)


def _with_disturbance(compared: Compared, why: str) -> Compared:
    if not why or compared.metric in RATES:
        return compared
    rows = [replace(row, ratio=stats.widened(row.ratio)) for row in compared.rows]
    rows = [replace(row, provisional=row.verdict != "cannot tell") for row in rows]
    explained = [stats.PROVISIONAL] if any(row.provisional for row in rows) else []
    return replace(compared, rows=rows, notes=[why, *explained, *compared.notes], disturbance=why)


def side_by_side(results: Results, a: str, b: str) -> pd.DataFrame:
    """Pair the decode speeds of two configurations of one run, ``a`` and ``b`` by id, by prompt, turn and repeat.

    Returns:
        One row per pair with ``prompt, turn, repeat, category, a, b``.
    """
    frame = _speeds(results)
    return _paired(*(frame[frame["config"] == config] for config in (a, b)))


def _paired(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
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
    metric: str | None = None,
) -> Compared:
    """Compare run A with run B: configurations matched by id, else by label, and paired by prompt.

    Args:
        results_a, results_b: The runs.
        names: Names of the runs.
        a, b: Compare only configuration ``a`` of A with ``b`` of B; if only one of the two is given, it names both.
        metric: One of ``COMPARED``; ``None`` is tokens per second if both machines are of one kind, otherwise speedups.

    Raises:
        UsageError: Both are the same run, their targets differ, they have no configuration or prompt in common, or
            ``metric`` is a speed and the machines differ.
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
    if machines and metric in SPEEDS:
        raise UsageError(
            f"The runs were made on different machines ({machines}), so their speeds cannot be compared.",
            "Compare speedups: --metric speedup.",
        )
    metric = metric or ("speedup" if machines else "tokens_per_second")
    matches = _matched(run_a, run_b, a, b, metric)
    values = [_values(Summary(each), metric) for each in (results_a, results_b)]
    prompts, prompt_notes = _common_prompts(results_a, results_b)
    mine, other = (each[each["prompt"].isin(prompts)] for each in values)
    rows: list[ComparedRow] = []
    missing: list[str] = []
    for match in matches:
        label = " / ".join(dict.fromkeys(one_line(config.label) for config in match))
        found = list(_rows(*match, mine, other, label, metric))
        rows += found
        missing += [] if found else [one_line(match[0].label)]
    if not rows:
        what = "prompt" if not prompts else "finished generation"
        raise UsageError(f"The runs have no {what} in common.", "Measure the same prompts in both.")
    over = _baselines(run_a, run_b)
    what = f"{_what(metric)} over {over} of its own run," if metric in SPEEDUPS else _what(metric)
    notes = [
        f"A / B: {what} of A over that of B, {_mean(metric)} that both have; above 1, A is {_more(metric)}.",
        *_batch_notes(metric, *(config for match in matches for config in match)),
    ]
    if machines and metric in SPEEDUPS:
        notes.append(
            f"The machines differ ({machines}), so only the speedups over {over} of each run are compared."
        )
    if metric in SPEEDS:
        notes.append(
            "The runs were not made at the same time: changes of the machine between them are in the ratios and not in"
            f" their intervals. --metric speedup compares each with {over} of its own run instead."
        )
    notes += [*_difference_notes(run_a, run_b), *prompt_notes]
    if missing:
        notes.append(f"No common finished generation: {listed(missing)}.")
    for side, run in enumerate((run_a, run_b) if a is b is None else ()):
        matched = {match[side].id for match in matches} | {config.baseline for config in run.configs}
        if only := [one_line(config.label) for config in run.configs if config.id not in matched]:
            notes.append(f"Only in {'AB'[side]} ({one_line(names[side])}): {listed(only)}.")
    notes += _interval_notes(rows)
    reasons = (("A", results_a.disturbance), ("B", results_b.disturbance))
    compared = Compared(one_line(names[0]), one_line(names[1]), metric, rows, notes)
    return _with_disturbance(compared, " ".join(f"{side}: {why}" for side, why in reasons if why))


# --- Values ---------------------------------------------------------------------------------------


def _rows(
    config_a: Row, config_b: Row, ours: pd.DataFrame, theirs: pd.DataFrame, label: str, metric: str,
    *, interleaved: bool = False,
) -> Iterator[ComparedRow]:  # fmt: skip
    """Yield a row for all prompts, then one for each category if there are several; turns that only one side has
    finished are left out. What was measured ``interleaved`` is paired one by one.
    """
    ours, theirs = ours[ours["config"] == config_a.id], theirs[theirs["config"] == config_b.id]
    turns = ours[["prompt", "turn"]].merge(theirs[["prompt", "turn"]]).drop_duplicates()
    ours, theirs = ours.merge(turns), theirs.merge(turns)
    compare = _of_sums if metric in RATES else _of_pairs if interleaved else _of_prompts
    for category, mine in _by_category(ours) if len(ours) else ():
        other = theirs[theirs["prompt"].isin(mine["prompt"])]
        a, b, ratio = compare(mine, other)
        yield ComparedRow(config_a.id, config_b.id, label, category, a, b, ratio)


_Three = tuple[Estimate, Estimate, Estimate]


def _of_pairs(ours: pd.DataFrame, theirs: pd.DataFrame) -> _Three:
    """Return A, B and their ratio from values that are paired one by one."""
    pairs = _paired(ours, theirs)
    prompts, repeats = pairs["prompt"].to_numpy(), pairs["repeat"].to_numpy()
    a, b, ratio = (
        stats.geometric_mean(values.to_numpy(), prompts, repeats)
        for values in (pairs["a"], pairs["b"], pairs["a"] / pairs["b"])
    )
    return a, b, ratio


def _of_prompts(ours: pd.DataFrame, theirs: pd.DataFrame) -> _Three:
    """Return the same from values that are paired by prompt."""
    a, b = (
        (each["value"].to_numpy(), each["prompt"].to_numpy(), each["repeat"].to_numpy())
        for each in (ours, theirs)
    )
    return stats.geometric_mean(*a), stats.geometric_mean(*b), stats.compare(*a, *b)


def _of_sums(ours: pd.DataFrame, theirs: pd.DataFrame) -> _Three:
    """Return the same from the sums of each prompt that make a rate."""
    both = ours.merge(theirs, on="prompt", suffixes=("_a", "_b"))
    a, of_a, b, of_b = (both[name].to_numpy() for name in ("value_a", "of_a", "value_b", "of_b"))
    prompts = both["prompt"].to_numpy()
    rates = [stats.pooled_rate(*sums, prompts) for sums in ((a, of_a), (b, of_b))]
    return rates[0], rates[1], stats.pooled_speedup(a, of_a, b, of_b, prompts)


def _speeds(results: Results) -> pd.DataFrame:
    """Return decode speeds with their keys; for requests of a batch, speeds from arrival to end."""
    done = results.done
    speeds = done["tokens_per_second"].where(done["group"] == "", whole_speed(done))
    return done[["config", "category", *_KEY]].assign(value=speeds)[speeds > 0]


def _values(summary: Summary, metric: str) -> pd.DataFrame:
    """Return ``config, category, prompt, turn, repeat, value``; of a rate also ``of``, its denominator, by prompt."""
    columns, done = ["config", "category", *_KEY], summary.results.done
    if metric in RATES:
        found = []
        for row in summary.rows:
            rows, part, whole = row.counts(metric)
            outputs = rows["output"] if "output" in rows else rows.index.to_series()
            sums = pd.DataFrame({"value": rows[part], "of": rows[whole]}, dtype=float)
            sums = sums.groupby(outputs.map(done["prompt"])).sum().rename_axis("prompt").reset_index()
            found.append(sums.assign(config=row.config.id))
        categories = done.drop_duplicates("prompt").set_index("prompt")["category"]
        frame = pd.concat(found)
        return frame.assign(category=frame["prompt"].map(categories), turn=0, repeat=0)
    if metric == "tokens_per_second":
        return _speeds(summary.results)
    if metric == "ttft_s":
        return done[columns].assign(value=done["ttft_s"])
    pairs = summary.pairs
    value = pairs[SPEEDUPS[metric]]
    return pairs[columns].assign(value=value)[value > 0]


def _by_category(rows: pd.DataFrame) -> Iterator[tuple[str | None, pd.DataFrame]]:
    """Yield all rows together, then the rows of each category if there are several."""
    yield None, rows
    categories = list(dict.fromkeys(rows["category"]))
    if len(categories) > 1:
        for category in categories:
            yield one_line(category), rows[rows["category"] == category]


def _what(metric: str) -> str:
    return (
        "decode tokens/s" if metric == "tokens_per_second" else "speedup" if metric == "speedup" else metric
    )


def _mean(metric: str) -> str:
    return "from the sums over the prompts" if metric in RATES else "geometric mean over the prompts"


def _more(metric: str) -> str:
    return "faster" if metric in ("tokens_per_second", *SPEEDUPS) else "higher"


# --- What can be compared -------------------------------------------------------------------------


def _matched(run_a: Run, run_b: Run, a: str | None, b: str | None, metric: str) -> list[tuple[Row, Row]]:
    if a is not None or b is not None:
        pair = find_config(run_a, str(a or b), "run A"), find_config(run_b, str(b or a), "run B")
        for config in pair:
            if metric in SPEEDUPS and config.id == config.baseline:
                raise UsageError(
                    f"{one_line(config.label)} is the baseline, so it has no speedup.",
                    "Name another configuration.",
                )
        return [pair]
    by_id = {config.id: config for config in run_b.configs}
    found = [
        (config, by_id[config.id])
        for config in run_a.configs
        if config.id in by_id and not (metric in SPEEDUPS and config.id == config.baseline)
    ]
    if not found:
        unless_baseline = " except the baseline" if metric in SPEEDUPS else ""
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


def _batch_notes(metric: str, *configs: Row) -> Iterator[str]:
    if metric == "tokens_per_second" and any(config.condition.batch is not None for config in configs):
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
