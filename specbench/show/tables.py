"""Tables of metrics, as parts of a document (``specbench.show.document``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specbench.base.record import BASELINE, Estimate
from specbench.base.textsafe import counted, one_line
from specbench.decoding.records import PARTS
from specbench.findings.catalog import Finding
from specbench.results import stats
from specbench.results.acceptance import along, positions, schedule, shorter
from specbench.results.metrics import METRICS, PERCENTILES, Figures
from specbench.results.run import OTHER_ANSWERS, PLAIN
from specbench.results.summary import Summary, best_by_baseline
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
    out, rows, over = list[str](), summary.rows, summary.run.baseline
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
    out += filter(None, (summary.stopping, summary.disturbance, provisional))
    differing: dict[str | None, list[Figures]] = {}
    for row in rows:
        label = row.config.label
        if _means_differ(row):
            out.append(
                f"{label}: all tokens over all seconds give {ratio_text(row.pooled_speedup)}, the mean over {unit}"
                f" {ratio_text(row.speedup)}: its {short} differ."
            )
        if row.identical_share.value < 1:
            differing.setdefault(row.difference, []).append(row)
        if failed := int(row.failures.value):
            out.append(f"{label}: {counted(failed, 'generation')} failed, not included in any other figure.")
        if row.config.kind in OTHER_ANSWERS:
            out.append(
                f"{label} searches for more probable answers than plain decoding: compare speeds only."
            )
        if not row.is_baseline and not row.measured:
            out.append(f"{label}: no generation of its baseline to compare with.")
    for alike in differing.values():
        label = f"{alike[0].config.label}: " if len(alike) == 1 else f"{len(alike)} configurations: "
        out.append(label + identity_text(alike, summary.run.target.dtype, over))
    if any(row.step_source == "bursts" for row in rows):
        out.append("~: estimated from bursts of tokens, because the server does not report what it accepted.")
    if any(not math.isnan(row.warming.value) for row in rows):
        out.append(
            "Again: a server's speed in later repeats over that in the first, when the prompts were new to it."
        )
    return [one_line(note) for note in out]


def identity_text(rows: Sequence[Figures], dtype: str | None, over: str = PLAIN) -> str:
    """Return a sentence on whether outputs equal those of the baseline, and why some do not.

    Args:
        rows: Rows of the summary, at least one, each with an ``identical_share`` and all with the same ``difference``.
        dtype: Dtype of the target.
        over: Name of the baseline.
    """
    shares = sorted(row.identical_share.value for row in rows)
    several = f" to {_percent(shares[-1])}" if shares[-1] > shares[0] else ""
    names = {"ties": "same.ties", "beyond rounding": "same.beyond"}
    name = names.get(str(rows[0].difference), "same.unchecked" if over == PLAIN else "same.server")
    share = f"{_percent(shares[0])}{several}"
    return Finding(
        "same.all" if shares[0] == 1 else name, share=share, over=over, dtype=dtype or "bfloat16"
    ).text


def _means_differ(row: Figures) -> bool:
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


_FORMS: dict[str, Callable[[Any], str]] = {
    "number": stats.decimals,
    "ratio": ratio_text,
    "share": _percent,
    "count": _count,
    "ms": _thousand,
    "bytes": _bytes,
    "text": str,
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: The attribute of a row that the column shows; after a dot, one of that attribute.
        heading: Its heading.
        form: How a value is shown, see ``_FORMS``; of an ``Estimate`` its figure, unless it is a ratio.
        rank: See ``Sheet.ranks``.
        about: What it is, for the notes; empty if the heading says it.
        mark: What stands before the text of a row's cell.
    """

    name: str
    heading: str
    form: str = "number"
    rank: int = 0
    about: str = ""
    mark: Callable[[Any], str] | None = None

    def cell(self, row: Any) -> tuple[str, Any]:
        """Return the text of a row's cell, and the value to sort it by."""
        *path, name = self.name.split(".")
        for part in path:
            row = getattr(row, part)
        value = row[name] if isinstance(row, Figures) and name in METRICS else getattr(row, name)
        figure = value.value if isinstance(value, Estimate) else value
        text = _FORMS[self.form](value if self.form == "ratio" else figure)
        return one_line((self.mark(row) if self.mark else "") + text), figure


def _figure(name: str, **changed: Any) -> Column:
    """Return the column of a figure, as ``METRICS`` describes it; before a dot stands the attribute that has it."""
    kind = METRICS[name.rpartition(".")[2]]
    return replace(Column(name, kind.heading, kind.form, kind.rank), **changed)


def _figures(names: str, of: str = "") -> list[Column]:
    return [_figure(of + name) for name in names.split()]


_CONFIGURATION = Column("config.label", "configuration", "text")
_SUMMARY = (
    _CONFIGURATION,
    *_figures("tokens_per_second speedup"),
    Column("verdict_text", "verdict", "text"),
    *_figures("warming speedup_total pooled_speedup"),
    _figure("tokens_per_step", mark=lambda row: "~" * (row.step_source == "bursts")),
    *_figures("acceptance_rate acceptance_tested tokens_per_draft accepted_per_draft alpha forced_share"),
    *_figures("corrected_share mean_gamma mean_nodes"),
    *_figures("cached_share ttft_s"),
    *_figures(" ".join(f"share_{part}" for part in PARTS)),
    *_figures("share_masks log_probability peak_memory_bytes identical_share prompts failures"),
)
_LATENCIES = ("request_token_s", "request_ttft_s", "latency_s", "queued_s")
_REQUESTS = (
    _CONFIGURATION,
    *_figures("finished_requests tokens_per_second"),
    *_figures(" ".join(f"{name}_{percent}" for name in _LATENCIES for percent in PERCENTILES)),
    *_figures("acceptance_rate pool_peak_bytes goodput"),
)
_ABOUT_REQUESTS = (
    "Percentiles are over all requests: of the time per token after the first emission, and of times from arrival, in"
    " which the time in the queue counts. Pool: the memory of the target's KV cache, at the peak."
)
_PARTS = (
    _CONFIGURATION,
    Column(
        "part", "part", "text", 0, "of thinking the steps that begin inside it, of the answer those after it"
    ),
    Column("tokens", "tokens", "count", 3),
    Column("share", "of tokens", "share", 1),
    Column("time_share", "of time", "share", 2),
    *_figures("tokens_per_second speedup tokens_per_step acceptance_rate", "figures."),
)


def _bound(name: str) -> Callable[[Any], str]:
    return lambda row: "≥ " * (row.least and getattr(row, name) < 1)


_POSITIONS = (
    _CONFIGURATION,
    Column("position", "position", "count"),
    Column("drafted", "drafted", "count", 2),
    Column("tested", "tested", "count", 1),
    Column("accepted", "accepted", "count", 1),
    Column("rate", "accepted/tested", "share", mark=_bound("rate")),
    Column("rate_of_drafted", "accepted/drafted", "share", mark=_bound("rate_of_drafted")),
    Column("alpha", "α", rank=1),
)
_ALONG = (
    _CONFIGURATION,
    Column("of", "of", "text"),
    Column("first", "from", "count"),
    Column("last", "to", "count"),
    Column("steps", "steps", "count", 2),
    Column("tokens_per_step", "tokens/step", "ratio"),
    Column("rate", "accepted", "share", 1),
)
_SHORTER = (
    _CONFIGURATION,
    Column("gamma", "γ", "count"),
    Column("tokens_per_step", "tokens/step", "ratio"),
    Column("speedup", "speedup"),
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
    counts = {int(row.prompts.value) for row in summary.rows if row.measured}
    return counts.pop() if len(counts) == 1 else None


def summary_sheet(summary: Summary) -> Sheet:
    """Return the table of the summary, without columns that are empty or only say that nothing failed."""

    def is_needed(column: Column) -> bool:
        values = [column.cell(row)[1] for row in summary.rows]
        if column.name == "failures":
            return any(values)
        if column.name == "prompts":  # else a note says how many
            return _prompts_of_all(summary) is None
        return column.rank == 0 or any(value == value for value in values)

    marked = [number for number, row in enumerate(summary.rows) if row.config.id in summary.winners]
    sheet = table(summary.rows, [*filter(is_needed, _SUMMARY)], notes(summary))
    at = sheet.headings.index("verdict")
    highest = best_by_baseline(row for row in summary.rows if row.speedup.value > 0)
    for number in marked:  # another one may be higher, though not surely faster than the baseline
        if summary.run.tuning is not None or summary.rows[number] in highest:
            sheet.rows[number][at] = sheet.rows[number][at].replace("faster", "fastest")
    return replace(sheet, marked=frozenset(marked))


def category_sheet(summary: Summary) -> Sheet:
    """Return a table of speedups and tokens per step by configuration and category, and over all of them."""
    categories = summary.categories
    names = list(dict.fromkeys(row.category for row in categories))
    cells = {(row.config.id, row.category): row for row in categories}
    rows, values = [], list[list[Any]]()
    for config in dict.fromkeys(row.config.id for row in categories):
        overall = summary.row(config)
        mine = [*(cells.get((config, name)) for name in names), overall]
        rows.append([one_line(overall.config.label), *map(_cell_text, mine)])
        speedups = (math.nan if each is None else each.speedup.value for each in mine)
        values.append([overall.config.label, *speedups])
    said = [
        f"Speedup over {summary.run.baseline}, geometric mean over the category's prompts, with its 95% interval; then"
        " tokens per step."
    ]
    if any(row.speedup.low is None for row in categories):
        said.append(_too_few("prompt"))
    if any(row.speedup.basis == "repeats" for row in categories):
        said.append("*: one or two prompts; the interval is over repeats and holds for these prompts only.")
    return Sheet(["configuration", *map(one_line, names), "overall"], rows, values, notes=said)


def _cell_text(row: Figures | None) -> str:
    if row is None:
        return "–"
    steps = row.tokens_per_step.value
    return ratio_text(row.speedup) + ("" if math.isnan(steps) else f"; {steps:.2f}")


def service_sheets(summary: Summary) -> dict[str, Sheet]:
    """Return the tables of batches and of thinking, by title, and without those without rows."""
    requests = [row for row in summary.rows if row.finished_requests.value]
    said = [_ABOUT_REQUESTS]
    if min((row.finished_requests.value for row in requests), default=0) < _FOR_P99:
        said.append(
            f"The 99th percentile of fewer than {_FOR_P99} requests is close to their maximum, as is the 95th of fewer"
            f" than {_FOR_P95}."
        )
    if summary.limits:
        within = ", ".join(f"{name} {1000 * value:g} ms" for name, value in summary.limits.items())
        said.append(f"Goodput: requests per second within the limits ({within}).")
    return _with_rows(
        {
            "Batches of requests": table(requests, _REQUESTS[: None if summary.limits else -1], said),
            "Thinking and answer": table(part_rows(summary.results), _PARTS),
        }
    )


def detail_sheets(summary: Summary) -> dict[str, Sheet]:
    """Return the tables by category, and of acceptance by position, along answers and with shorter drafts, likewise."""
    places = positions(summary)
    least = (
        "≥: a lower bound; the server's drafts differ in length, and it does not report how many reach this position:"
        " counted as if all did."
    )
    fewer = shorter(summary)
    said = [
        "From the steps at the measured γ, the last one; longer drafts cannot be predicted from them. Speedups are"
        " rough: the time of a step is taken to grow evenly with γ, from plain decoding's.",
        *(
            f'{server}: the fastest γ by batch size, "num_speculative_tokens_per_batch_size": {sizes}.'
            for server, sizes in schedule(fewer).items()
        ),
    ]
    about = "Length of the answer, or of prompt and answer, at the beginning of a step, in tokens."
    return _with_rows(
        {
            "By category": category_sheet(summary),
            "Acceptance by position": table(places, _POSITIONS, [least] * any(row.least for row in places)),
            "Along answer and context": table(along(summary), _ALONG, [about]),
            "Predicted with shorter drafts": table(fewer, _SHORTER, said),
        }
    )


def _with_rows(sheets: Mapping[str, Sheet]) -> dict[str, Sheet]:
    return {title: sheet for title, sheet in sheets.items() if sheet.rows}
