"""Tables of metrics, as parts of a document (``specbench.show.document``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench.base.record import BASELINE, Estimate
from specbench.base.textsafe import counted, one_line
from specbench.decoding.records import PARTS
from specbench.results import stats
from specbench.results.acceptance import positions
from specbench.results.goodput import goodput_rows
from specbench.results.heads import best_measurement, distinct_trainings, head_rows
from specbench.results.requests import PERCENTILES, request_rows
from specbench.results.results import Results
from specbench.results.run import OTHER_ANSWERS, PLAIN
from specbench.results.summary import Summary, SummaryRow
from specbench.results.thinking import part_rows
from specbench.show.document import Sheet

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
                f"{label}: all tokens over all seconds give {ratio_text(row.pooled_speedup)}, the mean over {unit}"
                f" {ratio_text(row.speedup)}: its {short} differ."
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


def _means_differ(row: SummaryRow) -> bool:
    """Return whether the pooled speedup is on the other side of 1 than
    the speedup, or outside the speedup's interval.
    """
    mean, pooled = row.speedup.value, row.pooled_speedup.value
    if not row.measured or math.isnan(pooled) or abs(math.log(pooled / mean)) < 0.02:
        return False
    return (mean - 1.0) * (pooled - 1.0) < 0 or row.speedup.overlaps(pooled) is False


# --- Columns --------------------------------------------------------------------------------------


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


def ratio_text(estimate: Estimate) -> str:
    """Format a ratio with its interval, or as that of a baseline."""
    return "1 (baseline)" if estimate == BASELINE else stats.ratio_text(estimate, "")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: The attribute of a row that the column shows; after a dot, one of that attribute, or its key.
        heading: Its heading.
        form: Formats a value; of an ``Estimate`` its figure, unless ``form`` is ``ratio_text``.
        rank: See ``Sheet.ranks``.
        about: What it is, for the notes; empty if the heading says it.
        mark: What stands before the text of a row's cell.
    """

    name: str
    heading: str
    form: Callable[[Any], str] = stats.decimals
    rank: int = 0
    about: str = ""
    mark: Callable[[Any], str] | None = None

    def value(self, row: Any) -> Any:
        """Return the value of a row."""
        for part in self.name.split("."):
            row = row[part] if isinstance(row, dict) else getattr(row, part)
        return row

    def cell(self, row: Any) -> tuple[str, Any]:
        """Return the text of a row's cell, and the value to sort it by."""
        value = self.value(row)
        figure = value.value if isinstance(value, Estimate) else value
        text = self.form(value if self.form is ratio_text else figure)
        return one_line((self.mark(row) if self.mark else "") + text), figure


_CONFIGURATION = Column("config.label", "configuration", str)
_TOKENS_PER_S = Column("tokens_per_second", "tokens/s", rank=1)
_ACCEPTED = Column("acceptance_rate", "accepted", _percent, 1)

_SUMMARY = (
    _CONFIGURATION,
    _TOKENS_PER_S,
    Column("speedup", "speedup", ratio_text),
    Column("verdict_text", "verdict", str),
    Column("speedup_first", "first time", ratio_text, 6),
    Column("warming", "again", ratio_text, 6),
    Column("speedup_total", "with TTFT", ratio_text, 14),
    Column("pooled_speedup", "pooled", ratio_text, 15),
    Column("tokens_per_step", "tokens/step", rank=4, mark=lambda row: "~" * (row.step_source == "bursts")),
    Column("acceptance_rate", "accepted", _percent, 5),
    Column("acceptance_tested", "of tested", _percent, 16),
    Column("alpha", "α", rank=6),
    Column("forced_share", "forced", _percent, 5),
    Column("corrected_share", "corrected", _percent, 12),
    Column("mean_gamma", "mean γ", rank=12),
    Column("mean_nodes", "nodes", rank=12),
    Column("predicted_speedup", "predicted", ratio_text, 8),
    Column("cached_share", "cached", _percent, 12),
    Column("ttft_s", "TTFT ms", _thousand, 9),
    *(Column(f"share.{part}", part, _percent, 10) for part in PARTS),
    Column("share_masks", "masks", _percent, 10),
    Column("log_probability", "log p/token", rank=11),
    Column("peak_memory_bytes", "memory", _bytes, 13),
    Column("identical_share", "identical", _percent, 13),
    Column("prompts", "prompts", _count, 3),
    Column("failures", "failed", _count, 7),
)


def _percentiles(
    name: str, heading: str, form: Callable[[float], str], rank: int, about: str
) -> list[Column]:
    """Return a column for each percentile of a latency; a narrow terminal leaves out the median last."""
    columns = [
        Column(f"{name}.{percentile}", f"{heading} {percentile}", form, rank + 5 * number)
        for number, percentile in enumerate(PERCENTILES)
    ]
    return [replace(columns[0], about=about), *columns[1:]]


_REQUESTS = (
    _CONFIGURATION,
    Column("requests", "requests", _count, 9),
    Column("overall.tokens_per_second", "tokens/s"),
    *_percentiles(
        "token_s", "ms/token", _thousand, 1, "percentiles over all requests, after the first emission"
    ),
    *_percentiles("ttft_s", "TTFT ms", _thousand, 2, "from arrival, including the time in the queue"),
    *_percentiles("latency_s", "total s", stats.decimals, 3, "from arrival"),
    *_percentiles("queued_s", "queued s", stats.decimals, 4, ""),
    Column("overall.acceptance_rate", "accepted", _percent, 8),
    Column("pool_peak_blocks", "blocks", _count, 10, "of the target's KV cache, at the peak"),
    Column("pool_peak_bytes", "pool", _bytes, 10, "their memory"),
)
_PARTS = (
    _CONFIGURATION,
    Column(
        "part", "part", str, 0, "of thinking the steps that begin inside it, of the answer those after it"
    ),
    Column("tokens", "tokens", _count, 3),
    Column("share", "of tokens", _percent, 1),
    Column("time_share", "of time", _percent, 2),
    replace(_TOKENS_PER_S, rank=0),
    Column("speedup", "speedup", ratio_text, 0, "over the same part of the baseline"),
    Column("tokens_per_step", "tokens/step"),
    _ACCEPTED,
)


def _bound(least: bool, rate: float) -> str:
    return "≥ " * (least and rate < 1)


_POSITIONS = (
    _CONFIGURATION,
    Column("position", "position", _count),
    Column("drafted", "drafted", _count, 2),
    Column("tested", "tested", _count, 1),
    Column("accepted", "accepted", _count, 1),
    Column("rate", "accepted/tested", _percent, mark=lambda row: _bound(row.least, row.rate)),
    Column(
        "rate_of_drafted",
        "accepted/drafted",
        _percent,
        mark=lambda row: _bound(row.least, row.rate_of_drafted),
    ),
    Column("alpha", "α", rank=1),
)
_HEADS = (
    Column("cell.config.label", "configuration", str),
    Column("cell.category", "category", str),
    Column("cell.tokens_per_step", "tokens/step"),
    Column(
        "trained", "when trained", rank=3,
        about="tokens per step, greedily and with chains, on held-out prompts of a category of that name",
    ),
    Column("first", "first accepted", _percent, 1, "of the drafts tested at that position"),
    Column("second", "second accepted", _percent, 2),
    Column("cell.speedup", "speedup", ratio_text),
)  # fmt: skip
_TRAININGS = (
    Column("drafter", "drafter", str),
    Column("tokens", "tokens trained on", _count),
    Column(
        "tokens_per_step", "tokens/step",
        about="measured by the decoder, greedily and with chains, on prompts that were not trained on",
    ),
    Column("accepted_1", "1. accepted", _percent, 0, "of the drafts tested at that position"),
    *(Column(f"accepted_{place}", f"{place}. accepted", _percent, place - 1) for place in range(2, 5)),
)  # fmt: skip
_ACCEPTED_AT = [f"accepted_{place}" for place in range(1, 5)]
_GOODPUT = (
    _CONFIGURATION,
    Column("requests", "requests", _count, 6),
    Column("rate", "requests/s", ratio_text, 5),
    Column("within", "within", _percent, 4, "requests within all limits, which one that failed missed"),
    Column("goodput", "goodput", ratio_text, 0, "such requests per second"),
    Column("goodput_ratio", "goodput ×", ratio_text, 1),
)


# --- Sheets ---------------------------------------------------------------------------------------


def table(rows: Sequence[Any], columns: Sequence[Column], notes: Iterable[str] = ()) -> Sheet:
    """Return a table; what its columns are stands before its other notes."""
    said = "; ".join(f"{each.heading}: {each.about}" for each in columns if each.about)
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Sheet(
        [column.heading for column in columns],
        [[text for text, _ in row] for row in cells],
        [[value for _, value in row] for row in cells],
        [column.rank for column in columns],
        [*([f"{said}."] if said else []), *map(one_line, notes)],
    )


def _prompts_of_all(summary: Summary) -> int | None:
    """Return the number of prompts of each configuration; ``None`` if they differ."""
    counts = {row.prompts for row in summary.rows if row.measured}
    return counts.pop() if len(counts) == 1 else None


def summary_sheet(summary: Summary) -> Sheet:
    """Return the table of the summary, without columns that are empty or only say that nothing failed."""

    def is_needed(column: Column) -> bool:
        values = [column.cell(row)[1] for row in summary.rows]
        if column.heading == "failed":
            return any(values)
        if column.heading == "prompts":  # else a note says how many
            return _prompts_of_all(summary) is None
        return column.rank == 0 or any(value == value for value in values)

    marked = [number for number, row in enumerate(summary.rows) if row.config.id in summary.winners]
    sheet = table(summary.rows, [*filter(is_needed, _SUMMARY)], notes(summary))
    at = sheet.headings.index("verdict")
    for number in marked:
        sheet.rows[number][at] = sheet.rows[number][at].replace("faster", "fastest")
    return replace(sheet, marked=frozenset(marked))


def category_sheet(categories: Sequence[SummaryRow], summary: Summary) -> Sheet:
    """Return a table of speedups and tokens per step by configuration and category, and over all of them."""
    names = list(dict.fromkeys(row.category for row in categories))
    found: dict[str, dict[str, SummaryRow]] = {}
    for row in categories:
        found.setdefault(row.config.id, {})[row.category] = row
    rows, values = [], list[list[Any]]()
    for config, cells in found.items():
        overall = summary.row(config)
        mine = [*(cells.get(name) for name in names), overall]
        rows.append([one_line(overall.config.label), *map(_cell_text, mine)])
        values.append(
            [overall.config.label, *(math.nan if each is None else each.speedup.value for each in mine)]
        )
    said = [
        f"Speedup over {summary.over}, geometric mean over the category's prompts, with its 95% interval; then"
        " tokens per step."
    ]
    if any(row.speedup.low is None for row in categories):
        said.append(_too_few("prompt"))
    if any(row.speedup.basis == "repeats" for row in categories):
        said.append("*: one prompt; the interval is over its repeats and holds within that prompt only.")
    return Sheet(["configuration", *map(one_line, names), "overall"], rows, values, notes=said)


def _cell_text(row: SummaryRow | None) -> str:
    if row is None:
        return "–"
    steps = row.tokens_per_step.value
    return ratio_text(row.speedup) + ("" if math.isnan(steps) else f"; {steps:.2f}")


def service_sheets(results: Results, summary: Summary, limits: Mapping[str, float]) -> dict[str, Sheet]:
    """Return the tables of batches, goodput within ``limits`` (in seconds, by name), and thinking.

    They are by title, and without those that have no rows.
    """
    requests = request_rows(results, summary)
    few = min((row.requests for row in requests), default=0) < _FOR_P99
    too_few = (
        f"The 99th percentile of fewer than {_FOR_P99} requests is close to their maximum, as is the 95th of fewer"
        f" than {_FOR_P95}."
    )
    within = ", ".join(f"{name} {1000 * value:g} ms" for name, value in limits.items())
    said = [
        f"The limits: {within}. Goodput ×: over {summary.over}. Intervals are over groups of requests, or prompts"
        " decoded alone."
    ]
    return _with_rows(
        {
            "Batches of requests": table(requests, _REQUESTS, [too_few] * few),
            "Goodput": table(goodput_rows(results, limits), _GOODPUT, said),
            "Thinking and answer": table(part_rows(results), _PARTS),
        }
    )


def drafter_sheets(results: Results) -> dict[str, Sheet]:
    """Return the tables of trained heads, their training, and acceptance by position; see ``service_sheets``."""
    places = positions(results)
    least = (
        "≥: a lower bound; the server's drafts differ in length, and it does not report how many reach this position:"
        " counted as if all did."
    )
    heads, trainings = head_rows(results), distinct_trainings(results.run.heads)
    measured = [
        {**dict.fromkeys(_ACCEPTED_AT, math.nan), **dict(zip(_ACCEPTED_AT, each.accepted, strict=False)),
         "drafter": name, "tokens": each.tokens, "tokens_per_step": each.tokens_per_step}
        for name, training in trainings.items()
        for each in training.measured
    ]  # fmt: skip
    kept = [
        f"{name} is the head after {best_measurement(training).tokens:,} tokens."
        for name, training in trainings.items()
    ]
    return _with_rows(
        {
            "Trained heads": table(heads, _HEADS, _head_notes(heads)),
            "Training": table(measured, _TRAININGS, kept),
            "Acceptance by position": table(places, _POSITIONS, [least] * any(row.least for row in places)),
        }
    )


def _with_rows(sheets: Mapping[str, Sheet]) -> dict[str, Sheet]:
    return {title: sheet for title, sheet in sheets.items() if sheet.rows}


def _head_notes(rows: Sequence[Any]) -> Iterator[str]:
    """Yield where each configuration drafts worst, and where it is slower than plain decoding."""
    if any("+" in row.cell.config.drafter for row in rows):
        yield "In a cascade the drafts of both parts count."
    for label in dict.fromkeys(row.cell.config.label for row in rows):
        mine = [row for row in rows if row.cell.config.label == label]
        slower = [row.cell.category for row in mine if row.cell.verdict == "slower"]
        if slower:
            provisionally = " (provisionally)" if any(row.cell.provisional for row in mine) else ""
            yield f"{label} is slower than plain decoding on {', '.join(slower)}{provisionally}."
        known = [row for row in mine if not math.isnan(row.first)]
        if len(known) > 1:
            worst = min(known, key=lambda row: row.first)
            first = f"{_percent(worst.first)} of the first tokens of its drafts are accepted"
            yield f"{label} drafts worst on {worst.cell.category}: {first}."
