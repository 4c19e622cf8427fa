"""Tables of metrics, as parts of a document (``specbench.show.document``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specbench.base.record import Estimate
from specbench.base.textsafe import counted, one_line
from specbench.decoding.records import PARTS
from specbench.models.training_metadata import TrainingMeasurement, TrainingMetadata
from specbench.results import stats
from specbench.results.acceptance import PositionRow
from specbench.results.goodput import GoodputRow
from specbench.results.heads import HeadRow, best_measurement, distinct_trainings
from specbench.results.requests import PERCENTILES, RequestRow
from specbench.results.run import OTHER_ANSWERS, PLAIN
from specbench.results.summary import Summary, SummaryRow
from specbench.results.thinking import PartRow
from specbench.results.turns import TurnRow
from specbench.rows import Row
from specbench.show.document import Sheet

AnyRow = TypeVar("AnyRow")
Compared = TypeVar("Compared", SummaryRow, PartRow)

_FOR_P95, _FOR_P99 = 20, 100
"""With fewer requests, these percentiles are nearly the largest value."""


# --- Notes ----------------------------------------------------------------------------------------


def _too_few(one: str) -> str:
    return f"Too few to say: one run of one {one}, two of them, or three that are all alike."


def notes(summary: Summary) -> list[str]:
    """Return the notes below a summary: over what the intervals are taken,
    and a note on each number that could be misread.
    """
    out, rows, over = list[str](), summary.rows, summary.over
    bases = {row.speedup.basis for row in rows}
    unit, one = ("groups of prompts", "group of prompts") if summary.side_by_side else ("prompts", "prompt")
    short = unit.split()[0]
    if summary.side_by_side:
        out.append(
            "With a batch, tokens/s is the throughput of all requests, from the arrival of each to its end, and the"
            f" speedup is the ratio of throughputs over {over} at the same batch."
        )
    if "prompts" in bases:
        count = _prompts_of_all(summary)
        over_all = unit if count is None else counted(count, one, unit)
        out.append(f"Speedups are geometric means over {over_all}; in brackets the 95% interval over {unit}.")
    slower = [row.prompts for row in rows if row.verdict == "slower"]
    if slower and not summary.side_by_side:
        out.append(stats.unseen_text(min(slower)))
    if "repeats" in bases:
        out.append(
            f"*: one {one}; the interval is over its repeats, holds within that {one.split()[0]} only, and is no"
            " verdict."
        )
    if any(row.measured and row.speedup.low is None for row in rows):
        out.append(_too_few(one))
    provisional = stats.PROVISIONAL if any(row.provisional for row in rows) else ""
    out += filter(None, (summary.stopping, summary.disturbance, provisional, summary.withheld))
    differing: dict[str | None, list[SummaryRow]] = {}
    for row in rows:
        label = row.config.label
        if _means_differ(row):
            out.append(
                f"{label}: all tokens over all seconds give {_ratio_text(row.pooled_speedup)}, the mean over {unit}"
                f" {_ratio_text(row.speedup)}: its {short} differ."
            )
        if row.identical_share < 1:
            differing.setdefault(row.difference, []).append(row)
        if row.failures:
            out.append(
                f"{label}: {counted(row.failures, 'generation')} failed, not included in any other figure."
            )
        if row.config.kind in OTHER_ANSWERS:
            out.append(
                f"{label} searches for more probable answers than plain decoding: compare speeds only."
            )
        if not row.is_baseline and not row.measured:
            out.append(f"{label}: no generation of its baseline to compare with.")
    for alike in differing.values():
        label = f"{alike[0].config.label}: " if len(alike) == 1 else f"{len(alike)} configurations: "
        out.append(label + identity_text(alike, summary.dtype, over))
    if any(row.step_source == "bursts" for row in rows):
        out.append("~: estimated from bursts of tokens, because the server does not report what it accepted.")
    if any(not math.isnan(row.speedup_first.value) for row in rows):
        out.append(
            "First time: the speedup over the first repeat, when a server has not seen the prompts yet; again: speed"
            " of the later repeats over that of the first."
        )
    return [one_line(note) for note in out]


def identity_text(rows: Sequence[SummaryRow], dtype: str | None, over: str = PLAIN) -> str:
    """Return a sentence on whether outputs equal those of the baseline, and why some do not.

    Args:
        rows: Rows of the summary, at least one, each with an ``identical_share`` and all with the same ``difference``.
        dtype: Dtype of the target.
        over: Name of the baseline.
    """
    shares = sorted(row.identical_share for row in rows)
    if shares[0] == 1:
        return f"Outputs are token for token those of {over}."
    several = f" to {_percent(shares[-1])}" if shares[-1] > shares[0] else ""
    share = f"{_percent(shares[0])}{several} of the outputs are token for token those of {over}"
    if rows[0].difference == "ties":
        return (
            f"{share}; the others differ only where two tokens tie within the rounding of"
            f" {one_line(dtype or 'bfloat16')}, which was checked: either is the target's own choice."
        )
    if rows[0].difference == "beyond rounding":
        return f"{share}; rounding does not explain all others: see the warnings."
    if over != PLAIN:
        return f"{share}; `specbench check --outputs` tells whether rounding explains the others."
    return f"{share}; the end of a sweep checks whether rounding explains the others."


def verdict_text(verdict: str | None, provisional: bool) -> str:
    """Return a verdict as text for tables, with a question mark if it is provisional; a dash for a baseline."""
    if verdict is None:
        return "–"
    return f"{verdict}?" if provisional and verdict != "cannot tell" else verdict


def _means_differ(row: SummaryRow) -> bool:
    """Return whether the pooled speedup is on the other side of 1 than
    the speedup, or outside the speedup's interval.
    """
    mean, pooled = row.speedup.value, row.pooled_speedup.value
    if not row.measured or math.isnan(pooled) or abs(math.log(pooled / mean)) < 0.02:
        return False
    return (mean - 1.0) * (pooled - 1.0) < 0 or row.speedup.overlaps(pooled) is False


# --- Columns --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column(Generic[AnyRow]):
    """A column of a table: its heading, its rank (see ``Sheet.ranks``),
    and functions for a cell's text and sort value.
    """

    heading: str
    rank: int
    text: Callable[[AnyRow], str]
    value: Callable[[AnyRow], str | float | None]


def _percent(value: float) -> str:
    """Format a share as a percentage; 99.97% does not become 100%."""
    if math.isnan(value):
        return "–"
    whole = round(100 * value)
    return f"{100 * value:.1f}%" if whole in (0, 100) and whole != 100 * value else f"{whole}%"


def _bytes(value: float) -> str:
    if math.isnan(value) or value <= 0:
        return "–"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _count(value: float) -> str:
    return "–" if math.isnan(value) else f"{int(value):,}"


def _thousand(value: float) -> str:
    return stats.decimals(1000.0 * value)


def _ratio_text(estimate: Estimate) -> str:
    return stats.ratio_text(estimate, "")


def _number(
    heading: str, rank: int, of: Callable[[AnyRow], float], form: Callable[[float], str] = stats.decimals
) -> _Column[AnyRow]:
    return _Column(heading, rank, lambda row: form(of(row)), of)


def _name(heading: str, of: Callable[[AnyRow], str]) -> _Column[AnyRow]:
    return _Column(heading, 0, of, of)


def _ratio(heading: str, rank: int, of: Callable[[AnyRow], Estimate]) -> _Column[AnyRow]:
    return _Column(heading, rank, lambda row: _ratio_text(of(row)), lambda row: of(row).value)


def _speedup(heading: str, rank: int, of: Callable[[Compared], Estimate]) -> _Column[Compared]:
    def text(row: Compared) -> str:
        is_one = row.is_baseline and of(row).low is None and of(row).value == 1.0
        return "1 (baseline)" if is_one else _ratio_text(of(row))

    return _Column(heading, rank, text, lambda row: of(row).value)


def _part(name: str) -> _Column[SummaryRow]:
    return _number(name, 10, lambda row: row.share[name], _percent)


def _tokens_per_step(row: SummaryRow) -> str:
    return ("~" if row.step_source == "bursts" else "") + stats.decimals(row.tokens_per_step.value)


_SUMMARY_COLUMNS: list[_Column[SummaryRow]] = [
    _name("configuration", lambda row: row.config.label),
    _number("tokens/s", 1, lambda row: row.tokens_per_second.value),
    _speedup("speedup", 0, lambda row: row.speedup),
    _Column("verdict", 0, lambda row: verdict_text(row.verdict, row.provisional), lambda row: row.verdict),
    _speedup("first time", 6, lambda row: row.speedup_first),
    _ratio("again", 6, lambda row: row.warming),
    _speedup("with TTFT", 14, lambda row: row.speedup_total),
    _speedup("pooled", 15, lambda row: row.pooled_speedup),
    _Column("tokens/step", 4, _tokens_per_step, lambda row: row.tokens_per_step.value),
    _number("accepted", 5, lambda row: row.acceptance_rate.value, _percent),
    _number("of tested", 16, lambda row: row.acceptance_tested.value, _percent),
    _number("α", 6, lambda row: row.alpha.value),
    _number("forced", 5, lambda row: row.forced_share, _percent),
    _number("corrected", 12, lambda row: row.corrected_share, _percent),
    _number("mean γ", 12, lambda row: row.mean_gamma),
    _number("nodes", 12, lambda row: row.mean_nodes),
    _ratio("predicted", 8, lambda row: row.predicted_speedup),
    _number("cached", 12, lambda row: row.cached_share, _percent),
    _number("TTFT ms", 9, lambda row: row.ttft_s, _thousand),
    *map(_part, PARTS),
    _number("masks", 10, lambda row: row.share_masks, _percent),
    _number("log p/token", 11, lambda row: row.log_probability),
    _number("memory", 13, lambda row: row.peak_memory_bytes, _bytes),
    _number("identical", 13, lambda row: row.identical_share, _percent),
    _number("prompts", 3, lambda row: row.prompts, _count),
    _number("failed", 7, lambda row: row.failures, _count),
]


def _percentiles(
    name: str, rank: int, of: Callable[[RequestRow], dict[str, float]], form: Callable[[float], str]
) -> list[_Column[RequestRow]]:
    """Return a column for each percentile of a latency; a narrow terminal leaves out the median last."""

    def column(number: int, percentile: str) -> _Column[RequestRow]:
        return _number(f"{name} {percentile}", rank + 5 * number, lambda row: of(row)[percentile], form)

    return [column(number, percentile) for number, percentile in enumerate(PERCENTILES)]


_REQUEST_COLUMNS: list[_Column[RequestRow]] = [
    _name("configuration", lambda row: row.config.label),
    _number("requests", 9, lambda row: row.requests, _count),
    _number("tokens/s", 0, lambda row: row.overall.tokens_per_second.value),
    *_percentiles("ms/token", 1, lambda row: row.token_s, _thousand),
    *_percentiles("TTFT ms", 2, lambda row: row.ttft_s, _thousand),
    *_percentiles("total s", 3, lambda row: row.latency_s, stats.decimals),
    *_percentiles("queued s", 4, lambda row: row.queued_s, stats.decimals),
    _number("accepted", 8, lambda row: row.overall.acceptance_rate.value, _percent),
    _number("blocks", 10, lambda row: row.pool_peak_blocks, _count),
    _number("pool", 10, lambda row: row.pool_peak_bytes, _bytes),
]


_TURN_COLUMNS: list[_Column[TurnRow]] = [
    _name("configuration", lambda row: row.config.label),
    _number("turn", 0, lambda row: row.turn + 1, _count),
    _number("answers", 4, lambda row: row.generations, _count),
    _number("prompt", 2, lambda row: row.prompt_tokens, _count),
    _number("cached", 1, lambda row: row.cached_tokens, _count),
    _number("reused", 0, lambda row: row.reused, _percent),
    _number("TTFT ms", 0, lambda row: row.ttft_s, _thousand),
    _number("tokens/s", 1, lambda row: row.tokens_per_second),
    _number("accepted", 1, lambda row: row.acceptance_rate, _percent),
    _number("tokens/step", 3, lambda row: row.tokens_per_step),
    _number("broken", 0, lambda row: row.broken, _count),
]


_PART_COLUMNS: list[_Column[PartRow]] = [
    _name("configuration", lambda row: row.config.label),
    _name("part", lambda row: row.part),
    _number("tokens", 3, lambda row: row.tokens, _count),
    _number("of tokens", 1, lambda row: row.share, _percent),
    _number("of time", 2, lambda row: row.time_share, _percent),
    _number("tokens/s", 0, lambda row: row.tokens_per_second.value),
    _speedup("speedup", 0, lambda row: row.speedup),
    _number("tokens/step", 0, lambda row: row.tokens_per_step.value),
    _number("accepted", 1, lambda row: row.acceptance_rate.value, _percent),
]


def _least(heading: str, of: Callable[[PositionRow], float]) -> _Column[PositionRow]:
    return _Column(heading, 0, lambda row: "≥ " * (row.least and of(row) < 1) + _percent(of(row)), of)


_POSITION_COLUMNS: list[_Column[PositionRow]] = [
    _name("configuration", lambda row: row.config.label),
    _number("position", 0, lambda row: row.position, _count),
    _number("drafted", 2, lambda row: row.drafted, _count),
    _number("tested", 1, lambda row: row.tested, _count),
    _number("accepted", 1, lambda row: row.accepted, _count),
    _least("accepted/tested", lambda row: row.rate),
    _least("accepted/drafted", lambda row: row.rate_of_drafted),
    _number("α", 1, lambda row: row.alpha),
]
_HEAD_COLUMNS: list[_Column[HeadRow]] = [
    _name("configuration", lambda row: row.cell.config.label),
    _name("category", lambda row: row.cell.category),
    _number("tokens/step", 0, lambda row: row.cell.tokens_per_step.value),
    _number("when trained", 3, lambda row: row.trained),
    _number("first accepted", 1, lambda row: row.first, _percent),
    _number("second accepted", 2, lambda row: row.second, _percent),
    _ratio("speedup", 0, lambda row: row.cell.speedup),
]


def _accepted_at(place: int) -> _Column[tuple[str, TrainingMeasurement]]:
    def of(row: tuple[str, TrainingMeasurement]) -> float:
        rates = row[1].accepted
        return rates[place] if place < len(rates) else math.nan

    return _number(f"{place + 1}. accepted", place, of, _percent)


_TRAINING_COLUMNS: list[_Column[tuple[str, TrainingMeasurement]]] = [
    _name("drafter", lambda row: row[0]),
    _number("tokens trained on", 0, lambda row: row[1].tokens, _count),
    _number("tokens/step", 0, lambda row: row[1].tokens_per_step),
    *map(_accepted_at, range(4)),
]

_GOODPUT_COLUMNS: list[_Column[GoodputRow]] = [
    _name("configuration", lambda row: row.config.label),
    _number("requests", 6, lambda row: row.requests, _count),
    _ratio("requests/s", 5, lambda row: row.rate),
    _number("within", 4, lambda row: row.within, _percent),
    _ratio("goodput", 0, lambda row: row.goodput),
    _ratio("goodput ×", 1, lambda row: row.goodput_ratio),
]

# --- Sheets ---------------------------------------------------------------------------------------


def _sheet(
    rows: Sequence[AnyRow],
    columns: Sequence[_Column[AnyRow]],
    notes: Sequence[str],
    marked: frozenset[int] = frozenset(),
) -> Sheet:
    return Sheet(
        [column.heading for column in columns],
        [[one_line(column.text(row)) for column in columns] for row in rows],
        [[column.value(row) for column in columns] for row in rows],
        [column.rank for column in columns],
        [*notes],
        marked,
    )


def _prompts_of_all(summary: Summary) -> int | None:
    """Return the number of prompts of each configuration; ``None`` if they differ."""
    counts = {row.prompts for row in summary.rows if row.measured}
    return counts.pop() if len(counts) == 1 else None


def summary_sheet(summary: Summary) -> Sheet:
    """Return the table of the summary, without columns that are empty or only say that nothing failed."""

    def is_needed(column: _Column[SummaryRow]) -> bool:
        values = [column.value(row) for row in summary.rows]
        if column.heading == "failed":
            return any(values)
        if column.heading == "prompts":  # else a note says how many
            return _prompts_of_all(summary) is None
        return column.rank == 0 or any(value == value for value in values)

    marked = [number for number, row in enumerate(summary.rows) if row.config.id in summary.winners]
    columns = [*filter(is_needed, _SUMMARY_COLUMNS)]
    sheet = _sheet(summary.rows, columns, notes(summary), frozenset(marked))
    for number in marked:
        at = sheet.headings.index("verdict")
        sheet.rows[number][at] = sheet.rows[number][at].replace("faster", "fastest")
    return sheet


def category_sheet(categories: Sequence[SummaryRow], summary: Summary) -> Sheet:
    """Return a table of speedups and tokens per step by configuration and category, and over all of them."""
    names = list(dict.fromkeys(row.category for row in categories))
    configs: dict[str, Row] = {row.config.id: row.config for row in categories}
    found = {(row.config.id, row.category): row for row in categories}
    rows, values = [], list[list[Any]]()
    for config in configs.values():
        overall = summary.row(config.id)
        of_each = [found.get((config.id, name)) for name in names]
        cells = ["–" if each is None else _cell_text(each) for each in of_each]
        rows.append([one_line(config.label), *cells, _cell_text(overall)])
        ratios = [math.nan if each is None else each.speedup.value for each in of_each]
        values.append([config.label, *ratios, overall.speedup.value])
    said = [
        f"Speedup over {summary.over}, geometric mean over the category's prompts, with its 95% interval; then"
        " tokens per step."
    ]
    if any(row.speedup.low is None for row in categories):
        said.append(_too_few("prompt"))
    if any(row.speedup.basis == "repeats" for row in categories):
        said.append("*: one prompt; the interval is over its repeats and holds within that prompt only.")
    headings = ["configuration", *map(one_line, names), "overall"]
    return Sheet(headings, rows, values, notes=said, matrix=True)


def _cell_text(row: SummaryRow) -> str:
    steps = row.tokens_per_step.value
    return _ratio_text(row.speedup) + ("" if math.isnan(steps) else f"; {steps:.2f}")


def request_sheet(rows: Sequence[RequestRow]) -> Sheet:
    """Return a table of the latencies of requests decoded in batches."""
    said = [
        "Percentiles over all requests: ms/token after the first emission; TTFT and total time from a request's"
        " arrival, including its time in the queue. Blocks and pool: the peak of the target's KV cache."
    ]
    if rows and min(row.requests for row in rows) < _FOR_P99:
        said.append(
            f"The 99th percentile of fewer than {_FOR_P99} requests is close to their maximum, as is the 95th of fewer"
            f" than {_FOR_P95}."
        )
    return _sheet(rows, _REQUEST_COLUMNS, said)


def turn_sheet(rows: Sequence[TurnRow]) -> Sheet:
    """Return a table of the turns of conversations."""
    said = [
        "Prompt, cached: mean tokens of the prompt, and of those that came from the prompt cache. Reused: cached tokens"
        " over those of the turn before, prompt and answer. Broken: answers that are empty, repeat a phrase over and"
        " over, or are not the JSON that was asked for."
    ]
    return _sheet(rows, _TURN_COLUMNS, said)


def part_sheet(rows: Sequence[PartRow]) -> Sheet:
    """Return a table of thinking and answers apart."""
    said = [
        "Thinking and answer: the steps that begin inside the thinking, and those after it. Speedup: over the same part"
        " of the baseline."
    ]
    return _sheet(rows, _PART_COLUMNS, said)


def position_sheet(rows: Sequence[PositionRow]) -> Sheet:
    """Return a table of acceptance by position."""
    least = (
        "≥: a lower bound; the server's drafts differ in length, and it does not report how many reach this position:"
        " counted as if all did."
    )
    return _sheet(rows, _POSITION_COLUMNS, [least] if any(row.least for row in rows) else [])


def head_sheet(rows: Sequence[HeadRow]) -> Sheet:
    """Return a table of trained heads by category, with notes on the worst category of each configuration."""
    out = [
        "Accepted: of the drafts tested at that position. When trained: tokens per step, greedily and with chains, on"
        " held-out prompts of a category of that name."
    ]
    if any("+" in row.cell.config.drafter for row in rows):
        out.append("In a cascade the drafts of both parts count.")
    for label in dict.fromkeys(row.cell.config.label for row in rows):
        mine = [row for row in rows if row.cell.config.label == label]
        slower = [row.cell.category for row in mine if row.cell.verdict == "slower"]
        if slower:
            provisionally = " (provisionally)" if any(row.cell.provisional for row in mine) else ""
            out.append(f"{label} is slower than plain decoding on {', '.join(slower)}{provisionally}.")
        known = [row for row in mine if not math.isnan(row.first)]
        if len(known) > 1:
            worst = min(known, key=lambda row: row.first)
            first = f"{_percent(worst.first)} of the first tokens of its drafts are accepted"
            out.append(f"{label} drafts worst on {worst.cell.category}: {first}.")
    return _sheet(rows, _HEAD_COLUMNS, [one_line(note) for note in out])


def training_sheet(heads: Mapping[str, TrainingMetadata]) -> Sheet:
    """Return a table of measurements of heads during training, with a note on which weights were kept."""
    trainings = distinct_trainings(heads)
    said = [
        "Measured by the decoder, greedily and with chains, on prompts that were not trained on; accepted: of the"
        " drafts tested at that position."
    ]
    said += [
        one_line(f"{name} is the head after {best_measurement(training).tokens:,} tokens.")
        for name, training in trainings.items()
    ]
    rows = [(name, each) for name, training in trainings.items() for each in training.measured]
    return _sheet(rows, _TRAINING_COLUMNS, said)


def goodput_sheet(rows: Sequence[GoodputRow], limits: Mapping[str, float], over: str) -> Sheet:
    """Return a table of goodput within ``limits``, in seconds; ``over``: name of the baseline."""
    within = ", ".join(f"{name} {1000 * value:g} ms" for name, value in limits.items())
    notes = [
        f"Goodput: requests per second within {within}, and how many times that of {over} they are. A failed request"
        " missed its limits.",
        "Intervals are over groups of requests, or prompts decoded alone.",
    ]
    return _sheet(rows, _GOODPUT_COLUMNS, notes)
