"""Whether a new run is worse than a baseline by more than is allowed.

The ratio NEW over BASELINE of each row and figure is tested against one limit, such as 0.97, from both sides. It is
*worse* if it surely is below the limit, *not worse* if it surely is above, and otherwise one cannot tell. Error rates:

- False alarms: where nothing is worse by more than is allowed, at most ``ERROR`` of the gates say "worse" of anything.
  The bound behind "worse" is corrected for the number of rows and figures (Bonferroni).
- Misses: where anything is, at most ``ERROR`` of the gates pass. To pass, all have to be "not worse", so the bound
  behind "not worse" needs no correction (R. L. Berger, Technometrics 24, 1982).

benchmarks/interval_coverage.py measures both. Acceptance is compared where greedy outputs agree: drafts and verdicts
then follow from the tokens alone, and how busy the machine is does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from msgspec import structs

from specbench.base.errors import UsageError
from specbench.base.record import Estimate
from specbench.base.textsafe import counted
from specbench.results.compare import Compared, ComparedRow, Matched
from specbench.results.frames import same_output
from specbench.results.metrics import METRICS

ERROR = 0.05
"""Most gates with a false alarm, and most that pass although something is worse."""

WORDS = ("new", "baseline")
"""What a gate compares: A and B."""

Outcome = Literal["worse", "cannot tell", "not worse"]


def judge(both: Matched, metrics: Sequence[str], worse_than: float, names: tuple[str, str]) -> Compared:
    """Judge A, a new run, by B, its baseline.

    Args:
        both: The runs.
        metrics: Figures among ``COMPARED``; empty for the usual one.
        worse_than: How much worse is allowed, as a share of the baseline's figure.
        names: Names of both runs.

    Raises:
        UsageError: They cannot be compared in one of the figures, or the baseline has none of them.
    """
    kinds = [METRICS[name] for name in metrics or [both.usual_metric]]
    matched = [row for kind in kinds for row in both.rows(kind) if _is_known(row, both)]
    if not matched:
        missing = ", ".join(kind.name for kind in kinds)
        raise UsageError(f"The baseline has no {missing}.", "Judge another figure: --metric NAME.")
    rows = [_of_same_outputs(row, both) for row in matched]
    rows = [_judged(row, both, worse_than, len(rows)) for row in rows]
    names = both.names(matched, names)
    notes = [*_notes(matched, rows, both, worse_than), *both.notes(matched, names)]
    return Compared(names, rows, notes, WORDS, worse_than)


def outcome(gate: Compared) -> Outcome:
    """Return what a gate says: worse if any row is, not worse if all are not."""
    return next(each for each in get_args(Outcome) if any(row.outcome == each for row in gate.rows))


def _is_known(row: ComparedRow, both: Matched) -> bool:
    """Return whether the baseline has the figure: where nothing is drafted, none is accepted."""
    return not math.isnan(both.figures(row.configs)[1][row.kind.name].value)


def _is_greedy_rate(row: ComparedRow) -> bool:
    return row.kind.sums is not None and not any(config.condition.temperature for config in row.configs)


def _of_same_outputs(row: ComparedRow, both: Matched) -> ComparedRow:
    """Return a row of acceptance without prompts whose greedy outputs differ."""
    if not _is_greedy_rate(row):
        return row
    ours, theirs = (figures.done for figures in both.figures(row.configs))
    pairs = ours.merge(theirs, on=["prompt", "turn"], suffixes=("_a", "_b"))
    outputs = (pairs[name] for name in ("token_ids_a", "text_a", "token_ids_b", "text_b"))
    is_same = np.fromiter(map(same_output, *outputs), bool, len(pairs))
    different = pairs["prompt"][~is_same]
    a, b = (side[~side["prompt"].isin(different)] for side in row.values)
    return replace(row, values=(a, b))


def _judged(row: ComparedRow, both: Matched, worse_than: float, rows: int) -> ComparedRow:
    bounds, said = decide(row, worse_than, rows)
    new, baseline = both.figures(row.configs)
    failed = (set(new.outputs["prompt"]) & set(baseline.done["prompt"])) - set(new.done["prompt"])
    why = ""
    if failed:
        why = f"{counted(len(failed), 'prompt')} of the baseline failed"
    elif not bounds.prompts:
        why = "no output of both to compare"
    elif math.isnan(bounds.value):
        why = "the new one has no such figure"
    elif row.disturbed:
        why = "other programs used the processor most of the time"
    elif bounds.basis != "prompts":
        why = f"{counted(bounds.prompts, 'prompt')}, too few"
    return replace(row, bounds=bounds, outcome="cannot tell" if why else said, why=why)


def decide(row: ComparedRow, worse_than: float, rows: int) -> tuple[Estimate, Outcome]:
    """Return the bounds that decide about a row, one of so many, and what they say."""
    alone, corrected = (row.ratio_at(1 - 2 * error) for error in (ERROR, ERROR / rows))
    if alone.low is None or alone.high is None or alone.basis != "prompts":
        return alone, "cannot tell"
    if row.kind.form == "ms":  # less is better
        bounds, limit = structs.replace(alone, low=corrected.low), 1 + worse_than
        is_worse, is_fine = bounds.low is not None and bounds.low > limit, alone.high < limit
    else:
        bounds, limit = structs.replace(alone, high=corrected.high), 1 - worse_than
        is_worse, is_fine = bounds.high is not None and bounds.high < limit, alone.low > limit
    return bounds, "worse" if is_worse else "not worse" if is_fine else "cannot tell"


def _notes(
    matched: Sequence[ComparedRow], rows: Sequence[ComparedRow], both: Matched, worse_than: float
) -> Iterator[str]:
    yield from (f"{row.label}, {row.kind.name}: {row.why}." for row in rows if row.why)
    yield (
        f"In brackets the bounds that decide whether it is worse by more than {100 * worse_than:g}%. Where nothing is,"
        f" at most {ERROR:.0%} of such gates say that anything is (bounds of {1 - ERROR / len(rows):.4g}, for"
        f" {counted(len(rows), 'row and figure', 'rows and figures')}). Where anything is, at most {ERROR:.0%} pass."
    )
    if any(row.outcome == "cannot tell" and not row.why for row in rows):
        yield "Where one cannot tell, the limit lies between the bounds: measure more prompts."
    if any(map(_is_greedy_rate, rows)):
        left_out = {
            prompt
            for whole, same in zip(matched, rows, strict=True)
            for prompt in set(whole.values[0]["prompt"]) - set(same.values[0]["prompt"])
        }
        yield (
            "Acceptance is that of prompts with the same greedy output on both sides, so a busy machine does not change"
            " it, unless a draft policy measures times."
            + f" {counted(len(left_out), 'prompt')} left out at least once: the outputs differ."
            * bool(left_out)
        )
    if any(row.kind.is_timed for row in rows) and not both.is_one_run:
        yield (
            "The runs were not made at the same time, and the bounds of times know nothing of changes of the machine in"
            " between. The metric speedup compares each with the baseline of its own run instead."
        )
